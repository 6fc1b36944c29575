"""``compressed_attention`` against the float64 oracle, both implementations, on batches full of poison."""

import dataclasses

import pytest
import torch

from quire.kernels.mla import LatentPages, compressed_attention
from tests.helpers import DEVICE, NAN, assert_within_budget
from tests.kernels.mla.compressed_cases import Case, W, exactly, make_batch

BF16, FP16 = torch.bfloat16, torch.float16
IMPLS = ("triton", "torch")
AROUND_W = [1, W - 1, W, W + 1, 3 * W]
REAL = {"head_dim": 512, "rope_dim": 64, "dtype": BF16}
FP8 = REAL | {"fp8": True}

CASES = [
    Case("window-decode-around-w", AROUND_W, [1] * 5),
    Case("window-decode-pages-only", AROUND_W, [1] * 5, fresh=False),
    Case("window-decode-linear-table", [30, 7], [1, 1], ring=False, turned=False, sinks=False),
    Case("window-1", [1, 9, 2], [1, 5, 2], sliding_window=1),
    Case("window-prefill-around-w", AROUND_W, AROUND_W),
    Case("window-prefill-chunk-ring", [30, 9, 61], [11, 9, 5]),
    Case("window-prefill-chunk-pages-only", [30, 61], [11, 5], fresh=False),
    Case("window-prefill-several-token-tiles", [45], [40], num_heads=3, rows=16),
    Case("window-padding", [2, 20], [5, 3]),
    Case("empty-sequences", [0, 20, 0, 5], [1, 1, 0, 1], ratio=4),
    Case("empty-sequences-pages-only", [0, 0], [1, 1], ratio=4, topk=4, fresh=False),
    Case("hca-decode-around-a-closing-entry", [3, 4, 5, 7, 8, 9, 31, 32, 33], [1] * 9, ratio=4),
    Case("hca-decode-pages-of-2", [40, 17], [1, 1], ratio=4, entry_rows=2, fresh=False),
    Case("hca-decode-speculative", [40, 9, 21], [3, 3, 3], ratio=4, num_decodes=3),
    Case("hca-prefill-first", [3, 4, 8, 33], [3, 4, 8, 33], ratio=4),
    Case("hca-prefill-chunk", [41, 20, 9], [17, 20, 1], ratio=8, entry_rows=2, num_heads=3),
    Case("hca-prefill-pages-only", [41, 20], [17, 20], ratio=4, fresh=False),
    Case("hca-prefill-ratio-128", [300], [4], ratio=128, entry_rows=2),
    Case("hca-padding", [2, 20], [5, 3], ratio=1),
    Case("hca-scale", [40], [2], ratio=4, softmax_scale=1.0),
    Case("csa-decode", [60, 9, 3, 4], [1] * 4, ratio=4, topk=6),
    Case("csa-decode-no-lens", [60, 9, 3, 4], [1] * 4, ratio=4, topk=6, lens=False, fresh=False),
    Case("csa-decode-all-visible", [25, 27], [1, 1], ratio=4, topk=16, scattered=False),
    Case("csa-decode-speculative", [60, 9], [3, 3], ratio=4, topk=20, num_decodes=2),
    Case("csa-prefill-chunk", [41, 9, 1], [5, 9, 1], ratio=4, topk=6, num_heads=20),
    Case("csa-prefill-pages-of-2", [41], [6], ratio=4, topk=5, entry_rows=2, fresh=False),
    Case("csa-topk-1", [41, 3], [2, 3], ratio=4, topk=1, scattered=False),
    Case("mixed-hca", [40, 9, 50, 17], [1, 1, 20, 17], ratio=4, num_decodes=2),
    Case("mixed-csa", [40, 9, 30], [1, 1, 6], ratio=4, topk=6, num_decodes=2),
    Case("mixed-long-decode", [30, 9, 20], [7, 1, 6], ratio=4, num_decodes=2),
    Case("split-hca", [2000], [1], ratio=4, entry_rows=64),
    Case("split-hca-ragged", [1600, 3, 0, 900], [1, 1, 1, 2], ratio=4, entry_rows=64, num_decodes=4),
    Case("split-hca-wide", [800], [2], ratio=2, num_decodes=1, fresh=False),
    Case("split-csa", [1500], [1], ratio=4, topk=300, entry_rows=64),
    Case("split-csa-speculative", [2400], [2], ratio=4, topk=600, num_decodes=1, entry_rows=64),
    Case("split-window", [400], [1], sliding_window=300, rows=16),
    Case("whole-max-seq-len", [900], [1], ratio=4, max_seq_len=900),
    Case("million-hca", [2**20, 2**20 - 1], [2, 1], ratio=2**17, num_decodes=1),
    Case("million-csa", [2**20, 2**20 - 1, 2**20 - 4], [1, 1, 1], ratio=4, topk=12, entry_rows=64, ring=False),
    Case("million-window-prefill", [2**20], [9], rows=64),
    Case("bf16-heads-8", [40, 9], [1, 1], ratio=4, dtype=BF16, num_heads=8),
    Case("bf16-heads-16-csa", [40], [3], ratio=4, topk=5, dtype=BF16, num_heads=16, head_dim=32),
    Case("bf16-heads-64", [40, 30], [1, 4], ratio=4, dtype=BF16, num_heads=64, num_decodes=1),
    Case("bf16-heads-128-csa", [40], [2], ratio=4, topk=5, dtype=BF16, num_heads=128),
    Case("bf16-heads-24-prefill", [40], [9], ratio=4, dtype=BF16, num_heads=24),
    Case("bf16-heads-80-prefill", [20], [3], ratio=4, dtype=BF16, num_heads=80),
    Case("fp16-heads-5", [40, 20], [1, 9], ratio=4, dtype=FP16, num_heads=5, num_decodes=1),
    Case("real-decode", [200, 140], [1, 1], ratio=4, topk=16, rows=64, entry_rows=64, sliding_window=128, num_heads=8, **REAL),
    Case("real-prefill-hca", [270], [3], ratio=128, rows=64, entry_rows=2, sliding_window=128, num_heads=32, **REAL),
    Case("real-fp32", [40], [2], ratio=4, topk=6, head_dim=512, rope_dim=64, num_heads=3),
    Case("fp8-window-decode", [200, 3], [1, 1], rows=64, sliding_window=128, fresh=False, **FP8),
    Case("fp8-hca-decode", [300], [1], ratio=128, rows=64, entry_rows=2, sliding_window=128, num_heads=16, fresh=False, **FP8),
    Case("fp8-hca-decode-fresh", [80, 1], [1, 1], ratio=8, rows=64, entry_rows=2, num_heads=8, **FP8),
    Case("fp8-csa-decode", [200], [1], ratio=4, topk=20, rows=64, entry_rows=64, num_heads=20, fresh=False, **FP8),
    Case("fp8-csa-decode-64", [90], [1], ratio=4, topk=9, rows=64, entry_rows=64, num_heads=64, **FP8),
    Case("fp8-prefill-chunk", [70, 9], [20, 9], ratio=8, rows=64, entry_rows=2, **FP8),
    Case("fp8-csa-prefill-fp32-queries", [40], [3], ratio=4, topk=5, **(FP8 | {"dtype": torch.float32})),
]  # fmt: skip


def attend(batch, impl, **more):
    return compressed_attention(**batch, impl=impl, **more)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_float64(case):
    batch = make_batch(case)
    exact, exact_lse = exactly(batch, torch.float64)
    plain, _ = exactly(batch, case.dtype)
    # The lse is fp32 arithmetic on the inputs whatever their dtype, and held to that.
    _, plain_lse = exactly(batch, torch.float32)
    for impl in IMPLS:
        lse = torch.full(exact_lse.shape, NAN, device=DEVICE)
        out = attend(batch, impl, lse=lse)
        assert out.dtype == case.dtype
        assert_within_budget(f"{impl} out", out.cpu(), plain, exact)
        assert_within_budget(f"{impl} lse", lse.cpu(), plain_lse, exact_lse)
