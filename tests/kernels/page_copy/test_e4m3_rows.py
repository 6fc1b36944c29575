"""gather_pages and scatter_pages of a pool with `E4m3Rows`, both implementations, against the oracle: every byte, the error that
``common.e4m3`` derives, and that what was rounded once is not rounded again."""

import math
import mmap
import sys
from dataclasses import replace

import pytest
import torch

from quire.kernels import E4m3Rows, PoolPages, gather_pages, scatter_pages
from quire.kernels.page_copy import reference, triton_impl
from tests.kernels.page_copy.test_page_copy import MAP_NORESERVE, bytes_, copied, whole
from tests.support.helpers import DEVICE

IMPLS = pytest.mark.parametrize("impl", ["triton", "torch"])
FUNCTIONS = pytest.mark.parametrize("function", [gather_pages, scatter_pages])
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "fp16", "fp32"])
CASES = {  # dtype, elements of a row, rows of a page, tensors, parts, bytes between pages and between rows of the buffer
    "bf16": (BF16, 128, 8, 2, 1, 0, 0),
    "fp16": (F16, 64, 8, 2, 1, 0, 0),
    "fp32": (F32, 32, 5, 3, 1, 0, 0),
    "longest": (BF16, 512, 3, 1, 1, 0, 0),
    "shortest-and-gaps": (BF16, 16, 3, 2, 1, 12, 4),
    "more-than-a-piece": (F16, 16, 260, 1, 1, 0, 0),
    "parts": (BF16, 32, 4, 6, 3, 0, 0),
    "one-row": (F32, 16, 1, 1, 1, 0, 0),
}
NUM_PAGES, NUM_ROWS = 6, 9


def special(dtype, dim):
    """Rows of numbers that are not like others, each with something beside them."""
    tiny, most = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    first = [0.0, math.inf, -math.inf, most, -most, math.nan, tiny, -smallest, 448.0, -0.0]
    rows = torch.linspace(-1, 1, len(first) * dim).view(len(first), dim)
    scale = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, tiny, 5 * smallest, 300.0, 0.0])
    rows *= scale[:, None]
    rows[:, 3] = torch.tensor(first)
    return rows.to(dtype)


def make_call(name="bf16", first_rows=False):
    """Arguments; pages hold rows of many sizes, the buffer what such pages become."""
    dtype, dim, num_rows, num_tensors, num_parts, page_gap, row_gap = CASES[name]
    generator = torch.Generator().manual_seed(3)
    form = E4m3Rows(dtype, dim)

    def some():
        x = torch.randn(NUM_PAGES, num_rows, dim, generator=generator)
        x = x * torch.randn(NUM_PAGES, num_rows, 1, generator=generator).mul(2).exp2()
        rows = x.to(dtype).view(-1, dim)
        odd = special(dtype, dim)[: len(rows)]
        rows[: len(odd)] = odd
        data = rows.view(torch.uint8).view(NUM_PAGES, -1)
        made = torch.full((NUM_PAGES, data.shape[1] + page_gap), 77, dtype=torch.uint8)
        made[:, : data.shape[1]] = data
        return made.to(DEVICE)[:, : data.shape[1]]

    pages = PoolPages([some() for _ in range(num_tensors)], num_parts, form)
    size, of_tensor = pages.num_bytes, num_rows * dim
    made = torch.full((NUM_ROWS, size + row_gap), 99, dtype=torch.uint8)
    for t in range(pages.num_tensors):
        at = t * pages.kept_bytes
        made[:, at : at + of_tensor] = torch.randint(
            256, (NUM_ROWS, of_tensor), generator=generator, dtype=torch.uint8
        )
        scales = torch.randn(NUM_ROWS, num_rows, generator=generator).exp2()
        made[:, at + of_tensor : at + pages.kept_bytes] = scales.view(torch.uint8)
    # NaN is read as 480 scales where no instruction widens e4m3; a row with a NaN has such a scale.
    made[(made & 0x7F) == 0x7F] = 0x7E
    num_copies = min(4, NUM_PAGES * num_parts)
    ids = torch.randperm(NUM_PAGES * num_parts, generator=generator)[:num_copies]
    rows = None if first_rows else torch.randperm(NUM_ROWS, generator=generator)[:num_copies]
    return {"pages": pages, "page_ids": ids.to(DEVICE), "buffer": made.to(DEVICE)[:, :size], "rows": None if rows is None else rows.to(DEVICE)}  # fmt: skip


def again(call):
    """As `copied`, with the rows."""
    made = copied(call)
    return made | {"pages": replace(made["pages"], e4m3_rows=call["pages"].e4m3_rows)}


def bits(call):
    """`whole`; each NaN as the same bits, whose sign nobody promises."""
    found = whole(call)
    form = call["pages"].e4m3_rows
    for i, tensor in enumerate(found[:-1]):
        size = call["pages"].page_bytes
        rows = tensor[:, :size].contiguous().view(form.dtype)
        rows[rows.isnan()] = math.nan
        found[i] = torch.cat([rows.view(torch.uint8), tensor[:, size:]], 1)
    pages, buffer = call["pages"], found[-1]
    for t in range(pages.num_tensors):
        at, end = t * pages.kept_bytes, (t + 1) * pages.kept_bytes
        values = pages.page_bytes // form.dtype.itemsize
        some = buffer[:, at : at + values]
        some[(some & 0x7F) == 0x7F] = 0x7F
        scales = buffer[:, at + values : end].contiguous().view(torch.float32)
        scales[scales.isnan()] = math.nan
        buffer[:, at + values : end] = scales.view(torch.uint8)
    return found


@IMPLS
@FUNCTIONS
@pytest.mark.parametrize("first_rows", [False, True], ids=["rows", "first-rows"])
@pytest.mark.parametrize("name", CASES)
def test_copy(impl, function, first_rows, name):
    call = make_call(name, first_rows)
    expected = again(call)
    getattr(reference, function.__name__)(**expected)
    function(**call, impl=impl)
    for got, want in zip(bits(call), bits(expected), strict=True):
        assert got.equal(want)


@FUNCTIONS
def test_few_programs_take_all_pieces(function, monkeypatch):
    monkeypatch.setattr(triton_impl, "DEVICE_PROGRAMS", 2)
    monkeypatch.setattr(triton_impl, "ELEMENTS", 64)
    call = make_call("fp16")
    expected = again(call)
    getattr(reference, function.__name__)(**expected)
    function(**call, impl="triton")
    assert all(a.equal(b) for a, b in zip(bits(call), bits(expected), strict=True))


def around(x, impl):
    """Rows [n, dim] once around a buffer, and what the buffer had."""
    pages = PoolPages([x.contiguous().view(torch.uint8).view(1, -1).clone()], 1, E4m3Rows(x.dtype, x.shape[1]))  # fmt: skip
    ids, buffer = torch.zeros(1, dtype=torch.int64, device=x.device), bytes_(1, pages.num_bytes).to(x.device)  # fmt: skip
    gather_pages(pages, ids, buffer, impl=impl)
    pages.tensors[0].zero_()
    scatter_pages(pages, ids, buffer, impl=impl)
    return pages.tensors[0].view(x.dtype).view(x.shape), buffer


def finite_rows(dtype, dim=32):
    """Rows of all sizes that a dtype has, mostly from -1 to 1."""
    generator = torch.Generator().manual_seed(8)
    low, high = math.log2(torch.finfo(dtype).tiny), math.log2(torch.finfo(dtype).max)
    size = torch.linspace(low - 6, high, 300, dtype=torch.float64).exp2()
    rows = (torch.rand(300, dim, generator=generator, dtype=torch.float64) * 2 - 1) * size[:, None]
    ends = torch.finfo(dtype).max
    return rows.clamp(-ends, ends).to(dtype).to(DEVICE)


@IMPLS
@DTYPES
def test_error(impl, dtype):
    """The bound of ``common.e4m3``, and the rounding to the dtype of the pages."""
    x = finite_rows(dtype)
    back, _ = around(x, impl)
    assert back.isfinite().all()
    exact, got = x.double(), back.double()
    scale = (exact.abs().amax(1, keepdim=True) / 448).clamp(min=2.0**-126)
    info = torch.finfo(dtype)
    # Half a step of e4m3 at the quotient; two fp32 roundings, of a quotient and of a product, whose results are at most 448 scales or
    # 17/16 of |x|; and half a step of the dtype.
    near = torch.maximum(exact.abs() * 2**-4, scale * 2**-10)
    fp32 = exact.abs() * 2**-22 + 2.0**-149
    bound = near + fp32 + (exact.abs() + near + fp32) * info.eps / 2 + info.tiny * info.eps / 2
    assert ((got - exact).abs() <= bound).all()
    # And it is no looser than it says: the worst rows come near half a step.
    assert ((got - exact).abs() > 0.9 * near).any()


@IMPLS
@DTYPES
def test_what_was_rounded_is_not_rounded_again(impl, dtype):
    """Bit equal in bf16 and fp16; in fp32 a scale may move by an ulp, once."""
    x = torch.cat([finite_rows(dtype), torch.zeros(1, 32, dtype=dtype, device=DEVICE)])
    once, first = around(x, impl)
    twice, second = around(once, impl)
    if dtype != F32:
        assert twice.equal(once)
        return
    values = slice(0, x.numel())
    assert first[:, values].equal(second[:, values])
    assert ((twice - once).abs() <= once.abs() * 2.0**-22).all()
    third, last = around(twice, impl)
    assert third.equal(twice) and last.equal(second)


@IMPLS
def test_parts_of_one_row_that_overlap(impl):
    """The last of them begins where it ends with the row."""
    x = torch.randn(3, 5 * 16, device=DEVICE).bfloat16()
    row = x.view(torch.uint8)
    pages = PoolPages([row[:, at : at + 64] for at in (0, 64, 96)], 3, E4m3Rows(BF16, 16))
    ids = torch.tensor([3, 4, 5], device=DEVICE)
    buffer = bytes_(3, pages.num_bytes).to(DEVICE)
    want, _ = around(x[1:2].view(5, 16), impl)
    gather_pages(pages, ids, buffer, impl=impl)
    before, x[:] = x.clone(), 0
    scatter_pages(pages, ids, buffer, impl=impl)
    assert x[1].view(5, 16).equal(want) and not want.equal(before[1].view(5, 16))
    assert not x[[0, 2]].any()


@FUNCTIONS
def test_pools_that_look_alike(function):
    """Of the same bytes in rows of another dtype: each has a launch of its own."""
    for dtype in (BF16, F16, BF16):
        calls = [make_call("bf16") for _ in range(2)]
        for call, impl in zip(calls, ("triton", "torch"), strict=True):
            call["pages"] = replace(call["pages"], e4m3_rows=E4m3Rows(dtype, 128))
            function(**call, impl=impl)
        assert all(a.equal(b) for a, b in zip(*map(bits, calls), strict=True))


@pytest.mark.skipif(
    DEVICE != "cpu" or sys.platform != "linux",
    reason="memory that is never touched is free on Linux",
)
@FUNCTIONS
def test_offsets_within_pool_and_buffer_have_64_bits(function):
    """Only the pages of a pool of 8 GiB are touched, and two rows of as large a buffer."""

    def far(size, stride=2**32):
        memory = mmap.mmap(-1, 2 * stride + size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)  # fmt: skip
        return torch.frombuffer(memory, dtype=torch.uint8).as_strided((3, size), (stride, 1))

    data, buffer = far(64), far(36)
    x = torch.linspace(-3, 3, 96).bfloat16().view(3, 32)
    data[:] = x.view(torch.uint8)
    pages = PoolPages([data], 1, E4m3Rows(BF16, 32))
    ids = torch.tensor([2, 0, 1])
    want = [around(x[i : i + 1], "torch") for i in ids.tolist()]
    kept = torch.cat([made for _, made in want])
    if function is gather_pages:
        gather_pages(pages, ids, buffer, impl="triton")
        assert buffer.equal(kept) and data.equal(x.view(torch.uint8))
    else:
        buffer[:] = kept
        scatter_pages(pages, ids, buffer, impl="triton")
        assert data[ids].equal(torch.cat([back for back, _ in want]).view(torch.uint8))


REFUSED = [
    (lambda: E4m3Rows(torch.float8_e4m3fn, 64), "dtype: expected one of bfloat16, float16, float32, got torch.float8_e4m3fn"),
    (lambda: E4m3Rows(BF16, 8), "row_dim: expected an int >= 16, got 8"),
    (lambda: E4m3Rows(BF16, 96), "row_dim: expected a power of two in 16..512, got 96"),
    (lambda: E4m3Rows(BF16, 1024), "row_dim: expected a power of two in 16..512, got 1024"),
    (lambda: PoolPages([bytes_(3, 96)], 1, E4m3Rows(BF16, 32)), "tensors: expected pages of a multiple of 64 bytes, whole rows of 32 bfloat16, got 96"),
]  # fmt: skip


@pytest.mark.parametrize("made, message", REFUSED, ids=[m[:50] for _, m in REFUSED])
def test_refused_rows(made, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        made()


@pytest.mark.skipif(DEVICE != "cpu", reason="messages about CPU tensors")
@IMPLS
@FUNCTIONS
def test_a_buffer_of_bytes_as_they_are_is_refused(function, impl):
    call = make_call() | {"buffer": bytes_(9, 2 * 8 * 128 * 2)}
    with pytest.raises(ValueError, match=r"^buffer: expected uint8 \[\*, 2112\], got uint8"):
        function(**call, impl=impl)
