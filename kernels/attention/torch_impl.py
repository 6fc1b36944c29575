"""The implementation for CPU tensors: plain torch, vectorised, fp32 arithmetic.

Sequences with one new token are one padded batch; every other sequence is a batch of its own, so
that the numbers of a prefill chunk depend on that chunk alone and not on what else the step holds.
Keys are gathered from the lowest visible one on: a window layer costs the same at any context
length. Reads lengths on the host, so under a GPU it synchronises; there it is asked for by name
only. So it can refuse what the kernels cannot see: prefix sums that are none, and ids of pages that
there are not.

Source: as ``kernel.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from ..common import e4m3
from ..common.checks import expect_ids, expect_offsets
from .call import AttentionCall

# Keys gathered at once for the batch of one-token sequences, so that a long batch does not copy the
# whole pool.
MAX_GATHERED_KEYS = 1 << 17


@torch.no_grad()
def attention(call: AttentionCall) -> torch.Tensor:
    """Compute one checked attention call; returns ``call.out``."""
    seq_lens, bounds = call.seq_lens.tolist(), call.cu_seqlens_q.tolist()
    expect_offsets("cu_seqlens_q", bounds, call.q.shape[0])
    q_lens = [last - first for first, last in pairwise(bounds)]
    reach = call.sliding_window or max(seq_lens, default=1)
    batch_size = max(1, MAX_GATHERED_KEYS // max(1, min(reach, max(seq_lens, default=1))))
    single = [s for s, q_len in enumerate(q_lens) if q_len == 1]
    batches = [single[i : i + batch_size] for i in range(0, len(single), batch_size)]
    batches += [[s] for s, q_len in enumerate(q_lens) if q_len > 1]
    for batch in batches:
        _attend(call, batch, [seq_lens[s] for s in batch], q_lens[batch[0]])
    return call.out


@torch.no_grad()
def merge_partials(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Merge partial results by their lse; shapes as in ``quire.kernels.merge_partials``."""
    if lse is not None:
        lse.copy_(torch.logsumexp(partial_lse, 0))
    logits = partial_lse
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None].expand(partial_lse.shape[1:])[None]])
    # Over the last dimension: torch's result over the first is off by twice as much.
    weight = torch.softmax(logits.transpose(0, 2).contiguous(), 2).transpose(0, 2)
    weight = weight[: partial_lse.shape[0]]
    # An empty part has lse -inf; its rows may hold anything, so both factors are replaced, not
    # multiplied by zero.
    empty = torch.isneginf(partial_lse)
    if sinks is not None:  # an infinite sink takes all
        weight = weight.masked_fill(torch.isposinf(sinks)[:, None], 0.0)
    weight = torch.where(empty, 0.0, weight).transpose(1, 2).unsqueeze(-1)
    rows = torch.where(empty.transpose(1, 2).unsqueeze(-1), 0.0, partial_out.float())
    return out.copy_((weight * rows).sum(0))


def _rows(
    pages: torch.Tensor, scale: float | torch.Tensor | None, page: torch.Tensor, row: torch.Tensor
) -> torch.Tensor:
    """Rows [..., num_kv_heads, head_dim] of pages by page id and row in it.

    Those of e4m3 pages as fp32.
    """
    if scale is None:
        return pages[page, row]
    values = pages.view(torch.uint8)[page, row].view(pages.dtype)
    if isinstance(scale, torch.Tensor) and scale.dim() == 3:
        scale = scale[page, row]
    return e4m3.dequantize(values, scale)


def _attend(call: AttentionCall, batch: Sequence[int], seq_lens: Sequence[int], q_len: int) -> None:
    """Attend for some sequences of equal q_len: shapes below are [B = sequences, L = q_len, S =
    gathered keys, ...]."""
    num_heads, head_dim = call.q.shape[1:]
    num_kv_heads = call.k_pages.shape[2]
    device = call.q.device
    sequence = torch.tensor(batch, device=device)
    length = torch.tensor(seq_lens, device=device)
    first = call.cu_seqlens_q[sequence].long()
    context = length - q_len
    tokens = first[:, None] + torch.arange(q_len, device=device)  # [B, L]
    position = context[:, None] + torch.arange(q_len, device=device)  # [B, L]
    lowest = torch.zeros_like(context)
    if call.sliding_window is not None:
        lowest = (context - call.sliding_window + 1).clamp(min=0)

    paged_end = context if call.paged_context else length
    span = max(0, int((paged_end - lowest).max()))
    key_position = lowest[:, None] + torch.arange(span, device=device)  # [B, S]
    live = key_position < paged_end[:, None]
    block_size, width = call.k_pages.shape[1], call.block_table.shape[1]
    block = key_position // block_size
    # A linear table that is too short: its last entry stands for all blocks from there on, as in
    # the kernels.
    entry = block.clamp(max=width - 1) if call.sliding_window is None else block % width
    # Entries that no query sees may hold anything, so page 0 stands in for them; its rows are
    # blanked below.
    page = torch.where(live, call.block_table[sequence[:, None], entry].long(), 0)
    expect_ids("block_table", page, call.k_pages.shape[0])
    row = key_position % block_size
    keys = _rows(call.k_pages, call.k_scale, page, row)  # [B, S, num_kv_heads, head_dim]
    values = _rows(call.v_pages, call.v_scale, page, row)
    if call.k is not None and call.v is not None:
        keys = torch.cat([keys, call.k[tokens].to(keys.dtype)], 1)
        values = torch.cat([values, call.v[tokens].to(values.dtype)], 1)
        key_position = torch.cat([key_position, position], 1)
        live = torch.cat([live, position >= 0], 1)
    row_live = live[:, :, None, None]
    keys = (
        torch.where(row_live, keys, 0).float().permute(0, 2, 3, 1)
    )  # [B, num_kv_heads, head_dim, S]
    values = (
        torch.where(row_live, values, 0).float().transpose(1, 2)
    )  # [B, num_kv_heads, S, head_dim]

    visible = live[:, None, :] & (key_position[:, None, :] <= position[:, :, None])
    if call.sliding_window is not None:
        visible &= position[:, :, None] - key_position[:, None, :] < call.sliding_window
    # The rows of one KV head: its group's heads, each with all L tokens.
    grouped = (len(batch), num_kv_heads, call.group, q_len)
    packed = (len(batch), num_kv_heads, call.group * q_len)
    queries = call.q[tokens].float().transpose(1, 2).reshape(*packed, head_dim)
    logits = (queries @ keys).view(*grouped, keys.shape[-1])
    logits = logits * call.softmax_scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    logits = logits.masked_fill(~visible[:, None, None], -torch.inf)
    if call.lse is not None:
        total = torch.logsumexp(logits, -1)  # [B, num_kv_heads, group, L]
        call.lse[:, tokens] = total.reshape(len(batch), num_heads, q_len).transpose(0, 1)
    joint = logits
    if call.sinks is not None:
        sinks = call.sinks.view(1, num_kv_heads, call.group, 1, 1)
        joint = torch.cat([logits, sinks.expand(*grouped, 1)], -1)
    weights = torch.softmax(joint, -1)[..., : logits.shape[-1]]
    # A row that sees nothing is NaN after the softmax, and so is one with an infinite sink; their
    # weights are 0.
    weights = torch.where(torch.isneginf(logits), 0.0, weights)
    if call.sinks is not None:
        weights = weights.masked_fill(torch.isposinf(sinks), 0.0)
    out = weights.reshape(*packed, keys.shape[-1]) @ values
    out = out.view(len(batch), num_heads, q_len, head_dim).transpose(1, 2)
    call.out[tokens] = out.to(call.out.dtype)
