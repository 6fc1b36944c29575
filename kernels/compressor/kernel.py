"""Gated pooling of tokens into entries, then norm, RoPE and the paged write of ``latent_write``.

    entry w = sum_j softmax_j(z_j) c_j   per channel, over the ratio tokens of window w;
              with overlap over series a of the tokens of window w - 1 and b of those of window w
    z_j = gate_j + ape[position_j mod ratio],  c_j = kv_j,  RoPE at position w * ratio

One program makes one entry: an online softmax over tiles of BLOCK_TOKENS tokens from the start of
the window, so an entry does not depend on how its tokens were split into steps. Rows of the step
come from kv and gate, older ones from the ring. Other programs each copy one of the step's last
rows to the ring: in the same launch if no row written can be one that is read, else in a second.

Layout: kv, gate [num_tokens, channels], channels = dim, or 2 * dim with overlap (series a, then b);
state [num_states, ring, 2, channels] fp32, in the kernel pages of rows with two "heads": values and
gate.

Source: DeepSeek-V4, compressed attention: the compressors of the latents and of the indexer.
"""

import torch
import triton
import triton.language as tl

from ..common import launching, strided
from ..common.latent_pages import IndexPages, LatentPages
from ..common.query_tiles import LOG2E
from ..latent_write.kernel import WIDTH, normed, paged_rows, rotated, stored

# Tokens that a program pools at once; sequences that it searches at once.
BLOCK_TOKENS = 8
BLOCK_SEQS = 256


@triton.jit
def _find_window(program, cu_seqlens_q, num_seqs, ratio, BLOCK_SEQS: tl.constexpr):
    """(sequence, windows behind the first that can close) of a program.

    Sequence s has the programs from cu_seqlens_q[s] // ratio + s on: at least as many as windows
    can close in its tokens.
    """
    begun = tl.zeros([], tl.int32)
    first = tl.zeros([], tl.int32)
    for start in range(0, num_seqs, BLOCK_SEQS):
        seq = start + tl.arange(0, BLOCK_SEQS)
        live = seq < num_seqs
        begin = tl.load(cu_seqlens_q + seq, mask=live, other=0) // ratio + seq
        live = live & (begin <= program)
        begun += tl.sum(live.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(live, begin, 0), 0))
    return begun - 1, program - first


@triton.jit
def _keep_row(
    kv, gate, ape, state, state_index, seq_lens, cu_seqlens_q, seq, back, ratio, ring, channels,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy the row ``back`` rows before the last of a sequence to its ring."""
    position = tl.load(seq_lens + seq) - 1 - back
    row = tl.load(cu_seqlens_q + seq + 1) - 1 - back
    index = tl.load(state_index + seq).to(tl.int64)
    live = (row >= tl.load(cu_seqlens_q + seq)) & (position >= 0) & (index >= 0)
    channel = tl.arange(0, 2 * WIDTH)
    inside = live & (channel < channels)
    row = row.to(tl.int64)
    c = tl.load(kv.data + row * kv.stride_row + channel, mask=inside, other=0.0)
    z = tl.load(gate.data + row * gate.stride_row + channel, mask=inside, other=0.0)
    bias = tl.load(ape.data + position % ratio * ape.stride_row + channel, mask=inside, other=0.0)
    cell = state.data + index * state.stride_page
    cell += (position % ring).to(tl.int64) * state.stride_row + channel
    tl.store(cell, c.to(tl.float32), mask=inside)
    tl.store(cell + state.stride_head, z.to(tl.float32) + bias, mask=inside)


@triton.jit
def _pool(
    kv, gate, ape, ring_rows, state, row, context, closing, ratio, slots, ring, dim,
    BLOCK_TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Weighted sum [1, WIDTH] fp32 of the ``slots`` tokens up to position ``closing``, whose row is
    ``row``; positions from ``context`` on are rows of the step, older ones rows of the ring."""
    channel = tl.arange(0, WIDTH)[None, :]
    inside = channel < dim
    row_max = tl.full([WIDTH], float("-inf"), tl.float32)
    row_sum = tl.zeros([WIDTH], tl.float32)
    acc = tl.zeros([WIDTH], tl.float32)
    for start in range(0, slots, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)[:, None]
        back = slots - 1 - token
        position = closing - back
        live = (position >= 0) & (token < slots) & inside
        new = live & (position >= context)
        old = live & (position < context)
        # Series a, then series b; without overlap one series of ``ratio`` tokens.
        second = token >= ratio
        column = tl.where(second, dim, 0) + channel
        new_row = (row - back).to(tl.int64)
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
    return acc[None, :] / tl.where(inside, row_sum[None, :], 1.0)


@triton.jit(
    do_not_specialize=[
        "num_seqs", "num_entries", "kept_rows", "first_program", "ratio", "slots", "ring",
        "block_size", "index_dim",
    ]
)  # fmt: skip
def _compress_kernel(
    kv, gate, ape, state, state_index, seq_lens, cu_seqlens_q, norm_weight, eps, cos_sin,
    pages, slot_mapping, num_seqs, num_entries, kept_rows, first_program,
    ratio, slots, ring, block_size, index_dim, dim, mean,
    ROPE_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_SEQS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0) + first_program
    if program >= num_entries:
        item = program - num_entries
        _keep_row(
            kv, gate, ape, state, state_index, seq_lens, cu_seqlens_q, item // kept_rows,
            item % kept_rows, ratio, ring, slots // ratio * dim, WIDTH,
        )  # fmt: skip
        return
    seq, window = _find_window(program, cu_seqlens_q, num_seqs, ratio, BLOCK_SEQS)
    first_token = tl.load(cu_seqlens_q + seq)
    seq_len = tl.load(seq_lens + seq)
    context = seq_len - (tl.load(cu_seqlens_q + seq + 1) - first_token)
    window += tl.maximum(context, 0) // ratio
    if window >= seq_len // ratio:
        return
    closing = window * ratio + ratio - 1
    row = first_token + closing - context
    slot = tl.load(slot_mapping + row)
    index = tl.load(state_index + seq).to(tl.int64)
    if (slot < 0) | (index < 0):
        return
    ring_rows = state.data + index * state.stride_page
    entry = _pool(
        kv, gate, ape, ring_rows, state, row, context, closing, ratio, slots, ring, dim,
        BLOCK_TOKENS, WIDTH,
    )  # fmt: skip
    entry = normed(entry, norm_weight, mean, eps, dim, WIDTH)
    one = tl.full([1], 1, tl.int1)
    start = tl.full([1], 0, tl.int64) + window * ratio
    entry = rotated(entry, start, one, cos_sin, dim, 1, WIDTH, ROPE_DIM)
    at = tl.full([1], 0, tl.int64) + slot
    stored(entry, at, one, pages, block_size, index_dim, dim, 1, WIDTH)


def compress(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    state_index: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    ratio: int,
    overlap: bool,
    norm_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    pages: LatentPages | IndexPages,
    slot_mapping: torch.Tensor,
    max_seqlen_q: int,
) -> None:
    """Launch ``compress`` of checked arguments."""
    num_seqs, ring, dim = seq_lens.shape[0], state.shape[1], pages.dim
    slots = ratio * (1 + overlap)
    kept_rows = max(1, min(ring, max_seqlen_q))
    entries = kv.shape[0] // ratio + num_seqs
    kept = num_seqs * kept_rows
    # Rows are written over those up to seq_len - 1 - ring; windows that close reach back to
    # context - (slots - 1).
    if ring >= max_seqlen_q + slots - 1:
        launches = [(0, entries + kept)]
    else:
        launches = [(0, entries), (entries, kept)]
    with torch.cuda.device_of(kv):
        for first_program, programs in launches:
            launching.launch(
                _compress_kernel,
                (programs,),
                kv=strided.matrix(kv),
                gate=strided.matrix(gate),
                ape=strided.matrix(ape),
                state=strided.pages(state),
                state_index=state_index,
                seq_lens=seq_lens,
                cu_seqlens_q=cu_seqlens_q,
                norm_weight=norm_weight,
                eps=float(eps),
                cos_sin=strided.matrix(cos_sin),
                pages=paged_rows(pages),
                slot_mapping=slot_mapping,
                num_seqs=num_seqs,
                num_entries=entries,
                kept_rows=kept_rows,
                first_program=first_program,
                ratio=ratio,
                slots=slots,
                ring=ring,
                block_size=pages.storage_block_size,
                index_dim=dim if isinstance(pages, IndexPages) else 0,
                dim=dim,
                mean=1 / dim,
                ROPE_DIM=cos_sin.shape[1],
                BLOCK_TOKENS=BLOCK_TOKENS,
                BLOCK_SEQS=BLOCK_SEQS,
                WIDTH=WIDTH,
                num_warps=4,
            )
