"""How decode work is divided into KV splits on the device, for attention and the merge of splits.

Every program derives the same division from the lengths of the batch, so the host needs no lengths
and a captured graph stays right. The paged keys of all decode sequences, divided by
``target_items``, give the keys of one split (never fewer than MIN_TOKENS); a sequence has as many
equal splits as that gives, and the splits of all sequences, the *work items*, are numbered one
after another. With three sequences, target_items 4 and MIN_TOKENS 256:

    sequence          0             1       2
    paged keys        3000          500     600          4100 in all
    keys of a split   1025 = ceil(4100 / 4)
    splits            3             1       1            ceil(keys / 1025)
    work items        0   1   2     3       4            whole tiles, about 1000 keys in 0 to 2
                      |---|---|---| |-----| |------|

There may be more items than target_items, as each sequence rounds up. Items 0 to 2 leave partial
results, which the merge combines; 3 and 4 are a sequence each and write the output themselves.

`stream_k` says what it costs that every program does so, and why it has another division: a split
here belongs to one sequence, and a program computes one.

Source: FlashDecoding (split-KV); FlashMLA's tile scheduler divides the batch's keys in the same
way.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.tiles import CHUNK


class Batch(NamedTuple):
    """The decode sequences of a batch, in kernels.

    Attributes:
        seq_lens: [num_seqs] int32, tokens of each, those of this step included.
        cu_seqlens_q: [num_seqs + 1] int32, prefix sums of the new tokens.
        num_decodes: the first so many sequences are decode's.
        sliding_window: keys that a query sees, its own included; None: all before it.
    """

    seq_lens: Any
    cu_seqlens_q: Any
    num_decodes: Any
    sliding_window: Any


@triton.jit
def paged_range(seq_len, q_len, sliding_window, NEW_KV: tl.constexpr):
    """The keys [low, high) in the pages that some query of a sequence sees; scalars or vectors.

    NEW_KV: the keys of the step are in no page, but beside them.
    """
    context = seq_len - q_len
    high = tl.maximum(context if NEW_KV else seq_len, 0)
    low = high * 0
    if sliding_window is not None:
        low = tl.minimum(tl.maximum(context - sliding_window + 1, 0), high)
    return low, high


@triton.jit
def _chunk_keys(seq, batch, NEW_KV: tl.constexpr):
    """New tokens and paged keys of a vector of sequences; 0 past the last decode sequence."""
    live = seq < batch.num_decodes
    first = tl.load(batch.cu_seqlens_q + seq, mask=live, other=0)
    q_len = tl.load(batch.cu_seqlens_q + seq + 1, mask=live, other=0) - first
    seq_len = tl.load(batch.seq_lens + seq, mask=live, other=0)
    low, high = paged_range(seq_len, q_len, batch.sliding_window, NEW_KV)
    return q_len, tl.where(live, high - low, 0)


@triton.jit
def split_tokens(batch, target_items, NEW_KV: tl.constexpr, MIN_TOKENS: tl.constexpr):
    """Keys of one split: the batch's paged keys over ``target_items``, at least MIN_TOKENS."""
    total = tl.zeros([], tl.int64)
    for start in range(0, batch.num_decodes, CHUNK):
        _, keys = _chunk_keys(start + tl.arange(0, CHUNK), batch, NEW_KV)
        total += tl.sum(keys.to(tl.int64), 0)
    return tl.maximum((total + target_items - 1) // target_items, MIN_TOKENS).to(tl.int32)


@triton.jit
def _num_splits(q_len, keys, tokens, BLOCK_Q: tl.constexpr):
    # A decode tile holds BLOCK_Q tokens: a sequence with more is the prefill kernel's, one without
    # new tokens is nobody's.
    splits = tl.maximum((keys + tokens - 1) // tokens, 1)
    return tl.where((q_len > 0) & (q_len <= BLOCK_Q), splits, 0)


@triton.jit
def find_item(item, batch, tokens, NEW_KV: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The sequence that a work item belongs to and the number of that sequence's first item.

    Past the last item the sequence is num_decodes.
    """
    found = tl.zeros([], tl.int32)
    first = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int32)
    for start in range(0, batch.num_decodes, CHUNK):
        seq = start + tl.arange(0, CHUNK)
        q_len, keys = _chunk_keys(seq, batch, NEW_KV)
        splits = _num_splits(q_len, keys, tokens, BLOCK_Q)
        stop = before + tl.cumsum(splits, 0)
        passed = (stop <= item) & (seq < batch.num_decodes)
        found += tl.sum(passed.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(passed, stop, 0), 0))
        before += tl.sum(splits, 0)
    return found, first


@triton.jit
def first_item(target, batch, tokens, NEW_KV: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The number of the first work item of sequence ``target``."""
    before = tl.zeros([], tl.int32)
    for start in range(0, target, CHUNK):
        seq = start + tl.arange(0, CHUNK)
        q_len, keys = _chunk_keys(seq, batch, NEW_KV)
        splits = _num_splits(q_len, keys, tokens, BLOCK_Q)
        before += tl.sum(tl.where(seq < target, splits, 0), 0)
    return before


@triton.jit
def num_splits(seq_len, q_len, tokens, sliding_window, NEW_KV: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Splits of one sequence, ``tokens`` keys each."""
    low, high = paged_range(seq_len, q_len, sliding_window, NEW_KV)
    return _num_splits(q_len, high - low, tokens, BLOCK_Q)


@triton.jit
def item_of_turn(turn):
    """The item that this program takes in a turn, where programs take items, longest first, in
    turns.

    They go to and fro: who had the longest item of one turn has the shortest of the next.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    index = tl.where(turn % 2 == 0, program, num_programs - 1 - program)
    return turn * num_programs + index
