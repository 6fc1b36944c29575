"""Jobs of the host tier through a `PageCopier`: where pages go, and what fails on the way."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.models.engine import host_tier
from quire.models.engine.host_tier import HostPages, PageCopier

CPU = torch.device("cpu")
PAGE_BYTES, NUM_TENSORS = 64, 3
ROW_BYTES = PAGE_BYTES * NUM_TENSORS


def job(kind, sources, targets):
    pages = (np.array(x, dtype=np.int32) for x in (sources, targets))
    return SimpleNamespace(kind=kind, **dict(zip(("sources", "targets"), pages, strict=True)), num_bytes=len(sources) * ROW_BYTES)  # fmt: skip


def test_on_a_gpu_copies_run_behind_the_model_and_are_awaited(monkeypatch):
    """A stream for each direction waits for the model's, then copies, then records."""
    log, ended = [], []

    class Stream:
        def __init__(self, device=None):
            self.name = f"stream {len(names)}"
            names.append(self.name)

        def wait_stream(self, other):
            log.append((self.name, "waits for", other.name))

        def record_event(self):
            log.append((self.name, "records"))
            number = len(log)
            return SimpleNamespace(
                query=lambda: number in ended,
                synchronize=lambda: log.append(("host waits for", number)),
            )

        def __enter__(self):
            current.append(self)

        def __exit__(self, *_):
            current.pop()

    names = []
    current = [Stream()]
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    for name in ("gather_pages", "scatter_pages"):
        done = lambda *_, name=name: log.append((current[-1].name, name))  # noqa: E731
        monkeypatch.setattr(host_tier, name, done)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *args, **options: x)
    pool = SimpleNamespace(device=torch.device("cuda"))
    copier = PageCopier(pool, SimpleNamespace(rows=None))
    assert log == [("stream 0", "gather_pages"), ("stream 0", "scatter_pages")]  # compiled
    for kind, stream, copy in (("store", "stream 1", "gather_pages"), ("load", "stream 2", "scatter_pages")):  # fmt: skip
        log.clear()
        copier.start(job(kind, [1, 2], [3, 4]))
        assert log == [(stream, "waits for", "stream 0"), (stream, copy), (stream, "records")]
        assert copier.poll() == [] and copier.has_jobs
        copier.wait()
        assert log[3:] == [("host waits for", 3)]
        ended.append(3)
        assert [c.job.kind for c in copier.poll()] == [kind]
        ended.clear()


def test_memory_that_is_not_there(monkeypatch):
    monkeypatch.setattr(host_tier, "free_memory", lambda device: 2**20)
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
