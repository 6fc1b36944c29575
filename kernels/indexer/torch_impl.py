"""``index_topk`` in plain torch, one sequence and a bounded number of scores at a time."""

from __future__ import annotations

from itertools import pairwise

import torch

from ..common.latent_pages import IndexPages
from .plan import IndexPlan

# Products of a head and a key that are held at once.
MAX_PRODUCTS = 1 << 24


@torch.no_grad()
def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: IndexPages,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    compress_ratio: int,
    plan: IndexPlan,
    out: torch.Tensor,
    lens: torch.Tensor,
    scores: torch.Tensor | None,
) -> None:
    """Fill ``out``, ``lens`` and, if given, ``scores`` of checked arguments."""
    out.fill_(-1)
    lens.zero_()
    if scores is not None:
        scores.fill_(-torch.inf)
    for s, (first, last) in enumerate(pairwise(cu_seqlens_q.tolist())):
        seq_len = int(seq_lens[s])
        num_entries = min(seq_len // compress_ratio, plan.num_entries)
        if last == first or num_entries <= 0:
            continue
        position = seq_len - last + torch.arange(first, last, device=q.device)
        visible = ((position + 1) // compress_ratio).clamp(0, num_entries)
        lens[first:last] = visible.clamp(max=plan.topk).int()
        rank = torch.arange(plan.topk, device=q.device)
        out[first:last] = torch.where(rank < visible[:, None], rank, -1).int()
        scored = (visible > (0 if plan.score_all else plan.topk)).nonzero()[:, 0]
        if not len(scored):
            continue
        entry = torch.arange(num_entries, device=q.device)
        rows = pages.storage_block_size
        keys = pages.read(block_table[s].long()[entry // rows] * rows + entry % rows)
        step = max(1, MAX_PRODUCTS // (num_entries * q.shape[1]))
        for part in scored.split(step):
            told = _select(q, weights, keys, first + part, visible[part], plan.topk, out)
            if scores is not None:
                scores[first + part] = told


def _select(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    row: torch.Tensor,
    visible: torch.Tensor,
    topk: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Fill ``out`` of some queries ``row`` of one sequence that see more than ``topk`` entries.

    Returns:
        [queries, topk] fp32 scores of what they select, then -inf.
    """
    products = (q[row].float() @ keys.T).relu_()  # [queries, heads, entries]
    # One order of summation for any number of queries, which a matrix product does not promise.
    scores = products.mul_(weights[row][..., None]).sum(1)
    many = visible > topk
    if many.any():
        order = scores[many].nan_to_num(torch.inf, torch.inf, -torch.inf)
        entry = torch.arange(len(keys), device=q.device)
        order = order.masked_fill(entry >= visible[many][:, None], -torch.inf)
        last = torch.topk(order, topk).values[:, -1:]
        above, equal = order > last, order == last
        needed = topk - above.sum(1, keepdim=True)
        taken = above | (equal & (equal.cumsum(1) <= needed))
        out[row[many]] = taken.nonzero()[:, 1].view(-1, topk).int()
    selected = out[row].long()
    return torch.where(selected >= 0, scores.gather(1, selected.clamp(min=0)), -torch.inf)
