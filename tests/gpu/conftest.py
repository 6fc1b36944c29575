"""Tests on a real device. Where there is none, what a CPU can of them runs in Triton's interpreter at tiny sizes, so that they are known to work
before there is a GPU."""

from contextlib import contextmanager

import pytest
import torch

DRY_RUN = not torch.cuda.is_available()


@pytest.fixture
def cuda():
    """The device of tests about CUDA itself: graphs, streams, allocations."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return torch.device("cuda")


@contextmanager
def without_waiting():
    """Refuse what makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_neither_waits_nor_allocates(step):
    """Run a step twice; the second time everything is compiled."""
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with without_waiting():
        step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def captured(step):
    """A CUDA graph of a step, which has run once before."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
