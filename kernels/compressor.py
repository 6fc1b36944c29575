"""Gated pooling of tokens into entries, then norm, RoPE and the paged write of ``latent_write``.

A program takes a token. If it closes a window, its entry is an online softmax over tiles of
BLOCK_TOKENS tokens from the start of the window, so an entry does not depend on how its tokens were
split into steps. The last rows of a sequence are copied to the ring: in the same launch if no row
written can be one that is read, else in a second. The ring holds rows by position, so rejected
drafts need no undo.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import checks, launching, strided
from .common.checks import MODEL_DTYPES, expect_device, expect_int, expect_tensor
from .common.latent_pages import IndexPages, LatentPages
from .common.query_tiles import LOG2E
from .indexer.kernel import find_sequence
from .latent_write import (
    expect_angles,
    expect_norm,
    norm_and_rotate,
    normed,
    paged_rows,
    rotated,
    stored,
)

# Tokens that a program pools at once; sequences that it searches at once.
BLOCK_TOKENS = 8
BLOCK_SEQS = 256


def compress(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    state_index: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    ratio: int,
    overlap: bool,
    norm_weight: torch.Tensor,
    eps: float = 1e-6,
    cos_sin: torch.Tensor,
    pages: LatentPages | IndexPages,
    slot_mapping: torch.Tensor,
    max_seqlen_q: int,
    impl: str | None = None,
) -> None:
    """Pool each window of ``ratio`` tokens that closes in this step into one entry in its slot.

    Entry w pools the tokens w * ratio .. w * ratio + ratio - 1; with ``overlap`` also the window
    before, in channels of its own. Per channel::

        entry = sum of softmax(gate + ape[position % ratio]) * kv    over these tokens

    then RMS norm, and RoPE at position w * ratio, all in fp32. Any split of a sequence into steps
    gives the same bits. The last rows of each sequence are kept in ``state``: a later call with a
    smaller context takes rejected drafts back, at most ring - (ratio * (1 + overlap) - 1) tokens.

    Args:
        kv, gate: [num_tokens, channels] bf16, fp16 or fp32, last stride 1, the step's ragged rows.
            channels = dim of the pages; with overlap twice that: series a, pooled by the next
            window, then series b, pooled by the token's own window.
        ape: [ratio, channels] fp32, position bias of the gate.
        state: [num_states, ring, 2, channels] fp32, any strides with last stride 1. Row
            position % ring holds kv and gate + ape of a token; ring >= ratio * (1 + overlap) - 1.
            A new sequence needs no cleared state. One launch if ring >= max_seqlen_q +
            ratio * (1 + overlap) - 1, else two.
        state_index: [num_seqs] int32, the state of each sequence, each once; a negative one is
            padding, of which nothing is read or written.
        seq_lens: [num_seqs] int32, tokens of each sequence including this step's; 0 = padding.
        cu_seqlens_q: [num_seqs + 1] int32, prefix sums of the new tokens, up to num_tokens.
        ratio: tokens of a window, 1..2**30.
        overlap: True = an entry also pools the window before its own.
        norm_weight: [dim] bf16, fp16 or fp32.
        eps, cos_sin: as in ``write_latent``.
        pages: destination: LatentPages, or IndexPages for the keys of the indexer.
        slot_mapping: [num_tokens] int64, page * storage_block_size + row for the entry that a token
            closes; -1 = no entry. Slots of other tokens are not read.
        max_seqlen_q: host int, at least the new tokens of the longest sequence.
        impl: see ``quire.kernels``, also for errors.

    Source: DeepSeek-V4, compressed sparse and heavily compressed attention.
    """
    chosen = checks.accept(
        impl, _check, kv, gate, ape, state, state_index, seq_lens, cu_seqlens_q, ratio, overlap,
        norm_weight, eps, cos_sin, pages, slot_mapping, max_seqlen_q,
    )  # fmt: skip
    num_tokens, num_seqs, ring = kv.shape[0], seq_lens.shape[0], state.shape[1]
    dim, slots = pages.dim, ratio * (1 + overlap)
    if chosen == "torch" or checks.is_readable(kv):
        checks.read_batch(seq_lens, cu_seqlens_q, num_tokens)
        # Padding may have any state, and tokens that close no window any slot.
        new_tokens = seq, token, position = _new_tokens(state_index, seq_lens, cu_seqlens_q)
        checks.expect_ids("state_index", state_index[seq], state.shape[0])
        closes = ((position + 1) % ratio == 0) & (slot_mapping[token] >= 0)
        num_slots = pages.data.shape[0] * pages.storage_block_size
        checks.expect_ids("slot_mapping", slot_mapping[token[closes]], num_slots)
        checks.expect_ids("cos_sin", position[closes] + 1 - ratio, cos_sin.shape[0], "positions")
    if chosen == "torch":
        _torch(
            kv, gate, ape, state, state_index, seq_lens, cu_seqlens_q, ratio, overlap,
            norm_weight, eps, cos_sin, pages, slot_mapping, new_tokens, closes,
        )  # fmt: skip
        return
    # Rows are written over those up to seq_len - 1 - ring; windows that close reach back to
    # context - (slots - 1).
    one_launch = ring >= max_seqlen_q + slots - 1
    with torch.cuda.device_of(kv):
        for pools, keeps in [(1, 1)] if one_launch else [(1, 0), (0, 1)]:
            launching.launch(
                _compress_kernel, (num_tokens,),
                kv=strided.matrix(kv), gate=strided.matrix(gate), ape=strided.matrix(ape),
                state=strided.pages(state), state_index=state_index, seq_lens=seq_lens,
                cu_seqlens_q=cu_seqlens_q, norm_weight=norm_weight, eps=float(eps),
                cos_sin=strided.matrix(cos_sin), pages=paged_rows(pages),
                slot_mapping=slot_mapping, num_seqs=num_seqs, pools=pools, keeps=keeps,
                ratio=ratio, ring=ring, block_size=pages.storage_block_size,
                INDEX_KEYS=isinstance(pages, IndexPages), OVERLAP=overlap, DIM=dim,
                ROPE_DIM=cos_sin.shape[1], BLOCK_TOKENS=BLOCK_TOKENS,
                BLOCK_SEQS=BLOCK_SEQS, num_warps=8, **launching.EQUAL_SUMS,
            )  # fmt: skip


def _check(
    kv, gate, ape, state, state_index, seq_lens, cu_seqlens_q, ratio, overlap, norm_weight, eps,
    cos_sin, pages, slot_mapping, max_seqlen_q,
) -> None:  # fmt: skip
    if not isinstance(pages, LatentPages | IndexPages):
        raise ValueError(f"pages: expected LatentPages or IndexPages, got {type(pages).__name__}")
    expect_int("ratio", ratio, 1, checks.MAX_TOKENS)
    if not isinstance(overlap, bool):
        raise ValueError(f"overlap: expected a bool, got {overlap!r}")
    dim, slots = pages.dim, ratio * (1 + overlap)
    channels, fp32 = dim * (1 + overlap), torch.float32
    expect_tensor("kv", kv, (None, channels), MODEL_DTYPES)
    num_tokens, device = kv.shape[0], kv.device
    expect_tensor("gate", gate, (num_tokens, channels), MODEL_DTYPES, device=device)
    expect_tensor("ape", ape, (ratio, channels), fp32, device=device)
    expect_tensor("state", state, (None, None, 2, channels), fp32, device=device)
    checks.expect_apart("state", state)
    expect_int("state: ring", state.shape[1], max(1, slots - 1))
    num_seqs = checks.expect_batch(seq_lens, cu_seqlens_q, max_seqlen_q, device)
    checks.expect_longest(num_tokens, num_seqs, max_seqlen_q)
    expect_tensor("state_index", state_index, (num_seqs,), torch.int32, device=device)
    expect_norm(norm_weight, eps, dim, device)
    rope_dim = pages.rope_dim if isinstance(pages, LatentPages) else None
    expect_angles(cos_sin, dim, rope_dim, device)
    expect_device("pages", pages.data, device)
    expect_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, device=device)


def _new_tokens(
    state_index: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sequence, row, position) of each new token that is not padding, in the order of rows."""
    device, q_lens = seq_lens.device, cu_seqlens_q.diff().long()
    seq = torch.repeat_interleave(torch.arange(len(seq_lens), device=device), q_lens)
    token = torch.arange(len(seq), device=device)
    position = token - cu_seqlens_q[seq] + (seq_lens - q_lens)[seq]
    live = (position >= 0) & (state_index[seq] >= 0)
    return seq[live], token[live], position[live]


@torch.no_grad()
def _torch(
    kv, gate, ape, state, state_index, seq_lens, cu_seqlens_q, ratio, overlap,
    norm_weight, eps, cos_sin, pages, slot_mapping, new_tokens, closes,
) -> None:  # fmt: skip
    """All entries of a step at once."""
    seq, token, position = new_tokens
    ring, num_series = state.shape[1], 1 + overlap
    index = state_index[seq].long()
    step_kv = kv[token].float()
    step_gate = gate[token].float() + ape[position % ratio]

    closing = closes.nonzero()  # [entries, 1]
    pooled_slot = torch.arange(ratio * num_series, device=kv.device)
    back = ratio * num_series - 1 - pooled_slot
    at = position[closing] - back  # [entries, pooled slots]
    context = (seq_lens - cu_seqlens_q.diff()).clamp(min=0)
    new = at >= context[seq[closing]]
    seen = at >= 0
    series = pooled_slot // ratio if overlap else torch.zeros_like(pooled_slot)

    def pooled(step_rows: torch.Tensor, part: int) -> torch.Tensor:
        """Rows that each entry pools, [entries, pooled slots, dim]; anything where not ``seen``."""
        step = step_rows.unflatten(1, (num_series, pages.dim))
        step = step[torch.where(new, closing - back, 0), series]
        old = state[:, :, part].unflatten(2, (num_series, pages.dim))
        old = old[torch.where(seen, index[closing], 0), torch.where(seen, at, 0) % ring, series]
        return torch.where(new[..., None], step, old)

    gates = pooled(step_gate, 1).masked_fill(~seen[..., None], -torch.inf)
    values = pooled(step_kv, 0).masked_fill(~seen[..., None], 0)
    entries = (torch.softmax(gates, 1) * values).sum(1)
    starts = position[closes] + 1 - ratio
    entries = norm_and_rotate(entries, starts, cos_sin, norm_weight, eps)
    pages.write(slot_mapping[token[closes]], entries)

    kept = seq_lens[seq] - position <= ring
    rows = torch.stack([step_kv[kept], step_gate[kept]], 1)
    state[index[kept], position[kept] % ring] = rows


@triton.jit
def _keep(kv, gate, ape, ring_rows, state, row, position, ratio, ring, CHANNELS: tl.constexpr):
    """Copy a row of the step to the ring of its sequence."""
    channel = tl.arange(0, CHANNELS)
    c = tl.load(kv.data + row * kv.stride_row + channel)
    z = tl.load(gate.data + row * gate.stride_row + channel)
    bias = tl.load(ape.data + position % ratio * ape.stride_row + channel)
    cell = ring_rows + (position % ring).to(tl.int64) * state.stride_row + channel
    tl.store(cell, c.to(tl.float32))
    tl.store(cell + state.stride_head, z.to(tl.float32) + bias)


@triton.jit
def _pool(
    kv, gate, ape, ring_rows, state, row, context, closing, ratio, ring,
    OVERLAP: tl.constexpr, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Weighted sum [1, DIM] fp32 of the tokens of the window up to position ``closing``, whose row
    is ``row``; positions from ``context`` on are rows of the step, older ones rows of the ring."""
    slots = 2 * ratio if OVERLAP else ratio
    channel = tl.arange(0, DIM)[None, :]
    row_max = tl.full([DIM], float("-inf"), tl.float32)
    row_sum = tl.zeros([DIM], tl.float32)
    acc = tl.zeros([DIM], tl.float32)
    for start in range(0, slots, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)[:, None]
        back = slots - 1 - token
        position = closing - back
        live = (position >= 0) & (token < slots)
        new = live & (position >= context)
        old = live & (position < context)
        # Series a, then series b; without overlap one series of ``ratio`` tokens.
        second = token >= ratio
        column = tl.where(second, DIM, 0) + channel
        new_row = row - back
        bias = ape.data + tl.where(second, token - ratio, token) * ape.stride_row + column
        cell = ring_rows + (position % ring).to(tl.int64) * state.stride_row + column
        c = tl.load(kv.data + new_row * kv.stride_row + column, mask=new, other=0.0)
        z = tl.load(gate.data + new_row * gate.stride_row + column, mask=new, other=float("-inf"))
        z = z.to(tl.float32) + tl.load(bias, mask=new, other=0.0)
        c = tl.where(old, tl.load(cell, mask=old, other=0.0), c.to(tl.float32))
        z = tl.where(old, tl.load(cell + state.stride_head, mask=old, other=0.0), z)
        new_max = tl.maximum(row_max, tl.max(z, 0))
        # Only slots before position 0 so far: subtracting -inf would give NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2((z - base[None, :]) * LOG2E)
        decay = tl.exp2((row_max - base) * LOG2E)
        acc = acc * decay + tl.sum(weight * c, 0)
        row_sum = row_sum * decay + tl.sum(weight, 0)
        row_max = new_max
    return (acc / row_sum)[None, :]


@triton.jit(do_not_specialize=["num_seqs", "pools", "keeps", "ratio", "ring", "block_size"])
def _compress_kernel(
    kv, gate, ape, state, state_index, seq_lens, cu_seqlens_q, norm_weight, eps, cos_sin,
    pages, slot_mapping, num_seqs, pools, keeps, ratio, ring, block_size,
    INDEX_KEYS: tl.constexpr, OVERLAP: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_SEQS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    seq = find_sequence(tl.program_id(0), cu_seqlens_q, num_seqs, BLOCK_SEQS)
    if seq >= num_seqs:  # behind the last sequence
        return
    seq_len = tl.load(seq_lens + seq)
    last = tl.load(cu_seqlens_q + seq + 1)
    position = seq_len - last + tl.program_id(0)
    index = tl.load(state_index + seq).to(tl.int64)
    if (position < 0) | (index < 0):
        return
    ring_rows = state.data + index * state.stride_page
    if (pools != 0) & ((position + 1) % ratio == 0):
        slot = tl.load(slot_mapping + row)
        if slot >= 0:
            context = seq_len - (last - tl.load(cu_seqlens_q + seq))
            entry = _pool(
                kv, gate, ape, ring_rows, state, row, context, position, ratio, ring,
                OVERLAP, DIM, BLOCK_TOKENS,
            )  # fmt: skip
            entry = normed(entry, norm_weight, eps, DIM)
            start = tl.full([1], 0, tl.int64) + (position + 1 - ratio)
            entry = rotated(entry, start, cos_sin, 1, DIM, ROPE_DIM)
            at = tl.full([1], 0, tl.int64) + slot
            stored(entry, at, tl.full([1], 1, tl.int1), pages, block_size, INDEX_KEYS, 1, DIM)
    if (keeps != 0) & (position >= seq_len - ring):
        channels: tl.constexpr = 2 * DIM if OVERLAP else DIM
        _keep(kv, gate, ape, ring_rows, state, row, position, ratio, ring, channels)
