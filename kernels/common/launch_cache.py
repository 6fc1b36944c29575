"""What calls that look alike have in common: that their arguments pass the checks, and what is launched for them.

A model makes the same call for each of its layers, over other tensors. Checks and launch arguments depend on sizes, strides, dtypes, devices and
host values alone, so they are worked out for the first such call and remembered, without any tensor. Values in device memory are never
looked at, here or there. Pages of latents or of index keys count as their tensor and what else they are made of.

A host value that changes makes another call: a bound of the lengths that follows them at each step has the first layer of a step prepare its
call anew, and the other layers find it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from . import launching
from .latent_pages import IndexPages, LatentPages
from .launching import Launch

# Remembered calls; all are forgotten when there are more.
LIMIT = 4096
# Arguments that hold a tensor and are described by it and by their ``format``.
PAGES = (LatentPages, IndexPages)
TENSORS = (Tensor, *PAGES)
HOST_VALUES = frozenset((int, float, bool))
# Launch arguments that go by another name in the call.
NAMES = {
    "k_fresh": "k", "v_fresh": "v", "k_tiles": "k", "v_tiles": "v", "partial_out": "workspace",
    "window_list": "window_table", "picks": "topk_indices", "pick_lens": "topk_lens",
    "keys": "pages", "scores": "workspace",
}  # fmt: skip


@dataclass(frozen=True)
class View:
    """How a launch sees a tensor of the call, which to a launch is a dtype and an address: strides come beside it.

    dtype: as another one. descriptor: what a tensor descriptor over it has beside the tensor, in its own dtype.
    """

    dtype: torch.dtype | None = None
    descriptor: dict[str, Any] | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor | TensorDescriptor:
        """The tensor so seen."""
        if self.descriptor is not None:
            # Made without its checks, which the first such call has passed: they take 10 us.
            made = TensorDescriptor.__new__(TensorDescriptor)
            made.__dict__.update(self.descriptor, base=tensor)
            return made
        return tensor.view(self.dtype)


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

    views: name -> (the call's argument, how it is seen); the name is that of the launch argument, primed where that is taken. made: "out",
    "lens", "lse" and "workspace" where the call has them, as (shape, strides, dtype, device). pages: arguments that are pages, of which
    launches take the tensor. device: index of the device of all tensors, -1 for a CPU.
    """

    device: int
    steps: tuple[Step, ...]
    views: dict[str, tuple[str, View]]
    made: dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]]
    pages: tuple[str, ...]

    def run(self, tensors: dict[str, Any]) -> None:
        """Launch over the tensors of a call, by name; what it does not give is made, and views are added."""
        for name in self.pages:
            tensors[name] = tensors[name].data
        for name, (shape, strides, dtype, device) in self.made.items():
            if tensors[name] is None:
                tensors[name] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        for name, (source, view) in self.views.items():
            tensors[name] = view.of(tensors[source])
        with launching.on_device(self.device):
            for step in self.steps:
                arguments = step.constants.copy()
                for name, source in step.tensors:
                    arguments[name] = tensors[source]
                launching.launch(step.kernel, step.grid, arguments)


_REMEMBERED: dict[Hashable, Recipe] = {}


def key(what: Hashable, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides of a call: all of its arguments but the addresses of tensors.

    what: which function this is, and what else its launches depend on.
    """
    # The most of what a remembered call costs: one flat tuple, made and hashed once; what most arguments are is told by their class.
    parts: list[Any] = [what]
    add = parts.append
    for value in arguments.values():
        if value is None:
            add(None)
            continue
        tensor, kind = value, value.__class__
        if kind is not Tensor:
            if kind in HOST_VALUES or not isinstance(value, TENSORS):
                add(kind)  # True is no 1
                add(value)
                continue
            if isinstance(value, PAGES):
                add(value.format)
                tensor = value.data
        add(tensor.shape)
        add(tensor.stride())
        add(tensor.dtype)
        index = tensor.get_device()
        add(index if index >= 0 else tensor.device)  # -1 is a CPU, and what has no storage
    return tuple(parts)


def run(
    what: Hashable,
    arguments: dict[str, Any],
    prepare: Callable[[dict[str, Any]], tuple[dict[str, Any], list[Launch]]],
) -> Any:
    """Check and launch a call, or launch what was launched for one like it; its ``out``, None if it has none.

    Args:
        what: as in ``key``.
        arguments: of the call, by name; changed: what was made is there after the call.
        prepare: checks arguments; returns them with ``out``, ``lens`` and ``lse`` made where the call wants them and gives none, and the
            launches.

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
    recipe = _REMEMBERED[found] = _recipe(launches, tensors)
    arguments.update((name, tensors[name]) for name in recipe.made if arguments[name] is None)
    with launching.on_device(recipe.device):
        for launch in launches:
            launch.run()
    return arguments.get("out")


def at_16_bytes(*values: Any) -> bool:
    """Whether the tensors among ``values``, pages too, start at multiples of 16 bytes. A call goes by it as much as by its strides."""
    addresses = 0
    for value in values:
        if value is not None:
            tensor = value.data if isinstance(value, PAGES) else value
            if isinstance(tensor, Tensor):
                addresses |= tensor.data_ptr()
    return addresses % 16 == 0


def rows_at_16_bytes(*values: Any) -> bool:
    """Whether also all of their rows do, those of quantised pages at their fixed sizes."""
    tensors = [value.data if isinstance(value, PAGES) else value for value in values]
    strides = [stride * t.itemsize for t in tensors if t is not None for stride in t.stride()[:-1]]
    return at_16_bytes(*values) and all(stride % 16 == 0 for stride in strides)


def forget() -> None:
    """Forget all calls."""
    _REMEMBERED.clear()


def _recipe(launches: Sequence[Launch], arguments: Mapping[str, Any]) -> Recipe:
    pages = {name: value.data for name, value in arguments.items() if isinstance(value, PAGES)}
    tensors = {**arguments, **pages}
    views: dict[str, tuple[str, View]] = {}
    steps = tuple(_step(launch, tensors, views) for launch in launches)
    made = {
        name: (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        for name in ("out", "lens", "lse", "workspace")
        if (tensor := tensors.get(name)) is not None
    }
    device = next(t.get_device() for t in tensors.values() if isinstance(t, Tensor))
    return Recipe(device, steps, views, made, tuple(pages))


def _step(launch: Launch, tensors: Mapping[str, Any], views: dict[str, tuple[str, View]]) -> Step:
    constants, passed = {}, []
    for name, value in launch.arguments.items():
        if not isinstance(value, (torch.Tensor, TensorDescriptor)):
            constants[name] = value
            continue
        source = name if name in tensors else NAMES[name]
        view = _view(value, tensors[source])
        if view is not None:
            seen = next((known for known, same in views.items() if same == (source, view)), name)
            # Primed where that names an argument, or what another launch sees by it.
            while seen in tensors or views.setdefault(seen, (source, view)) != (source, view):
                seen += "'"
            source = seen
        passed.append((name, source))
    return Step(launch.kernel, launch.grid, constants, tuple(passed))


def _view(value: torch.Tensor | TensorDescriptor, source: torch.Tensor) -> View | None:
    """How ``value`` is seen of ``source``; None: as it is."""
    if isinstance(value, TensorDescriptor):
        assert value.base is source
        return View(descriptor={k: v for k, v in vars(value).items() if k != "base"})
    # A copy would be that of the first such call for ever.
    assert value.data_ptr() == source.data_ptr()
    return None if value.dtype == source.dtype else View(value.dtype)
