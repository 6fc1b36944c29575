"""``gather_pages`` and ``scatter_pages`` in one launch over all tensors of a pool.

Layout: tensors [num_pages, page_bytes], buffer [num_rows, num_tensors * page_bytes], uint8; tensors
are given by a list of their addresses [num_parts, num_tensors], where an id names a page and a part
of it. A page of one tensor is pieces of BLOCK words of 4 bytes. A
few programs take the pieces in turn: to and from host memory the link is the bound, which few are
enough for, and the other multiprocessors stay with whoever computes meanwhile.

A pool with ``e4m3_rows`` is converted on the way: pieces are rows, and what the buffer has is what
``common.e4m3`` says, bit for bit (but for the sign of a NaN).

Source: as of ``gather_pages``; ``common.e4m3``.
"""

import torch
import triton
import triton.language as tl

from ..common.arch import Arch
from ..common.checks import expect_tensor
from ..common.launching import Launch, arch_and_sms, run
from ..common.strided import rows_at_16_bytes
from ..common.tile_shapes import next_power_of_2
from ..common.tiles import rounded_to_e4m3, row_scales, widen_e4m3
from .pool_pages import ALIGNMENT, FASTEST, SCALE_BYTES, E4m3Rows, PoolPages

# Words of a piece: of each of 128 threads four loads of 16 bytes are under way.
BLOCK = 2048
# Elements of rows that are converted at once: on the link they are 4 KiB.
ELEMENTS = 4096
# Programs, at most. A link of 64 GB/s over which an answer takes 2 us has 128 KiB under way, and a
# program has 8; device memory has some MiB.
HOST_PROGRAMS = 32
DEVICE_PROGRAMS = 1024
TRITON_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


@triton.jit(do_not_specialize=["num_pieces"])
def _copy_pages_kernel(
    addresses,
    page_ids,
    buffer,
    rows,
    num_pieces,
    NUM_PARTS: tl.constexpr,
    NUM_TENSORS: tl.constexpr,
    WORDS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Of a page of one tensor.
    PIECES: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    cells = tl.multiple_of(buffer.to(tl.pointer_type(tl.int32)), ALIGN)
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        tensor = piece // PIECES % NUM_TENSORS
        copy = tl.cast(piece // PIECES // NUM_TENSORS, tl.int64)
        word = piece % PIECES * BLOCK + tl.arange(0, BLOCK)
        page_id = tl.load(page_ids + copy)
        page, part = page_id // NUM_PARTS, page_id % NUM_PARTS
        row = copy
        if rows is not None:
            row = tl.load(rows + copy)
        base = tl.load(addresses + part * NUM_TENSORS + tensor).to(tl.pointer_type(tl.int32))
        of_page = tl.multiple_of(base, ALIGN) + page * PAGE_STRIDE + word
        of_row = cells + row * ROW_STRIDE + (tensor * WORDS + word)
        if GATHER:
            values = tl.load(of_page, mask=word < WORDS, other=0)
            tl.store(of_row, values, mask=word < WORDS)
        else:
            values = tl.load(of_row, mask=word < WORDS, other=0)
            tl.store(of_page, values, mask=word < WORDS)


@triton.jit(do_not_specialize=["num_pieces"])
def _convert_pages_kernel(
    addresses,
    page_ids,
    buffer,
    rows,
    num_pieces,
    NUM_PARTS: tl.constexpr,
    NUM_TENSORS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    ROW_DIM: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    GATHER: tl.constexpr,
    DTYPE: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Of a page of one tensor, and what a row of the buffer has of it.
    PIECES: tl.constexpr = (NUM_ROWS + BLOCK - 1) // BLOCK
    KEPT: tl.constexpr = NUM_ROWS * (ROW_DIM + 4)
    dim = tl.arange(0, ROW_DIM)[None, :]
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        tensor = piece // PIECES % NUM_TENSORS
        copy = tl.cast(piece // PIECES // NUM_TENSORS, tl.int64)
        of_page = piece % PIECES * BLOCK + tl.arange(0, BLOCK)
        live = of_page < NUM_ROWS
        cell = of_page[:, None] * ROW_DIM + dim  # [BLOCK, ROW_DIM]
        page_id = tl.load(page_ids + copy)
        page, part = page_id // NUM_PARTS, page_id % NUM_PARTS
        row = copy
        if rows is not None:
            row = tl.load(rows + copy)
        base = tl.load(addresses + part * NUM_TENSORS + tensor).to(tl.pointer_type(DTYPE))
        elements = tl.multiple_of(base, ALIGN) + page * PAGE_STRIDE + cell
        kept = tl.multiple_of(buffer, ALIGN) + row * ROW_STRIDE + tensor * KEPT
        values = kept + cell
        scales = (kept + NUM_ROWS * ROW_DIM).to(tl.pointer_type(tl.float32)) + of_page
        if GATHER:
            x = tl.load(elements, mask=live[:, None], other=0.0).to(tl.float32)
            scale = row_scales(x)
            divisor = scale[:, None] + tl.zeros_like(x)
            _, byte = rounded_to_e4m3(tl.math.div_rn(x, divisor))
            tl.store(values, byte.to(tl.uint8), mask=live[:, None])
            tl.store(scales, scale, mask=live)
        else:
            x = tl.load(values, mask=live[:, None], other=0)
            scale = tl.load(scales, mask=live, other=0.0)
            x = widen_e4m3(x, tl.float32, HARDWARE_E4M3) * scale[:, None]
            tl.store(elements, x.to(DTYPE), mask=live[:, None])


def copy(
    pages: PoolPages,
    page_ids: torch.Tensor,
    buffer: torch.Tensor,
    rows: torch.Tensor | None,
    written: str,
) -> None:
    """Launch the copies of the checked arguments of ``call.check_copy``."""
    for name, ids in (("page_ids", page_ids), ("rows", rows)):
        if ids is not None:
            expect_tensor(name, ids, (None,), torch.int64, device=pages.device)
    aligned = pages.is_aligned and pages.kept_bytes % FASTEST == 0
    aligned = aligned and rows_at_16_bytes(buffer)
    sizes = pages.num_parts, pages.num_tensors, pages.tensors[0].stride(0)
    gather = written == "buffer"
    if pages.e4m3_rows is None:
        launch = prepare(
            pages.addresses, page_ids, buffer, rows, *sizes, gather=gather, aligned=aligned
        )
    else:
        launch = prepare_e4m3(
            pages.addresses,
            page_ids,
            buffer,
            rows,
            *sizes,
            gather=gather,
            aligned=aligned,
            form=pages.e4m3_rows,
            arch=arch_and_sms(pages.addresses)[0],
        )
    run([launch], pages.addresses)


def prepare(
    addresses: torch.Tensor,
    page_ids: torch.Tensor,
    buffer: torch.Tensor,
    rows: torch.Tensor | None,
    num_parts: int,
    num_tensors: int,
    page_stride: int,
    *,
    gather: bool,
    aligned: bool,
) -> Launch:
    """The launch of checked arguments.

    Args:
        addresses: of `PoolPages`.
        page_ids, buffer, rows: as of ``quire.kernels.gather_pages``.
        num_parts, num_tensors: of the pool.
        page_stride: bytes from one page to the next.
        gather: from pages to the buffer; else the reverse.
        aligned: whether all rows begin and end at multiples of 16 bytes.
    """
    words = buffer.shape[1] // num_tensors // ALIGNMENT
    block = min(BLOCK, next_power_of_2(words))
    num_pieces = page_ids.shape[0] * num_tensors * triton.cdiv(words, block)
    return Launch(
        _copy_pages_kernel,
        _grid(addresses, buffer, num_pieces),
        {
            "addresses": addresses,
            "page_ids": page_ids,
            "buffer": buffer,
            "rows": rows,
            "num_pieces": num_pieces,
            "NUM_PARTS": num_parts,
            "NUM_TENSORS": num_tensors,
            "WORDS": words,
            "PAGE_STRIDE": page_stride // ALIGNMENT,
            "ROW_STRIDE": buffer.stride(0) // ALIGNMENT,
            "ALIGN": FASTEST if aligned else ALIGNMENT,
            "GATHER": gather,
            "BLOCK": block,
            "num_warps": 4,
        },
    )


def prepare_e4m3(
    addresses: torch.Tensor,
    page_ids: torch.Tensor,
    buffer: torch.Tensor,
    rows: torch.Tensor | None,
    num_parts: int,
    num_tensors: int,
    page_stride: int,
    *,
    gather: bool,
    aligned: bool,
    form: E4m3Rows,
    arch: Arch,
) -> Launch:
    """The launch of checked arguments of a pool with ``e4m3_rows``.

    Args:
        form: these rows.
        arch: of the device.
        others: as of `prepare`.
    """
    num_rows = buffer.shape[1] // num_tensors // (form.row_dim + SCALE_BYTES)
    block = min(ELEMENTS // form.row_dim, next_power_of_2(num_rows))
    num_pieces = page_ids.shape[0] * num_tensors * triton.cdiv(num_rows, block)
    return Launch(
        _convert_pages_kernel,
        _grid(addresses, buffer, num_pieces),
        {
            "addresses": addresses,
            "page_ids": page_ids,
            "buffer": buffer,
            "rows": rows,
            "num_pieces": num_pieces,
            "NUM_PARTS": num_parts,
            "NUM_TENSORS": num_tensors,
            "NUM_ROWS": num_rows,
            "ROW_DIM": form.row_dim,
            "PAGE_STRIDE": page_stride // form.dtype.itemsize,
            "ROW_STRIDE": buffer.stride(0),
            "ALIGN": FASTEST if aligned else ALIGNMENT,
            "GATHER": gather,
            "DTYPE": TRITON_DTYPES[form.dtype],
            "HARDWARE_E4M3": not gather and arch.widens_e4m3,
            "BLOCK": block,
            "num_warps": 4,
        },
    )


def _grid(addresses: torch.Tensor, buffer: torch.Tensor, num_pieces: int) -> tuple[int]:
    """Programs that take so many pieces in turn."""
    over_link = buffer.is_cpu and not addresses.is_cpu
    return (min(num_pieces, HOST_PROGRAMS if over_link else DEVICE_PROGRAMS),)
