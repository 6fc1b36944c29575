"""K and V in e4m3 pages: what is written against torch's cast, and attention against the float64 oracle on the dequantised values."""

import dataclasses

import pytest
import torch

from quire.kernels import write_kv
from quire.kernels.attention import launch as paged
from quire.kernels.common import e4m3
from quire.kernels.common.arch import named
from tests.kernels.attention.test_attention import attend
from tests.kernels.oracles import write_kv as reference_write
from tests.support.helpers import (
    DEVICE,
    NAN,
    AttentionCase,
    assert_within_budget,
    attention_reference,
    in_dtypes,
    make_batch,
)

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
IMPLS = ("triton", "torch")
KINDS = ("rows", "number", "tensor")
NAN_E4M3 = 0x7F
W = 20

CASES = [
    AttentionCase("decode-around-block", [1, 15, 16, 17, 33], [1] * 5),
    AttentionCase("decode-pages-only-bf16", [1, 15, 16, 17, 70], [1] * 5, in_step=False, dtype=BF16),
    AttentionCase("decode-empty-sequences", [0, 50, 0, 30], [1, 1, 0, 1], sinks=True),
    AttentionCase("decode-speculative-hnd", [9, 21, 3], [3, 3, 3], num_decodes=3, layout="hnd"),
    AttentionCase("decode-d64-gqa-8-bf16", [90], [1], num_heads=8, num_kv_heads=1, head_dim=64, dtype=BF16),
    AttentionCase("decode-d128-page-48-fp16", [90], [1], head_dim=128, block_size=48, dtype=FP16),
    AttentionCase("decode-d256-page-256", [300], [1], head_dim=256, block_size=256, dtype=BF16),
    AttentionCase("decode-d512-bf16", [40], [1], head_dim=512, dtype=BF16, num_heads=8, num_kv_heads=1),
    AttentionCase("decode-softcap-sinks", [40, 3], [1, 1], softcap=5.0, sinks=True),
    AttentionCase("split", [700, 3, 0, 300], [1] * 4, block_size=64, num_heads=2, num_kv_heads=1),
    AttentionCase("split-bf16-sinks", [620, 9], [3, 1], num_decodes=2, num_heads=2, num_kv_heads=1, sinks=True, dtype=BF16),
    AttentionCase("prefill-first", [1, 15, 17, 33], [1, 15, 17, 33]),
    AttentionCase("prefill-chunk", [40, 90, 33], [7, 20, 1], num_decodes=0),
    AttentionCase("prefill-pages-only-interleaved", [40, 17, 1], [7, 17, 1], in_step=False, layout="interleaved"),
    AttentionCase("prefill-group-3-page-8-bf16", [150], [50], num_heads=6, block_size=8, dtype=BF16),
    AttentionCase("prefill-long-context-bf16", [300], [40], num_heads=2, num_kv_heads=1, dtype=BF16, block_size=128),
    AttentionCase("prefill-d512-fp16", [40], [20], head_dim=512, dtype=FP16, num_heads=2, num_kv_heads=1),
    AttentionCase("prefill-softcap-sinks", [40, 3], [20, 3], softcap=3.0, sinks=True, softmax_scale=1.0),
    AttentionCase("mixed-interleaved-bf16", [30, 40], [1, 9], num_decodes=1, layout="interleaved", dtype=BF16),
    AttentionCase("window-decode-ring", [45, 90, 7], [1] * 3, sliding_window=W, ring=True),
    AttentionCase("window-decode-pages-only", [1, W - 1, W, W + 1, 2 * W], [1] * 5, sliding_window=W, in_step=False),
    AttentionCase("window-split-ring-sinks", [900], [2], num_decodes=1, sliding_window=600, ring=True, sinks=True, num_heads=2, num_kv_heads=1),
    AttentionCase("window-prefill-chunk-ring", [90, 33, 300], [30, 33, 8], sliding_window=W, ring=True),
    AttentionCase("window-prefill-wide-bf16", [400], [60], sliding_window=200, dtype=BF16, num_heads=1, num_kv_heads=1, block_size=128),
    AttentionCase("window-mixed-d256-bf16", [40, 30], [1, 9], sliding_window=W, head_dim=256, dtype=BF16, num_decodes=1),
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


def assert_exact(batch, dtype, impls, exact=None):
    """Output and lse of some implementations are as near to the float64 oracle (or to what it said, ``exact``) as a right program's."""
    exact, exact_lse = exact or attention_reference(batch)
    for impl in impls:
        lse = torch.full(exact_lse.shape, NAN, device=DEVICE)
        out = attend(batch, impl, lse=lse)
        assert out.dtype == dtype
        assert_within_budget(f"{impl} out", out, exact)
        assert_within_budget(f"{impl} lse", lse, exact_lse)


@pytest.mark.parametrize("case, kind", kinds_of_cases(), ids=lambda x: getattr(x, "name", x))
def test_against_float64(case, kind):
    batch = quantised(make_batch(case), kind)
    assert_exact(batch, case.dtype, IMPLS)


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
    assert_exact(batch, dtype, ["triton"])


@pytest.mark.parametrize("size", [2.0**-8, 2.0**8])
def test_fp16_weights_neither_vanish_nor_overflow(size):
    """A scale of 2^-8 / 448 is near the smallest fp16 numbers, and a weight times it below them."""
    case = AttentionCase(
        "", [300, 200], [1, 9], num_decodes=1, dtype=FP16, head_dim=64, in_step=False
    )
    batch = make_batch(case)
    batch["v_pages"] = batch["v_pages"] * size
    batch = quantised(batch, "rows")
    exact, _ = attention_reference(batch)
    assert_within_budget("out", attend(batch, "triton"), exact)


@pytest.mark.parametrize("spread", [12, 60])
def test_scales_of_values_may_differ_by_any_power(spread):
    """Each head's result is near the size of its largest values, whatever those of other rows are; the lse has nothing to do with them."""
    case = AttentionCase("", [300, 40], [1, 1], dtype=BF16, head_dim=64, in_step=False)
    batch = make_batch(case)
    sizes = torch.randint(-spread, spread + 1, batch["v_pages"].shape[:3], generator=torch.Generator().manual_seed(3))  # fmt: skip
    batch["v_pages"] = (batch["v_pages"].float() * sizes.to(DEVICE).float().exp2()[..., None]).to(BF16)  # fmt: skip
    batch = quantised(batch, "rows")
    exact, exact_lse = attention_reference(batch)
    lse = torch.full(exact_lse.shape, NAN, device=DEVICE)
    out = attend(batch, "triton", lse=lse)
    assert_within_budget("out", out, exact)
    assert_within_budget("lse", lse, exact_lse)


@pytest.mark.parametrize("impl", IMPLS)
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
    exact, exact_lse = attention_reference(batch)
    lse = torch.full(exact_lse.shape, NAN, device=DEVICE)
    out = attend(batch, impl, lse=lse)
    assert not out[1].any()
    assert exact[0, 0, 1:].abs().amax() < 1e-5 < exact[0, 0, 0].abs()
    assert_within_budget("out", out, exact)
    assert_within_budget("lse", lse, exact_lse)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("scale", [1.0, 0.37, torch.tensor(3.3), torch.tensor([2.0**-9])])
def test_one_scale_rounds_as_torch_does(impl, scale):
    """The quotient; `common.test_e4m3` rounds every number."""
    scale = scale.to(DEVICE) if isinstance(scale, torch.Tensor) else scale
    number = torch.as_tensor(scale, device=DEVICE).float()
    x = torch.randn(64, 1, 16, device=DEVICE) * torch.logspace(-3, 3, 64, device=DEVICE).view(-1, 1, 1)  # fmt: skip
    x[0, 0, :7] = torch.tensor([0.0, -0.0, 464.0, 465.0, -1e30, torch.inf, -torch.inf])
    x *= number
    want = (x / number.expand(x.shape)).clamp(-448, 448).to(E4M3).view(torch.uint8)
    pages = [torch.zeros(len(x), 1, 1, 16, dtype=E4M3, device=DEVICE) for _ in range(2)]
    slots = torch.arange(len(x), device=DEVICE)
    write_kv(x, -2 * x, *pages, slots, k_scale=scale, v_scale=2 * scale, impl=impl)
    k, v = (page.view(torch.uint8).view(x.shape) for page in pages)
    assert k.equal(want)
    assert v.equal(want ^ 0x80)
    assert not pages[0].float().isnan().any()


WRITES = {
    "no-rows": (0, AttentionCase("", [], [])),
    "odd-heads": (11, AttentionCase("", [], [], num_kv_heads=5, block_size=7)),
    "many-heads-bf16": (5, AttentionCase("", [], [], num_kv_heads=20, head_dim=512, dtype=BF16)),
    "interleaved-bf16": (40, AttentionCase("", [], [], layout="interleaved", dtype=BF16)),
    "head-major-fp16": (9, AttentionCase("", [], [], layout="hnd", dtype=FP16, head_dim=64)),
}


def blank(case, num_pages):
    """K and V pages and their row scales, NaN everywhere; strides of the case's layout."""
    batch = make_batch(dataclasses.replace(case, seq_lens=[1], q_lens=[1]))
    pages = []
    for like in batch["k_pages"], batch["v_pages"]:
        shape = (num_pages, *like.shape[1:])
        code = torch.empty_strided(shape, like.stride(), dtype=torch.uint8, device=DEVICE)
        pages.append(code.fill_(NAN_E4M3).view(E4M3))
    scales = torch.full((2, num_pages, case.num_kv_heads, case.block_size), NAN, device=DEVICE)
    return pages, list(scales.transpose(2, 3).unbind(0))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", WRITES)
def test_rows_with_scales_of_their_own(impl, name):
    num_rows, case = WRITES[name]
    fused = torch.randn(num_rows, 2 * case.num_kv_heads, case.head_dim).to(DEVICE, case.dtype)
    fused *= torch.logspace(-4, 3, num_rows, device=DEVICE).to(case.dtype)[:, None, None]
    # Halfway between two codes below the smallest normal one: an error of half a step, and rounding.
    fused[..., 1] = fused.abs().amax(-1) * 2.0**-16
    k, v = fused[:, : case.num_kv_heads], fused[:, case.num_kv_heads :]
    slots = torch.randperm(4 * case.block_size)[:num_rows].to(DEVICE)
    slots[1::3] = -1
    pages, scales = blank(case, 4)
    expected, expected_scales = blank(case, 4)
    write_kv(k, v, *pages, slots, k_scale=scales[0], v_scale=scales[1], impl=impl)
    reference_write.write_kv(k, v, *expected, slots, *expected_scales)
    for got, want in zip(pages, expected, strict=True):
        assert got.view(torch.uint8).equal(want.view(torch.uint8))
    for got, want in zip(scales, expected_scales, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    written = slots >= 0
    page, row = slots[written] // case.block_size, slots[written] % case.block_size
    quantized = pages[0].view(torch.uint8)[page, row].view(E4M3)
    back, x = e4m3.dequantize(quantized, scales[0][page, row]).double(), k[written].double()
    largest = x.abs().amax(-1, keepdim=True) if num_rows else x
    # Half a step of 3 bits; below the smallest normal code (2**-6), half of that one's step. The scale,
    # the quotient and the product are rounded: two of these are relative to the value, which may be
    # that code, so relative to half a step they are 2 * 2**-24 * 2**-6 / 2**-10.
    bound = torch.maximum(x.abs() * (2.0**-4 + 2.0**-22), largest / 448 * 2.0**-10 * (1 + 2.0**-18))
    assert bool(((back - x).abs() <= bound).all())


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_that_are_not_ordinary(impl):
    x = torch.randn(9, 1, 16, device=DEVICE)
    x[0] = 0.0
    x[1] = 1e-44
    x[2] = 3e-38
    x[3, 0, 5] = torch.inf
    x[4, 0, 2] = -torch.inf
    x[5, 0, 7] = NAN
    x[6, 0, 3] = 3e38
    x[7] = -0.0
    pages, scales = blank(AttentionCase("", [], [], num_kv_heads=1), 1)
    slots = torch.arange(9, device=DEVICE)
    write_kv(x, -x, *pages, slots, k_scale=scales[0], v_scale=scales[1], impl=impl)
    expected, expected_scales = blank(AttentionCase("", [], [], num_kv_heads=1), 1)
    reference_write.write_kv(x, -x, *expected, slots, *expected_scales)
    for got, want in zip(scales, expected_scales, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    back = e4m3.dequantize(pages[0][0, :9], scales[0][0, :9])[:, 0]
    for got, want in zip(pages, expected, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0, equal_nan=True)
    assert back[[0, 7]].eq(0).all()
    assert back[5].isnan().all(), "a NaN is not lost"
    finite = back[[0, 1, 2, 3, 4, 6, 7, 8]]
    assert finite.isfinite().all(), "nothing else becomes one"
    top = torch.finfo(torch.float32).max
    assert abs(back[3, 5].item()) >= 0.99 * top
    assert abs(back[4, 2].item()) >= 0.99 * top
    assert scales[0].isnan()[0, 9:].all(), "other rows stay as they were"
