"""Launches: on which device, and of which grids."""

import torch

from quire.kernels import sample_tokens
from quire.kernels.common import launching


class Kernel:
    """Calls ``ran`` with the grid where a kernel would be launched."""

    def __init__(self, ran):
        self.ran = ran

    def __getitem__(self, grid):
        return lambda **_: self.ran(grid)


def test_an_empty_grid_runs_nothing():
    grids = []
    for n in (1, 0, 2):
        launching.launch(Kernel(grids.append), (3, n))
    assert grids == [(3, 1), (3, 2)]
    assert sample_tokens(torch.zeros(0, 7), impl="triton").shape == (0,)


def test_a_call_runs_on_the_device_of_its_tensors(monkeypatch):
    """Triton launches on the current device, whatever the tensors are on: that of the tensors is made the current one."""
    current, seen = ["first"], []

    class DeviceOf:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            current.append(self.tensor)

        def __exit__(self, *_):
            current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", DeviceOf)
    monkeypatch.setattr(launching, "launch", lambda kernel, grid, **_: seen.append(current[-1]))
    logits = torch.zeros(3, 7)
    sample_tokens(logits, impl="triton")
    assert seen[0] is logits and current == ["first"]
