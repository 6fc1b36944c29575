"""Attention over e4m3 pages against the float64 oracle on the dequantised values."""

import dataclasses

import pytest
import torch

from quire.kernels.attention import launch as paged
from quire.kernels.common import e4m3
from quire.kernels.common.arch import named
from tests.kernels.attention.test_attention import FULL, WINDOW, attend
from tests.support.helpers import (
    DEVICE,
    AttentionCase,
    assert_attends,
    attention_reference,
    in_dtypes,
    make_batch,
)

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
KINDS = ("rows", "number", "tensor")
NAN_E4M3 = 0x7F

# Every second case of plain pages, and those that only e4m3 pages tell apart.
CASES = [
    *FULL[::2],
    *(dataclasses.replace(case, name=f"window-{case.name}") for case in WINDOW[::2]),
    AttentionCase("decode-pages-only-bf16", [1, 15, 16, 17, 70], [1] * 5, in_step=False, dtype=BF16),
    AttentionCase("decode-speculative-hnd", [9, 21, 3], [3, 3, 3], num_decodes=3, layout="hnd"),
    AttentionCase("decode-d64-gqa-8-bf16", [90], [1], num_heads=8, num_kv_heads=1, head_dim=64, dtype=BF16),
    AttentionCase("decode-d128-page-48-fp16", [90], [1], head_dim=128, block_size=48, dtype=FP16),
    AttentionCase("prefill-pages-only-interleaved", [40, 17, 1], [7, 17, 1], in_step=False, layout="interleaved"),
    AttentionCase("prefill-group-3-page-8-bf16", [150], [50], num_heads=6, block_size=8, dtype=BF16),
    AttentionCase("decodes-around-a-chunk-sinks", [30, 40, 5], [1, 9, 1], dtype=BF16, sinks=True),
    AttentionCase("window-mixed-d256-bf16", [40, 30], [1, 9], sliding_window=20, head_dim=256, dtype=BF16, num_decodes=1),
]  # fmt: skip


def strided_like(tensor, dtype):
    """NaN in a tensor of the same shape and strides."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.uint8, device=DEVICE)
    return made.fill_(NAN_E4M3).view(dtype)


def quantised(batch, kind):
    """A batch whose pages are e4m3: NaN quantized values, and NaN scales, where its pages are NaN."""
    changed = {}
    for name in "k", "v":
        rows = batch[f"{name}_pages"]
        factor = {"k": 0.02, "v": 0.013}[name]
        quantized, scales = e4m3.quantize(rows, None if kind == "rows" else factor)
        pages = strided_like(rows, E4M3)
        pages.view(torch.uint8).copy_(quantized.view(torch.uint8))
        changed[f"{name}_pages"] = pages
        if kind == "rows":
            assert bool(scales.isnan().any())
            if name == "k":  # as in the runner's pool: a head's rows side by side
                scales = scales.transpose(1, 2).contiguous().transpose(1, 2)
        changed[f"{name}_scale"] = factor if kind == "number" else scales
    return batch | changed


def kinds_of_cases():
    """Every case with scales of rows; every third with each of the others."""
    table = in_dtypes(CASES, (FP16, FP32))
    found = [(case, "rows") for case in table]
    return found + [(case, KINDS[1 + i // 3 % 2]) for i, case in enumerate(table) if i % 3 == 0]


@pytest.mark.parametrize("case, kind", kinds_of_cases(), ids=lambda x: getattr(x, "name", x))
def test_against_float64(case, kind):
    batch = quantised(make_batch(case), kind)
    assert_attends(attend, batch, attention_reference(batch))


@pytest.mark.slow
@pytest.mark.parametrize("dtype, q_lens", [(BF16, [1, 3, 12]), (FP16, [2, 1, 0])])
def test_quantized_values_widened_by_hand(dtype, q_lens, monkeypatch):
    """As on sm_80, which has no instruction for it; every code but NaN occurs among the keys."""
    monkeypatch.setattr(paged, "arch_and_sms", lambda _: (named("sm_80"), 2))
    case = AttentionCase("", [300, 40, 19], q_lens, num_decodes=2, dtype=dtype)
    batch = quantised(make_batch(case), "rows")
    quantized = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    quantized[NAN_E4M3::128] = 0
    batch["k_pages"].view(torch.uint8)[batch["block_table"][0, 0], :8] = quantized.view(8, 2, 16)
    assert_attends(attend, batch, attention_reference(batch), "triton")


@pytest.mark.parametrize("size", [2.0**-8, 2.0**8])
def test_fp16_weights_neither_vanish_nor_overflow(size):
    """A scale of 2^-8 / 448 is near the smallest fp16 numbers, and a weight times it below them."""
    case = AttentionCase(
        "", [300, 200], [1, 9], num_decodes=1, dtype=FP16, head_dim=64, in_step=False
    )
    batch = make_batch(case)
    batch["v_pages"] = batch["v_pages"] * size
    batch = quantised(batch, "rows")
    assert_attends(attend, batch, attention_reference(batch), "triton")


@pytest.mark.parametrize("spread", [12, 60])
def test_scales_of_values_may_differ_by_any_power(spread):
    """Each head's result is near the size of its largest values, whatever those of other rows are; the lse has nothing to do with them."""
    case = AttentionCase("", [300, 40], [1, 1], dtype=BF16, head_dim=64, in_step=False)
    batch = make_batch(case)
    sizes = torch.randint(-spread, spread + 1, batch["v_pages"].shape[:3], generator=torch.Generator().manual_seed(3))  # fmt: skip
    batch["v_pages"] = (batch["v_pages"].float() * sizes.to(DEVICE).float().exp2()[..., None]).to(BF16)  # fmt: skip
    batch = quantised(batch, "rows")
    assert_attends(attend, batch, attention_reference(batch), "triton")


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_zero(kind, impl):
    """All of them give zeros; where nearly all attention rests on one, as models have it, the small sum of all others is as it is."""
    case = AttentionCase("", [300, 40], [1, 1], num_heads=1, num_kv_heads=1, head_dim=64, in_step=False, dtype=BF16)  # fmt: skip
    batch = make_batch(case)
    first = batch["block_table"][0, 0]
    query = batch["q"][0, 0].float()
    batch["k_pages"][first, 0, 0] = (query * 17 * 64**0.5 / query.square().sum()).to(BF16)
    batch["v_pages"][first, 0, 0, 1:] = 0
    batch["v_pages"][batch["block_table"][1, : -(-40 // case.block_size)]] = 0
    batch = quantised(batch, kind)
    exact = attention_reference(batch)
    assert not exact[0][1].any()
    assert exact[0][0, 0, 1:].abs().amax() < 1e-5 < exact[0][0, 0, 0].abs()
    assert_attends(attend, batch, exact, impl)
