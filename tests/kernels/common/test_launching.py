"""Launches: on which device, and of which grids."""

import torch

from quire.kernels import sample_tokens
from quire.kernels.common import launching


def test_calls_with_nothing_to_launch():
    logits = torch.zeros(0, 7)
    assert sample_tokens(logits, impl="triton").shape == (0,)


def test_a_call_runs_on_the_device_of_its_tensors(monkeypatch):
    """Triton launches on the current device, whatever the tensors are on: that of the tensors is made the current one, for each such call."""
    current, seen = ["first"], []

    class DeviceOf:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            current.append(self.tensor)

        def __exit__(self, *_):
            current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda **_: seen.append((grid, current[-1]))

    monkeypatch.setattr(torch.cuda, "device_of", DeviceOf)
    launches = [launching.Launch(Kernel(), (n,), {}) for n in (1, 0, 2)]
    tensor = torch.zeros(3)
    launching.run(launches, tensor)
    assert [(grid, device is tensor) for grid, device in seen] == [((1,), True), ((2,), True)]
    assert current == ["first"]
