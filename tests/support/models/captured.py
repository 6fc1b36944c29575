"""A stand-in for CUDA graphs on a CPU: what a capture forbids is refused, and a replay repeats what was captured and nothing else.

Between the beginning and the end of a capture every torch operation is written down with its tensors and its numbers. A replay runs these
operations again on the same memory, without any of the Python around them: a number, a decision or an address that Python takes in each
step is, in a replay, that of the capture, and shows in the output. Kernels are operations as a whole.

What a capture makes lives in a pool that graphs share: all of it is poison before a replay of any graph. Other tensors are read by
address, which does not keep them alive: a replay is refused once one of them is gone.
"""

import warnings
from contextlib import contextmanager

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
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
    *((v4_attention, name) for name in ("write_latent", "copy_overlap", "compress", "index_topk", "compressed_attention")),
    (sampler, "sample_tokens"), (device_drafter, "sample_tokens"), (moe, "expert_mlp"), (v4_model, "expert_mlp"),
]  # fmt: skip
ON_HOST = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
FROM_HOST = ("tensor", "as_tensor", "from_numpy")
SHAPES_FROM_VALUES = ("nonzero", "unique", "masked_select", "local_scalar", "equal", "is_nonzero", "bincount")  # fmt: skip


class NotCapturable(Exception):
    """An operation that a CUDA graph cannot hold."""


def forbidden(op, args, kwargs) -> str | None:
    """The name of an operation that waits for the device or whose shapes depend on values."""
    name = op._schema.name.removeprefix("aten::")
    masks = name.startswith("index") and any(
        i is not None and i.dtype == torch.bool for i in (args[1] if isinstance(args[1], (list, tuple)) else [])
    )  # fmt: skip
    counts = name == "repeat_interleave" and kwargs.get("output_size") is None
    return name if masks or counts or any(n in name for n in SHAPES_FROM_VALUES) else None


class Waits(TorchDispatchMode):
    """Keeps the names of operations that wait for the device. monkeypatch: to see copies from and to the host too."""

    def __init__(self, monkeypatch=None):
        super().__init__()
        self.found, self._inside = [], False
        for owner, names in ((torch.Tensor, ON_HOST), (torch, ("tensor", "as_tensor"))):
            for name in names if monkeypatch else ():
                monkeypatch.setattr(owner, name, self._seen(name, getattr(owner, name)))

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self._see(forbidden(op, args, kwargs or {}))
        return op(*args, **(kwargs or {}))

    def _see(self, name):
        if name is not None and not self._inside:
            self.found.append(name)

    def _seen(self, name, work):
        return lambda *args, **kwargs: (self._see(name), work(*args, **kwargs))[1]

    def unseen(self, work):
        """A function in which nothing is kept, as it is one operation on a device."""

        def call(*args, **kwargs):
            before, self._inside = self._inside, True
            try:
                return work(*args, **kwargs)
            finally:
                self._inside = before

        return call


class Graph(TorchDispatchMode):
    """One capture. made: the tensors whose memory it took."""

    def __init__(self):
        super().__init__()
        self.made, self.inside, self._work = [], False, []  # inside: a kernel

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.inside:
            return op(*args, **kwargs)
        if found := forbidden(op, args, kwargs):
            raise NotCapturable(found)
        return self._run(op, args, kwargs, writes=op._schema.is_mutable)

    def kernel(self, function, *args, **kwargs):
        """Runs a function as one operation."""
        if self.inside:
            return function(*args, **kwargs)
        self.inside = True
        try:
            return self._run(function, args, kwargs, writes=True)
        finally:
            self.inside = False

    def _run(self, op, args, kwargs, *, writes):
        out = op(*args, **kwargs)
        given = {_place(t) for t in _tensors((args, kwargs))}
        results = _tensors(out)
        fresh = [i for i, t in enumerate(results) if t.numel() and _place(t) not in given]
        self.made += [results[i] for i in fresh]
        if "empty" not in getattr(op, "__name__", "") and (writes or fresh):
            self._work.append((op, args, kwargs, {i: results[i] for i in fresh}))
        return out

    def forget_outside(self):
        """After the capture: of tensors that it did not make, only the address is known."""
        own = {_place(tensor) for tensor in self.made}

        def by_address(tensor):
            return tensor if _place(tensor) in own or not tensor.numel() else Outside(tensor)

        self._work = [
            (op, *tree_map_only(torch.Tensor, by_address, given), kept)
            for op, *given, kept in self._work
        ]

    @torch.inference_mode()
    def replay(self):
        for op, *arguments, kept in self._work:
            args, kwargs = tree_map_only(Outside, Outside.tensor, arguments)
            new = _tensors(op(*args, **kwargs))
            for i, tensor in kept.items():
                tensor.copy_(new[i])

    @torch.inference_mode()
    def poison(self):
        for tensor in self.made:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif tensor.dtype != torch.bool:
                tensor.fill_(-(2**30) if tensor.dtype.itemsize >= 4 else 7)


class Outside:
    """A tensor by its address."""

    def __init__(self, tensor):
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._view = tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self):
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise NotCapturable("memory of a tensor that is gone")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


class Captures:
    """Captures work as `quire.models.engine.graphs.CudaCapture` does."""

    def __init__(self):
        self.graphs, self.num_replays = [], 0

    def __call__(self, work):
        for _ in range(graphs.WARM_UP_RUNS):
            work()
        graph = Graph()
        with _capturing(graph), graph:
            work()
        graph.forget_outside()
        self.graphs.append(graph)

        def replay():
            self.num_replays += 1
            for other in self.graphs:
                other.poison()
            graph.replay()

        return replay


@contextmanager
def _capturing(graph):
    def on_host(name, original):
        def call(*args, **kwargs):
            if not graph.inside:
                raise NotCapturable(name)
            return original(*args, **kwargs)

        return call

    def kernel(original):
        return lambda *args, **kwargs: graph.kernel(original, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "is_readable", lambda tensor: graph.inside and tensor.is_cpu)
        for module, name in KERNELS:
            patch.setattr(module, name, kernel(getattr(module, name)))
        for owner, names in ((torch.Tensor, ON_HOST), (torch, FROM_HOST)):
            for name in names:
                patch.setattr(owner, name, on_host(name, getattr(owner, name)))
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
