"""How work is divided on the device: helpers that the attention kernels and the merge of decode's pieces share.

Decode: every program derives the same division from the lengths of the batch, so the host needs no lengths and a captured graph stays right.
The paged keys of all decode sequences, divided by ``target_items``, give the keys of one piece (never fewer than MIN_SPLIT_KEYS); a
sequence is cut into as many equal pieces as that gives, and the pieces of all sequences are numbered one after another.

Source: FlashDecoding (split-KV); FlashMLA's tile scheduler divides the batch's keys in the same way.
"""

import triton
import triton.language as tl

# Sequences whose lengths a program looks at together.
CHUNK = tl.constexpr(128)


@triton.jit
def paged_range(seq_len, q_len, sliding_window, FRESH: tl.constexpr):
    """The keys [low, high) in the pages that some query of a sequence sees; scalars or vectors."""
    context = seq_len - q_len
    high = tl.maximum(context if FRESH else seq_len, 0)
    low = high * 0
    if sliding_window is not None:
        low = tl.minimum(tl.maximum(context - sliding_window + 1, 0), high)
    return low, high


@triton.jit
def _chunk_keys(seq_lens, cu_seqlens_q, seq, num_decodes, sliding_window, FRESH: tl.constexpr):
    """New tokens and paged keys of a vector of sequences; 0 past the last decode sequence."""
    live = seq < num_decodes
    first = tl.load(cu_seqlens_q + seq, mask=live, other=0)
    q_len = tl.load(cu_seqlens_q + seq + 1, mask=live, other=0) - first
    seq_len = tl.load(seq_lens + seq, mask=live, other=0)
    low, high = paged_range(seq_len, q_len, sliding_window, FRESH)
    return q_len, tl.where(live, high - low, 0)


@triton.jit
def piece_tokens(
    seq_lens,
    cu_seqlens_q,
    num_decodes,
    target_items,
    sliding_window,
    FRESH: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
):
    """Keys of one piece: the batch's paged keys over ``target_items``, at least MIN_TOKENS."""
    total = tl.zeros([], tl.int64)
    for start in range(0, num_decodes, CHUNK):
        _, keys = _chunk_keys(
            seq_lens,
            cu_seqlens_q,
            start + tl.arange(0, CHUNK),
            num_decodes,
            sliding_window,
            FRESH,
        )
        total += tl.sum(keys.to(tl.int64), 0)
    return tl.maximum((total + target_items - 1) // target_items, MIN_TOKENS).to(tl.int32)


@triton.jit
def _num_pieces(q_len, keys, tokens, BLOCK_Q: tl.constexpr):
    # A decode tile holds BLOCK_Q tokens: a sequence with more is the prefill kernel's, one without new tokens is nobody's.
    pieces = tl.maximum((keys + tokens - 1) // tokens, 1)
    return tl.where((q_len > 0) & (q_len <= BLOCK_Q), pieces, 0)


@triton.jit
def find_item(
    item,
    seq_lens,
    cu_seqlens_q,
    num_decodes,
    tokens,
    sliding_window,
    FRESH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """The sequence that work item belongs to and the number of its first item; the sequence is num_decodes past the last item."""
    found = tl.zeros([], tl.int32)
    first = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int32)
    for start in range(0, num_decodes, CHUNK):
        seq = start + tl.arange(0, CHUNK)
        q_len, keys = _chunk_keys(seq_lens, cu_seqlens_q, seq, num_decodes, sliding_window, FRESH)
        pieces = _num_pieces(q_len, keys, tokens, BLOCK_Q)
        stop = before + tl.cumsum(pieces, 0)
        passed = (stop <= item) & (seq < num_decodes)
        found += tl.sum(passed.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(passed, stop, 0), 0))
        before += tl.sum(pieces, 0)
    return found, first


@triton.jit
def first_item(
    target,
    seq_lens,
    cu_seqlens_q,
    num_decodes,
    tokens,
    sliding_window,
    FRESH: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """The number of the first work item of sequence ``target``."""
    before = tl.zeros([], tl.int32)
    for start in range(0, target, CHUNK):
        seq = start + tl.arange(0, CHUNK)
        q_len, keys = _chunk_keys(seq_lens, cu_seqlens_q, seq, num_decodes, sliding_window, FRESH)
        pieces = _num_pieces(q_len, keys, tokens, BLOCK_Q)
        before += tl.sum(tl.where(seq < target, pieces, 0), 0)
    return before


@triton.jit
def num_pieces(seq_len, q_len, tokens, sliding_window, FRESH: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Pieces of one sequence."""
    low, high = paged_range(seq_len, q_len, sliding_window, FRESH)
    return _num_pieces(q_len, high - low, tokens, BLOCK_Q)


@triton.jit
def item_of_turn(turn):
    """The item that this program takes in a turn, where programs take items, longest first, in turns.

    They go to and fro: who had the longest item of one turn has the shortest of the next.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    place = tl.where(turn % 2 == 0, program, num_programs - 1 - program)
    return turn * num_programs + place
