"""gather_pages and scatter_pages, both implementations, against the oracle: every byte, and what must stay untouched."""

import mmap
import sys

import pytest
import torch

from quire.kernels import PoolPages, gather_pages, scatter_pages
from quire.kernels import pages as copies
from tests.kernels.oracles import page_copy as reference
from tests.support.helpers import DEVICE

FUNCTIONS = pytest.mark.parametrize("function", [gather_pages, scatter_pages])
CASES = {  # tensors, page bytes, bytes between pages, copies, bytes between rows
    "one-tensor": (1, 64, 0, 3, 0),
    "three-tensors": (3, 1168, 0, 4, 0),  # two rows of 584 bytes
    "views-of-a-pool": (2, 96, 32, 3, 48),
    "no-power-of-two": (3, 144, 16, 6, 16),
    "four-words": (2, 16, 0, 3, 0),
    "more-than-a-piece": (2, 8192 + 64, 0, 2, 0),
    "nothing": (2, 64, 0, 0, 0),
    "six-tensors": (6, 64, 0, 5, 0),
    "few-programs-take-all-pieces": (3, 1168, 0, 4, 0),
}
NUM_PAGES, NUM_ROWS = 7, 6
MAP_NORESERVE = 0x4000  # Python 3.12 and before have no name for it


def make_call(name="three-tensors"):
    """Arguments; tensors and buffer hold bytes that all differ from their neighbours'."""
    num_tensors, page_bytes, page_gap, num_copies, row_gap = CASES[name]
    generator = torch.Generator().manual_seed(3)

    def some(rows, size, gap):
        made = torch.randint(256, (rows, size + gap), generator=generator, dtype=torch.uint8)
        return made.to(DEVICE)[:, :size]

    tensors = [some(NUM_PAGES, page_bytes, page_gap) for _ in range(num_tensors)]
    page_ids, rows = (torch.randperm(n, generator=generator) for n in (NUM_PAGES, NUM_ROWS))
    return {
        "pages": PoolPages(tensors),
        "page_ids": page_ids[:num_copies].to(DEVICE),
        "buffer": some(NUM_ROWS, num_tensors * page_bytes, row_gap),
        "rows": rows[:num_copies].to(DEVICE),
    }


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


@FUNCTIONS
@pytest.mark.parametrize("name", CASES)
def test_copy(impl, function, name, monkeypatch):
    if "few" in name:
        monkeypatch.setattr(copies, "DEVICE_PROGRAMS", 2)
        monkeypatch.setattr(copies, "BLOCK", 16)
    call = make_call(name)
    expected = copied(call)
    getattr(reference, function.__name__)(**expected)
    function(**call, impl=impl)
    for got, want in zip(whole(call), whole(expected), strict=True):
        assert got.equal(want)


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
        gather_pages(PoolPages([pages]), ids, buffer, ids.flip(0), impl="triton")
        assert buffer[ids.flip(0)].equal(pages[ids]) and pages[:, 0].tolist() == [1, 2, 3]
    else:
        scatter_pages(PoolPages([pages]), ids, buffer, ids.flip(0), impl="triton")
        assert pages[ids].equal(buffer[ids.flip(0)]) and buffer[:, 0].tolist() == [9, 10, 11]
