"""MLPs of experts in three launches, without a copy to the host.

Order: sort the rows (a token once for each of its experts) by expert, and list the tiles of BLOCK_M
rows of each expert. Gate and up: multiply a tile's rows by gate and up rows alternately, so that
both sums of a pair end in one thread, which stores their gated product. Down: multiply these by the
second matrix, and store them in the unsorted order. Quantized weights are widened in registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..common import checks, dequantize, launching, strided
from ..common.bits import widen, widen_e2m1
from ..common.tile_shapes import MAX_REGISTERS, next_power_of_2
from .gating import check_options, gated_torch, gated_values

# Rows and columns of a block that shares a scale, in e4m3; columns that do, in e2m1.
FP8_BLOCK = tl.constexpr(128)
FP4_GROUP = tl.constexpr(dequantize.FP4_GROUP)
# Rows that a program of the first kernel looks at together, and its warps.
CHUNK, ORDER_WARPS = 1024, 8
MIN_BINS = 256  # of a histogram: a bin a thread
# A tile in the list: expert, first sorted row, number of rows.
ENTRY = tl.constexpr(3)


class Tile(NamedTuple):
    """Launch choices of both products."""

    block_m: int  # rows of an expert
    block_n: int  # rows of its matrix; a multiple of 2, as gate and up come in pairs
    block_k: int  # columns of its matrix; a power of two in 32..128
    num_warps: int
    num_stages: int


# For up to 16 rows of an expert, and for more. No matrix instruction multiplies fp32, but with 64
# rows Triton 3.7.1 takes that of tf32 on sm_100, whatever input_precision says.
TILES = {
    "plain": (Tile(16, 32, 128, 4, 4), Tile(128, 128, 64, 8, 3)),
    "quantized": (Tile(16, 64, 128, 4, 4), Tile(128, 128, 64, 8, 3)),
    "fp32": (Tile(16, 32, 32, 4, 3), Tile(32, 64, 32, 8, 2)),
}


def select_tile(num_rows: int, num_experts: int, dtype_bytes: int, quantized: bool) -> Tile:
    """Tile of both products; num_rows: num_tokens * k; quantized: the weights."""
    few, many = TILES["fp32" if dtype_bytes == 4 else "quantized" if quantized else "plain"]
    return few if num_rows <= 16 * num_experts else many


def expert_mlp(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    activation: str,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """MLP of each expert of each token, for ``combine_experts`` or ``expand_streams`` to add up::

        gate, up = gate_up[e] x + gate_up_bias[e]
        row      = down[e] gated_product(gate, up) + down_bias[e]

    with fp32 sums; the gated product, the row, and a quantized weight times its scale are rounded
    to the dtype of x. e4m3 weights have a scale for each block of 128 x 128. e2m1 weights (fp4,
    MXFP4) have two values a byte, the earlier one in the low bits, and an E8M0 scale byte for each
    32 columns. No quantized value and no scale may be NaN. A row does not depend on other tokens.

    Args:
        x: [num_tokens, hidden_size] bf16, fp16 or fp32, last stride 1.
        ids: [num_tokens, k] int64 in 0..num_experts - 1, last stride 1.
        gate_up: [num_experts, 2, width, hidden_size], the gate first, any strides: gate and up rows
            may alternate, and matrices may be transposed. e4m3 and uint8 (e2m1: hidden_size / 2
            bytes): last stride 1.
        down: [num_experts, hidden_size, width], or as above.
        activation, limit, alpha, up_offset: as in ``gated_product``.
        gate_up_scale: e4m3: [num_experts, 2, ceil(width / 128), ceil(hidden_size / 128)] fp32;
            e2m1: [num_experts, 2, width, hidden_size / 32] uint8; None for plain weights.
        down_scale: the same for [hidden_size, width].
        gate_up_bias: [num_experts, 2, width] bf16, fp16 or fp32, any strides; None = 0.
        down_bias: [num_experts, hidden_size] of these dtypes; None = 0.
        impl: see ``quire.kernels``, also for errors. "torch" reads the choices on the host.

    Returns:
        [num_tokens * k, hidden_size] in the dtype of x, the rows of a token one after another.

    Raises:
        NotImplementedError: Triton with a matrix of 2**31 elements or more.

    Source: transformers ``modeling_deepseek_v4``, ``modeling_gpt_oss``, ``modeling_gemma4``.
    """
    weights = gate_up, down, gate_up_scale, down_scale, gate_up_bias, down_bias
    options = activation, limit, alpha, up_offset
    chosen = checks.accept(impl, _check, x, ids, *weights, *options)
    checks.expect_values("ids", ids, 0, gate_up.shape[0] - 1)
    if chosen == "torch":
        return _torch(x, ids, *weights, options)
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if weight.stride(0) >= 2**31:  # rows of a matrix are addressed with 32 bits
            raise NotImplementedError(
                f"{name}: matrices of < 2**31 elements are supported, got {weight.stride()}"
            )
    hidden, top_k, (num_experts, _, width, _) = x.shape[1], ids.shape[1], gate_up.shape
    num_rows, kind = ids.numel(), _weight_format(gate_up)
    tile = select_tile(num_rows, num_experts, x.element_size(), kind != "plain")
    num_tiles = min(num_rows, num_rows // tile.block_m + num_experts)  # at most
    # The sorted rows, then the list of tiles; unused ones have 0 rows.
    order = ids.new_empty(num_rows + ENTRY.value * num_tiles, dtype=torch.int32)
    gated = x.new_empty(num_rows, width)  # sorted
    out = x.new_empty(num_rows, hidden)
    if kind == "fp8":  # Triton refuses the type where no instruction converts it
        gate_up, down = gate_up.view(torch.uint8), down.view(torch.uint8)
    shape = dict(
        FORMAT=kind, TOP_K=top_k, GELU=activation == "gelu_tanh",
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
        **launching.arch_and_sms(x)[0].register_limit(MAX_REGISTERS),
    )  # fmt: skip
    with torch.cuda.device_of(x):
        launching.launch(
            _order_kernel, (num_experts if num_rows else 0,),
            ids=strided.matrix(ids), order=order, num_rows=num_rows, num_tiles=num_tiles,
            block_m=tile.block_m, TOP_K=top_k, CHUNK=CHUNK,
            EXPERTS=max(MIN_BINS, next_power_of_2(num_experts)), num_warps=ORDER_WARPS,
        )  # fmt: skip
        launching.launch(
            _product_kernel, (triton.cdiv(2 * width, tile.block_n), num_tiles),
            x=strided.matrix(x), order=order, weight=strided.matrices(gate_up),
            scale=strided.matrices(gate_up_scale),
            bias=strided.matrices(gate_up_bias, columns=False), out=gated,
            limit=None if limit is None else float(limit), alpha=float(alpha),
            up_offset=float(up_offset), num_rows=num_rows, COLUMNS=hidden, ROWS=width, GATED=True,
            **shape,
        )  # fmt: skip
        down_bias = None if down_bias is None else down_bias[..., None]
        launching.launch(
            _product_kernel, (triton.cdiv(hidden, tile.block_n), num_tiles),
            x=strided.matrix(gated), order=order, weight=strided.matrices(down, parts=False),
            scale=strided.matrices(down_scale, parts=False),
            bias=strided.matrices(down_bias, parts=False), out=out,
            limit=None, alpha=1.0, up_offset=0.0, num_rows=num_rows, COLUMNS=width, ROWS=hidden,
            GATED=False, **shape,
        )  # fmt: skip
    return out


def _weight_format(weight: torch.Tensor) -> str:
    return {checks.E4M3: "fp8", torch.uint8: "fp4"}.get(weight.dtype, "plain")


def _check(
    x, ids, gate_up, down, gate_up_scale, down_scale, gate_up_bias, down_bias, *options
) -> None:
    checks.expect_tensor("x", x, (None, None), checks.MODEL_DTYPES)
    num_tokens, hidden = x.shape
    checks.expect_int("x: hidden_size", hidden, 1)
    checks.expect_tensor("ids", ids, (num_tokens, None), torch.int64, device=x.device)
    checks.expect_int("ids: k", ids.shape[1], 1)
    stored = (x.dtype, checks.E4M3, torch.uint8)
    checks.expect_tensor("gate_up", gate_up, (None, 2, None, None), stored, any_stride=True)
    num_experts, _, width, _ = gate_up.shape
    checks.expect_int("gate_up: num_experts", num_experts, 1)
    checks.expect_int("gate_up: width", width, 1)
    _check_weight("gate_up", gate_up, gate_up_scale, (num_experts, 2), width, hidden, x)
    checks.expect_tensor("down", down, (None, None, None), gate_up.dtype, any_stride=True)
    _check_weight("down", down, down_scale, (num_experts,), hidden, width, x)
    for name, bias, shape in (
        ("gate_up_bias", gate_up_bias, (num_experts, 2, width)),
        ("down_bias", down_bias, (num_experts, hidden)),
    ):
        checks.expect_tensor(
            name, bias, shape, checks.MODEL_DTYPES, device=x.device, any_stride=True, optional=True
        )
    check_options(*options)


def _check_weight(name, weight, scale, lead, rows, columns, x) -> None:
    kind, group, block = _weight_format(weight), FP4_GROUP.value, FP8_BLOCK.value
    if kind == "fp4" and columns % group:
        raise ValueError(
            f"{name}: expected rows of a multiple of {group} values in uint8, got {columns}"
        )
    shape = (*lead, rows, columns // 2 if kind == "fp4" else columns)
    plain = kind == "plain"
    checks.expect_tensor(name, weight, shape, weight.dtype, device=x.device, any_stride=plain)
    if plain:
        if scale is not None:
            raise ValueError(f"{name}_scale: expected None with plain weights, got a tensor")
        return
    dtype, scales = torch.uint8, (*lead, rows, columns // group)
    if kind == "fp8":
        dtype, scales = torch.float32, (*lead, -(-rows // block), -(-columns // block))
    checks.expect_tensor(f"{name}_scale", scale, scales, dtype, device=x.device)


@torch.no_grad()
def _torch(
    x, ids, gate_up, down, gate_up_scale, down_scale, gate_up_bias, down_bias, options
) -> torch.Tensor:
    kind = _weight_format(gate_up)

    def product(rows, weight, scale, bias, *index) -> torch.Tensor:
        matrix = weight[index]
        if scale is not None:
            matrix = dequantize.DEQUANTIZE[kind](matrix, scale[index], x.dtype)
        sums = rows @ matrix.T
        return sums if bias is None else (sums + bias[index]).to(x.dtype)

    flat = ids.flatten()
    out = x.new_empty(len(flat), x.shape[1])
    by_expert = flat.argsort(stable=True).split(flat.bincount().tolist())
    for expert, rows in enumerate(by_expert):
        if len(rows):
            tokens = x[rows // ids.shape[1]]
            gate = product(tokens, gate_up, gate_up_scale, gate_up_bias, expert, 0)
            up = product(tokens, gate_up, gate_up_scale, gate_up_bias, expert, 1)
            gated = gated_torch(gate, up, *options)
            out[rows] = product(gated, down, down_scale, down_bias, expert)
    return out


@triton.jit
def _load_experts(ids, row, num_rows, TOP_K: tl.constexpr):
    """Experts of rows; -1 past the last row."""
    cells = ids.data + (row // TOP_K).to(tl.int64) * ids.stride_row + row % TOP_K
    return tl.load(cells, mask=row < num_rows, other=-1).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "block_m"])
def _order_kernel(
    ids, order, num_rows, num_tiles, block_m,
    TOP_K: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Write the sorted rows and the tiles of one expert, behind those of all lower ones."""
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    other = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, num_rows, CHUNK):
        chosen = _load_experts(ids, first + lane, num_rows, TOP_K)
        counts += tl.histogram(chosen, EXPERTS, mask=(chosen >= 0) & (chosen < EXPERTS))
    tiles = (counts + block_m - 1) // block_m
    start = tl.sum(tl.where(other < expert, counts, 0), 0)
    count = tl.sum(tl.where(other == expert, counts, 0), 0)
    if count > 0:
        seen = start
        for first in range(0, num_rows, CHUNK):
            mine = _load_experts(ids, first + lane, num_rows, TOP_K) == expert
            place = tl.cumsum(mine.to(tl.int32), 0)
            tl.store(order + seen + place - 1, first + lane, mask=mine)
            seen += tl.sum(mine.to(tl.int32), 0)
    base = tl.sum(tl.where(other < expert, tiles, 0), 0)
    end = base + (count + block_m - 1) // block_m
    if expert == tl.num_programs(0) - 1:  # and the unused tiles
        end = num_tiles
    for first in range(base, end, CHUNK):
        entry = first + lane
        done = (entry - base) * block_m
        rows = tl.minimum(tl.maximum(count - done, 0), block_m)
        cells = order + num_rows + ENTRY * entry
        tl.store(cells, expert, mask=entry < end)
        tl.store(cells + 1, start + done, mask=entry < end)
        tl.store(cells + 2, rows, mask=entry < end)


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x, order, weight, scale, bias, out, limit, alpha, up_offset, num_rows,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of rows times rows of its expert's matrix [ROWS, COLUMNS].

    GATED: tokens times gate and up rows in turns, stored sorted; else sorted rows times down rows,
    stored in the order of tokens.
    """
    part, tile = tl.program_id(0), tl.program_id(1)
    entry = order + num_rows + ENTRY * tile
    count = tl.load(entry + 2)
    if count == 0:
        return
    expert, start = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    m = tl.arange(0, BLOCK_M)
    live = m < count
    sorted_row = (start + m).to(tl.int64)
    unsorted_row = tl.load(order + start + m, mask=live, other=0)
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        rows = x.data + (unsorted_row // TOP_K).to(tl.int64) * x.stride_row
        real, half, row = n < 2 * ROWS, n % 2, n // 2
    else:
        rows = x.data + sorted_row * x.stride_row
        real, half, row = n < ROWS, 0, n
    matrix = weight.data + expert * weight.stride_matrix
    matrix += half * weight.stride_part + row * weight.stride_row
    if FORMAT != "plain":
        block = row // FP8_BLOCK if FORMAT == "fp8" else row
        scales = scale.data + expert * scale.stride_matrix
        scales += half * scale.stride_part + block * scale.stride_row
    dtype = x.data.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, COLUMNS, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = (k < COLUMNS)[None, :]
        a = tl.load(rows[:, None] + k[None, :], mask=live[:, None] & inside, other=0.0)
        if FORMAT == "fp4":
            byte = first // 2 + tl.arange(0, BLOCK_K // 2)
            there = real[:, None] & (byte < COLUMNS // 2)[None, :]
            packed = tl.load(matrix[:, None] + byte[None, :], mask=there, other=0)
            group = first // FP4_GROUP + tl.arange(0, BLOCK_K // FP4_GROUP)
            there = real[:, None] & (group < COLUMNS // FP4_GROUP)[None, :]
            exponents = tl.load(scales[:, None] + group[None, :], mask=there, other=0)
            b = tl.trans(widen_e2m1(packed, exponents, FP4_GROUP, dtype))
        elif FORMAT == "fp8":
            bits = tl.load(matrix[:, None] + k[None, :], mask=real[:, None] & inside, other=0)
            cells = scales + first // FP8_BLOCK * scale.stride_column
            factor = tl.load(cells, mask=real, other=0.0)
            b = tl.trans((widen(bits, tl.float32, HARDWARE=False) * factor[:, None]).to(dtype))
        else:
            # Loaded as it is multiplied: a transposed load would not be copied ahead.
            cells = matrix[None, :] + k[:, None] * weight.stride_column
            b = tl.load(cells, mask=(k < COLUMNS)[:, None] & real[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if bias is not None:
        cells = bias.data + expert * bias.stride_matrix
        cells += half * bias.stride_part + row * bias.stride_row
        acc += tl.load(cells, mask=real, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(acc.reshape(BLOCK_M, BLOCK_N // 2, 2))
        acc = gated_values(gate, up, limit, alpha, up_offset, GELU)
        n = part * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        cells = out + sorted_row[:, None] * ROWS + n[None, :]
    else:
        cells = out + unsorted_row.to(tl.int64)[:, None] * ROWS + n[None, :]
    tl.store(cells, acc.to(out.dtype.element_ty), mask=live[:, None] & (n < ROWS)[None, :])
