"""Paged and sliding-window attention against the float64 oracle, both implementations, on batches full of poison."""

import pytest
import torch

from quire.kernels import paged_attention, sliding_window_attention, workspace_numel
from tests.support.helpers import (
    DEVICE,
    NAN,
    AttentionCase,
    assert_attends,
    assert_within_budget,
    attention_reference,
    in_dtypes,
    make_batch,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
W = 20
AROUND_W = [1, W - 1, W, W + 1, 2 * W]

FULL = [
    AttentionCase("decode-around-block", [1, 15, 16, 17, 33], [1] * 5),
    AttentionCase("decode-pages-only", [1, 15, 16, 17, 33], [1] * 5, in_step=False),
    AttentionCase("decode-empty-sequences", [0, 50, 0, 30], [1, 1, 0, 1]),
    AttentionCase("decode-empty-pages-only", [0, 50, 0, 30], [1, 1, 0, 1], in_step=False, sinks=True),
    AttentionCase("decode-all-empty", [0, 0], [1, 1], in_step=False),
    AttentionCase("decode-speculative", [9, 21, 3], [3, 3, 3], num_decodes=3),
    AttentionCase("decode-long-q-in-front", [40, 21], [40, 1], num_decodes=2),
    AttentionCase("decode-bf16", [1, 70], [1, 1], dtype=BF16, num_heads=8),
    AttentionCase("decode-fp16-mqa", [9, 70], [1, 1], dtype=FP16, num_heads=5, num_kv_heads=1),
    AttentionCase("decode-mha", [40], [1], num_heads=3, num_kv_heads=3),
    AttentionCase("decode-group-24", [18], [1], num_heads=24, num_kv_heads=1),
    AttentionCase("decode-softcap-sinks", [40, 3], [1, 1], softcap=5.0, sinks=True),
    AttentionCase("decode-d512-bf16", [40], [1], head_dim=512, dtype=BF16, num_heads=8, num_kv_heads=1),
    AttentionCase("decode-d256-page-256", [300], [1], head_dim=256, block_size=256, dtype=BF16),
    AttentionCase("split", [700, 3, 0, 300], [1] * 4, block_size=64, num_heads=2, num_kv_heads=1),
    AttentionCase("split-speculative-sinks", [620, 9], [3, 1], num_decodes=2, num_heads=2, num_kv_heads=1, sinks=True),
    AttentionCase("split-pages-only-softcap", [600], [2], num_decodes=1, in_step=False, softcap=9.0, num_heads=2, num_kv_heads=1),
    AttentionCase("split-max-seq-len-512", [512], [1], max_seq_len=512, num_heads=2, num_kv_heads=1),
    AttentionCase("whole-max-seq-len-256", [256], [1], max_seq_len=256, num_heads=2, num_kv_heads=1),
    AttentionCase("prefill-first", [1, 15, 17, 33], [1, 15, 17, 33]),
    AttentionCase("prefill-chunk", [40, 90, 33], [7, 20, 1], num_decodes=0),
    AttentionCase("prefill-pages-only", [40, 17, 1], [7, 17, 1], in_step=False),
    AttentionCase("prefill-empty-q", [9, 60, 5], [0, 20, 0]),
    AttentionCase("prefill-padding", [0, 20], [3, 5]),
    AttentionCase("prefill-group-3", [50], [50], num_heads=6),
    AttentionCase("prefill-group-5-page-48", [60], [20], num_heads=10, block_size=48),
    AttentionCase("prefill-group-160", [6], [3], num_heads=160, num_kv_heads=1),
    AttentionCase("prefill-two-tiles-bf16", [150], [140], num_heads=1, num_kv_heads=1, dtype=BF16),
    AttentionCase("prefill-long-context-bf16", [300], [40], num_heads=2, num_kv_heads=1, dtype=BF16, block_size=128),
    AttentionCase("prefill-small-pages-bf16", [200], [9], dtype=BF16, block_size=16),
    AttentionCase("prefill-d64-interleaved", [70], [30], head_dim=64, layout="interleaved"),
    AttentionCase("prefill-d128-hnd", [70], [30], head_dim=128, layout="hnd", dtype=BF16),
    AttentionCase("prefill-d512", [40], [20], head_dim=512, dtype=BF16, num_heads=2, num_kv_heads=1),
    AttentionCase("prefill-softcap-sinks", [40, 3], [20, 3], softcap=3.0, sinks=True, softmax_scale=1.0),
    AttentionCase("mixed", [40, 9, 50, 17], [1, 1, 30, 17], num_decodes=2),
    AttentionCase("mixed-scale", [40, 50, 17], [1, 30, 17], num_decodes=1, softmax_scale=0.5),
    AttentionCase("mixed-long-decode", [60, 9, 50], [20, 1, 30], num_decodes=2),
    AttentionCase("context-prefill", [40, 17, 90, 1], [7, 17, 20, 1], in_step=False, context_only=True, num_decodes=0),
    AttentionCase("context-decode", [1, 17, 33, 0], [1] * 4, in_step=False, context_only=True, sinks=True),
    AttentionCase("context-speculative-split", [620, 9], [3, 3], num_decodes=2, in_step=False, context_only=True, num_heads=2, num_kv_heads=1),
    AttentionCase("context-mixed-bf16", [300, 9, 150, 5], [1, 2, 40, 5], num_decodes=2, in_step=False, context_only=True, dtype=BF16, softcap=5.0),
    AttentionCase("mixed-interleaved-bf16", [30, 40], [1, 9], num_decodes=1, layout="interleaved", dtype=BF16),
]  # fmt: skip

WINDOW = [
    AttentionCase("decode-around-w", AROUND_W, [1] * 5, sliding_window=W),
    AttentionCase("decode-around-w-pages-only", AROUND_W, [1] * 5, sliding_window=W, in_step=False),
    AttentionCase("decode-ring-wrapped", [45, 90, 7], [1] * 3, sliding_window=W, ring=True),
    AttentionCase("decode-ring-pages-only", [45, 90], [1, 2], num_decodes=2, sliding_window=W, ring=True, in_step=False),
    AttentionCase("decode-empty-ring", [0, 40, 70, 33], [1, 1, 1, 1], sliding_window=W, ring=True, sinks=True),
    AttentionCase("window-1", [1, 40, 2], [1, 9, 2], sliding_window=1),
    AttentionCase("window-1-pages-only", [1, 40, 2], [1, 9, 2], sliding_window=1, in_step=False),
    AttentionCase("split", [900, 40], [1, 1], sliding_window=600, num_heads=2, num_kv_heads=1),
    AttentionCase("split-ring-sinks", [900], [2], num_decodes=1, sliding_window=600, ring=True, sinks=True, num_heads=2, num_kv_heads=1),
    AttentionCase("enough-not-split", [330] * 9, [1] * 9, sliding_window=300, num_heads=1, num_kv_heads=1),
    AttentionCase("prefill-around-w", AROUND_W, AROUND_W, sliding_window=W),
    AttentionCase("decode-ring-shorter-than-a-tile", [45, 90, 7], [1] * 3, sliding_window=5, ring=True, block_size=4),
    AttentionCase("prefill-ring-shorter-than-a-tile", [90, 33], [12, 3], sliding_window=5, ring=True, block_size=4),
    AttentionCase("prefill-ring-page-48", [150, 33], [9, 33], sliding_window=50, ring=True, block_size=48, dtype=BF16),
    AttentionCase("prefill-chunk-ring", [90, 33, 300], [30, 33, 8], sliding_window=W, ring=True),
    AttentionCase("prefill-pages-only-ring", [90, 300], [30, 8], sliding_window=W, ring=True, in_step=False),
    AttentionCase("prefill-padding", [0, 40], [5, 9], sliding_window=3),
    AttentionCase("prefill-wide-bf16", [400], [60], sliding_window=200, dtype=BF16, num_heads=1, num_kv_heads=1, block_size=128),
    AttentionCase("prefill-wide-in-step-bf16", [260], [260], sliding_window=129, dtype=BF16, num_heads=1, num_kv_heads=1),
    AttentionCase("prefill-wide-pages-only", [260], [200], sliding_window=150, dtype=FP16, num_heads=1, num_kv_heads=1, in_step=False),
    AttentionCase("prefill-group-3-softcap-hnd", [60], [25], sliding_window=W, num_heads=6, softcap=4.0, layout="hnd"),
    AttentionCase("mixed-ring-interleaved", [40, 9, 50], [1, 2, 30], sliding_window=W, ring=True, num_decodes=2, layout="interleaved"),
    AttentionCase("mixed-d512-bf16", [40, 30], [1, 9], sliding_window=W, head_dim=512, dtype=BF16, num_decodes=1),
]  # fmt: skip


def cases(*tables):
    named = [(prefix, case) for prefix, table in tables for case in in_dtypes(table, (FP16, FP32))]
    return pytest.mark.parametrize(
        "case", [case for _, case in named], ids=[f"{prefix}-{case.name}" for prefix, case in named]
    )


def attend(**arguments):
    return (sliding_window_attention if "sliding_window" in arguments else paged_attention)(
        **arguments
    )


@cases(("full", FULL), ("window", WINDOW))
def test_against_float64(case):
    batch = make_batch(case)
    exact = attention_reference(batch)
    assert_attends(attend, batch, exact)
    # Without lse, torch's own attention computes decodes of plain calls.
    assert_within_budget("torch out without lse", attend(**batch, impl="torch"), exact[0])


def test_given_memory_is_filled_and_nothing_else(impl):
    case = AttentionCase("", [700, 40, 9], [1, 2, 9], num_decodes=2, num_heads=2, num_kv_heads=1)
    batch = make_batch(case)
    expected = attend(**batch, impl=impl)
    workspace = torch.full((10**6,), NAN, device=DEVICE)
    strided = torch.full((12, 5, 16), NAN, device=DEVICE)
    rows = strided[:, 1:3]
    assert attend(**batch, impl=impl, out=rows, workspace=workspace) is rows
    assert rows.equal(expected)
    assert strided[:, [0, 3, 4]].isnan().all()


@pytest.mark.parametrize("which", [("k_pages",), ("v_pages",), ("k",), ("v",), ("v_pages", "v")])
@pytest.mark.parametrize("head_dim", [16, 512])
def test_rows_of_values_may_lie_otherwise_than_rows_of_keys(which, head_dim):
    case = AttentionCase(
        "", [40, 33], [1, 20], num_decodes=1, head_dim=head_dim, num_heads=2, num_kv_heads=1, dtype=BF16
    )  # fmt: skip
    batch = make_batch(case)
    exact = attention_reference(batch)
    for name in which:
        rows = batch[name]
        wide = torch.full((*rows.shape[:-2], 3, head_dim), NAN, dtype=BF16, device=DEVICE)
        wide[..., 1:2, :] = rows
        batch[name] = wide[..., 1:2, :]
    assert_attends(attend, batch, exact, "triton")


def test_workspace_is_as_large_as_stated_and_no_larger_is_needed():
    case = AttentionCase("", [700, 300], [3, 1], num_decodes=2, num_heads=6, num_kv_heads=2)
    batch = make_batch(case)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count if DEVICE == "cuda" else 2
    numel = workspace_numel(
        num_decodes=2, max_seqlen_q=3, num_heads=6, num_kv_heads=2, head_dim=16, num_sms=num_sms
    )
    expected = attend(**batch, impl="triton")
    guarded = torch.full((numel + 100,), NAN, device=DEVICE)
    assert attend(**batch, impl="triton", workspace=guarded[:numel]).equal(expected)
    assert guarded[numel:].isnan().all()
    assert not guarded[:numel].isnan().all()
    with pytest.raises(
        ValueError,
        match=rf"workspace: expected float32 \[>= {numel}\], got float32 \[{numel - 1}\]",
    ):
        attend(**batch, impl="triton", workspace=guarded[: numel - 1])


def test_a_row_of_a_batch_is_what_it_is_alone(impl):
    together = make_batch(AttentionCase("", [40, 21], [6, 6]))
    out = attend(**together, impl=impl)
    for s in range(2):
        rows = slice(6 * s, 6 * s + 6)
        alone = dict(together, q=together["q"][rows], k=together["k"][rows], v=together["v"][rows])
        alone.update(
            block_table=together["block_table"][s : s + 1],
            seq_lens=together["seq_lens"][s : s + 1],
            cu_seqlens_q=together["cu_seqlens_q"][:2],
        )
        assert attend(**alone, impl=impl).equal(out[rows])
