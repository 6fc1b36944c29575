"""A stand-in for CUDA graphs on a CPU: what a capture forbids is refused, and a replay repeats what was captured and nothing else.

Between the beginning and the end of a capture every torch operation is written down with its tensors and its numbers. A replay runs these
operations again on the same memory, without any of the Python around them. So a number, a decision or an address that Python takes
in each step is, in a replay, that of the capture, and shows in the output. Kernels are operations as a whole: their torch code on a CPU is not
what runs on a GPU; with ``impl="triton"`` each launch is one.

What a capture makes lives in a pool that graphs share, so it is lost at the next replay of any graph: all of it is poison before a replay.
Other tensors are read by address, which does not keep them alive: a replay is refused once one of them is gone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from quire.kernels.attention import api
from quire.kernels.common import checks, launching
from quire.models.deepseek_v4 import attention as v4_attention
from quire.models.deepseek_v4 import model as v4_model
from quire.models.engine import device_drafter, graphs, sampler
from quire.models.engine.engine import Engine
from quire.models.layers import attention, moe

KERNELS = {
    api: ("paged_attention", "sliding_window_attention"),
    attention: ("write_kv",),
    v4_attention: (
        "write_latent",
        "copy_overlap",
        "compress",
        "index_topk",
        "compressed_attention",
    ),
    sampler: ("sample_tokens",),
    device_drafter: ("sample_tokens",),
    moe: ("expert_mlp",),
    v4_model: ("expert_mlp",),
}
ON_HOST = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
FROM_HOST = ("tensor", "as_tensor", "from_numpy")
SHAPES_FROM_VALUES = ("nonzero", "unique", "masked_select", "local_scalar", "equal", "is_nonzero", "bincount")  # fmt: skip


class NotCapturable(Exception):
    """An operation that a CUDA graph cannot hold: a wait for the device, a shape that depends on values, or a copy from memory that is not pinned."""


def forbidden(op, args, kwargs) -> str | None:
    """The name of an operation that waits for the device or whose shapes depend on values."""
    name = op._schema.name.removeprefix("aten::")
    masks = name.startswith("index") and any(
        i is not None and i.dtype == torch.bool for i in (args[1] if isinstance(args[1], (list, tuple)) else [])
    )  # fmt: skip
    counts = name == "repeat_interleave" and kwargs.get("output_size") is None
    return name if masks or counts or any(n in name for n in SHAPES_FROM_VALUES) else None


class Graph(TorchDispatchMode):
    """One capture. made: the tensors whose memory it took."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []
        self.inside = False  # a kernel
        self._work: list[tuple[Callable, tuple, dict, dict[int, torch.Tensor]]] = []

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
        is_empty = "empty" in getattr(op, "__name__", "")
        if not is_empty and (writes or fresh):
            self._work.append((op, args, kwargs, {i: results[i] for i in fresh}))
        return out

    def forget_outside(self) -> None:
        """After the capture: of tensors that it did not make, only the address is known."""
        own = {_place(tensor) for tensor in self.made}

        def by_address(tensor):
            return tensor if _place(tensor) in own or not tensor.numel() else Outside(tensor)

        self._work = [
            (op, *tree_map_only(torch.Tensor, by_address, (args, kwargs)), kept)
            for op, args, kwargs, kept in self._work
        ]

    @torch.inference_mode()
    def replay(self) -> None:
        for op, *arguments, kept in self._work:
            args, kwargs = tree_map_only(Outside, Outside.tensor, arguments)
            new = _tensors(op(*args, **kwargs))
            for i, tensor in kept.items():
                tensor.copy_(new[i])

    @torch.inference_mode()
    def poison(self) -> None:
        for tensor in self.made:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif tensor.dtype != torch.bool:
                tensor.fill_(-(2**30) if tensor.dtype.itemsize >= 4 else 7)


class Outside:
    """A tensor by its address."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._dtype = tensor.dtype
        self._view = tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise NotCapturable("memory of a tensor that is gone")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


class Captures:
    """Captures work as `quire.models.engine.graphs.CudaCapture` does.

    granularity: functions that are one operation each, by module, as `KERNELS`.
    """

    def __init__(self, kernels=KERNELS) -> None:
        self.graphs: list[Graph] = []
        self.num_replays = 0
        self._kernels = kernels

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        for _ in range(graphs.WARM_UP_RUNS):
            work()
        graph = Graph()
        with self._capturing(graph), graph:
            work()
        graph.forget_outside()
        self.graphs.append(graph)

        def replay() -> None:
            self.num_replays += 1
            for other in self.graphs:
                other.poison()
            graph.replay()

        return replay

    @contextmanager
    def _capturing(self, graph: Graph):
        def on_host(name, original):
            def call(*args, **kwargs):
                if not graph.inside:
                    raise NotCapturable(name)
                return original(*args, **kwargs)

            return call

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checks, "is_readable", lambda tensor: graph.inside and tensor.is_cpu)
            for module, names in self._kernels.items():
                for name in names:
                    original = getattr(module, name)
                    patch.setattr(module, name, lambda *a, f=original, **k: graph.kernel(f, *a, **k))  # fmt: skip
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


LAUNCHES = {launching: ("launch",)}
"""Kernels by launch: what wrappers do around them is captured operation by operation."""


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
