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

Layout: kv, gate [num_tokens, channels], channels = dim, or 2 * dim with overlap (series a, then b);
state [num_states, ring, 2, channels] fp32.

Source: DeepSeek-V4, compressed attention: the compressors of the latents and of the indexer.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common import launch_cache, strided
from ..common.launching import Launch
from ..common.query_tiles import LOG2E
from ..common.tile_shapes import next_power_of_2
from ..latent_write.triton_impl import normed, page_arguments, rotated, stored
from .call import CompressCall

# Values that a program of an entry pools at once, 16 a thread; sequences that it looks through at
# once.
TILE_ELEMENTS = 8192
ELEMENTS_PER_WARP = 512
BLOCK_SEQS = 256


@triton.jit
def _entry_of(item, cu_seqlens_q, num_seqs, RATIO: tl.constexpr, BLOCK_SEQS: tl.constexpr):
    """(sequence, how many windows behind its first one) of a program.

    Sequence s gets the programs from cu_seqlens_q[s] // RATIO + s on: at least as many as windows
    can close in its tokens.
    """
    before = tl.full([], 0, tl.int32)
    first = tl.full([], 0, tl.int32)
    for start in range(0, num_seqs, BLOCK_SEQS):
        seq = start + tl.arange(0, BLOCK_SEQS)
        live = seq < num_seqs
        begin = tl.load(cu_seqlens_q + seq, mask=live, other=0) // RATIO + seq
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
    do_not_specialize=["num_seqs", "num_entries", "kept_rows", "first_program", "one_window"]
)
def _compress_kernel(
    kv, gate, ape, state, state_index, seq_lens, cu_seqlens_q, norm_weight, eps, cos_sin,
    pages, slot_mapping, num_seqs, num_entries, kept_rows, first_program, one_window,
    page_stride, row_stride,
    RATIO: tl.constexpr, OVERLAP: tl.constexpr, RING: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LATENTS: tl.constexpr, DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_SEQS: tl.constexpr,
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
        channel = tl.arange(0, DIM * (1 + OVERLAP))
        row = row.to(tl.int64)
        z = tl.load(gate.data + row * gate.stride_row + channel).to(tl.float32)
        z += tl.load(ape.data + position % RATIO * ape.stride_row + channel)
        cell = state.data + index * state.stride_state
        cell += (position % RING).to(tl.int64) * state.stride_row + channel
        tl.store(cell, tl.load(kv.data + row * kv.stride_row + channel).to(tl.float32))
        tl.store(cell + state.stride_part, z)
        return
    seq = program
    window = 0
    if one_window == 0:
        seq, window = _entry_of(program, cu_seqlens_q, num_seqs, RATIO, BLOCK_SEQS)
    first_token = tl.load(cu_seqlens_q + seq)
    seq_len = tl.load(seq_lens + seq)
    context = seq_len - (tl.load(cu_seqlens_q + seq + 1) - first_token)
    window += tl.maximum(context, 0) // RATIO
    if window >= seq_len // RATIO:
        return
    closing = window * RATIO + RATIO - 1
    slot = tl.load(slot_mapping + first_token + closing - context)
    index = tl.load(state_index + seq).to(tl.int64)
    if (slot < 0) | (index < 0):
        return

    ring_rows = state.data + index * state.stride_state
    dim = tl.arange(0, DIM)[None, :]
    row_max = tl.full([DIM], float("-inf"), tl.float32)
    row_sum = tl.zeros([DIM], tl.float32)
    acc = tl.zeros([DIM], tl.float32)
    for start in range(0, RATIO * (1 + OVERLAP), BLOCK_TOKENS):
        token = (start + tl.arange(0, BLOCK_TOKENS))[:, None]
        position = (window - OVERLAP) * RATIO + token
        live = (position >= 0) & (position <= closing)
        column = dim
        if OVERLAP:
            column = tl.where(token < RATIO, 0, DIM) + dim
        # Rows from ``context`` on are the step's, older ones lie in the ring.
        new = live & (position >= context)
        old = live & (position < context)
        row = (first_token + position - context).to(tl.int64)
        cell = ring_rows + (position % RING).to(tl.int64) * state.stride_row + column
        c = tl.load(kv.data + row * kv.stride_row + column, mask=new, other=0.0).to(tl.float32)
        z = tl.load(gate.data + row * gate.stride_row + column, mask=new, other=0.0)
        z = z.to(tl.float32)
        z += tl.load(ape.data + position % RATIO * ape.stride_row + column, mask=new, other=0.0)
        c = tl.where(old, tl.load(cell, mask=old, other=0.0), c)
        z = tl.where(old, tl.load(cell + state.stride_part, mask=old, other=0.0), z)
        z = tl.where(live, z, float("-inf"))  # [BLOCK_TOKENS, DIM]
        new_max = tl.maximum(row_max, tl.max(z, 0))
        # Nothing but slots before position 0 so far: subtracting that -inf would give NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2((z - base[None, :]) * LOG2E)
        decay = tl.exp2((row_max - base) * LOG2E)
        acc = acc * decay + tl.sum(weight * c, 0)
        row_sum = row_sum * decay + tl.sum(weight, 0)
        row_max = new_max
    entry = normed((acc / row_sum)[None, :], norm_weight, eps, DIM)
    one = tl.full([1], 1, tl.int1)
    start = tl.full([1], 0, tl.int64) + window * RATIO
    entry = rotated(entry, start, one, cos_sin.data, cos_sin.stride_row, 1, DIM, ROPE_DIM)
    slots = tl.full([1], 0, tl.int64) + slot
    stored(entry, slots, one, pages, page_stride, row_stride, BLOCK_SIZE, LATENTS, 1, DIM)


def compress(arguments: dict[str, Any]) -> None:
    """Check and launch ``compress(**arguments)``.

    Calls that look alike are checked once (``common.launch_cache``).
    """
    launch_cache.run(prepare, arguments, _checked)


def _checked(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Launch]]:
    return arguments, prepare(CompressCall(**arguments))


def prepare(call: CompressCall) -> list[Launch]:
    """The launches of a checked call, in order."""
    ratio, overlap, max_seqlen_q = call.ratio, call.overlap, call.max_seqlen_q
    num_seqs, ring, dim = call.seq_lens.shape[0], call.state.shape[1], call.pages.dim
    one_window = max_seqlen_q <= ratio
    num_entries = num_seqs if one_window else call.kv.shape[0] // ratio + num_seqs
    kept_rows = max(1, min(ring, max_seqlen_q))
    slots = ratio * (1 + overlap)
    block_tokens = min(next_power_of_2(slots), TILE_ELEMENTS // dim)
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
        **page_arguments(call.pages),
        "RATIO": ratio,
        "OVERLAP": int(overlap),
        "RING": ring,
        "DIM": dim,
        "ROPE_DIM": call.cos_sin.shape[1],
        "BLOCK_TOKENS": block_tokens,
        "BLOCK_SEQS": BLOCK_SEQS,
        "num_warps": max(4, block_tokens * dim // ELEMENTS_PER_WARP),
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
