"""Gated pooling of tokens into entries, then norm, RoPE and the paged write of ``latent_write``.

    entry w = sum_j softmax_j(z_j) c_j   per channel, over the ratio tokens of window w;
              with overlap over series a of the tokens of window w - 1 and b of those of window w
    z_j = gate_j + ape[position_j mod ratio],  c_j = kv_j,  RoPE at position w * ratio

One program makes one entry: it runs an online softmax over tiles of BLOCK_TOKENS tokens, in fp32,
counted from the start of the window and not from that of the chunk, so that an entry is the same
bit for bit however its tokens were split into steps. Rows of this step come from kv and gate, older
ones from the ring. Before position 0 there is nothing: those slots weigh 0, and a tile of them
alone leaves the sums as they are. One more program for each of the last ``ring`` rows of a sequence
puts it into the ring.

Both kinds of program run in one launch where the ring is so large that no row written can be one
that is still read, which is so in decode; otherwise the rows are written by a second launch of the
same kernel.

Entries and index keys of any ratio are made by the same kernel, whose tiles have WIDTH channels:
those that a row does not have cost no bytes, and stay 0. Eight tokens of 512 channels are all that
an entry of ratio 4 pools with overlap. Programs are small (4 warps, about 110 registers), so that
four of them have 128 KiB under way on an SM.

Layout: kv, gate [num_tokens, channels], channels = dim, or 2 * dim with overlap (series a, then b);
state [num_states, ring, 2, channels] fp32.

Source: DeepSeek-V4, compressed attention: the compressors of the latents and of the indexer.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common import strided
from ..common.latent_pages import IndexPages
from ..common.launching import Launch, arch_and_sms, run
from ..common.query_tiles import LOG2E
from ..latent_write.triton_impl import WIDTH, normed, paged_rows, rotated, stored
from .call import CompressCall

# Tokens that a program of an entry pools at once; sequences that it looks through at once.
BLOCK_TOKENS = 8
NUM_WARPS = 4
REGISTERS = 168, 128  # of a thread, and where rows are fp32: an SM has three programs, or four
BLOCK_SEQS = 256


@triton.jit
def _entry_of(item, cu_seqlens_q, num_seqs, ratio, BLOCK_SEQS: tl.constexpr):
    """(sequence, how many windows behind its first one) of a program.

    Sequence s gets the programs from cu_seqlens_q[s] // ratio + s on: at least as many as windows
    can close in its tokens.
    """
    before = tl.full([], 0, tl.int32)
    first = tl.full([], 0, tl.int32)
    for start in range(0, num_seqs, BLOCK_SEQS):
        seq = start + tl.arange(0, BLOCK_SEQS)
        live = seq < num_seqs
        begin = tl.load(cu_seqlens_q + seq, mask=live, other=0) // ratio + seq
        begun = live & (begin <= item)
        before += tl.sum(begun.to(tl.int32), 0)
        first = tl.maximum(first, tl.max(tl.where(begun, begin, 0), 0))
    return before - 1, item - first


class State(NamedTuple):
    """The last rows of each sequence, [num_states, ring, 2, channels].

    Attributes:
        data: the tensor; a pointer in a kernel.
        stride_state: elements from one sequence's state to the next.
        stride_row: elements from one row of the ring to the next.
        stride_part: elements from the values of a row to its gate.
    """

    data: Any
    stride_state: Any
    stride_row: Any
    stride_part: Any


@triton.jit(
    do_not_specialize=[
        "num_seqs", "num_entries", "kept_rows", "first_program", "one_window", "ratio", "slots",
        "ring", "block_size", "index_dim",
    ]
)  # fmt: skip
def _compress_kernel(
    kv, gate, ape, state, state_index, seq_lens, cu_seqlens_q, norm_weight, eps, cos_sin,
    pages, slot_mapping, num_seqs, num_entries, kept_rows, first_program, one_window,
    ratio, slots, ring, block_size, index_dim, dim, mean,
    ROPE_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_SEQS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0) + first_program
    if program >= num_entries:
        # Put a row of the step into the ring of its sequence: the row that is item % kept_rows
        # before the last one.
        item = program - num_entries
        seq = item // kept_rows
        position = tl.load(seq_lens + seq) - 1 - item % kept_rows
        row = tl.load(cu_seqlens_q + seq + 1) - 1 - item % kept_rows
        index = tl.load(state_index + seq).to(tl.int64)
        if (row < tl.load(cu_seqlens_q + seq)) | (position < 0) | (index < 0):
            return
        channel = tl.arange(0, 2 * WIDTH)
        inside = channel < tl.where(slots > ratio, 2 * dim, dim)  # two series, or one
        row = row.to(tl.int64)
        z = tl.load(gate.data + row * gate.stride_row + channel, mask=inside, other=0.0)
        bias = tl.load(
            ape.data + position % ratio * ape.stride_row + channel, mask=inside, other=0.0
        )
        c = tl.load(kv.data + row * kv.stride_row + channel, mask=inside, other=0.0)
        cell = state.data + index * state.stride_state
        cell += (position % ring).to(tl.int64) * state.stride_row + channel
        tl.store(cell, c.to(tl.float32), mask=inside)
        tl.store(cell + state.stride_part, z.to(tl.float32) + bias, mask=inside)
        return
    seq = program
    window = 0
    if one_window == 0:
        seq, window = _entry_of(program, cu_seqlens_q, num_seqs, ratio, BLOCK_SEQS)
    first_token = tl.load(cu_seqlens_q + seq)
    seq_len = tl.load(seq_lens + seq)
    context = seq_len - (tl.load(cu_seqlens_q + seq + 1) - first_token)
    window += tl.maximum(context, 0) // ratio
    if window >= seq_len // ratio:
        return
    closing = window * ratio + ratio - 1
    slot = tl.load(slot_mapping + first_token + closing - context)
    index = tl.load(state_index + seq).to(tl.int64)
    if (slot < 0) | (index < 0):
        return

    ring_rows = state.data + index * state.stride_state
    channel = tl.arange(0, WIDTH)[None, :]
    inside = channel < dim
    first = closing + 1 - slots
    first_cell = first % ring
    offset = tl.arange(0, BLOCK_TOKENS)[:, None]
    row_max = tl.full([WIDTH], float("-inf"), tl.float32)
    row_sum = tl.zeros([WIDTH], tl.float32)
    acc = tl.zeros([WIDTH], tl.float32)
    for start in tl.range(0, slots, BLOCK_TOKENS, disable_licm=True):
        token = start + offset
        position = first + token
        # Rows from ``context`` on are the step's, older ones lie in the ring.
        old = position < context
        live = (position >= 0) & (token < slots) & inside
        new = live & (position >= context)
        # Series a, then series b; without overlap there is one, of no more than ``ratio`` tokens.
        second = token >= ratio
        column = tl.where(second, dim, 0) + channel
        row = (first_token + position - context).to(tl.int64)
        c_row = kv.data + row * kv.stride_row
        z_row = gate.data + row * gate.stride_row
        # At most ``ring`` rows behind the first one: less than once around, or back at its cell.
        place = first_cell + token
        place = tl.where(place >= ring, place - ring, place)
        cell = ring_rows + place.to(tl.int64) * state.stride_row
        bias = ape.data + tl.where(second, token - ratio, token) * ape.stride_row + column
        bias = tl.load(bias, mask=new, other=0.0)
        if kv.data.dtype == state.data.dtype and gate.data.dtype == state.data.dtype:
            # Of a token one address, not two loads of which one is masked.
            c = tl.load(tl.where(old, cell, c_row) + column, mask=live, other=0.0)
            z_row = tl.where(old, cell + state.stride_part, z_row)
            z = tl.load(z_row + column, mask=live, other=float("-inf"))
        else:
            old = live & old
            c = tl.load(c_row + column, mask=new, other=0.0).to(tl.float32)
            z = tl.load(z_row + column, mask=new, other=float("-inf")).to(tl.float32)
            c = tl.where(old, tl.load(cell + column, mask=old, other=0.0), c)
            z = tl.where(old, tl.load(cell + state.stride_part + column, mask=old, other=0.0), z)
        z += bias  # [BLOCK_TOKENS, WIDTH]
        new_max = tl.maximum(row_max, tl.max(z, 0))
        # Nothing but slots before position 0 so far: subtracting that -inf would give NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2((z - base[None, :]) * LOG2E)
        decay = tl.exp2((row_max - base) * LOG2E)
        acc = acc * decay + tl.sum(weight * c, 0)
        row_sum = row_sum * decay + tl.sum(weight, 0)
        row_max = new_max
    entry = acc[None, :] / tl.where(inside, row_sum[None, :], 1.0)
    entry = normed(entry, norm_weight, mean, eps, dim, WIDTH)
    one = tl.full([1], 1, tl.int1)
    start = tl.full([1], 0, tl.int64) + window * ratio
    entry = rotated(entry, start, one, cos_sin, dim, 1, WIDTH, ROPE_DIM)
    at = tl.full([1], 0, tl.int64) + slot
    stored(entry, at, one, pages, block_size, index_dim, dim, 1, WIDTH)


def compress(call: CompressCall) -> None:
    """Launch a checked call."""
    run(prepare(call), call.kv)


def prepare(call: CompressCall) -> list[Launch]:
    """The launches of a checked call, in order."""
    ratio, overlap, max_seqlen_q = call.ratio, call.overlap, call.max_seqlen_q
    num_seqs, ring, dim = call.seq_lens.shape[0], call.state.shape[1], call.pages.dim
    one_window = max_seqlen_q <= ratio
    num_entries = num_seqs if one_window else call.kv.shape[0] // ratio + num_seqs
    kept_rows = max(1, min(ring, max_seqlen_q))
    slots = ratio * (1 + overlap)
    arguments: dict[str, Any] = {
        "kv": strided.matrix(call.kv),
        "gate": strided.matrix(call.gate),
        "ape": strided.matrix(call.ape),
        "state": State(call.state, *call.state.stride()[:3]),
        "state_index": call.state_index,
        "seq_lens": call.seq_lens,
        "cu_seqlens_q": call.cu_seqlens_q,
        "norm_weight": call.norm_weight,
        "eps": float(call.eps),
        "cos_sin": strided.matrix(call.cos_sin),
        "slot_mapping": call.slot_mapping,
        "num_seqs": num_seqs,
        "num_entries": num_entries,
        "kept_rows": kept_rows,
        "one_window": int(one_window),
        "pages": paged_rows(call.pages),
        "ratio": ratio,
        "slots": slots,
        "ring": ring,
        "block_size": call.pages.storage_block_size,
        # Where pages are plain, they are written alike.
        "index_dim": dim if isinstance(call.pages, IndexPages) else 0,
        "dim": dim,
        "mean": 1 / dim,
        "ROPE_DIM": call.cos_sin.shape[1],
        "BLOCK_TOKENS": BLOCK_TOKENS,
        "BLOCK_SEQS": BLOCK_SEQS,
        "WIDTH": WIDTH,
        "num_warps": NUM_WARPS,
        **arch_and_sms(call.kv)[0].register_limit(REGISTERS[call.kv.dtype == torch.float32]),
    }
    kept = num_seqs * kept_rows
    # The rows written replace those up to seq_len - 1 - ring, and the windows that close reach back
    # to context - (slots - 1).
    if ring >= max_seqlen_q + slots - 1:
        launches = [(num_entries + kept, 0)]
    else:
        launches = [(num_entries, 0), (kept, num_entries)]
    return [
        Launch(_compress_kernel, (programs,), arguments | {"first_program": first})
        for programs, first in launches
    ]
