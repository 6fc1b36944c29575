"""A stand-in for CUDA graphs on a CPU.

A capture refuses what a CUDA graph cannot hold. A replay does the work again, and must do what was
captured: the same operations, with the same numbers, on the same memory of tensors that the capture
did not make. Kernels are operations as a whole. What captures make lives in a pool that graphs
share: all of it is poison before a replay of any graph.
"""

import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from quire.kernels.attention import api
from quire.kernels.common import checks
from quire.models.deepseek_v4 import attention as v4_attention
from quire.models.deepseek_v4 import model as v4_model
from quire.models.engine import device_drafter, graphs, sampler
from quire.models.engine.engine import Engine
from quire.models.layers import attention, moe

KERNELS = [
    (api, "paged_attention"), (api, "sliding_window_attention"), (attention, "write_kv"),
    (v4_attention, "write_latent"), (v4_attention, "copy_overlap"), (v4_attention, "compress"),
    (v4_attention, "index_topk"), (v4_attention, "compressed_attention"),
    (sampler, "sample_tokens"), (device_drafter, "sample_tokens"),
    (moe, "expert_mlp"), (v4_model, "expert_mlp"),
]  # fmt: skip
ON_HOST = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
FROM_HOST = ("tensor", "as_tensor", "from_numpy")
SHAPES_FROM_VALUES = (
    "nonzero", "unique", "masked_select", "local_scalar", "equal", "is_nonzero", "bincount",
)  # fmt: skip


class NotCapturable(Exception):
    """An operation that a CUDA graph cannot hold."""


def forbidden(op, args, kwargs) -> str | None:
    """The name of an operation that waits for the device or whose shapes depend on values."""
    name = op._schema.name.removeprefix("aten::")
    indices = args[1] if name.startswith("index") and isinstance(args[1], list | tuple) else []
    masks = any(i is not None and i.dtype == torch.bool for i in indices)
    counts = name == "repeat_interleave" and kwargs.get("output_size") is None
    return name if masks or counts or any(n in name for n in SHAPES_FROM_VALUES) else None


class Recording(TorchDispatchMode):
    """One run of the work of a graph.

    Attributes:
        made: the tensors whose memory it took.
        done: operations with their arguments, tensors as `_Tensor`.
        inside: True in a kernel.
    """

    def __init__(self):
        super().__init__()
        self.made, self.done, self.inside, self._own = [], [], False, {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.inside:
            return op(*args, **kwargs)
        if found := forbidden(op, args, kwargs):
            self.refuse(found)
        return self._run(op, args, kwargs, writes=op._schema.is_mutable)

    def refuse(self, name):
        raise NotCapturable(name)

    def kernel(self, name, function, *args, **kwargs):
        """Run a function as one operation."""
        if self.inside:
            return function(*args, **kwargs)
        self.inside = True
        try:
            return self._run(function, args, kwargs, writes=True, name=name)
        finally:
            self.inside = False

    def _run(self, op, args, kwargs, *, writes, name=None):
        given = tree_map_only(torch.Tensor, self._described, (args, kwargs))
        out = op(*args, **kwargs)
        known = {*map(_place, _tensors((args, kwargs)))} | self._own.keys()
        fresh = [t for t in _tensors(out) if t.numel() and _place(t) not in known]
        for tensor in fresh:
            self._own[_place(tensor)] = len(self._own)
        self.made += fresh
        if writes or fresh:  # else a view
            self.done.append((name or op, given))
        return out

    def _described(self, tensor):
        """Memory and view of a tensor; memory of its own is counted."""
        place = _place(tensor)
        where = ("made", self._own[place]) if place in self._own else place
        return where, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    @torch.inference_mode()
    def poison(self):
        for tensor in self.made:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif tensor.dtype != torch.bool:
                tensor.fill_(-(2**30) if tensor.dtype.itemsize >= 4 else 7)


class Captures:
    """Captures work as `quire.models.engine.graphs.CudaCapture` does."""

    def __init__(self):
        self.graphs, self.num_replays = [], 0

    def __call__(self, work):
        for _ in range(graphs.WARM_UP_RUNS):
            work()
        captured, number = recorded(work), len(self.graphs)
        self.graphs.append(captured)

        def replay():
            self.num_replays += 1
            for other in self.graphs:
                other.poison()
            self.graphs[number] = again = recorded(work)
            assert again.done == captured.done

        return replay


def recorded(work):
    """The `Recording` of a run of ``work``."""
    recording = Recording()
    with capturing(recording):
        work()
    return recording


class Waits(Recording):
    """Notes what waits for the device, and is no capture.

    Attributes:
        found: names of operations.
    """

    def __init__(self):
        super().__init__()
        self.found = []

    def refuse(self, name):
        if name != "from_numpy":  # is copied from pinned memory
            self.found.append(name)


@contextmanager
def capturing(recording):
    """Let ``recording`` see what runs."""

    def on_host(name, original):
        def call(*args, **kwargs):
            if not recording.inside:
                recording.refuse(name)
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "is_readable", lambda tensor: recording.inside and tensor.is_cpu)
        for module, name in KERNELS:
            patch.setattr(module, name, partial(recording.kernel, name, getattr(module, name)))
        for owner, names in ((torch.Tensor, ON_HOST), (torch, FROM_HOST)):
            for name in names:
                patch.setattr(owner, name, on_host(name, getattr(owner, name)))
        with recording:
            yield


def captured_engine(model, config, capture, **more) -> Engine:
    """An engine whose decode graphs ``capture`` makes; one that it cannot make is an error."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("error", message="decode graphs: ")
        patch.setattr(graphs, "default_capture", lambda device: capture)
        return Engine(model, config, **more)


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _place(tensor):
    return tensor.untyped_storage().data_ptr()
