"""``compressed_attention`` against the float64 oracle, both implementations, on batches full of poison."""

import pytest
import torch

from quire.kernels import (
    LatentPages,
    compressed_attention,
    compressed_attention_workspace_numel,
    flash_mla_with_kvcache,
    page_bytes,
)
from quire.kernels.common.arch import named
from quire.kernels.common.launching import arch_and_sms
from quire.kernels.latent import launch as latent_launch
from tests.kernels.oracles.compressed_attention import read_row
from tests.support.helpers import DEVICE, NAN, assert_attends, in_dtypes, needs_e4m3_conversions
from tests.support.kernels.compressed_cases import Case, W, exactly, make_batch

BF16, FP16 = torch.bfloat16, torch.float16
AROUND_W = [1, W - 1, W, W + 1, 3 * W]
REAL = {"head_dim": 512, "rope_dim": 64, "dtype": BF16}
FP8 = REAL | {"fp8": True}

CASES = [
    Case("window-decode-around-w", AROUND_W, [1] * 5),
    Case("window-decode-pages-only", AROUND_W, [1] * 5, in_step=False),
    Case("window-decode-linear-table", [30, 7], [1, 1], ring=False, inverse_rope=False, sinks=False),
    Case("window-decode-ring-wrapped", [18, 19, 90], [1, 1, 2], num_decodes=3),
    Case("window-1", [1, 9, 2], [1, 5, 2], sliding_window=1),
    Case("window-prefill-around-w", AROUND_W, AROUND_W),
    Case("window-prefill-chunk-ring", [30, 9, 61, 20], [11, 9, 5, 3]),
    Case("window-prefill-chunk-pages-only", [30, 61], [11, 5], in_step=False),
    Case("window-prefill-several-token-tiles", [45], [40], num_heads=3, rows=16),
    Case("window-padding", [0, 20], [5, 3]),
    Case("empty-sequences", [0, 20, 0, 5], [1, 1, 0, 1], ratio=4),
    Case("empty-sequences-pages-only", [0, 0], [1, 1], ratio=4, topk=4, in_step=False),
    Case("hca-decode-around-a-closing-entry", [3, 4, 5, 7, 8, 9, 31, 32, 33], [1] * 9, ratio=4),
    Case("hca-decode-pages-of-2", [40, 17], [1, 1], ratio=4, entry_rows=2, in_step=False),
    Case("hca-decode-speculative", [40, 9, 21], [3, 3, 3], ratio=4, num_decodes=3),
    Case("hca-prefill-first", [3, 4, 8, 33], [3, 4, 8, 33], ratio=4),
    Case("hca-prefill-chunk", [41, 20, 9], [17, 20, 1], ratio=8, entry_rows=2, num_heads=3),
    Case("hca-prefill-pages-only", [41, 20], [17, 20], ratio=4, in_step=False),
    Case("hca-prefill-ratio-128", [300], [4], ratio=128, entry_rows=2),
    Case("hca-padding", [0, 20], [5, 3], ratio=1),
    Case("hca-scale", [40], [2], ratio=4, softmax_scale=1.0),
    Case("csa-decode", [60, 9, 3, 4], [1] * 4, ratio=4, topk=6),
    Case("csa-decode-no-lens", [60, 9, 3, 4], [1] * 4, ratio=4, topk=6, lens=False, in_step=False),
    Case("csa-decode-all-visible", [25, 27], [1, 1], ratio=4, topk=16, scattered=False),
    Case("csa-decode-speculative", [60, 9], [3, 3], ratio=4, topk=20, num_decodes=2),
    Case("csa-prefill-chunk", [41, 5, 1], [3, 5, 1], ratio=4, topk=6),
    Case("csa-prefill-pages-of-2", [41], [6], ratio=4, topk=5, entry_rows=2, in_step=False),
    Case("csa-pages-of-3", [141, 23, 70], [1, 1, 6], ratio=2, topk=9, entry_rows=3, num_decodes=2),
    Case("csa-pages-of-48", [141, 23, 70], [1, 1, 6], ratio=2, topk=9, entry_rows=48, num_decodes=2),
    Case("csa-topk-1", [41, 3], [2, 3], ratio=4, topk=1, scattered=False),
    Case("mixed-hca", [40, 9, 50, 9], [1, 1, 10, 9], ratio=4, num_decodes=2),
    Case("mixed-csa", [40, 9, 30], [1, 1, 6], ratio=4, topk=6, num_decodes=2),
    Case("mixed-long-decode", [30, 9, 20], [7, 1, 6], ratio=4, num_decodes=2),
    Case("split-hca", [1100], [1], ratio=4, entry_rows=64, num_sms=9),
    Case("split-hca-ragged", [3, 1100, 0, 1600, 9], [1, 2, 1, 1, 1], ratio=4, entry_rows=64, num_decodes=5, num_sms=9),
    Case("split-hca-across-sequences", [1100] * 3, [1] * 3, ratio=4, entry_rows=64, num_decodes=3, num_sms=2),
    Case("split-hca-past-other-sequences", [30, 1100, 9, 700, 1100, 9, 1100, 20], [0, 1, 0, 3, 1, 0, 1, 5], ratio=4, entry_rows=64, num_decodes=7, num_sms=2),
    Case("split-hca-two-head-tiles", [600], [1], ratio=2, num_heads=18, in_step=False, num_sms=7),
    Case("split-csa", [1300], [1], ratio=4, topk=270, entry_rows=64, num_sms=3),
    Case("split-csa-in-three", [1800], [1], ratio=4, topk=400, entry_rows=64, num_sms=4),
    Case("split-csa-speculative", [1300, 9], [2, 2], ratio=4, topk=270, num_decodes=2, entry_rows=64, num_sms=9),
    Case("split-window", [300], [1], sliding_window=270, rows=16, num_sms=5),
    Case("split-fp8-in-step", [600], [2], ratio=2, num_decodes=1, entry_rows=2, num_sms=4, **FP8),
    Case("split-bf16", [1400], [1], ratio=2, num_heads=33, dtype=BF16, num_sms=3),
    Case("whole-max-seq-len", [900], [1], ratio=4, max_seq_len=900),
    Case("million-hca", [2**20, 2**20 - 1], [2, 1], ratio=2**17, num_decodes=1),
    Case("million-csa", [2**20, 2**20 - 1, 2**20 - 4], [1, 1, 1], ratio=4, topk=12, entry_rows=64, ring=False),
    Case("million-window-prefill", [2**20], [9], rows=64),
    Case("bf16-heads-8", [40, 9], [1, 1], ratio=4, dtype=BF16, num_heads=8),
    Case("bf16-heads-16-csa", [40], [3], ratio=4, topk=5, dtype=BF16, num_heads=16, head_dim=32),
    Case("bf16-heads-64", [40, 30], [1, 2], ratio=4, dtype=BF16, num_heads=64, num_decodes=1),
    Case("bf16-heads-128-csa", [40], [2], ratio=4, topk=5, dtype=BF16, num_heads=128),
    Case("bf16-heads-24-prefill", [40], [9], ratio=4, dtype=BF16, num_heads=24),
    Case("bf16-heads-80-prefill", [20], [3], ratio=4, dtype=BF16, num_heads=80),
    Case("fp16-heads-5", [40, 20], [1, 9], ratio=4, dtype=FP16, num_heads=5, num_decodes=1),
    Case("real-decode", [200, 140], [1, 1], ratio=4, topk=16, rows=64, entry_rows=64, sliding_window=128, num_heads=8, **REAL),
    Case("real-prefill-hca", [270], [3], ratio=128, rows=64, entry_rows=2, sliding_window=128, num_heads=32, **REAL),
    Case("real-fp32", [40], [2], ratio=4, topk=6, head_dim=512, rope_dim=64, num_heads=3),
    Case("csa-below-hopper", [150, 40], [1, 1], ratio=4, topk=6, num_heads=20, arch="sm_80", **REAL),
    Case("csa-below-hopper-ragged", [150, 40], [2, 1], ratio=4, topk=6, num_heads=20, arch="sm_80", **REAL),
    Case("fp8-window-decode", [200, 3], [1, 1], rows=64, sliding_window=128, in_step=False, **FP8),
    Case("fp8-hca-decode", [300], [1], ratio=128, rows=64, entry_rows=2, sliding_window=128, num_heads=16, in_step=False, **FP8),
    Case("fp8-hca-decode-in-step", [80, 1], [1, 1], ratio=8, rows=64, entry_rows=2, num_heads=8, **FP8),
    Case("fp8-csa-decode", [200], [1], ratio=4, topk=20, rows=64, entry_rows=64, num_heads=20, in_step=False, **FP8),
    Case("fp8-csa-decode-64", [90], [1], ratio=4, topk=9, rows=64, entry_rows=64, num_heads=64, **FP8),
    Case("fp8-csa-pages-of-1", [141, 23, 70], [1, 1, 6], ratio=2, topk=9, entry_rows=1, num_decodes=2, **FP8),
    Case("fp8-csa-pages-of-5", [141, 23, 70], [1, 1, 6], ratio=2, topk=9, entry_rows=5, num_decodes=2, **FP8),
    Case("fp8-prefill-chunk", [70, 9], [20, 9], ratio=8, rows=64, entry_rows=2, **FP8),
    Case("fp8-csa-prefill-fp32-queries", [40], [3], ratio=4, topk=5, **(FP8 | {"dtype": torch.float32})),
]  # fmt: skip


@pytest.mark.parametrize("case", in_dtypes(CASES, (BF16,)), ids=lambda case: case.name)
def test_against_float64(case, monkeypatch):
    """For ``num_sms`` multiprocessors work is split: parts are written to the workspace."""
    batch = make_batch(case)
    exact = exactly(batch)
    assert_attends(compressed_attention, batch, exact, "torch")
    if case.num_sms is not None:
        numel = compressed_attention_workspace_numel(head_dim=case.head_dim, num_sms=case.num_sms)
        workspace = batch["workspace"] = torch.full((numel,), NAN, device=DEVICE)
    arch, num_sms = arch_and_sms(batch["q"])
    found = named(case.arch) if case.arch else arch, case.num_sms or num_sms
    monkeypatch.setattr(latent_launch, "arch_and_sms", lambda q: found)
    assert_attends(compressed_attention, batch, exact, "triton")
    if case.num_sms is not None:
        assert workspace.isfinite().sum() >= 2 * case.num_heads * (case.head_dim + 1)


@pytest.mark.parametrize("case, split", [
    (Case("hca", [1104], [1], ratio=4), True),
    (Case("hca-short", [500], [1], ratio=4), False),
    (Case("csa", [1200], [1], ratio=4, topk=280), True),
    (Case("window", [900], [1]), None),
    (Case("max-seq-len", [400], [1], ratio=2, max_seq_len=400), None),
], ids=lambda x: getattr(x, "name", ""))  # fmt: skip
def test_work_is_cut_only_where_it_pays(case, split):
    """None: the host knows already that there are no KV splits, and launches no merge. The workspace suffices in any case."""
    batch = make_batch(case)
    sms = torch.cuda.get_device_properties(0).multi_processor_count if DEVICE == "cuda" else 2
    numel = compressed_attention_workspace_numel(head_dim=16, num_sms=sms)
    workspace = torch.full((numel,), NAN, device=DEVICE)
    compressed_attention(**batch, impl="triton", workspace=workspace)
    assert workspace.isnan().all() == (not split)
    if split is not None:
        with pytest.raises(
            ValueError, match=r"workspace: expected float32 \[>= \d+\], got float32 \[9\]"
        ):
            compressed_attention(**batch, impl="triton", workspace=workspace[:9])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_quantized_rows_are_read_exactly(arch, monkeypatch):
    """A query that sees one key gets its row: every quantized value with every scale that a finite bf16 number can have."""
    if named(arch).widens_e4m3:
        needs_e4m3_conversions()
    quantized = torch.arange(256, dtype=torch.uint8)
    quantized = torch.where(quantized % 128 == 127, 0, quantized)  # without NaN
    exponents = torch.tensor([10, 60, 105, 127, 134, 200, 246], dtype=torch.uint8)
    rows = 16
    data = torch.full((2, page_bytes(rows)), 255, dtype=torch.uint8)
    for row in range(rows):
        data[1, row * 576 : row * 576 + 448] = quantized.roll(37 * row).repeat(2)[:448]
        data[1, row * 576 + 448 : row * 576 + 576] = torch.randn(64).bfloat16().view(torch.uint8)
        data[1, rows * 576 + row * 8 :][:7] = exponents.roll(row)
    pages = LatentPages(data.to(DEVICE), rows)
    q = torch.zeros(rows, 1, 512, dtype=BF16, device=DEVICE)
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)[:, None] + rows
    monkeypatch.setattr(latent_launch, "arch_and_sms", lambda _: (named(arch), 2))
    cache = data[:, : rows * 584].unflatten(1, (rows, 1, 584)).to(DEVICE)
    out, _ = flash_mla_with_kvcache(
        q[:, None], cache, None, None, 512, is_fp8_kvcache=True, indices=slots[:, None], impl="triton"
    )  # fmt: skip
    expected = torch.stack([read_row(pages, 1, row) for row in range(rows)])
    assert out[:, 0, 0].double().equal(expected.to(BF16).double())


def test_what_is_not_supported_says_so():
    batch = make_batch(Case("", [4], [1], ratio=4, in_step=False, rows=2, **FP8))
    plain = make_batch(Case("", [4], [1], ratio=4, in_step=False, **REAL))
    with pytest.raises(NotImplementedError, match="quantized and plain pages in one call"):
        compressed_attention(**(batch | {"compressed_pages": plain["compressed_pages"]}))
    with pytest.raises(NotImplementedError, match="float16 with quantized pages"):
        compressed_attention(**(batch | {"q": batch["q"].half()}))
    odd = make_batch(Case("", [4], [1], rope_dim=6))
    with pytest.raises(NotImplementedError, match="rope_dim 6 is not a power of two"):
        compressed_attention(**odd)
