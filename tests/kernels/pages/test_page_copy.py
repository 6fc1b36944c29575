"""gather_pages and scatter_pages, both implementations, against the oracle: every byte, and what must stay untouched."""

import mmap
import sys

import pytest
import torch

from quire.kernels import PoolPages, gather_pages, scatter_pages
from quire.kernels import pages as copies
from tests.kernels.oracles import page_copy as reference
from tests.support.helpers import DEVICE

IMPLS = pytest.mark.parametrize("impl", ["triton", "torch"])
FUNCTIONS = pytest.mark.parametrize("function", [gather_pages, scatter_pages])
CASES = {  # tensors, page bytes, bytes between pages, copies, bytes between rows
    "one-tensor": (1, 64, 0, 3, 0),
    "three-tensors": (3, 1168, 0, 4, 0),  # two rows of 584 bytes
    "views-of-a-pool": (2, 96, 32, 3, 48),
    "eight-bytes": (2, 584, 0, 3, 0),
    "four-bytes": (3, 132, 0, 2, 4),
    "one-word": (2, 4, 0, 3, 0),
    "more-than-a-piece": (2, 8192 + 64, 0, 2, 0),
    "nothing": (2, 64, 0, 0, 0),
    "six-tensors": (6, 64, 0, 5, 0),
    "gaps-of-four-bytes": (3, 132, 4, 6, 0),
}
NUM_PAGES, NUM_ROWS = 7, 6
MAP_NORESERVE = 0x4000  # Python 3.12 and before have no name for it


def make_call(name="three-tensors", first_rows=False):
    """Arguments; tensors and buffer hold bytes that all differ from their neighbours'."""
    num_tensors, page_bytes, page_gap, num_copies, row_gap = CASES[name]
    generator = torch.Generator().manual_seed(3)

    def some(rows, size, gap):
        made = torch.randint(256, (rows, size + gap), generator=generator, dtype=torch.uint8)
        return made.to(DEVICE)[:, :size]

    tensors = [some(NUM_PAGES, page_bytes, page_gap) for _ in range(num_tensors)]
    return {
        "pages": PoolPages(tensors),
        "page_ids": torch.randperm(NUM_PAGES, generator=generator)[:num_copies].to(DEVICE),
        "buffer": some(NUM_ROWS, num_tensors * page_bytes, row_gap),
        "rows": None if first_rows else torch.randperm(NUM_ROWS, generator=generator)[:num_copies].to(DEVICE),
    }  # fmt: skip


def copied(call):
    """The arguments over other memory with the same bytes."""
    pages = [
        tensor._base.clone()[:, : tensor.shape[1]] if tensor._is_view() else tensor.clone()
        for tensor in call["pages"].tensors
    ]
    return call | {"pages": PoolPages(pages), "buffer": call["buffer"].clone()}


def whole(call):
    """Everything that a copy may write to, and the gaps of the tensors."""
    tensors = [tensor if tensor._base is None else tensor._base for tensor in call["pages"].tensors]
    return [t.clone() for t in (*tensors, call["buffer"])]


@IMPLS
@FUNCTIONS
@pytest.mark.parametrize("first_rows", [False, True], ids=["rows", "first-rows"])
@pytest.mark.parametrize("name", CASES)
def test_copy(impl, function, first_rows, name):
    call = make_call(name, first_rows)
    expected = copied(call)
    getattr(reference, function.__name__)(**expected)
    function(**call, impl=impl)
    for got, want in zip(whole(call), whole(expected), strict=True):
        assert got.equal(want)


@FUNCTIONS
def test_few_programs_take_all_pieces(function, monkeypatch):
    """As many pieces as there are, in turn."""
    monkeypatch.setattr(copies, "DEVICE_PROGRAMS", 2)
    monkeypatch.setattr(copies, "BLOCK", 16)
    call = make_call("three-tensors")
    expected = copied(call)
    getattr(reference, function.__name__)(**expected)
    function(**call, impl="triton")
    assert all(a.equal(b) for a, b in zip(whole(call), whole(expected), strict=True))


@pytest.mark.skipif(
    DEVICE != "cpu" or sys.platform != "linux",
    reason="memory that is never touched is free on Linux",
)
@FUNCTIONS
def test_offsets_within_pool_and_buffer_have_64_bits(function):
    """In words too. Only the rows of a pool of 8 GiB and of as large a buffer are touched."""

    def far(first, size=64, stride=2**32):
        memory = mmap.mmap(-1, 2 * stride + size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)  # fmt: skip
        rows = torch.frombuffer(memory, dtype=torch.uint8).as_strided((3, size), (stride, 1))
        rows[:] = torch.arange(first, first + 3, dtype=torch.uint8)[:, None]
        return rows

    pages, buffer, ids = far(1), far(9), torch.tensor([2, 0, 1])
    if function is gather_pages:
        gather_pages(PoolPages([pages]), ids, buffer, impl="triton")
        assert buffer.equal(pages[ids]) and pages[:, 0].tolist() == [1, 2, 3]
    else:
        scatter_pages(PoolPages([pages]), ids, buffer, impl="triton")
        assert pages[ids].equal(buffer) and buffer[:, 0].tolist() == [9, 10, 11]


def bytes_(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


TENSORS = [
    ((), r"tensors: expected at least one tensor in a list, got \(\)"),
    (bytes_(3, 16), "tensors: expected at least one tensor in a list, got"),
    ([3], r"tensors\[0\]: expected uint8 \[\*, \*\], got int"),
    ([torch.zeros(3, 16)], r"tensors\[0\]: expected uint8 \[\*, \*\], got float32 \[3, 16\]"),
    ([bytes_(3, 0)], r"tensors\[0\]: page_bytes: expected an int >= 1, got 0"),
    ([bytes_(3, 16).t()], r"tensors\[0\]: expected stride 1"),
    ([bytes_(1, 16).expand(3, -1)], r"tensors\[0\]: expected elements that share no memory"),
    ([bytes_(3, 18)], r"tensors\[0\]: expected rows whose size is a multiple of 4 bytes, got 18"),
    ([bytes_(3, 18)[:, :16]], r"tensors\[0\]: expected rows whose stride is a multiple of 4 bytes, got 18"),
    ([bytes_(3, 20)[:, 2:18]], r"tensors\[0\]: expected an address that is a multiple of 4 bytes"),
    ([bytes_(3, 16), bytes_(4, 16)], r"tensors\[1\]: expected \[3, 16\] with strides \(16, 1\) as tensors\[0\], got \[4, 16\]"),
]  # fmt: skip


@pytest.mark.skipif(DEVICE != "cpu", reason="messages about CPU tensors")
@pytest.mark.parametrize("tensors, message", TENSORS, ids=[m[:50] for _, m in TENSORS])
def test_refused_page_tensors(tensors, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        PoolPages(tensors)


def int64(*ids):
    return torch.tensor(ids, dtype=torch.int64)


REFUSED = [
    ({"pages": [bytes_(3, 16)]}, "pages: expected PoolPages, got list"),
    ({"buffer": [1, 2]}, r"buffer: expected uint8 \[\*, 3504\], got list"),
    ({"page_ids": None}, r"page_ids: expected int64 \[\*\], got NoneType"),
    ({"rows": 3}, r"rows: expected int64 \[4\], got int"),
    ({"buffer": bytes_(6, 16)}, r"buffer: expected uint8 \[\*, 3504\], got uint8 \[6, 16\]"),
    ({"buffer": bytes_(6, 3506)[:, :3504]}, "buffer: expected rows whose stride is a multiple of 4 bytes, got 3506"),
    ({"buffer": bytes_(6, 3508)[:, 2:3506]}, "buffer: expected an address that is a multiple of 4 bytes"),
    ({"buffer": bytes_(6, 3504).to("meta")}, "buffer: expected a tensor on cpu or in pinned host memory, got one on meta"),
    ({"buffer": bytes_(3, 3504), "rows": None}, r"buffer: expected uint8 \[>= 4, 3504\], got uint8 \[3, 3504\]"),
    ({"page_ids": int64(1, 2).int()}, r"page_ids: expected int64 \[\*\], got int32 \[2\]"),
    ({"rows": int64(1, 2)}, r"rows: expected int64 \[4\], got int64 \[2\]"),
    ({"page_ids": int64(0, 1, 2, 7)}, r"page_ids: expected ids in \[0, 7\), got 7"),
    ({"page_ids": int64(-1, 0, 1, 2)}, r"page_ids: expected ids in \[0, 7\), got -1"),
    ({"rows": int64(6, 0, 1, 2)}, r"rows: expected ids in \[0, 6\), got 6"),
    ({"rows": int64(0, 1, 2, -1)}, r"rows: expected ids in \[0, 6\), got -1"),
    ({"impl": "cuda"}, "impl: expected 'triton', 'torch' or None, got 'cuda'"),
]  # fmt: skip


@pytest.mark.skipif(DEVICE != "cpu", reason="messages about CPU tensors")
@IMPLS
@FUNCTIONS
@pytest.mark.parametrize("changes, message", REFUSED, ids=[m[:50] for _, m in REFUSED])
def test_refused(function, impl, changes, message):
    call = make_call()
    before = whole(call)
    with pytest.raises(ValueError, match=f"^{message}"):
        function(**call | {"impl": impl} | changes)
    assert all(a.equal(b) for a, b in zip(whole(call), before, strict=True))


@IMPLS
def test_a_buffer_that_is_written_shares_no_memory(impl):
    call = make_call() | {"buffer": bytes_(1, 3504).to(DEVICE).expand(6, -1)}
    with pytest.raises(ValueError, match=r"^buffer: expected elements that share no memory"):
        gather_pages(**call, impl=impl)
