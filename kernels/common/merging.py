"""Triton helpers and the kernel that merge partial results of one query by their lse.

All merges are `merge_rows`; they differ in where the parts of a row lie, and in what follows. The
registers of a thread and the programs of an SM (sm_90, Triton 3.7.1; `bench.static`) say why there
are three kernels:

    merge_partials_kernel     dense parts                                       32 to 40  12 to 16
    compressed_merge_kernel   equal splits, or `stream_k` finds the programs
                              that had a part; inverse RoPE                     64 to 72  7 to 8
    merge_splits_kernel       `attention.split_kv` finds a sequence's splits    72 to 80  6 to 7

A kernel that chooses at run time takes the registers of the costliest: dense parts would have half
as many programs. A kernel that chooses when it is compiled would compile as often as the three, and
a merge of dense parts would take 28 arguments instead of 9, which cost the host time at each
launch. Equal splits and `stream_k` are near enough: in kernels of their own the former have 9
programs (56 registers), the latter 7 (72).
"""

import triton
import triton.language as tl

from . import stream_k
from .query_tiles import LOG2E


@triton.jit
def _exp(x):
    # Differences of logarithms come in: scaled to base 2 only here, large ones lose nothing to the
    # factor's rounding.
    return tl.exp2(x * LOG2E)


@triton.jit
def merge_rows(
    rows,
    lses,
    num_parts,
    stride_part,
    lse_stride_part,
    sink,
    HEAD_DIM: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    step=None,
):
    """Merge one row of every part; returns the row [HEAD_DIM] fp32 and its natural-log lse.

    step: 2 where of those behind the second every other one is a part; 1 or None: all are.
    """
    part = tl.arange(0, BLOCK_PARTS)
    dim = tl.arange(0, HEAD_DIM)
    row_max = tl.full([], float("-inf"), tl.float32)
    row_sum = tl.zeros([], tl.float32)
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for start in range(0, num_parts, BLOCK_PARTS):
        index = (start + part).to(tl.int64)
        live = index < num_parts
        if step is not None:
            index = tl.maximum(step * index - (step - 1), 0)
        part_lse = tl.load(lses + index * lse_stride_part, mask=live, other=float("-inf"))
        live &= part_lse != float("-inf")
        new_max = tl.maximum(row_max, tl.max(part_lse, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = _exp(part_lse - base)  # [BLOCK_PARTS]
        decay = _exp(row_max - base)
        values = tl.load(
            rows + index[:, None] * stride_part + dim[None, :], mask=live[:, None], other=0.0
        ).to(tl.float32)
        acc = acc * decay + tl.sum(values * weight[:, None], 0)
        row_sum = row_sum * decay + tl.sum(weight, 0)
        row_max = new_max
    joint = tl.maximum(row_max, sink)
    base = tl.where(joint == float("-inf"), 0.0, joint)
    share = _exp(row_max - base)
    total = row_sum * share + _exp(sink - base)
    merged = acc * tl.where(total > 0.0, share / total, 0.0)
    return merged, tl.where(row_sum > 0.0, row_max + tl.log(row_sum), float("-inf"))


@triton.jit
def load_sink(sinks, head):
    """The sink of a head; -inf, which adds nothing, where there are none."""
    if sinks is not None:
        sink = tl.load(sinks + head)
    else:
        sink = float("-inf")
    return sink


def block_parts(num_parts: int, head_dim: int) -> int:
    """Parts that are merged at once: all of a few, or what keeps a tile at 4096 values."""
    return min(triton.next_power_of_2(num_parts), max(8, 4096 // head_dim))


@triton.jit(
    do_not_specialize=[
        "num_unsplit", "num_decodes", "decode_tokens", "num_splits", "programs", "cost", "ratio",
    ]
)  # fmt: skip
def compressed_merge_kernel(
    partial_out, first_lse, seq_lens, cu_seqlens_q, sinks, cos_sin, out, lse,
    num_unsplit, num_decodes, decode_tokens, num_splits, programs, cost, sliding_window, ratio,
    num_heads,
    out_stride_token, out_stride_head, lse_stride_head, cos_sin_stride,
    BLOCK_Q: tl.constexpr, SLOTS: tl.constexpr, HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Merge the KV splits of one head of a decode sequence, as the attention kernel left them, and
    apply inverse RoPE to the result.

    programs: those that divided all query tiles between them (``stream_k``); 0: each sequence from
        ``num_unsplit`` on has ``num_splits``.
    """
    seq = num_unsplit + tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    first_token = seq
    q_len = 1
    context = 0
    if not SLOTS:
        first_token = tl.load(cu_seqlens_q + seq)
        q_len = tl.load(cu_seqlens_q + seq + 1) - first_token
        context = tl.load(seq_lens + seq) - q_len
    if q_len > decode_tokens:
        return
    units, size, least, first, step = 1, 1, 1, 0, 1
    if not SLOTS and programs > 0:
        batch = (seq_lens, cu_seqlens_q, num_decodes, decode_tokens, sliding_window, ratio)
        # Short query tiles are never cut, whatever the batch holds.
        _, units = stream_k.work(seq, batch, BLOCK_Q, BLOCK_N)
        if units < 2 * LEAST:
            return
        size, least, _ = stream_k.share(batch, programs, LEAST, cost, BLOCK_Q, BLOCK_N)
        if units < 2 * least:
            return
        first, step = stream_k.first_unit(seq, batch, BLOCK_Q, BLOCK_N), 2
    sink = load_sink(sinks, head)
    dim = tl.arange(0, HEAD_DIM)
    for t in range(0, q_len):
        part = ((seq - num_unsplit) * tl.cdiv(decode_tokens, BLOCK_Q) + t // BLOCK_Q) * num_splits
        if programs > 0:
            program, num_splits = stream_k.programs_of(
                first + t // BLOCK_Q * units, units, size, least
            )
            part = 2 * program + 1
        if num_splits > 1:
            row = (part.to(tl.int64) * BLOCK_Q + t % BLOCK_Q) * num_heads + head
            merged, merged_lse = merge_rows(
                partial_out + row * HEAD_DIM, partial_out + first_lse + row, num_splits,
                BLOCK_Q * num_heads * HEAD_DIM, BLOCK_Q * num_heads, sink, HEAD_DIM, BLOCK_PARTS, step,
            )  # fmt: skip
            if cos_sin is not None:
                even, odd = tl.split(tl.reshape(merged, [HEAD_DIM // 2, 2]))
                pair = tl.arange(0, HEAD_DIM // 2) - (HEAD_DIM - ROPE_DIM) // 2
                angle = cos_sin + (context + t).to(tl.int64) * cos_sin_stride + pair
                # The rows of padding have no position. (Triton 3.9's interpreter takes no mask made
                # of a vector & a scalar.)
                known = pair >= tl.where(context + t >= 0, 0, HEAD_DIM)
                cos = tl.load(angle, mask=known, other=1.0)
                sin = tl.load(angle + ROPE_DIM // 2, mask=known, other=0.0)
                merged = tl.reshape(
                    tl.join(even * cos + odd * sin, odd * cos - even * sin), [HEAD_DIM]
                )
            token = (first_token + t).to(tl.int64)
            out_row = out + token * out_stride_token + head * out_stride_head
            tl.store(out_row + dim, merged.to(out.dtype.element_ty))
            if lse is not None:
                if SLOTS:
                    merged_lse = tl.where(merged_lse == float("-inf"), float("inf"), merged_lse)
                tl.store(lse + head * lse_stride_head + token, merged_lse)
