"""Tests on a real device. Without one, tiny sizes run in Triton's interpreter."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

DRY_RUN = not torch.cuda.is_available()


@pytest.fixture(autouse=True)
def memory_goes_back():
    """Torch keeps the memory of freed tensors, which tests of other processes need."""
    yield
    if not DRY_RUN:
        torch.cuda.empty_cache()


def needs_memory(gib):
    """Skip a test where other processes leave less of the GPU's memory."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free:.3g} are free")


@pytest.fixture
def cuda():
    """The device of tests about CUDA itself: streams and pinned memory."""
    if DRY_RUN:
        pytest.skip("needs a GPU")
    return torch.device("cuda")


@contextmanager
def without_waiting():
    """Refuse what makes the host wait for the device."""
    if DRY_RUN:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_neither_waits_nor_allocates(step):
    """Run a step twice; the second time everything is compiled."""
    step()
    if DRY_RUN:
        return
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with without_waiting():
        step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def captured(step):
    """A CUDA graph of a step that has run once; without a device its replay calls the step."""
    step()
    if DRY_RUN:
        return SimpleNamespace(replay=step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
