"""Bytes that a case must move, and operations of the products that it must form.

Visible keys are read once and whole tiles are not counted, so no kernel does less.
"""

from __future__ import annotations

import numpy as np

from ..common.visible import visible_pairs
from .latent_shapes import LatentCase
from .shapes import Case

ITEM_BYTES = 2  # bf16


def attention_bytes(case: Case) -> float:
    """Bytes that must move: visible keys and values read once, queries read, results written."""
    rows = sum(case.q_lens) * case.shape.num_heads * case.shape.head_dim
    return case.cache_bytes + 2 * rows * ITEM_BYTES


def attention_flops(case: Case) -> float:
    """Operations of visible pairs: two products of two operations for each pair, head and channel."""
    pairs = visible_pairs(np.array(case.q_lens), np.array(case.seq_lens), case.shape.sliding_window)
    return 4.0 * pairs * case.shape.num_heads * case.shape.head_dim


def latent_bytes(case: LatentCase) -> float:
    """Bytes that must move: visible rows read once, queries read, results written.

    Rows and states for "write" and "compress".
    """
    shape, tokens = case.shape, case.num_tokens
    if shape.op == "write":
        return tokens * (2 * ITEM_BYTES * shape.head_dim + case.row_bytes)
    if shape.op == "compress":
        # Entries, and the new rows' place in the state.
        kept = min(shape.ratio * (1 + shape.overlap), case.q_lens[0])
        entries = max(1, case.q_lens[0] // shape.ratio) * case.row_bytes
        return _rows_bytes(case) + case.batch * (kept * _pooled_row_bytes(case) + entries)
    if shape.op == "index":
        results = 4 * (shape.topk + 1)
        queries = shape.num_heads * (shape.head_dim * ITEM_BYTES + 4)
        return _rows_bytes(case) + tokens * (queries + results)
    value = shape.head_dim_v if shape.op == "mla" else shape.head_dim
    queries = tokens * shape.num_heads * (shape.head_dim + value) * ITEM_BYTES
    return _rows_bytes(case) + queries + 4.0 * tokens * shape.topk


def _rows_bytes(case: LatentCase) -> float:
    """Bytes of the rows that a case reads: cached ones, or new ones and states for "compress"."""
    shape, q_len = case.shape, case.q_lens[0]
    if shape.op == "write":
        return 0.0
    if shape.op == "compress":
        # Of the state the windows that close have all rows but one, or those of the window before.
        pooled = shape.ratio * (1 + shape.overlap)
        old = pooled - 1 if case.phase == "decode" else shape.overlap * shape.ratio
        return float(case.batch * (q_len * _pooled_row_bytes(case) + 8 * shape.head_dim * old))
    seen = case.num_entries
    if shape.op == "csa":
        seen = min(seen, q_len * shape.topk)
    if shape.op in ("window", "csa", "hca"):
        seen += min(case.context, shape.sliding_window - 1 + q_len)
    return float(case.batch * seen * case.row_bytes)


def _pooled_row_bytes(case: LatentCase) -> int:
    """Bytes of a token's fp32 row and gate."""
    return 2 * 4 * case.shape.head_dim * (1 + case.shape.overlap)


def latent_flops(case: LatentCase) -> float:
    """Operations of the products of visible pairs; 0 for what forms none."""
    shape = case.shape
    if shape.op in ("write", "compress"):
        return 0.0
    pairs = float(case.batch * _visible(case).sum())
    if shape.op == "index":
        return 2.0 * pairs * shape.num_heads * shape.head_dim
    value = shape.head_dim_v if shape.op == "mla" else shape.head_dim
    return 2.0 * pairs * shape.num_heads * (shape.head_dim + value)


def _visible(case: LatentCase) -> np.ndarray:
    """Rows that each new token of one sequence sees, or that the indexer scores for it."""
    shape = case.shape
    position = np.arange(case.context - case.q_lens[0], case.context, dtype=np.int64)
    seen = np.zeros_like(position)
    if shape.op in ("window", "csa", "hca"):
        seen += np.minimum(position + 1, shape.sliding_window)
    if case.num_entries:
        entries = (position + 1) // shape.ratio
        if shape.op == "index":
            # Who sees no more than topk takes all, unscored.
            entries = np.where(entries > shape.topk, entries, 0)
        seen += np.minimum(entries, shape.topk) if shape.op == "csa" else entries
    return seen
