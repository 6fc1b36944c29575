"""Split-KV decode: how the keys of a batch are divided on the device, and how results are merged.

The paged keys of all decode sequences over ``target_splits`` give the keys of one split (at least
MIN_SPLIT_KEYS). A sequence has as many equal splits as that gives; the splits of all sequences are
numbered one after another, a program each. With three sequences and target_splits 4:

    sequence          0             1       2
    paged keys        3000          500     600          4100 in all
    keys of a split   1025 = ceil(4100 / 4)
    splits            0   1   2     3       4            about 1000 keys in 0 to 2

Every program derives this from the lengths in device memory: the host needs none, and a captured
graph stays right. Splits 0 to 2 leave partial results, which `merge_splits_kernel` combines by their
lse; 3 and 4 write the output themselves.

Source: FlashDecoding (split-KV); FlashInfer (arXiv 2501.01005) 2.2 for the merge.
"""

import triton
import triton.language as tl

from ..common.decode_plans import MIN_SPLIT_KEYS
from ..common.merging import load_sink, merge_rows
from ..common.tiles import CHUNK

LEAST_KEYS = tl.constexpr(MIN_SPLIT_KEYS)


@triton.jit
def paged_range(seq_len, q_len, sliding_window, NEW_KV: tl.constexpr):
    """Keys [low, high) in the pages that some query of a sequence sees; scalars or vectors.

    NEW_KV: the keys of the step are in no page.
    """
    context = seq_len - q_len
    high = tl.maximum(context if NEW_KV else seq_len, 0)
    low = high * 0
    if sliding_window is not None:
        low = tl.minimum(tl.maximum(context - sliding_window + 1, 0), high)
    return low, high


@triton.jit
def split_range(low, high, split, num_splits, BLOCK_N: tl.constexpr):
    """The part of keys [low, high) that one of ``num_splits`` splits has: whole tiles inside."""
    first = low // BLOCK_N
    tiles = tl.cdiv(high, BLOCK_N) - first
    begin = (first + tiles * split // num_splits) * BLOCK_N
    end = (first + tiles * (split + 1) // num_splits) * BLOCK_N
    return tl.maximum(low, begin), tl.minimum(high, end)


@triton.jit
def _keys(seq, seq_lens, cu_seqlens_q, num_decodes, sliding_window, NEW_KV: tl.constexpr):
    """New tokens and paged keys of [CHUNK] sequences; 0 past the last decode sequence."""
    live = seq < num_decodes
    first = tl.load(cu_seqlens_q + seq, mask=live, other=0)
    q_len = tl.load(cu_seqlens_q + seq + 1, mask=live, other=0) - first
    seq_len = tl.load(seq_lens + seq, mask=live, other=0)
    low, high = paged_range(seq_len, q_len, sliding_window, NEW_KV)
    return q_len, tl.where(live, high - low, 0)


@triton.jit
def _num_splits(q_len, keys, share, BLOCK_Q: tl.constexpr):
    # A sequence of more new tokens than a decode tile holds is prefill's.
    splits = tl.maximum((keys + share - 1) // share, 1)
    return tl.where((q_len > 0) & (q_len <= BLOCK_Q), splits, 0)


@triton.jit
def _keys_of_a_split(
    seq_lens, cu_seqlens_q, num_decodes, target_splits, sliding_window, NEW_KV: tl.constexpr
):
    total = tl.zeros([], tl.int64)
    for start in range(0, num_decodes, CHUNK):
        seq = start + tl.arange(0, CHUNK)
        _, keys = _keys(seq, seq_lens, cu_seqlens_q, num_decodes, sliding_window, NEW_KV)
        total += tl.sum(keys.to(tl.int64), 0)
    return tl.maximum((total + target_splits - 1) // target_splits, LEAST_KEYS).to(tl.int32)


@triton.jit
def find_split(
    item, seq_lens, cu_seqlens_q, num_decodes, target_splits, sliding_window,
    NEW_KV: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """The sequence of a split (num_decodes past the last), its number in it, and their count."""
    share = _keys_of_a_split(
        seq_lens, cu_seqlens_q, num_decodes, target_splits, sliding_window, NEW_KV
    )
    found = tl.zeros([], tl.int32)
    first = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int32)
    count = tl.zeros([], tl.int32)
    for start in range(0, num_decodes, CHUNK):
        seq = start + tl.arange(0, CHUNK)
        q_len, keys = _keys(seq, seq_lens, cu_seqlens_q, num_decodes, sliding_window, NEW_KV)
        splits = _num_splits(q_len, keys, share, BLOCK_Q)
        stop = before + tl.cumsum(splits, 0)
        passed = (stop <= item) & (seq < num_decodes)
        found += tl.sum(passed.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(passed, stop, 0), 0))
        count += tl.sum(tl.where((stop > item) & (stop - splits <= item), splits, 0), 0)
        before += tl.sum(splits, 0)
    return found, item - first, count


@triton.jit
def splits_of(
    target, seq_lens, cu_seqlens_q, num_decodes, target_splits, sliding_window,
    NEW_KV: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """The first split of a sequence, and how many it has."""
    share = _keys_of_a_split(
        seq_lens, cu_seqlens_q, num_decodes, target_splits, sliding_window, NEW_KV
    )
    first = tl.zeros([], tl.int32)
    count = tl.zeros([], tl.int32)
    for start in range(0, target + 1, CHUNK):
        seq = start + tl.arange(0, CHUNK)
        q_len, keys = _keys(seq, seq_lens, cu_seqlens_q, num_decodes, sliding_window, NEW_KV)
        splits = _num_splits(q_len, keys, share, BLOCK_Q)
        first += tl.sum(tl.where(seq < target, splits, 0), 0)
        count += tl.sum(tl.where(seq == target, splits, 0), 0)
    return first, count


@triton.jit(do_not_specialize=["num_decodes", "target_splits"])
def merge_splits_kernel(
    partial_out, first_lse, sinks, out, lse, seq_lens, cu_seqlens_q, num_decodes, num_heads,
    target_splits, sliding_window, NEW_KV: tl.constexpr, BLOCK_Q: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Merge the KV splits of one head of one decode sequence, if it has several."""
    seq = tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    first_token = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - first_token
    low, high = paged_range(tl.load(seq_lens + seq), q_len, sliding_window, NEW_KV)
    if high - low <= LEAST_KEYS:  # never split: most short sequences end here
        return
    first, num_parts = splits_of(
        seq, seq_lens, cu_seqlens_q, num_decodes, target_splits, sliding_window, NEW_KV, BLOCK_Q
    )
    if num_parts <= 1:
        return
    sink = load_sink(sinks, head)
    for t in range(0, q_len):
        row = (first.to(tl.int64) * BLOCK_Q + t) * num_heads + head
        merged, merged_lse = merge_rows(
            partial_out + row * HEAD_DIM,
            partial_out + first_lse + row,
            num_parts,
            BLOCK_Q * num_heads * HEAD_DIM,
            BLOCK_Q * num_heads,
            sink,
            HEAD_DIM,
            BLOCK_PARTS,
        )
        _store(merged, merged_lse, out, lse, (first_token + t).to(tl.int64), head, HEAD_DIM)


@triton.jit(do_not_specialize=["num_parts"])
def merge_partials_kernel(
    partial_out, partial_lse, sinks, out, lse, num_parts, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Merge one row of dense parts: ``strided.Pages`` [num_parts, num_tokens, num_heads, ...]."""
    token = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    merged, merged_lse = merge_rows(
        partial_out.data + token * partial_out.stride_row + head * partial_out.stride_head,
        partial_lse.data + token * partial_lse.stride_row + head * partial_lse.stride_head,
        num_parts,
        partial_out.stride_page,
        partial_lse.stride_page,
        load_sink(sinks, head),
        HEAD_DIM,
        BLOCK_PARTS,
    )
    _store(merged, merged_lse, out, lse, token, head, HEAD_DIM)


@triton.jit
def _store(merged, merged_lse, out, lse, token, head, HEAD_DIM: tl.constexpr):
    row = out.data + token * out.stride_token + head * out.stride_head
    tl.store(row + tl.arange(0, HEAD_DIM), merged.to(out.data.dtype.element_ty))
    if lse is not None:
        tl.store(lse.data + token * lse.stride_token + head * lse.stride_head, merged_lse)
