"""``index_topk`` for CPU tensors: vectorised torch, a bounded number of scores at a time.

Reads lengths on the host.

Source: as ``reference``.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from ..common.checks import expect_ids
from .call import IndexCall

# Products of a head and a key that are held at once.
MAX_PRODUCTS = 1 << 24


@torch.no_grad()
def index_topk(call: IndexCall) -> None:
    """Fill ``call.out`` and ``call.lens``."""
    call.out.fill_(-1)
    call.lens.zero_()
    if call.scores is not None:
        call.scores.fill_(-torch.inf)
    bounds = call.cu_seqlens_q.tolist()
    for s, (seq_len, (first, last)) in enumerate(
        zip(call.seq_lens.tolist(), pairwise(bounds), strict=True)
    ):
        num_entries = min(seq_len // call.compress_ratio, call.plan.num_entries)
        if last == first or num_entries <= 0:
            continue
        position = seq_len - last + torch.arange(first, last, device=call.q.device)
        visible = ((position + 1) // call.compress_ratio).clamp(0, num_entries)
        scored = num_entries > (0 if call.scores is not None else call.plan.topk)
        keys = _keys(call, s, num_entries) if scored else None
        step = max(1, MAX_PRODUCTS // (num_entries * call.q.shape[1]))
        for start in range(first, last, step):
            tokens = slice(start, min(start + step, last))
            _select(call, keys, tokens, visible[tokens.start - first : tokens.stop - first])


def _keys(call: IndexCall, seq: int, num_entries: int) -> torch.Tensor:
    """The first ``num_entries`` keys of a sequence, [num_entries, index_dim] fp32."""
    rows = call.pages.storage_block_size
    entry = torch.arange(num_entries, device=call.q.device)
    page = call.block_table[seq].long()[entry // rows]
    expect_ids("block_table", page, call.pages.data.shape[0])
    return call.pages.read(page * rows + entry % rows)


def _select(
    call: IndexCall, keys: torch.Tensor | None, tokens: slice, visible: torch.Tensor
) -> None:
    """Select for some queries of one sequence.

    Args:
        keys: [entries, index_dim] fp32; None if nothing is scored.
        visible: [queries] entries that each query sees.
    """
    topk, device = call.plan.topk, call.q.device
    call.lens[tokens] = visible.clamp(max=topk).int()
    rank = torch.arange(topk, device=device)
    call.out[tokens] = torch.where(rank < visible[:, None], rank, -1).int()
    scored = visible > (topk if call.scores is None else 0)
    if keys is None or not scored.any():
        return
    visible, row = visible[scored], tokens.start + scored.nonzero().squeeze(1)
    products = (call.q[row].float() @ keys.T).relu_()  # [queries, heads, entries]
    # One order of summation for any number of queries, which a matrix product does not promise.
    scores = products.mul_(call.weights[row][..., None]).sum(1)
    many = visible > topk
    if many.any():
        # A score of NaN counts as the largest: it is selected, so that the query's output tells.
        order = scores[many].nan_to_num(torch.inf, torch.inf, -torch.inf)
        entry = torch.arange(len(keys), device=device)
        order = order.masked_fill(entry >= visible[many][:, None], -torch.inf)
        last = torch.topk(order, topk).values[:, -1:]
        above, equal = order > last, order == last
        needed = topk - above.sum(1, keepdim=True)
        taken = above | (equal & (equal.cumsum(1) <= needed))
        call.out[row[many]] = taken.nonzero()[:, 1].view(-1, topk).int()
    if call.scores is not None:
        selected = call.out[row].long()
        told = scores.gather(1, selected.clamp(min=0))
        call.scores[row] = torch.where(selected >= 0, told, -torch.inf)
