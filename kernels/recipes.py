"""What calls that look alike have in common: that their arguments pass the checks, and what is launched for them.

A model makes the same call for each of its layers, over other tensors. Checks and launch arguments depend on sizes, strides, dtypes, devices and
host values alone, so they are worked out for the first such call and remembered, without any tensor. Values in device memory are never
looked at, here or there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels import _launch
from quire.kernels._launch import Launch

# Remembered calls; all are forgotten when there are more.
LIMIT = 4096
# Launch arguments that go by another name in the call.
NAMES = {
    "k_fresh": "k", "v_fresh": "v", "k_tiles": "k", "v_tiles": "v", "partial_out": "workspace", "partial_lse": "workspace",
}  # fmt: skip


@dataclass(frozen=True)
class View:
    """How a launch sees a tensor of the call: as another dtype, some of its elements, or described by (shape, strides, block shape)."""

    dtype: torch.dtype | None = None
    elements: slice | None = None
    descriptor: tuple[list[int], list[int], list[int]] | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor | TensorDescriptor:
        """The tensor so seen."""
        if self.descriptor is not None:
            return TensorDescriptor(tensor, *self.descriptor)
        return tensor[self.elements] if self.elements is not None else tensor.view(self.dtype)


@dataclass(frozen=True)
class Step:
    """One launch without its tensors: those are (launch argument, name of the call's argument or of a view)."""

    kernel: JITFunction
    grid: tuple[int, ...]
    constants: dict[str, Any]
    tensors: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Recipe:
    """The launches of a call without its tensors.

    views: launch argument -> (the call's argument, how it is seen). made: "out" and "workspace" where the call has them, as (shape, dtype,
    device).
    """

    steps: tuple[Step, ...]
    views: dict[str, tuple[str, View]]
    made: dict[str, tuple[torch.Size, torch.dtype, torch.device]]

    def run(self, tensors: dict[str, Any]) -> None:
        """Launch over the tensors of a call, by name; what it does not give is made, and views are added."""
        for name, (shape, dtype, device) in self.made.items():
            if tensors[name] is None:
                tensors[name] = torch.empty(shape, dtype=dtype, device=device)
        for name, (source, view) in self.views.items():
            tensors[name] = view.of(tensors[source])
        for step in self.steps:
            arguments = step.constants.copy()
            for name, source in step.tensors:
                arguments[name] = tensors[source]
            _launch.launch(step.kernel, step.grid, arguments)


_REMEMBERED: dict[Hashable, Recipe] = {}


def key(what: Hashable, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides of a call: all of its arguments but the addresses of tensors.

    what: which function this is, and what else its launches depend on.
    """
    # The most of what a remembered call costs: one flat tuple, made and hashed once.
    parts: list[Any] = [what]
    for value in arguments.values():
        if value is None:
            parts.append(None)
        elif isinstance(value, torch.Tensor):
            parts += (value.shape, value.stride(), value.dtype, value.get_device())
        else:
            parts += (value.__class__, value)  # True is no 1
    return tuple(parts)


def run(
    what: Hashable,
    arguments: dict[str, Any],
    prepare: Callable[[dict[str, Any]], tuple[dict[str, Any], list[Launch]]],
) -> Any:
    """Check and launch a call, or launch what was launched for one like it; its ``out``, None if it has none.

    Args:
        what: as in ``key``.
        arguments: of the call, by name; changed.
        prepare: checks arguments; returns them with ``out`` made where the call gives none, and the launches.

    Source: this file's docstring.
    """
    found = key(what, arguments)
    try:
        recipe = _REMEMBERED.get(found)
    except TypeError:  # an argument that has no hash: the checks refuse it
        recipe = None
    if recipe is not None:
        recipe.run(arguments)
        return arguments.get("out")
    tensors, launches = prepare(arguments)
    if "workspace" in tensors and tensors["workspace"] is None:
        # What launches share then is made for them.
        shared = (launch.arguments.get("partial_out") for launch in launches)
        tensors["workspace"] = next((tensor for tensor in shared if tensor is not None), None)
    if len(_REMEMBERED) >= LIMIT:
        _REMEMBERED.clear()
    _REMEMBERED[found] = _recipe(launches, tensors)
    for launch in launches:
        launch.run()
    return tensors.get("out")


def forget() -> None:
    """Forget all calls."""
    _REMEMBERED.clear()


def _recipe(launches: Sequence[Launch], tensors: Mapping[str, Any]) -> Recipe:
    views: dict[str, tuple[str, View]] = {}
    steps = tuple(_step(launch, tensors, views) for launch in launches)
    made = {
        name: (tensor.shape, tensor.dtype, tensor.device)
        for name in ("out", "workspace")
        if (tensor := tensors.get(name)) is not None
    }
    return Recipe(steps, views, made)


def _step(launch: Launch, tensors: Mapping[str, Any], views: dict[str, tuple[str, View]]) -> Step:
    constants, passed = {}, []
    for name, value in launch.arguments.items():
        if not isinstance(value, (torch.Tensor, TensorDescriptor)):
            constants[name] = value
            continue
        source = name if name in tensors else NAMES[name]
        view = _view(value, tensors[source])
        if view is not None:
            assert views.setdefault(name, (source, view)) == (source, view)
            source = name
        passed.append((name, source))
    return Step(launch.kernel, launch.grid, constants, tuple(passed))


def _view(value: torch.Tensor | TensorDescriptor, source: torch.Tensor) -> View | None:
    """How ``value`` is seen of ``source``; None: as it is."""
    if isinstance(value, TensorDescriptor):
        assert value.base is source
        return View(descriptor=(value.shape, value.strides, value.block_shape))
    if value is source:
        return None
    if value.dtype != source.dtype:
        assert value.data_ptr() == source.data_ptr() and value.stride() == source.stride()
        return View(dtype=value.dtype)
    assert value.dim() == source.dim() == 1 and value.stride() == source.stride() == (1,)
    start = value.storage_offset() - source.storage_offset()
    return View(elements=slice(start, start + value.numel()))
