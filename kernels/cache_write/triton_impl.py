"""Write rows of keys and values to their slots.

One program moves or quantizes some heads of one row; a row with slot -1 moves nothing.

Layout: k, v [num_rows, num_kv_heads, head_dim] -> pages [num_pages, block_size, num_kv_heads,
head_dim] of any strides, slot = page * block_size + row; row scales [num_pages, block_size,
num_kv_heads] of any strides. Bound by memory: each row is read once and written once.

What e4m3 pages get is what ``common.e4m3`` says, bit for bit (but for the sign of a NaN): the
division is IEEE's, and the rounding to e4m3 is integer arithmetic, which is exact also where there
is no such instruction (sm_80) and in Triton's interpreter, whose own cast is not.

Source: ``common.e4m3``; PagedAttention (arXiv 2309.06180) 4.3.
"""

import torch
import triton
import triton.language as tl

from ..common import strided
from ..common.checks import expect_head_dim, scale_kind
from ..common.launching import Launch, run
from ..common.tile_shapes import next_power_of_2
from ..common.tiles import rounded_to_e4m3, row_scales

# Elements of K that one program holds; V the same.
ELEMENTS_PER_PROGRAM = 2048


@triton.jit
def _write_kv_kernel(
    k, v, k_pages, v_pages, slot_mapping, num_kv_heads,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    if slot < 0:
        return
    page = slot // BLOCK_SIZE
    page_row = slot % BLOCK_SIZE
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM)[None, :]
    live = (head < num_kv_heads)[:, None]
    head = head[:, None]
    k_cells = k.data + row * k.stride_token + head * k.stride_head + dim
    v_cells = v.data + row * v.stride_token + head * v.stride_head + dim
    k_row = tl.load(k_cells, mask=live, other=0.0)
    v_row = tl.load(v_cells, mask=live, other=0.0)
    k_slot = k_pages.data + page * k_pages.stride_page + page_row * k_pages.stride_row
    v_slot = v_pages.data + page * v_pages.stride_page + page_row * v_pages.stride_row
    tl.store(k_slot + head * k_pages.stride_head + dim, k_row, mask=live)
    tl.store(v_slot + head * v_pages.stride_head + dim, v_row, mask=live)


@triton.jit
def _write_rows(rows, scale, cells, scale_cells, live, SCALES: tl.constexpr):
    """Quantize and store rows [HEADS, HEAD_DIM], and scales of their own.

    SCALES: as in ``attention.arguments.TileConfig``.
    """
    rows = rows.to(tl.float32)
    if SCALES == "rows":
        scales = row_scales(rows)
        tl.store(scale_cells, scales, mask=live)
        divisor = scales[:, None] + tl.zeros_like(rows)
    elif SCALES == "tensor":
        divisor = tl.full(rows.shape, 0.0, tl.float32) + tl.load(scale)
    else:
        divisor = tl.full(rows.shape, 0.0, tl.float32) + scale
    _, values = rounded_to_e4m3(tl.math.div_rn(rows, divisor))
    tl.store(cells, values.to(tl.uint8), mask=live[:, None])


@triton.jit
def _write_kv_e4m3_kernel(
    k, v, k_pages, v_pages, k_scale, v_scale, slot_mapping, num_kv_heads,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    if slot < 0:
        return
    page = slot // BLOCK_SIZE
    page_row = slot % BLOCK_SIZE
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
    heads = head[:, None]
    dim = tl.arange(0, HEAD_DIM)[None, :]
    live = head < num_kv_heads
    k_rows = k.data + row * k.stride_token + heads * k.stride_head + dim
    v_rows = v.data + row * v.stride_token + heads * v.stride_head + dim
    k_row = tl.load(k_rows, mask=live[:, None], other=0.0)
    v_row = tl.load(v_rows, mask=live[:, None], other=0.0)
    k_cells = k_pages.data + page * k_pages.stride_page + page_row * k_pages.stride_row
    v_cells = v_pages.data + page * v_pages.stride_page + page_row * v_pages.stride_row
    k_scale_cells = None
    v_scale_cells = None
    if SCALES == "rows":
        k_scale_cells = k_scale.data + page * k_scale.stride_page + page_row * k_scale.stride_row
        k_scale_cells += head * k_scale.stride_head
        v_scale_cells = v_scale.data + page * v_scale.stride_page + page_row * v_scale.stride_row
        v_scale_cells += head * v_scale.stride_head
    k_cells = k_cells + heads * k_pages.stride_head + dim
    v_cells = v_cells + heads * v_pages.stride_head + dim
    _write_rows(k_row, k_scale, k_cells, k_scale_cells, live, SCALES)
    _write_rows(v_row, v_scale, v_cells, v_scale_cells, live, SCALES)


def block_heads(num_kv_heads: int, head_dim: int) -> int:
    """Heads that one program moves: a power of two."""
    return min(next_power_of_2(num_kv_heads), max(1, ELEMENTS_PER_PROGRAM // head_dim))


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
) -> None:
    """Launch the write of checked arguments, shaped as in ``quire.kernels.write_kv``."""
    expect_head_dim("k_pages", k_pages.shape[3])
    if k_scale is None or v_scale is None:
        launch = prepare(k, v, k_pages, v_pages, slot_mapping)
    else:
        launch = prepare_e4m3(k, v, k_pages, v_pages, slot_mapping, k_scale, v_scale)
    run([launch], k)


def prepare(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> Launch:
    """The launch that writes checked arguments; shapes as in ``quire.kernels.write_kv``."""
    num_rows, num_kv_heads, head_dim = k.shape
    heads = block_heads(num_kv_heads, head_dim)
    return Launch(
        _write_kv_kernel,
        (num_rows, triton.cdiv(num_kv_heads, heads)),
        {
            "k": strided.rows(k),
            "v": strided.rows(v),
            "k_pages": strided.pages(k_pages),
            "v_pages": strided.pages(v_pages),
            "slot_mapping": slot_mapping,
            "num_kv_heads": num_kv_heads,
            "BLOCK_SIZE": k_pages.shape[1],
            "HEAD_DIM": head_dim,
            "BLOCK_HEADS": heads,
            "num_warps": 4,
        },
    )


def prepare_e4m3(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
) -> Launch:
    """The launch that writes checked arguments; shapes as in ``quire.kernels.write_kv``."""
    plain = prepare(k, v, k_pages.view(torch.uint8), v_pages.view(torch.uint8), slot_mapping)
    kind = scale_kind(k_scale)
    arguments = plain.arguments | {"SCALES": kind}
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if kind == "number":
            scale = float(scale)
        arguments[name] = strided.pages(scale) if kind == "rows" else scale
    return Launch(_write_kv_e4m3_kernel, plain.grid, arguments)
