"""The experts of all tokens in three kernels, none of which asks the host for anything.

1. order: rows (a token once for each of its experts) sorted by expert, and the tiles of block_m of
   an expert's rows. A program takes one expert: it counts the rows of lower experts and its own,
   which says where its rows begin, and then writes them there, first token first. Where its tiles
   are listed follows from the same two numbers. So the list has gaps, whose entries say 0 rows.
2. gate_up: a tile's rows times rows of gate and up in turns, so that both sums of a pair end in one
   thread; bias and gated product before anything is stored.
3. down: the products times the second matrix, stored at the rows' places before they were sorted.

Quantized weights are widened in registers, on their way to the product.

Layout: order int32: [num_rows] rows sorted by expert, then [num_tiles, 3] of expert, first sorted
row, and number of rows. gated [num_rows, width], sorted. Decode is bound by the weights of the
experts, of which each is read once for up to block_m rows; programs of neighbouring tiles run at
about the same time, so that an expert's further tiles find them in the L2 cache.

Source: transformers ``modeling_deepseek_v4``, ``modeling_gpt_oss``; OCP Microscaling Formats 1.0.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..common import strided
from ..common.arch import Arch
from ..common.launching import Launch, arch_and_sms, run
from ..common.tile_shapes import MAX_REGISTERS
from ..common.tiles import halve_e4m3
from ..gating.triton_impl import gated as gated_values
from .call import FP4_GROUP, FP8_BLOCK, weight_format
from .configs import ExpertConfig, select_config

# Rows that a program of the first kernel looks at together, and its warps. Few rows take one turn,
# and with more at a time prefill would issue as many instructions for each.
CHUNK, ORDER_WARPS = 1024, 8
# Registers of a thread that leave an SM 16 warps.
TWO_PROGRAMS = 128
# Tiles whose programs run one after another for the same rows of the matrix.
GROUP = tl.constexpr(8)
ENTRY = tl.constexpr(3)
# Powers of two that fp16's bias of 15 has too little for e2m1 (1) and e4m3 (7).
E2M1_FACTOR = tl.constexpr(2.0**14)
E4M3_FACTOR = tl.constexpr(2.0**8)
BLOCK_FP8 = tl.constexpr(FP8_BLOCK)
GROUP_FP4 = tl.constexpr(FP4_GROUP)


@triton.jit(do_not_specialize=["num_rows", "block_m", "by_row"])
def _order_kernel(
    ids, order, num_rows, block_m, by_row,
    TOP_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    below = tl.zeros([CHUNK], tl.int32)
    own = tl.zeros([CHUNK], tl.int32)
    for first in range(0, num_rows, CHUNK):
        row = first + lane
        cells = ids.data + (row // TOP_K).to(tl.int64) * ids.stride_row + row % TOP_K
        chosen = tl.load(cells, mask=row < num_rows, other=expert + 1)
        below += (chosen < expert).to(tl.int32)
        own += (chosen == expert).to(tl.int32)
    start = tl.sum(below, 0)
    count = tl.sum(own, 0)
    if count > 0:
        seen = start
        for first in range(0, num_rows, CHUNK):
            row = first + lane
            cells = ids.data + (row // TOP_K).to(tl.int64) * ids.stride_row + row % TOP_K
            mine = tl.load(cells, mask=row < num_rows, other=expert + 1) == expert
            place = tl.cumsum(mine.to(tl.int32), 0)
            tl.store(order + seen + place - 1, row, mask=mine)
            seen += tl.sum(mine.to(tl.int32), 0)
    # A tile is listed at its first sorted row, or where that is shorter at start // block_m +
    # expert + its number: those of the next expert come behind, however many rows this one has.
    if by_row == 1:
        base, end, step = start, start + count, block_m
    else:
        base, end, step = start // block_m + expert, (start + count) // block_m + expert + 1, 1
    for first in range(base, end, CHUNK):
        entry = first + lane
        done = (entry - base) // step * block_m
        real = (done < count) & ((entry - base) % step == 0)
        rows = tl.where(real, tl.minimum(count - done, block_m), 0)
        cells = order + num_rows + ENTRY * entry
        tl.store(cells, expert, mask=entry < end)
        tl.store(cells + 1, start + done, mask=entry < end)
        tl.store(cells + 2, rows, mask=entry < end)


@triton.jit
def _find_tile(PARTS: tl.constexpr):
    """(tile, part of the matrix' rows) of a program: GROUP tiles of one part, then of the next."""
    program, tiles = tl.program_id(0), tl.num_programs(0) // PARTS
    first = program // (GROUP * PARTS) * GROUP
    size = tl.minimum(tiles - first, GROUP)
    within = program % (GROUP * PARTS)
    return first + within % size, within // size


@triton.jit
def _widen_e2m1(packed, exponents, dtype: tl.constexpr):
    """Bytes of two e2m1 values [N, K / 2], scale bytes [N, K / 32]: their products [N, K]."""
    bits = packed.to(tl.uint16)
    bits = tl.join(bits & 15, bits >> 4)
    half = ((bits & 8) << 12) | ((bits & 7) << 9)
    values = half.to(tl.float16, bitcast=True).to(tl.float32) * E2M1_FACTOR
    # Byte 0 stands for 2^-127, which is a subnormal number.
    scale = tl.maximum(exponents.to(tl.uint32) << 23, 0x400000).to(tl.float32, bitcast=True)
    N: tl.constexpr = packed.shape[0]
    GROUPS: tl.constexpr = exponents.shape[1]
    values = values.reshape(N, GROUPS, GROUP_FP4) * scale[:, :, None]
    return values.reshape(N, GROUPS * GROUP_FP4).to(dtype)


@triton.jit
def _multiply(
    rows, live, matrix, scale, real, stride_column, scale_stride,
    SIZE: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] fp32: rows times the rows of a matrix, over SIZE columns.

    rows, matrix: pointers to rows [BLOCK_M] and [BLOCK_N], of which ``live`` and ``real`` say which
        are there. scale: pointers [BLOCK_N] to the scales of the matrix' rows.
    """
    dtype = rows.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, SIZE, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = (k < SIZE)[None, :]
        a = tl.load(rows[:, None] + k[None, :], mask=live[:, None] & inside, other=0.0)
        if FORMAT == "fp4":
            byte = first // 2 + tl.arange(0, BLOCK_K // 2)
            there = real[:, None] & (byte < SIZE // 2)[None, :]
            packed = tl.load(matrix[:, None] + byte[None, :], mask=there, other=0)
            group = first // GROUP_FP4 + tl.arange(0, BLOCK_K // GROUP_FP4)
            there = real[:, None] & (group < SIZE // GROUP_FP4)[None, :]
            exponents = tl.load(scale[:, None] + group[None, :], mask=there, other=0)
            b = tl.trans(_widen_e2m1(packed, exponents, dtype))
        elif FORMAT == "fp8":
            bits = tl.load(matrix[:, None] + k[None, :], mask=real[:, None] & inside, other=0)
            half = halve_e4m3(bits, HARDWARE=False)
            factor = tl.load(scale + first // BLOCK_FP8 * scale_stride, mask=real, other=0.0)
            b = tl.trans((half.to(tl.float32) * E4M3_FACTOR * factor[:, None]).to(dtype))
        else:
            # Loaded as it is multiplied: a transposed load would not be copied ahead.
            cells = matrix[None, :] + k[:, None] * stride_column
            b = tl.load(cells, mask=(k < SIZE)[:, None] & real[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_kernel(
    x, order, gate_up, gate_up_scale, gate_up_bias, gated, limit, alpha, up_offset, num_rows,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    INTERLEAVED: tl.constexpr, GELU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile, part = _find_tile((2 * WIDTH + BLOCK_N - 1) // BLOCK_N)
    entry = order + num_rows + ENTRY * tile
    count = tl.load(entry + 2)
    if count == 0:
        return
    expert, start = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    m = tl.arange(0, BLOCK_M)
    live = m < count
    token = tl.load(order + start + m, mask=live, other=0) // TOP_K
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    real = n < 2 * WIDTH
    matrix = gate_up.data + expert * gate_up.stride_matrix
    if INTERLEAVED:  # rows in turns are adjacent
        matrix += n * gate_up.stride_part
    else:
        matrix += n % 2 * gate_up.stride_part + n // 2 * gate_up.stride_row
    scale, scale_stride = None, 0
    if FORMAT != "plain":
        block = n // 2 // BLOCK_FP8 if FORMAT == "fp8" else n // 2
        scale = gate_up_scale.data + expert * gate_up_scale.stride_matrix
        scale += n % 2 * gate_up_scale.stride_part + block * gate_up_scale.stride_row
        scale_stride = gate_up_scale.stride_column
    acc = _multiply(
        x.data + token.to(tl.int64) * x.stride_row, live, matrix, scale, real,
        gate_up.stride_column, scale_stride, HIDDEN, FORMAT, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if gate_up_bias is not None:
        cells = gate_up_bias.data + expert * gate_up_bias.stride_matrix
        cells += n % 2 * gate_up_bias.stride_part + n // 2 * gate_up_bias.stride_row
        acc += tl.load(cells, mask=real, other=0.0).to(tl.float32)[None, :]
    gate, up = tl.split(acc.reshape(BLOCK_M, BLOCK_N // 2, 2))
    made = gated_values(gate, up, limit, alpha, up_offset, GELU)
    n = part * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    cells = gated + (start + m).to(tl.int64)[:, None] * WIDTH + n[None, :]
    tl.store(cells, made.to(gated.dtype.element_ty), mask=live[:, None] & (n < WIDTH)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _down_kernel(
    gated, order, down, down_scale, down_bias, out, num_rows,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile, part = _find_tile((HIDDEN + BLOCK_N - 1) // BLOCK_N)
    entry = order + num_rows + ENTRY * tile
    count = tl.load(entry + 2)
    if count == 0:
        return
    expert, start = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    m = tl.arange(0, BLOCK_M)
    live = m < count
    row = tl.load(order + start + m, mask=live, other=0).to(tl.int64)
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    real = n < HIDDEN
    matrix = down.data + expert * down.stride_matrix + n * down.stride_row
    scale, scale_stride = None, 0
    if FORMAT != "plain":
        block = n // BLOCK_FP8 if FORMAT == "fp8" else n
        scale = down_scale.data + expert * down_scale.stride_matrix + block * down_scale.stride_row
        scale_stride = down_scale.stride_column
    acc = _multiply(
        gated + (start + m).to(tl.int64) * WIDTH, live, matrix, scale, real,
        down.stride_column, scale_stride, WIDTH, FORMAT, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if down_bias is not None:
        cells = down_bias.data + expert * down_bias.stride_row + n * down_bias.stride_column
        acc += tl.load(cells, mask=real, other=0.0).to(tl.float32)[None, :]
    cells = out + row[:, None] * HIDDEN + n[None, :]
    tl.store(cells, acc.to(out.dtype.element_ty), mask=live[:, None] & real[None, :])


def expert_mlp(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    limit: float | None,
    alpha: float,
    up_offset: float,
    gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    """Launch checked arguments, shaped as in ``quire.kernels.expert_mlp``; returns the rows."""
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if weight.stride(0) >= 2**31:  # rows of a matrix are addressed with 32 bits
            raise NotImplementedError(
                f"{name}: matrices of < 2**31 elements are supported, got {weight.stride()}"
            )
    out, launches = prepare(
        arch_and_sms(x)[0],
        x,
        ids,
        (gate_up, down),
        (gate_up_scale, down_scale),
        (gate_up_bias, down_bias),
        activation,
        limit,
        alpha,
        up_offset,
    )
    run(launches, x)
    return out


def prepare(
    arch: Arch,
    x: torch.Tensor,
    ids: torch.Tensor,
    matrices: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    activation: str,
    limit: float | None,
    alpha: float,
    up_offset: float,
) -> tuple[torch.Tensor, list[Launch]]:
    """The rows of checked arguments of ``quire.kernels.expert_mlp``, not filled yet, and the
    launches; pairs of tensors are those of ``gate_up`` and of ``down``."""
    (gate_up, down), (gate_up_scale, down_scale) = matrices, scales
    gate_up_bias, down_bias = biases
    hidden, top_k, (num_experts, _, width, _) = x.shape[1], ids.shape[1], gate_up.shape
    num_rows, kind = ids.numel(), weight_format(gate_up)
    config = select_config(num_rows, num_experts, x.element_size(), kind != "plain")
    num_tiles = num_rows // config.block_m + num_experts
    by_row = num_rows <= num_tiles
    num_tiles = min(num_rows, num_tiles)
    out = x.new_empty(num_rows, hidden)
    order = ids.new_empty(num_rows + ENTRY.value * num_tiles, dtype=torch.int32)
    gated = x.new_empty(num_rows, width)
    shared = {
        "order": order, "gated": gated, "num_rows": num_rows, "HIDDEN": hidden,
        "WIDTH": width, "FORMAT": kind, **_blocks(config, arch),
    }  # fmt: skip
    return out, [
        Launch(
            _order_kernel,
            (num_experts if num_rows else 0,),
            {
                "ids": strided.matrix(ids),
                "order": order,
                "num_rows": num_rows,
                "block_m": config.block_m,
                "by_row": int(by_row),
                "TOP_K": top_k,
                "CHUNK": CHUNK,
                "num_warps": ORDER_WARPS,
            },
        ),
        Launch(
            _gate_up_kernel,
            (num_tiles * triton.cdiv(2 * width, config.block_n),),
            {
                "x": strided.matrix(x),
                "gate_up": strided.matrices(_bytes(gate_up)),
                "gate_up_scale": strided.matrices(gate_up_scale),
                "gate_up_bias": strided.matrices(gate_up_bias, columns=False),
                "limit": None if limit is None else float(limit),
                "alpha": float(alpha),
                "up_offset": float(up_offset),
                "TOP_K": top_k,
                "INTERLEAVED": gate_up.stride(2) == 2 * gate_up.stride(1),
                "GELU": activation == "gelu_tanh",
                **shared,
            },
        ),
        Launch(
            _down_kernel,
            (num_tiles * triton.cdiv(hidden, config.block_n),),
            {
                "down": strided.matrices(_bytes(down), parts=False),
                "down_scale": strided.matrices(down_scale, parts=False),
                "down_bias": None if down_bias is None else strided.cells(down_bias),
                "out": out,
                **shared,
            },
        ),
    ]


def _bytes(weight: torch.Tensor) -> torch.Tensor:
    """A weight as kernels read it."""
    return weight.view(torch.uint8) if weight_format(weight) == "fp8" else weight


def _blocks(config: ExpertConfig, arch: Arch) -> dict[str, Any]:
    # There products read the weights from shared memory: two programs of 8 warps fit on an SM.
    two = config.block_m == 128 and arch.matrix == "wgmma"
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **arch.register_limit(TWO_PROGRAMS if two else MAX_REGISTERS),
    }
