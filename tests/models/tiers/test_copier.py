"""Jobs of the host tier through a `PageCopier`: where pages go, and what fails on the way."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.kernels import E4m3Rows, PoolPages, gather_pages, scatter_pages
from quire.kvcore.tier import Copies
from quire.models.tiers import host_pages, streams, ways
from quire.models.tiers.copier import PageCopier
from quire.models.tiers.host_pages import HostPages

CPU = torch.device("cpu")
NUM_PAGES, PAGE_BYTES, NUM_TENSORS = 12, 64, 3
ROW_BYTES = PAGE_BYTES * NUM_TENSORS


def made():
    """(copier, tensors of its pool with random bytes, host pages)."""
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randint(256, (NUM_PAGES, PAGE_BYTES), generator=generator, dtype=torch.uint8) for _ in range(NUM_TENSORS)]  # fmt: skip
    host = HostPages(9, ROW_BYTES, CPU)
    return PageCopier(PoolPages(tensors), host), tensors, host


def copies(sources, targets, parts=None):
    parts = [0] * len(sources) if parts is None else parts
    return Copies(0, *(np.array(x, dtype=np.int32) for x in (sources, targets, parts)))


def job(kind, *some):
    return SimpleNamespace(kind=kind, copies=some)


def run(copier, kind, *some):
    one = job(kind, *some)
    copier.start(one)
    [ended] = copier.wait()
    assert ended.job is one and not copier.has_jobs and ended.seconds >= 0
    assert copier.wait() == []
    return ended


def rows(tensors, pages):
    return torch.cat([tensor[pages] for tensor in tensors], 1)


@pytest.mark.parametrize("by", ["kernel", "engines"])
def test_to_the_host_and_back(by):
    """As if they had never left, and nothing else changed; of several groups at once."""
    copier, tensors, host = made()
    if by == "kernel":
        copier._ways.kernel_from = dict.fromkeys(streams.DIRECTIONS, 1)
    before, others = rows(tensors, [2, 7, 5]), [i for i in range(NUM_PAGES) if i not in (1, 3, 4)]
    untouched = rows(tensors, others)
    for kind, some in [
        ("store", [copies([2, 7], [4, 1]), copies([5], [8])]),
        ("load", [copies([4], [1]), copies([1, 8], [4, 3])]),
    ]:
        ended = run(copier, kind, *some)
        assert ended.error is None and not len(ended.failed)
    assert rows(tensors, [1, 4, 3]).equal(before) and host.rows[[4, 1, 8]].equal(before)
    assert rows(tensors, others).equal(untouched)
    assert copier.num_bytes == {"to_host": 3 * ROW_BYTES, "to_device": 3 * ROW_BYTES}


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_copy_that_fails(monkeypatch, kind):
    copier, _tensors, _host = made()

    def fail(*args):
        raise RuntimeError("copy")

    with monkeypatch.context() as patch:
        patch.setattr(ways.PageWays, "copy", fail)
        ended = run(copier, kind, copies([1, 2], [3, 4]), copies([5], [6]))
    assert ended.failed.tolist() == [3, 4, 6] and str(ended.error) == "copy"
    assert copier.num_bytes == {"to_host": 0, "to_device": 0}
    assert run(copier, kind, copies([1, 2], [3, 4])).error is None


def test_a_copy_that_cannot_begin(monkeypatch):
    """As a GPU's driver refuses it."""
    copier, _tensors, _host = made()

    def fail(*args):
        raise RuntimeError("begin")

    monkeypatch.setattr(copier.streams, "begin", fail)
    ended = run(copier, "store", copies([1, 2], [3, 4]))
    assert ended.failed.tolist() == [3, 4] and str(ended.error) == "begin"


def test_close_waits():
    copier, _tensors, _host = made()
    one = job("load", copies([1], [1]))
    copier.start(one, ahead=True)  # made when somebody waits
    copier.close()
    assert not copier.has_jobs and copier.num_bytes["to_device"] == ROW_BYTES


def test_memory_that_is_not_there(monkeypatch):
    monkeypatch.setattr(host_pages, "free_memory", lambda device: 2**20)
    with pytest.raises(
        MemoryError,
        match=r"expected host memory for 1025 pages of 1024 bytes, 0.0009775 GiB, and 0.0009766 GiB are free",
    ):
        HostPages(1025, 1024, CPU)  # fmt: skip


class Driver:
    """Stands in for the CUDA run time: what is pinned, and in which order a stream is given work."""

    def __init__(self, status=0):
        self.status, self.pinned, self.log = status, {}, []

    def cudaHostRegister(self, address, size, flags):
        if not self.status:
            self.pinned[address] = size
        return self.status

    def cudaHostUnregister(self, address):
        del self.pinned[address]


@pytest.fixture
def driver(monkeypatch):
    one = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: one)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return one


def test_pages_are_pinned_as_long_as_they_live(driver):
    pages = HostPages(3, 8192, torch.device("cuda"))
    assert driver.pinned == {pages.rows.data_ptr(): 3 * 8192}
    del pages
    assert driver.pinned == {}


def test_a_driver_that_pins_nothing(driver):
    driver.status = 2
    with pytest.raises(MemoryError, match=r"memory that the driver pins, got CUDA error 2"):
        HostPages(3, 8192, torch.device("cuda"))


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for streams and events: (log of what each stream is given, list of events that have ended)."""
    log, ended = [], []

    class Stream:
        def __init__(self, device=None, name=None):
            self.name = name or ("to_host", "to_device")[len(made)]
            made.append(self)

        def wait_stream(self, other):
            log.append((self.name, "waits for", other.name))

        def wait_event(self, event):
            log.append((self.name, "waits for", event.number))

        def __enter__(self):
            current.append(self)

        def __exit__(self, *_):
            current.pop()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            self.number = len(events)
            events.append(self)

        def record(self):
            log.append((current[-1].name, "records", self.number))

        def elapsed_time(self, other):
            return 1500.0 * (other.number - self.number)

        def query(self):
            return self.number in ended

        def synchronize(self):
            log.append(("host", "waits for", self.number))

    made, events = [], []
    current = [Stream(name="model")]
    made.clear()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    return log, ended, lambda what: lambda: log.append((current[-1].name, what))


def test_copies_run_behind_the_model_and_are_awaited(gpu):
    """On a GPU: the copy stream waits for the model's, then copies, then records."""
    log, ended, copy = gpu
    both = streams.CopyStreams(torch.device("cuda"))
    pending = both.begin("to_device", copy("copies"))
    assert log == [("to_device", "waits for", "model"), ("to_device", "records", 0), ("to_device", "copies"), ("to_device", "records", 1)]  # fmt: skip
    assert not pending.done()
    ended.append(1)
    assert pending.done()
    pending.result()
    assert log[-1] == ("host", "waits for", 1) and pending.seconds == 1.5


def test_the_model_comes_behind_each_tensor_that_it_runs_ahead_of(gpu):
    """And so do copies to the host, which may write rows that these come from; until they have ended."""
    log, ended, copy = gpu
    both = streams.CopyStreams(torch.device("cuda"))
    pending = both.begin_ahead([copy("tensor 0"), copy("tensor 1")])
    assert [x for x in log if x[0] != "model"] == [
        ("to_device", "waits for", "model"),
        ("to_device", "records", 0),
        ("to_device", "tensor 0"),
        ("to_device", "records", 1),
        ("to_device", "tensor 1"),
        ("to_device", "records", 2),
    ]
    log.clear()
    both.arrive(0), both.arrive(1), both.arrive_all()
    assert log == [("model", "waits for", 1), ("model", "waits for", 2), ("model", "waits for", 2)]
    log.clear()
    both.begin("to_host", copy("stores"))
    assert log[:2] == [("to_host", "waits for", "model"), ("to_host", "waits for", 2)]
    assert log[3] == ("to_host", "stores")
    ended += [0, 1]
    both.forget_ended()
    log.clear()
    both.arrive(0)
    assert log == [("model", "waits for", 1)] and not pending.done()
    ended.append(2)
    both.forget_ended()
    both.arrive_all()
    assert len(log) == 1 and pending.done() and pending.seconds == 3.0


def test_on_a_cpu_a_part_is_copied_when_somebody_waits():
    log = []
    both = streams.CopyStreams(CPU)
    first = both.begin_ahead([lambda i=i: log.append((1, i)) for i in range(2)])
    second = both.begin_ahead([lambda i=i: log.append((2, i)) for i in range(2)])
    both.arrive(1)
    both.arrive(1)
    assert log == [(1, 1), (2, 1)] and not first.done()
    both.begin("to_host", lambda: log.append("stores"))
    assert log[2:] == [(1, 0), (2, 0), "stores"] and first.done() and second.done()

    def fail():
        raise ValueError("copy")

    bad = both.begin_ahead([lambda: log.append("good"), fail])
    both.begin("to_device", lambda: log.append("another"))  # is not its business
    assert bad.done() and log[-1] == "another"
    for _ in range(2):
        with pytest.raises(streams.CopyFailed, match="pages that a step reads did not come"):
            both.arrive_all()
        both.forget_ended()
    with pytest.raises(ValueError, match="copy"):
        bad.result()
    both.forget_ended(failed=True)
    both.arrive_all()


@pytest.mark.parametrize("how", ["at once", "by tensor", "tensors as parts", "bytes as parts"])
def test_a_job_that_steps_run_ahead_of(how):
    """Of all groups at once, tensor by tensor where layers wait for these."""
    _, tensors, _host = made()
    num_tensors, n, views = None if how == "at once" else NUM_TENSORS, 1, tensors
    if how == "tensors as parts":
        n = NUM_TENSORS
    elif how == "bytes as parts":
        n, half = 2, PAGE_BYTES // 2
        views = [tensor[:, i * half :][:, :half] for i in range(n) for tensor in tensors]
    pool = PoolPages(views, n)
    host = HostPages(1 + 4 * n, pool.num_bytes, CPU)
    copier = PageCopier(pool, host, num_tensors=num_tensors)
    host.rows[1:] = (
        torch.arange(4 * n, dtype=torch.uint8)[:, None] // n + 7
    )  # of a page, then the next

    def some(first, targets):
        rows = [1 + first * n + i for i in range(2 * n)]
        return copies(rows, np.repeat(targets, n), [*range(n)] * 2)

    one = job("load", some(0, [3, 4]), some(2, [5, 6]))
    copier.start(one, ahead=True)
    assert copier.poll() == [] and copier.has_jobs
    expected = torch.tensor([7, 8, 9, 10], dtype=torch.uint8)
    if num_tensors:
        copier.streams.arrive(2)
        assert tensors[2][3:7].eq(expected[:, None]).all()
        assert not tensors[0][3:7].eq(expected[:, None]).all()
    copier.streams.arrive_all()
    assert all(tensor[3:7].eq(expected[:, None]).all() for tensor in tensors)
    [ended] = copier.poll()
    assert ended.job is one and ended.error is None and ended.seconds > 0


@pytest.mark.parametrize("quick_from, found", [(1, 1), (4, 4), (16, 16), (99, float("inf"))])
def test_the_kernel_is_taken_from_where_it_is_quicker(monkeypatch, quick_from, found):
    """Times of a stand-in clock; both ways leave a pool of zeros as it was."""
    clock = [0.0]
    monkeypatch.setattr(ways, "perf_counter", lambda: clock[0])

    def copy(self, direction, impl, pages, buffer, rows, tensor=None):
        n = len(pages)
        clock[0] += n if impl == "torch" else (n / 2 if n >= quick_from else n / 1.1)
        taken.append((direction, impl, n))

    pool = PoolPages([torch.zeros(70, 64, dtype=torch.uint8)])
    taken = []
    monkeypatch.setattr(ways.PageWays, "_by", copy)
    chosen = ways.PageWays(pool)
    buffer = torch.zeros(64, 64, dtype=torch.uint8)
    chosen.probe(buffer, synchronize=lambda: None)
    assert chosen.kernel_from == {"to_host": found, "to_device": found}
    taken.clear()
    for n in (1, 3, 4, 63):
        chosen.copy("to_host", np.arange(1, n + 1), buffer, np.arange(n))
    assert [impl for _, impl, _ in taken] == [
        "triton" if n >= found else "torch" for n in (1, 3, 4, 63)
    ]


def test_what_converts_is_the_kernel(monkeypatch):
    """Whatever copy engines would take: they move bytes. It is compiled before a request waits for it."""
    made, calls = torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8), []
    pool = PoolPages([made], 1, E4m3Rows(torch.bfloat16, 32))
    chosen = ways.PageWays(pool)
    by = chosen._by
    monkeypatch.setattr(chosen, "_by", lambda *args: (calls.append(args[:2]), by(*args)))
    buffer = torch.zeros(9, pool.num_bytes, dtype=torch.uint8)
    chosen.probe(buffer, synchronize=lambda: None)
    assert calls == [(direction, "triton") for direction in streams.DIRECTIONS]
    assert not made.any()
    chosen.copy("to_host", np.array([1]), buffer, np.array([0]))
    assert calls[-1] == ("to_host", "triton")


def test_rows_in_e4m3_go_to_the_host_and_back():
    """Pages are as they are when a pool is gathered and scattered."""
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(NUM_PAGES, PAGE_BYTES // 2, generator=generator).bfloat16().view(torch.uint8) for _ in range(NUM_TENSORS)]  # fmt: skip
    form = E4m3Rows(torch.bfloat16, 16)
    expected = PoolPages([tensor.clone() for tensor in tensors], 1, form)
    ids, kept = torch.tensor([2, 7, 5]), torch.zeros(3, expected.num_bytes, dtype=torch.uint8)
    gather_pages(expected, ids, kept)
    scatter_pages(expected, ids, kept)
    pool = PoolPages(tensors, 1, form)
    host = HostPages(9, pool.num_bytes, CPU)
    copier = PageCopier(pool, host)
    for kind, one in (
        ("store", copies([2, 7, 5], [4, 1, 8])),
        ("load", copies([4, 1, 8], [1, 4, 3])),
    ):
        assert run(copier, kind, one).error is None
    assert host.rows[[4, 1, 8]].equal(kept)
    for tensor, other in zip(tensors, expected.tensors, strict=True):
        assert tensor[[1, 4, 3]].equal(other[ids])
    assert copier.num_bytes == {"to_host": 3 * pool.num_bytes, "to_device": 3 * pool.num_bytes}
    assert pool.num_bytes == NUM_TENSORS * 2 * (16 + 4)
