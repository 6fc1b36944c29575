"""Pages of a pool: rows of keys and values written to their slots, and whole pages copied.

A program of ``write_kv`` writes some heads of one row; e4m3 pages get the bits of ``common.e4m3``,
except for the sign of a NaN. Copies divide pages into pieces of BLOCK words of 4 bytes, which the
programs of one launch take in turn: few, so that the other multiprocessors stay free for the model.

Source: PagedAttention (arXiv 2309.06180) 4.3; vLLM 0.33 ``v1/kv_offload`` and SGLang ``sgl-kernel``
    transfers for copies by a kernel and by copy engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import checks, e4m3, launching, strided
from .common.bits import INF_BITS, rounded_to_e4m3
from .common.checks import MODEL_DTYPES, expect_apart, expect_ids, expect_int, expect_tensor
from .common.tile_shapes import next_power_of_2

LARGEST = tl.constexpr(e4m3.E4M3_MAX)
LEAST_SCALE = tl.constexpr(e4m3.MIN_SCALE)
MAX_BITS = tl.constexpr(0x7F7FFFFF)  # of the largest finite fp32 number
# Elements of K that one program writes; V the same.
ELEMENTS_PER_PROGRAM = 2048
# Words of a piece of a page: each of 128 threads has four loads of 16 bytes under way.
BLOCK = 2048
# Largest numbers of programs that copy pages. A link of 64 GB/s with a latency of 2 us has 128 KiB
# under way, and a program has 8 KiB; device memory has some MiB under way.
HOST_PROGRAMS = 32
DEVICE_PROGRAMS = 1024
WORD_BYTES = 4
ALIGNMENT = tl.constexpr(16)  # bytes; required of addresses, strides and sizes of rows


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    impl: str | None = None,
) -> None:
    """Write rows of keys and values to their slots in the pages, quantized in e4m3 pages.

    Args:
        k, v: [num_rows, num_kv_heads, head_dim] bf16, fp16 or fp32, last stride 1.
        k_pages, v_pages: [num_pages, block_size, num_kv_heads, head_dim] same dtype or
            torch.float8_e4m3fn, any strides with last stride 1 (two views of one pool, head-major
            pages). No two of the slots written may share memory.
        slot_mapping: [num_rows] int64, page * block_size + row; -1 = do not write this row.
        k_scale, v_scale: scales of e4m3 pages, both of one kind; None with other pages. Read: a
            number in 2**-30 .. 2**30, or fp32 [] or [1], of all rows. Written: fp32 [num_pages,
            block_size, num_kv_heads], any strides, one of each row.
        impl: see ``quire.kernels``, also for errors.

    Raises:
        NotImplementedError: with Triton, head_dim is not a power of two in 16..512.

    Source: PagedAttention (arXiv 2309.06180) 4.3.
    """
    chosen = checks.accept(
        impl, _check_write, k, v, k_pages, v_pages, slot_mapping, k_scale, v_scale
    )
    if chosen == "torch" or checks.is_readable(k):
        places = checks.once_a_step(_places, slot_mapping, *k_pages.shape[:2])
    if chosen == "torch":
        return _write_torch(k, v, k_pages, v_pages, places, k_scale, v_scale)
    num_rows, num_kv_heads, head_dim = k.shape
    checks.expect_head_dim("k_pages", head_dim)
    block = min(next_power_of_2(num_kv_heads), max(1, ELEMENTS_PER_PROGRAM // head_dim))
    kind = checks.scale_kind(k_scale)
    if kind != "none":  # as bytes: not every architecture has the type
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    if kind == "rows":
        k_scale, v_scale = strided.pages(k_scale), strided.pages(v_scale)
    elif kind == "number":
        k_scale, v_scale = float(k_scale), float(v_scale)
    with torch.cuda.device_of(k):
        launching.launch(
            _write_kv_kernel, (num_rows, triton.cdiv(num_kv_heads, block)),
            k=strided.rows(k), v=strided.rows(v), k_pages=strided.pages(k_pages),
            v_pages=strided.pages(v_pages), k_scale=k_scale, v_scale=v_scale,
            slot_mapping=slot_mapping, num_kv_heads=num_kv_heads, BLOCK_SIZE=k_pages.shape[1],
            HEAD_DIM=head_dim, BLOCK_HEADS=block, SCALES=kind, num_warps=4,
        )  # fmt: skip
    return None


def _check_write(k, v, k_pages, v_pages, slot_mapping, k_scale, v_scale) -> None:
    expect_tensor("k", k, (None, None, None), MODEL_DTYPES)
    expect_tensor("v", v, tuple(k.shape), k.dtype, device=k.device)
    checks.check_pages(k_pages, v_pages, k.dtype, k.device)
    checks.check_scales(k_scale, v_scale, k_pages)
    if k.shape[1:] != k_pages.shape[2:]:
        raise ValueError(
            f"k: expected [*, {k_pages.shape[2]}, {k_pages.shape[3]}], got {list(k.shape)}"
        )
    expect_tensor("slot_mapping", slot_mapping, k.shape[:1], torch.int64, device=k.device)


def _places(
    slot_mapping: torch.Tensor, num_pages: int, block_size: int
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """(rows to write, None for all; the page of each, its row there), checked."""
    written = torch.nonzero(slot_mapping >= 0)[:, 0]
    slots = slot_mapping[written]
    expect_ids("slot_mapping", slots, num_pages * block_size)
    is_all = len(slots) == len(slot_mapping)
    return None if is_all else written, slots // block_size, slots % block_size


@torch.no_grad()
def _write_torch(k, v, k_pages, v_pages, places, k_scale, v_scale) -> None:
    written, page, row = places
    if written is not None:
        k, v = k[written], v[written]
    for new, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        if scale is None:
            pages[page, row] = new
            continue
        of_rows = checks.scale_kind(scale) == "rows"
        values, scales = e4m3.quantize(new, None if of_rows else scale)
        # Torch does not index e4m3 tensors everywhere; their bytes it does.
        pages.view(torch.uint8)[page, row] = values.view(torch.uint8)
        if of_rows:
            scale[page, row] = scales


@triton.jit
def _row_scales(rows):
    """Scales [ROWS] of rows [ROWS, DIM] fp32, as in ``e4m3.quantize``."""
    # Bits of positive floats are ordered as the floats are, and those of a NaN come last.
    largest = tl.max(rows.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    largest = tl.where(largest == INF_BITS, MAX_BITS, largest).to(tl.float32, bitcast=True)
    scales = tl.math.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    return tl.where(scales < LEAST_SCALE, LEAST_SCALE, scales)


@triton.jit
def _write_rows(rows, pages, scale, page, row, head, live, SCALES: tl.constexpr):
    """Store the heads [HEADS, HEAD_DIM] of one row, and scales of their own.

    SCALES: "none", "number", "tensor" (of one number) or "rows".
    """
    dim = tl.arange(0, rows.shape[1])[None, :]
    cells = pages.data + page * pages.stride_page + row * pages.stride_row
    cells += head[:, None] * pages.stride_head + dim
    if SCALES != "none":
        rows = rows.to(tl.float32)
        divisor = scale
        if SCALES == "rows":
            scales = _row_scales(rows)
            of_row = scale.data + page * scale.stride_page + row * scale.stride_row
            tl.store(of_row + head * scale.stride_head, scales, mask=live)
            divisor = scales[:, None]
        elif SCALES == "tensor":
            divisor = tl.load(scale)
        # div_rn takes operands of one shape.
        _, values = rounded_to_e4m3(tl.math.div_rn(rows, tl.zeros_like(rows) + divisor))
        rows = values.to(tl.uint8)
    tl.store(cells, rows, mask=live[:, None])


@triton.jit
def _write_kv_kernel(
    k, v, k_pages, v_pages, k_scale, v_scale, slot_mapping, num_kv_heads,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    page, row = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM)[None, :]
    live = head < num_kv_heads
    k_cells = k.data + token * k.stride_token + head[:, None] * k.stride_head + dim
    v_cells = v.data + token * v.stride_token + head[:, None] * v.stride_head + dim
    k_rows = tl.load(k_cells, mask=live[:, None], other=0.0)
    v_rows = tl.load(v_cells, mask=live[:, None], other=0.0)
    _write_rows(k_rows, k_pages, k_scale, page, row, head, live, SCALES)
    _write_rows(v_rows, v_pages, v_scale, page, row, head, live, SCALES)


@dataclass(frozen=True, eq=False)
class PoolPages:
    """Page tensors of one shape: page p is row p of each tensor. Make it once for a pool.

    Args:
        tensors: [num_pages, page_bytes] uint8 each, on one device, with equal strides, the last one
            1; may be views of one memory. Addresses, page_bytes and the page stride are multiples
            of 16.

    Attributes:
        addresses: [num_tensors] int64, addresses of the tensors, on their device.
    """

    tensors: Sequence[Tensor]
    addresses: Tensor = field(init=False)

    def __post_init__(self) -> None:
        tensors = self.tensors
        if not isinstance(tensors, (list, tuple)) or not tensors:
            raise ValueError(f"tensors: expected at least one tensor in a list, got {tensors!r}")
        first = tensors[0]
        for i, tensor in enumerate(tensors):
            name = f"tensors[{i}]"
            device = first.device if i else None
            expect_tensor(name, tensor, (None, None), torch.uint8, device=device)
            expect_int(f"{name}: page_bytes", tensor.shape[1], 1)
            expect_apart(name, tensor)
            _expect_alignment(name, tensor)
            if tensor.shape != first.shape or tensor.stride() != first.stride():
                raise ValueError(
                    f"{name}: expected {list(first.shape)} with strides {first.stride()} as "
                    f"tensors[0], got {list(tensor.shape)} with strides {tensor.stride()}"
                )
        found = [tensor.data_ptr() for tensor in tensors]
        addresses = torch.tensor(found, dtype=torch.int64, device=first.device)
        object.__setattr__(self, "tensors", tuple(tensors))
        object.__setattr__(self, "addresses", addresses)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.tensors[0].device

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.tensors[0].shape[0]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in one tensor."""
        return self.tensors[0].shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of a page in all tensors: a row of a buffer."""
        return len(self.tensors) * self.page_bytes


def gather_pages(
    pages: PoolPages,
    page_ids: torch.Tensor,
    buffer: torch.Tensor,
    rows: torch.Tensor,
    *,
    impl: str | None = None,
) -> None:
    """Copy pages of a pool to rows of a buffer, each one page of all tensors, one after the other.

    Args:
        pages: page tensors.
        page_ids: [num_copies] int64 in [0, pages.num_pages).
        buffer: [num_rows, pages.num_bytes] uint8; last stride 1, address and row stride multiples
            of 16; on the device of the pages, or in pinned host memory.
        rows: [num_copies] int64 in [0, num_rows), distinct.
        impl: "triton" is one launch; ids are on the device of the pages. "torch" is one copy per
            page and tensor, on a GPU by its copy engines; the host waits only for ids on the GPU.

    Source: vLLM 0.33 ``v1/kv_offload`` and SGLang ``sgl-kernel`` transfers for the two ways.
    """
    _copy(pages, page_ids, buffer, rows, impl, gather=True)


def scatter_pages(
    pages: PoolPages,
    page_ids: torch.Tensor,
    buffer: torch.Tensor,
    rows: torch.Tensor,
    *,
    impl: str | None = None,
) -> None:
    """Copy rows of a buffer to pages of a pool: the reverse of ``gather_pages``.

    The arguments are those of ``gather_pages``, but ``page_ids`` are distinct; ``rows`` may not be.
    """
    _copy(pages, page_ids, buffer, rows, impl, gather=False)


def _copy(pages, page_ids, buffer, rows, impl, *, gather: bool) -> None:
    if not isinstance(pages, PoolPages):
        raise ValueError(f"pages: expected PoolPages, got {type(pages).__name__}")
    chosen = checks.implementation(impl, pages.addresses)
    expect_tensor("buffer", buffer, (None, pages.num_bytes), torch.uint8)
    _expect_alignment("buffer", buffer)
    if gather:
        expect_apart("buffer", buffer)
    if buffer.device != pages.device and not (buffer.is_cpu and buffer.is_pinned()):
        raise ValueError(
            f"buffer: expected a tensor on {pages.device} or in pinned host memory, got one on "
            f"{buffer.device}"
        )
    device = pages.device if chosen == "triton" else None
    expect_tensor("page_ids", page_ids, (None,), torch.int64, device=device)
    expect_tensor("rows", rows, page_ids.shape, torch.int64, device=device)
    if chosen == "torch" or checks.is_readable(page_ids):
        expect_ids("page_ids", page_ids, pages.num_pages)
        expect_ids("rows", rows, len(buffer))
    if chosen == "torch":
        return _copy_torch(pages, page_ids, buffer, rows, gather)
    num_tensors, words = len(pages.tensors), pages.page_bytes // WORD_BYTES
    block = min(BLOCK, next_power_of_2(words))
    num_pieces = page_ids.shape[0] * num_tensors * triton.cdiv(words, block)
    most = DEVICE_PROGRAMS if buffer.device == pages.device else HOST_PROGRAMS
    with torch.cuda.device_of(pages.addresses):
        launching.launch(
            _copy_pages_kernel, (min(num_pieces, most),),
            addresses=pages.addresses, page_ids=page_ids, buffer=buffer, rows=rows,
            num_pieces=num_pieces, NUM_TENSORS=num_tensors, WORDS=words,
            PAGE_STRIDE=pages.tensors[0].stride(0) // WORD_BYTES,
            ROW_STRIDE=buffer.stride(0) // WORD_BYTES, GATHER=gather, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return None


def _expect_alignment(name: str, tensor: Tensor) -> None:
    for what, number in (
        ("rows whose size", tensor.shape[1]),
        ("rows whose stride", tensor.stride(0)),
        ("an address that", tensor.data_ptr()),
    ):
        if number % ALIGNMENT.value:
            raise ValueError(f"{name}: expected {what} is a multiple of 16 bytes, got {number}")


@torch.no_grad()
def _copy_torch(pages, page_ids, buffer, rows, gather: bool) -> None:
    """One copy per page and tensor: a memcpy on a CPU (``index_copy_`` would move single bytes), a
    copy engine's between a GPU and pinned memory."""
    places = list(zip(page_ids.tolist(), rows.tolist(), strict=True))
    for tensor, cells in zip(pages.tensors, buffer.split(pages.page_bytes, 1), strict=True):
        for page, row in places:
            source, target = tensor[page], cells[row]
            if not gather:
                source, target = target, source
            target.copy_(source, non_blocking=True)


@triton.jit(do_not_specialize=["num_pieces"])
def _copy_pages_kernel(
    addresses, page_ids, buffer, rows, num_pieces,
    NUM_TENSORS: tl.constexpr, WORDS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    GATHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PIECES: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK  # per page and tensor
    cells = tl.multiple_of(buffer.to(tl.pointer_type(tl.int32)), ALIGNMENT)
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        tensor = piece // PIECES % NUM_TENSORS
        copy = piece // PIECES // NUM_TENSORS
        word = piece % PIECES * BLOCK + tl.arange(0, BLOCK)
        page, row = tl.load(page_ids + copy), tl.load(rows + copy)
        base = tl.load(addresses + tensor).to(tl.pointer_type(tl.int32))
        of_page = tl.multiple_of(base, ALIGNMENT) + page * PAGE_STRIDE + word
        of_row = cells + row * ROW_STRIDE + (tensor * WORDS + word)
        if GATHER:
            values = tl.load(of_page, mask=word < WORDS, other=0)
            tl.store(of_row, values, mask=word < WORDS)
        else:
            values = tl.load(of_row, mask=word < WORDS, other=0)
            tl.store(of_page, values, mask=word < WORDS)
