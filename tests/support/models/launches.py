"""Launches of a layer on a device, counted on a CPU."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.kernels.common import checks, launching

# What gives memory and launches nothing.
FREE = {"empty", "empty_like", "empty_strided", "new_empty"}


class LaunchCounter(TorchDispatchMode):
    """Counts launches while it is entered: operations of torch that are no views, and kernels
    of Triton, which it does not run.

    Args:
        monkeypatch: that of a test.

    Attributes:
        counts: launches by name.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.counts = Counter()
        monkeypatch.setattr(launching, "launch", self._launch)
        monkeypatch.setattr(checks, "is_readable", lambda tensor: False)

    def _launch(self, kernel, grid, **arguments):
        if min(grid) > 0:
            self.counts[kernel.__name__.strip("_")] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        shared = _storages(args) >= _storages(out) and not func._schema.is_mutable
        if not shared and name not in FREE:
            self.counts[name] += 1
        return out


def _storages(values):
    """Addresses of the memory of all tensors among values."""
    tensors = [x for x in tree_leaves(values) if isinstance(x, Tensor)]
    return {x.untyped_storage().data_ptr() for x in tensors}


def one_product(x, weight):
    """``linear_fp32`` as a device runs it, with a result of its dtype: one launch."""
    return torch.zeros(len(x), len(weight))


def launches_of_layers(model, forward, monkeypatch):
    """[Counter of one layer] of a model's step, which is ``forward()``."""
    counter, found = LaunchCounter(monkeypatch), []
    handles = []
    for layer in model.layers:
        handles.append(layer.register_forward_pre_hook(lambda *_: counter.counts.clear()))
        handles.append(layer.register_forward_hook(lambda *_: found.append(counter.counts.copy())))
    with counter:
        forward()
    for handle in handles:
        handle.remove()
    assert len(found) == len(model.layers)
    return found
