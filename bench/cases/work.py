"""Least bytes and operations of a case: visible keys are read once, no tile is rounded up."""

from __future__ import annotations

import numpy as np

from ..common.floors import visible_pairs
from .shapes import AttentionShape, Case, LatentShape

ITEM_BYTES = 2  # bf16


def case_bytes(case: Case) -> float:
    """Bytes of visible keys or rows, queries and results."""
    if isinstance(case.shape, AttentionShape):
        rows = case.num_tokens * case.shape.num_heads * case.shape.head_dim
        return case.cache_bytes + 2 * rows * ITEM_BYTES
    return _latent_bytes(case, case.shape)


def case_flops(case: Case) -> float:
    """Operations of the products of visible pairs."""
    shape = case.shape
    if isinstance(shape, AttentionShape):
        q_lens, seq_lens = np.array(case.q_lens), np.full(case.batch, case.context)
        pairs = visible_pairs(q_lens, seq_lens, shape.sliding_window)
        return 4.0 * pairs * shape.num_heads * shape.head_dim
    channels = shape.head_dim + (0 if shape.op == "index" else shape.head_dim_v)
    return 2.0 * case.batch * int(_seen(case, shape).sum()) * shape.num_heads * channels


def _latent_bytes(case: Case, shape: LatentShape) -> float:
    tokens, q_len, row_bytes = case.num_tokens, case.q_lens[0], shape.row_bytes
    rows = shape.entries(case.context)
    if shape.op == "index":
        queries = shape.num_heads * (shape.head_dim * ITEM_BYTES + 4)
        return case.batch * rows * row_bytes + tokens * (queries + 4.0 * (shape.topk + 1))
    if shape.op == "csa":
        rows = min(rows, q_len * shape.topk)
    if shape.op != "mla":
        rows += min(case.context, shape.sliding_window - 1 + q_len)
    queries = shape.num_heads * (shape.head_dim + shape.head_dim_v) * ITEM_BYTES
    return case.batch * rows * row_bytes + tokens * (queries + 4.0 * shape.topk)


def _seen(case: Case, shape: LatentShape) -> np.ndarray:
    """Rows that each new token of one sequence sees, or that the indexer scores for it."""
    position = np.arange(case.context - case.q_lens[0], case.context, dtype=np.int64)
    entries = (position + 1) // shape.ratio
    if shape.op == "mla":
        return entries
    if shape.op == "index":  # a token that sees at most topk entries takes all, unscored
        return np.where(entries > shape.topk, entries, 0)
    if shape.op == "csa":
        entries = np.minimum(entries, shape.topk)
    window = np.minimum(position + 1, shape.sliding_window)
    return window if shape.op == "window" else window + entries
