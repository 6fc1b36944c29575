"""Jobs of tiers through a `PageCopier`: every way that pages go, and what fails on it."""

import threading
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.kernels import E4m3Rows, PoolPages, gather_pages, scatter_pages
from quire.kvcore.tier import Copies
from quire.models.tiers import copier as copier_module
from quire.models.tiers import host_pages, streams, ways
from quire.models.tiers.copier import PageCopier
from quire.models.tiers.host_pages import HostPages

CPU = torch.device("cpu")
NUM_PAGES, PAGE_BYTES, NUM_TENSORS = 12, 64, 3
ROW_BYTES = PAGE_BYTES * NUM_TENSORS


class Damaged(OSError):
    def __init__(self, pages):
        self.pages = pages


class MemoryDisk:
    """Pages in a dictionary. Calls end at once, or when `finish` is called; what they end with can be set."""

    def __init__(self, *, at_once=True):
        self.pages, self.errors, self.calls, self.at_once = {}, [], [], at_once

    def write(self, pages, buffers):
        copies = dict(zip(pages.tolist(), buffers, strict=True))
        return self._call(lambda: self.pages.update({p: b.copy() for p, b in copies.items()}))

    def read(self, pages, buffers):
        def fill():
            for page, buffer in zip(pages.tolist(), buffers, strict=True):
                buffer[:] = self.pages[page]

        return self._call(fill)

    def _call(self, work):
        future = Future()
        self.calls.append((future, work))
        if self.at_once:
            self.finish()
        return future

    def finish(self):
        future, work = self.calls.pop(0)
        error = self.errors.pop(0) if self.errors else None
        if not isinstance(error, OSError) or isinstance(error, Damaged):
            work()
        future.set_exception(error) if error else future.set_result(None)


def made(**options):
    """(copier, tensors of its pool with random bytes, host pages, disk)."""
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randint(256, (NUM_PAGES, PAGE_BYTES), generator=generator, dtype=torch.uint8) for _ in range(NUM_TENSORS)]  # fmt: skip
    disk, host = MemoryDisk(**options), HostPages(9, ROW_BYTES, CPU)
    return PageCopier(PoolPages(tensors), host=host, disk=disk), tensors, host, disk


def copies(source, target, sources, targets, parts=None):
    parts = [0] * len(sources) if parts is None else parts
    ids = (np.array(x, dtype=np.int32) for x in (sources, targets, parts))
    return Copies(0, source, target, *ids)


def job(*some):
    return SimpleNamespace(copies=some)


def run(copier, *some):
    one = job(*some)
    copier.start(one)
    [ended] = copier.wait()
    assert ended.job is one and not copier.has_jobs and ended.seconds >= 0
    assert copier.wait() == []
    return ended


def rows(tensors, pages):
    return torch.cat([tensor[pages] for tensor in tensors], 1)


@pytest.mark.parametrize("by", ["kernel", "engines"])
def test_around_all_places(by):
    """Device, host, disk, host, device, disk, device: as if they had never left, and nothing else changed."""
    copier, tensors, host, _disk = made()
    if by == "kernel":
        copier._ways.kernel_from = dict.fromkeys(streams.DIRECTIONS, 1)
    before, others = (
        rows(tensors, [2, 7, 5]),
        [i for i in range(NUM_PAGES) if i not in (1, 3, 4, 8, 9, 10)],
    )
    untouched = rows(tensors, others)
    way = [
        copies("device", "host", [2, 7, 5], [4, 1, 8]),
        copies("host", "disk", [4, 1, 8], [3, 9, 1]),
        copies("disk", "host", [3, 9, 1], [2, 3, 5]),
        copies("host", "device", [2, 3, 5], [1, 4, 3]),
        copies("device", "disk", [1, 4, 3], [11, 12, 13]),
        copies("disk", "device", [11, 12, 13], [10, 8, 9]),
    ]
    for one in way:
        assert run(copier, one).failed == ()
    assert rows(tensors, [1, 4, 3]).equal(before) and rows(tensors, [10, 8, 9]).equal(before)
    assert rows(tensors, others).equal(untouched)
    assert host.rows[[4, 1, 8]].equal(before)
    assert copier.num_bytes == {(c.source, c.target): 3 * ROW_BYTES for c in way}


def test_a_job_of_several_places():
    copier, tensors, host, disk = made()
    disk.pages[6] = np.full(ROW_BYTES, 6, np.uint8)
    host.rows[2] = 2
    assert (
        run(copier, copies("host", "device", [2], [1]), copies("disk", "device", [6], [2])).failed
        == ()
    )
    assert rows(tensors, [1, 2]).equal(
        torch.tensor([[2], [6]], dtype=torch.uint8).expand(2, ROW_BYTES)
    )


def test_few_staging_rows(monkeypatch):
    """Parts take turns at them; what needs none goes past."""
    monkeypatch.setattr(copier_module, "STAGING_BYTES", 2 * ROW_BYTES)
    copier, tensors, _host, disk = made(at_once=False)
    first = job(copies("device", "disk", [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]))
    second = job(copies("device", "host", [6], [1]))
    copier.start(first)
    assert len(disk.calls) == 2  # of a page each
    copier.start(second)
    assert [ended.job for ended in copier.poll()] == [second]
    disk.finish()
    assert copier.poll() == [] and len(disk.calls) == 2
    for _ in range(4):
        disk.finish()
        copier.poll()
    assert not copier.has_jobs and sorted(disk.pages) == [1, 2, 3, 4, 5]
    assert all(torch.from_numpy(disk.pages[i]).equal(rows(tensors, [i])[0]) for i in disk.pages)


def test_wait_waits_for_threads():
    copier, _tensors, _host, disk = made(at_once=False)
    one = job(copies("host", "disk", [1], [1]), copies("device", "disk", [1], [2]))
    copier.start(one)
    threading.Timer(0.02, lambda: (disk.finish(), disk.finish())).start()
    assert [ended.job for ended in copier.wait()] == [one]


@pytest.mark.parametrize("source, target", [("host", "disk"), ("device", "disk")])
def test_a_write_that_fails(source, target):
    copier, tensors, host, disk = made()
    disk.errors = [OSError("full")]
    ended = run(copier, copies(source, target, [1, 2], [5, 6]), copies("device", "host", [3], [4]))
    assert ended.failed == (5, 6) and [str(e) for e in ended.errors] == ["full"] and not disk.pages
    assert host.rows[4].equal(rows(tensors, [3])[0])
    assert run(copier, copies(source, target, [1, 2], [5, 6])).failed == ()  # and its rows are free


@pytest.mark.parametrize("target", ["host", "device"])
@pytest.mark.parametrize("error, failed", [(Damaged((8,)), (2,)), (OSError("gone"), (1, 2, 3))])
def test_a_read_that_fails(target, error, failed):
    """Of damaged pages all others come."""
    copier, tensors, host, disk = made()
    for page in (7, 8, 9):
        disk.pages[page] = np.full(ROW_BYTES, page, np.uint8)
    before = rows(tensors, [2])
    disk.errors = [error]
    ended = run(copier, copies("disk", target, [7, 8, 9], [1, 2, 3]))
    assert ended.failed == failed and ended.errors == (error,)
    have = host.rows if target == "host" else rows(tensors, slice(None))
    if len(failed) == 1:
        assert have[1].eq(7).all() and have[3].eq(9).all()
    if target == "device":
        assert rows(tensors, [2]).equal(before)
    assert run(copier, copies("disk", target, [7, 8, 9], [1, 2, 3])).failed == ()


@pytest.mark.parametrize(
    "way", [("device", "host"), ("host", "device"), ("disk", "device"), ("device", "disk")]
)
def test_a_copy_that_fails(monkeypatch, way):
    copier, _tensors, _host, disk = made()
    disk.pages = {i: np.zeros(ROW_BYTES, np.uint8) for i in (1, 2)}

    def fail(*args):
        raise RuntimeError("copy")

    with monkeypatch.context() as patch:
        patch.setattr(ways.PageWays, "copy", fail)
        ended = run(copier, copies(*way, [1, 2], [3, 4]))
    assert ended.failed == (3, 4) and [str(e) for e in ended.errors] == ["copy"]
    assert copier.num_bytes == {}
    assert run(copier, copies(*way, [1, 2], [3, 4])).failed == ()


def test_a_cancelled_job_ends_what_has_begun(monkeypatch):
    monkeypatch.setattr(copier_module, "STAGING_BYTES", 2 * ROW_BYTES)
    copier, _tensors, _host, disk = made(at_once=False)
    one = job(copies("device", "disk", [1, 2, 3, 4], [1, 2, 3, 4]))
    copier.start(one)
    copier.cancel(one)
    assert copier.poll() == []
    disk.finish(), disk.finish()
    [ended] = copier.poll()
    assert ended.job is one and ended.failed == () and ended.missing == (3, 4)
    assert sorted(disk.pages) == [1, 2]


def test_close_waits():
    copier, _tensors, _host, disk = made(at_once=False)
    copier.start(job(copies("host", "disk", [1], [1])))
    threading.Timer(0.02, disk.finish).start()
    copier.close()
    assert not copier.has_jobs and 1 in disk.pages


def test_host_pages_begin_where_a_disk_takes_them():
    """Large ones; small ones would waste too much."""
    for page_bytes, stride in [
        (ROW_BYTES, ROW_BYTES),
        (4096, 4096),
        (300_000, 74 * 4096),
        (5000, 5000),
    ]:
        pages = HostPages(3, page_bytes, CPU)
        assert pages.rows.shape == (3, page_bytes) and pages.rows.stride(0) == stride
        assert pages.num_bytes == 3 * stride and not pages.rows.any()
        pages.arrays(np.array([1]))[0][:] = 7
        assert pages.rows[1].eq(7).all() and not pages.rows[0].any()


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
    """Of all groups at once, tensor by tensor where layers wait for these; not what a disk brings."""
    _, tensors, _host, _disk = made()
    num_tensors, n, views = None if how == "at once" else NUM_TENSORS, 1, tensors
    if how == "tensors as parts":
        n = NUM_TENSORS
    elif how == "bytes as parts":
        n, half = 2, PAGE_BYTES // 2
        views = [tensor[:, i * half :][:, :half] for i in range(n) for tensor in tensors]
    pool = PoolPages(views, n)
    host = HostPages(1 + 4 * n, pool.num_bytes, CPU)
    copier = PageCopier(pool, host=host, num_tensors=num_tensors)
    host.rows[1:] = (
        torch.arange(4 * n, dtype=torch.uint8)[:, None] // n + 7
    )  # of a page, then the next

    def some(first, targets):
        rows = [1 + first * n + i for i in range(2 * n)]
        return copies("host", "device", rows, np.repeat(targets, n), [*range(n)] * 2)

    one = job(some(0, [3, 4]), some(2, [5, 6]))
    assert copier.can_run_ahead(one) and not copier.can_run_ahead(job())
    assert not copier.can_run_ahead(job(*one.copies, copies("disk", "device", [1], [1])))
    copier.start(one, ahead=True)
    assert copier.poll() == [] and copier.has(one)
    expected = torch.tensor([7, 8, 9, 10], dtype=torch.uint8)
    if num_tensors:
        copier.streams.arrive(2)
        assert tensors[2][3:7].eq(expected[:, None]).all()
        assert not tensors[0][3:7].eq(expected[:, None]).all()
    copier.streams.arrive_all()
    assert all(tensor[3:7].eq(expected[:, None]).all() for tensor in tensors)
    [ended] = copier.poll()
    assert ended.job is one and ended.failed == () and ended.seconds > 0


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


def test_rows_in_e4m3_go_around_all_places():
    """What host and disk have are the same bytes; pages are as they are when a pool is gathered and scattered."""
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(NUM_PAGES, PAGE_BYTES // 2, generator=generator).bfloat16().view(torch.uint8) for _ in range(NUM_TENSORS)]  # fmt: skip
    form = E4m3Rows(torch.bfloat16, 16)
    expected = PoolPages([tensor.clone() for tensor in tensors], 1, form)
    ids, kept = torch.tensor([2, 7, 5]), torch.zeros(3, expected.num_bytes, dtype=torch.uint8)
    gather_pages(expected, ids, kept)
    scatter_pages(expected, ids, kept)
    pool, disk = PoolPages(tensors, 1, form), MemoryDisk()
    host = HostPages(9, pool.num_bytes, CPU)
    copier = PageCopier(pool, host=host, disk=disk)
    way = [
        copies("device", "host", [2, 7, 5], [4, 1, 8]),
        copies("host", "disk", [4, 1, 8], [3, 9, 1]),
        copies("disk", "host", [3, 9, 1], [2, 3, 5]),
        copies("host", "device", [2, 3, 5], [1, 4, 3]),
        copies("device", "disk", [1, 4, 3], [11, 12, 13]),
        copies("disk", "device", [11, 12, 13], [10, 8, 9]),
    ]
    for one in way:
        assert run(copier, one).failed == ()
    assert host.rows[[2, 3, 5]].equal(kept)
    assert all(torch.from_numpy(disk.pages[11 + i]).equal(kept[i]) for i in range(3))
    for tensor, other in zip(tensors, expected.tensors, strict=True):
        assert tensor[[1, 4, 3]].equal(other[ids]) and tensor[[10, 8, 9]].equal(other[ids])
    assert copier.num_bytes == {(c.source, c.target): 3 * pool.num_bytes for c in way}
    assert pool.num_bytes == NUM_TENSORS * 2 * (16 + 4)
