"""``gather_pages`` and ``scatter_pages`` in one launch over all tensors of a pool.

Layout: tensors [num_pages, page_bytes], buffer [num_rows, num_tensors * page_bytes], uint8. A page
of one tensor is divided into pieces of BLOCK words of 4 bytes. The programs take the pieces in
turn. Few programs saturate the link to host memory; the other multiprocessors stay free for the
model.

Source: see ``quire.kernels.gather_pages``.
"""

import torch
import triton
import triton.language as tl

from ..common.checks import expect_tensor
from ..common.launching import Launch, run
from ..common.strided import rows_at_16_bytes
from ..common.tile_shapes import next_power_of_2
from .call import ALIGNMENT, FASTEST, PoolPages

# Words of a piece: each of 128 threads has four loads of 16 bytes under way.
BLOCK = 2048
# Largest numbers of programs. A link of 64 GB/s with a latency of 2 us has 128 KiB under way, and a
# program has 8 KiB; device memory has some MiB under way.
HOST_PROGRAMS = 32
DEVICE_PROGRAMS = 1024


@triton.jit(do_not_specialize=["num_pieces"])
def _copy_pages_kernel(
    addresses,
    page_ids,
    buffer,
    rows,
    num_pieces,
    NUM_TENSORS: tl.constexpr,
    WORDS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    ALIGN: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    PIECES: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK  # per page and tensor
    cells = tl.multiple_of(buffer.to(tl.pointer_type(tl.int32)), ALIGN)
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        tensor = piece // PIECES % NUM_TENSORS
        copy = tl.cast(piece // PIECES // NUM_TENSORS, tl.int64)
        word = piece % PIECES * BLOCK + tl.arange(0, BLOCK)
        page = tl.load(page_ids + copy)
        row = copy
        if rows is not None:
            row = tl.load(rows + copy)
        base = tl.load(addresses + tensor).to(tl.pointer_type(tl.int32))
        of_page = tl.multiple_of(base, ALIGN) + page * PAGE_STRIDE + word
        of_row = cells + row * ROW_STRIDE + (tensor * WORDS + word)
        if GATHER:
            values = tl.load(of_page, mask=word < WORDS, other=0)
            tl.store(of_row, values, mask=word < WORDS)
        else:
            values = tl.load(of_row, mask=word < WORDS, other=0)
            tl.store(of_page, values, mask=word < WORDS)


def copy(
    pages: PoolPages,
    page_ids: torch.Tensor,
    buffer: torch.Tensor,
    rows: torch.Tensor | None,
    gather: bool,
) -> None:
    """Launch the copies; arguments as in ``call.check_copy``, which checked them."""
    for name, ids in (("page_ids", page_ids), ("rows", rows)):
        if ids is not None:
            expect_tensor(name, ids, (None,), torch.int64, device=pages.device)
    num_tensors, words = len(pages.tensors), pages.page_bytes // ALIGNMENT
    block = min(BLOCK, next_power_of_2(words))
    num_pieces = page_ids.shape[0] * num_tensors * triton.cdiv(words, block)
    most = DEVICE_PROGRAMS if buffer.device == pages.device else HOST_PROGRAMS
    aligned = pages.is_aligned and rows_at_16_bytes(buffer)
    launch = Launch(
        _copy_pages_kernel,
        (min(num_pieces, most),),
        {
            "addresses": pages.addresses,
            "page_ids": page_ids,
            "buffer": buffer,
            "rows": rows,
            "num_pieces": num_pieces,
            "NUM_TENSORS": num_tensors,
            "WORDS": words,
            "PAGE_STRIDE": pages.tensors[0].stride(0) // ALIGNMENT,
            "ROW_STRIDE": buffer.stride(0) // ALIGNMENT,
            "ALIGN": FASTEST if aligned else ALIGNMENT,
            "GATHER": gather,
            "BLOCK": block,
            "num_warps": 4,
        },
    )
    run([launch], pages.addresses)
