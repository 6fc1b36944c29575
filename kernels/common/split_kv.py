"""Split-KV decode: the keys of a batch divided on the device among about equal programs.

A split has the keys of all query tiles of decode over ``target_splits``. A query tile has as many
equal splits as its keys hold of these, rounded down, and at least one; a program each. With three
sequences of a token and target_splits 4:

    sequence          0          1       2
    keys              3000       500     600          4100 in all
    keys of a split   1025 = ceil(4100 / 4)
    splits            0     1    2       3            1500 keys in 0 and 1

A query tile of fewer than MIN_SPLIT_KEYS keys is not split, and a split has about half as many at
least: it takes whole K/V tiles.
Every program derives this from the lengths in device memory, so a captured graph stays right.
Splits of a query tile that has several leave partial results, numbered among those alone, for
`merging.merge_splits`. The others write the output.

Source: FlashDecoding (split-KV); FlashInfer (arXiv 2501.01005) 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

# With fewer keys a KV split costs more in the merge than it wins in parallelism.
MIN_SPLIT_KEYS = 256
LEAST_KEYS = tl.constexpr(MIN_SPLIT_KEYS)
# Sequences whose lengths a program looks at together.
CHUNK = tl.constexpr(128)


@dataclass(frozen=True)
class DecodePlan:
    """Split of the decode part of a batch."""

    decode_tokens: int  # most new tokens of a sequence on the decode path
    target_splits: int
    max_items: int  # query tiles and their splits, at most
    workspace_numel: int  # fp32 elements; 0 where nothing can be split

    def partials(
        self, dim: int, workspace: torch.Tensor | None, device: torch.device
    ) -> tuple[torch.Tensor | None, int]:
        """Memory of the partial results: rows of ``dim`` values, then the lse of each, which begin
        at the element that is returned with it; ValueError if the workspace is too small."""
        numel = self.workspace_numel
        if numel == 0:
            return None, 0
        if workspace is None:
            workspace = torch.empty(numel, dtype=torch.float32, device=device)
        elif workspace.numel() < numel:
            raise ValueError(
                f"workspace: expected float32 [>= {numel}], got float32 [{workspace.numel()}]"
            )
        return workspace, numel // (dim + 1) * dim


def plan_decode(
    *,
    num_decodes: int,
    max_seqlen_q: int,
    block_q: int,
    target_splits: int,
    row_numel: int,
    max_keys: int | None,
    bounded: bool,
) -> DecodePlan:
    """Plan the decode of ``num_decodes`` sequences of at most ``max_seqlen_q`` new tokens.

    Args:
        block_q: tokens of a query tile.
        row_numel: elements of the partial results of a token.
        max_keys: upper bound of the keys of a query tile; None if unknown.
        bounded: True if these stay few at any context length (a window, top-k).
    """
    tokens = max(max_seqlen_q, block_q)
    tiles = num_decodes * -(-tokens // block_q)
    short = max_keys is not None and max_keys < MIN_SPLIT_KEYS
    # What is bounded is so for every tile alike: with enough of them there is no long one to split.
    if target_splits <= 1 or short or (bounded and tiles >= target_splits):
        return DecodePlan(tokens, max(1, target_splits), tiles, 0)
    numel = target_splits * block_q * row_numel
    return DecodePlan(tokens, target_splits, target_splits + tiles, numel)


class DecodeBatch(NamedTuple):
    """The decode sequences, and how their keys are divided, for a kernel."""

    seq_lens: Any  # None: every sequence has one token and ``most_entries`` keys
    cu_seqlens_q: Any
    num_decodes: Any
    decode_tokens: Any  # a sequence of more new tokens is prefill's
    target_splits: Any
    sliding_window: Any  # raw keys that a query sees; None: all before it
    ratio: Any  # raw tokens of a compressed entry; None: there are no entries
    most_entries: Any  # that a query sees


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
    """The share of keys [low, high) of one of ``num_splits`` splits, in whole tiles."""
    first = low // BLOCK_N
    tiles = (tl.cdiv(high, BLOCK_N) - first).to(tl.int64)
    begin = (first + tiles * split // num_splits).to(tl.int32) * BLOCK_N
    end = (first + tiles * (split + 1) // num_splits).to(tl.int32) * BLOCK_N
    return tl.maximum(low, begin), tl.minimum(high, end)


@triton.jit
def _tiles_and_keys(seq, batch, NEW_KV: tl.constexpr, BLOCK_Q: tl.constexpr):
    """(query tiles of decode sequences, approximate keys of each tile)."""
    live = seq < batch.num_decodes
    if batch.seq_lens is None:
        tiles = live.to(tl.int32)
        keys = tiles * batch.most_entries
    else:
        first = tl.load(batch.cu_seqlens_q + seq, mask=live, other=0)
        q_len = tl.load(batch.cu_seqlens_q + seq + 1, mask=live, other=0) - first
        seq_len = tl.load(batch.seq_lens + seq, mask=live, other=0)
        low, high = paged_range(seq_len, q_len, batch.sliding_window, NEW_KV)
        keys = high - low
        if batch.ratio is not None:
            keys += tl.minimum(tl.maximum(seq_len, 0) // batch.ratio, batch.most_entries)
        tiles = tl.where(q_len <= batch.decode_tokens, (q_len + BLOCK_Q - 1) // BLOCK_Q, 0)
    return tiles, keys


@triton.jit
def _keys_of_a_split(batch, NEW_KV: tl.constexpr, BLOCK_Q: tl.constexpr):
    total = tl.zeros([], tl.int64)
    for start in range(0, batch.num_decodes, CHUNK):
        tiles, keys = _tiles_and_keys(start + tl.arange(0, CHUNK), batch, NEW_KV, BLOCK_Q)
        total += tl.sum(tiles.to(tl.int64) * keys, 0)
    share = (total + batch.target_splits - 1) // batch.target_splits
    return tl.maximum(share, LEAST_KEYS // 2).to(tl.int32)


@triton.jit
def find_split(item, batch, SPLIT: tl.constexpr, NEW_KV: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Find the KV split of a program; without SPLIT every query tile is one.

    Returns:
        (sequence, num_decodes or more past the last; its query tile; the split of it; how many
        splits that has; the number of the split among those that leave partial results).
    """
    if SPLIT:
        found = _find_split(item, batch, NEW_KV, BLOCK_Q)
    else:
        tiles = tl.cdiv(batch.decode_tokens, BLOCK_Q)
        found = item // tiles, item % tiles, 0, 1, 0
    return found


@triton.jit
def _find_split(item, batch, NEW_KV: tl.constexpr, BLOCK_Q: tl.constexpr):
    share = _keys_of_a_split(batch, NEW_KV, BLOCK_Q)
    found = tl.zeros([], tl.int32)
    first = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int32)
    parts = tl.zeros([], tl.int32)
    num_splits = tl.zeros([], tl.int32)
    for start in range(0, batch.num_decodes, CHUNK):
        seq = start + tl.arange(0, CHUNK)
        tiles, keys = _tiles_and_keys(seq, batch, NEW_KV, BLOCK_Q)
        splits = tl.maximum(keys // share, 1)
        items = tiles * splits
        stop = before + tl.cumsum(items, 0)
        passed = (stop <= item) & (seq < batch.num_decodes)
        found += tl.sum(passed.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(passed, stop, 0), 0))
        parts += tl.sum(tl.where(passed & (splits > 1), items, 0), 0)
        num_splits += tl.sum(tl.where((stop > item) & (stop - items <= item), splits, 0), 0)
        before += tl.sum(items, 0)
    num_splits = tl.maximum(num_splits, 1)
    index = item - first
    return found, index // num_splits, index % num_splits, num_splits, parts + index


@triton.jit
def splits_of(target, batch, NEW_KV: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The first split of a sequence among those that leave partial results, and how many splits a
    query tile of it has."""
    _, target_keys = _tiles_and_keys(target, batch, NEW_KV, BLOCK_Q)
    parts = tl.zeros([], tl.int32)
    num_splits = tl.full([], 1, tl.int32)
    if target_keys >= LEAST_KEYS:  # else never split: most short sequences end here
        share = _keys_of_a_split(batch, NEW_KV, BLOCK_Q)
        num_splits = tl.maximum(target_keys // share, 1)
        for start in range(0, target, CHUNK):
            seq = start + tl.arange(0, CHUNK)
            tiles, keys = _tiles_and_keys(seq, batch, NEW_KV, BLOCK_Q)
            splits = tl.maximum(keys // share, 1)
            before = (seq < target) & (splits > 1)
            parts += tl.sum(tl.where(before, tiles * splits, 0), 0)
    return parts, num_splits
