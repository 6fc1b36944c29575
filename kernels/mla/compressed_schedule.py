"""How the decode work of ``compressed_attention`` is divided on the device; the attention kernel and the merge of its pieces share it.

A query tile of 64 heads leaves 128 KiB of fp32 partial results behind, as much as 128 keys are: a cut must buy parallelism, so work is cut
only where it would leave multiprocessors idle. The keys of all decode tiles over ``target_items`` give the keys of a piece, at least
MIN_KEYS; a sequence is cut into as many pieces as fit whole into its keys. Cut sequences then have at most ``target_items`` pieces
together, whatever the batch, and that many partial results.

Every program derives this from the lengths of the batch, so that the host needs none of them and a captured graph stays right. ``batch`` is
the tuple (seq_lens, cu_seqlens_q, window_lens, entry_lens, num_decodes, decode_tokens, window_width, topk, sliding_window, ratio) of kernel
arguments; where keys come as lists of slots, only the lengths of the lists and their widths count, and each token is a sequence.

Source: FlashDecoding (split-KV); FlashMLA's tile scheduler divides the batch's keys in a similar way.
"""

import triton
import triton.language as tl

# Sequences whose lengths a program looks at together.
CHUNK = tl.constexpr(128)


@triton.jit
def _work(seq, batch, SLOTS: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Query tiles of each sequence that are decode's to compute, and a bound of the keys of each of them."""
    seq_lens, cu_seqlens_q, window_lens, entry_lens, num_decodes, decode_tokens, window_width, topk, sliding_window, ratio = batch  # fmt: skip
    live = seq < num_decodes
    if SLOTS:
        tiles = live.to(tl.int32)
        if window_lens is not None:
            keys = tl.load(window_lens + seq, mask=live, other=0)
        else:
            keys = tiles * window_width
        if entry_lens is not None:
            keys += tl.load(entry_lens + seq, mask=live, other=0)
        elif topk is not None:
            keys += topk
    else:
        first = tl.load(cu_seqlens_q + seq, mask=live, other=0)
        q_len = tl.load(cu_seqlens_q + seq + 1, mask=live, other=0) - first
        # A sequence with more new tokens than that is the prefill kernel's.
        tiles = tl.where(q_len <= decode_tokens, (q_len + BLOCK_Q - 1) // BLOCK_Q, 0)
        seq_len = tl.maximum(tl.load(seq_lens + seq, mask=live, other=0), 0)
        keys = tl.minimum(seq_len, sliding_window - 1 + tl.minimum(q_len, BLOCK_Q))
        if ratio is not None:
            entries = seq_len // ratio
            if topk is not None:
                entries = tl.minimum(entries, topk)
            keys += entries
    return tiles, keys


@triton.jit
def piece_size(batch, target_items, SLOTS: tl.constexpr, BLOCK_Q: tl.constexpr, MIN_KEYS: tl.constexpr):  # fmt: skip
    """Keys of one piece."""
    num_decodes = batch[4]
    total = tl.zeros([], tl.int64)
    for start in range(0, num_decodes, CHUNK):
        tiles, keys = _work(start + tl.arange(0, CHUNK), batch, SLOTS, BLOCK_Q)
        total += tl.sum(tiles.to(tl.int64) * keys, 0)
    return tl.maximum((total + target_items - 1) // target_items, MIN_KEYS).to(tl.int32)


@triton.jit
def pieces_of(seq, batch, size, SLOTS: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Query tiles of a sequence (or a vector of them) and pieces of each tile."""
    tiles, keys = _work(seq, batch, SLOTS, BLOCK_Q)
    return tiles, tl.maximum(keys // size, 1)


@triton.jit
def find_item(item, batch, size, SLOTS: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The sequence of a work item and the sequence's first item; the sequence is num_decodes past the last item."""
    num_decodes = batch[4]
    found = tl.zeros([], tl.int32)
    first = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int32)
    for start in range(0, num_decodes, CHUNK):
        seq = start + tl.arange(0, CHUNK)
        tiles, pieces = pieces_of(seq, batch, size, SLOTS, BLOCK_Q)
        stop = before + tl.cumsum(tiles * pieces, 0)
        passed = (stop <= item) & (seq < num_decodes)
        found += tl.sum(passed.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(passed, stop, 0), 0))
        before += tl.sum(tiles * pieces, 0)
    return found, first


@triton.jit
def first_part(target, batch, size, SLOTS: tl.constexpr, BLOCK_Q: tl.constexpr):
    """How many partial results the sequences before ``target`` leave: one for each piece of those that are cut."""
    before = tl.zeros([], tl.int32)
    for start in range(0, target, CHUNK):
        seq = start + tl.arange(0, CHUNK)
        tiles, pieces = pieces_of(seq, batch, size, SLOTS, BLOCK_Q)
        before += tl.sum(tl.where((seq < target) & (pieces > 1), tiles * pieces, 0), 0)
    return before
