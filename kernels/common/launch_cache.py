"""The launches of calls that look alike, prepared once: checked arguments and launch arguments.

A model makes the same call for each of its layers, over other tensors. Checks and launch arguments
depend on sizes, strides, dtypes, devices and host values alone, so they are worked out for the
first such call and cached without any tensor. The second one binds its launches to the kernels that
Triton compiled (``bound_launch``). Values in device memory are never looked at, neither then nor
later. Pages of latents or of index keys count as their tensor and what else they are made of.

A host value that changes makes another call: if a bound of the lengths changes at each step, the
first layer of a step prepares its call anew, and the other layers find it in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from . import bound_launch, launching
from .bound_launch import BoundLaunch, Place
from .call_keys import PAGES, key
from .launching import Launch

# Cached calls; all are dropped when there are more.
LIMIT = 4096
# Arguments that a call makes where they are None.
MADE = (
    "out", "ids", "lens", "lse", "post", "comb", "route_weights", "order", "gated", "workspace",
)  # fmt: skip
# Launch arguments that have another name in the call.
NAMES = {
    "k_new": "k", "v_new": "v", "k_tiles": "k", "v_tiles": "v", "partial_out": "workspace",
    "keys": "pages",
}  # fmt: skip


@dataclass(frozen=True)
class View:
    """How a launch sees a tensor of the call, of which a launch takes the dtype and the address.

    Attributes:
        dtype: seen as this dtype.
        descriptor: what a tensor descriptor over it has beside the tensor, in its own dtype.
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
class CachedLaunch:
    """One launch without its tensors, which are named by the call's argument or a view.

    Attributes:
        kernel: what is launched.
        grid: its programs.
        constants: launch arguments and options that hold no tensor, by name.
        tensors: (launch argument, its tensor's name).
        tuples: launch arguments that are named tuples with tensors: (launch argument, its class,
            of each field (its tensor's name, None) or ("", its value)).
    """

    kernel: JITFunction
    grid: tuple[int, ...]
    constants: dict[str, Any]
    tensors: tuple[tuple[str, str], ...]
    tuples: tuple[tuple[str, type, tuple[tuple[str, Any], ...]], ...]

    @property
    def sources(self) -> list[str]:
        """Names of the tensors."""
        in_tuples = [source for _, _, fields in self.tuples for source, _ in fields if source]
        return [source for _, source in self.tensors] + in_tuples

    def arguments(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The launch arguments and options over ``tensors``, by name."""
        found = self.constants.copy()
        for name, source in self.tensors:
            found[name] = tensors[source]
        for name, kind, fields in self.tuples:
            values = [tensors[source] if source else value for source, value in fields]
            found[name] = tuple.__new__(kind, values)  # half the time that the class takes
        return found


@dataclass(frozen=True)
class CachedCall:
    """The launches of a call without its tensors.

    Attributes:
        device: index of the device of all tensors, -1 for a CPU.
        launches: in the order in which they run.
        views: name -> (the call's argument, how it is seen); the name is that of the launch
            argument, primed where that is taken.
        made: those of MADE that the call has, as (shape, strides, dtype, device).
        pages: arguments that are pages, of which launches take the tensor.
        pointers: the call's arguments of which launches take the address.
        descriptors: views that are tensor descriptors.
        places: of what launches take, by its name: its place among pointers and descriptors.
        bound: the launches as Triton has made them, by which addresses are divisible.
    """

    device: int
    launches: tuple[CachedLaunch, ...]
    views: dict[str, tuple[str, View]]
    made: dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]]
    pages: tuple[str, ...]
    pointers: tuple[str, ...]
    descriptors: tuple[str, ...]
    places: dict[str, Place]
    bound: dict[tuple[bool, ...], list[BoundLaunch]] = field(default_factory=dict)

    def run(self, tensors: dict[str, Any]) -> None:
        """Launch over a call's tensors, by name; those not given are made."""
        for name in self.pages:
            tensors[name] = tensors[name].data
        for name, (shape, strides, dtype, device) in self.made.items():
            if tensors[name] is None:
                tensors[name] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        addresses = [tensors[name].data_ptr() for name in self.pointers]
        divisible = bound_launch.divisible(addresses)
        bound = self.bound.get(divisible)
        with launching.on_device(self.device):
            if bound is None or bound_launch.observed():
                self._launch(tensors, divisible)
                return
            addresses += [self._view(tensors, name) for name in self.descriptors]
            stream = bound_launch.current_stream(self.device)
            for launch in bound:
                launch.run(stream, addresses)

    def _launch(self, tensors: dict[str, Any], divisible: tuple[bool, ...]) -> None:
        """Have Triton launch, and bind what it launched; views are added to ``tensors``."""
        for name in self.views:
            tensors[name] = self._view(tensors, name)
        bound: list[BoundLaunch | None] = []
        for cached in self.launches:
            compiled = launching.launch(cached.kernel, cached.grid, cached.arguments(tensors))
            if min(cached.grid) > 0:
                arguments = cached.arguments(self.places)
                bound.append(
                    bound_launch.bind(
                        compiled, cached.kernel, cached.grid, arguments, len(self.places)
                    )
                )
        if bound and None not in bound and not bound_launch.observed():
            self.bound[divisible] = bound

    def _view(self, tensors: dict[str, Any], name: str) -> Any:
        source, view = self.views[name]
        return view.of(tensors[source])


_CACHE: dict[Hashable, CachedCall] = {}


def run(
    what: Hashable,
    arguments: dict[str, Any],
    prepare: Callable[[dict[str, Any]], tuple[dict[str, Any], list[Launch]]],
) -> Any:
    """Check and launch a call, or launch what was launched for one like it.

    Args:
        what: as in ``call_keys.key``.
        arguments: of the call, by name; changed: what was made is there after the call.
        prepare: checks arguments; returns them, with those of MADE made that the call wants and
            gives none of, and the launches.

    Returns:
        The call's ``out``; None if it has none.

    Source: this file's docstring.
    """
    found = key(what, arguments)
    try:
        cached = _CACHE.get(found)
    except TypeError:  # an argument that has no hash: the checks refuse it
        cached = None
    if cached is not None:
        cached.run(arguments)
        return arguments.get("out")
    tensors, launches = prepare(arguments)
    if "workspace" in tensors and tensors["workspace"] is None:
        # What launches share then is made for them.
        shared = (launch.values.get("partial_out") for launch in launches)
        tensors["workspace"] = next((tensor for tensor in shared if tensor is not None), None)
    if len(_CACHE) >= LIMIT:
        _CACHE.clear()
    cached = _CACHE[found] = _cached_call(launches, tensors)
    arguments.update((name, tensors[name]) for name in cached.made if arguments[name] is None)
    with launching.on_device(cached.device):
        for launch in launches:
            launch.run()
    return arguments.get("out")


def at_16_bytes(*values: Any) -> bool:
    """Whether the tensors among ``values``, pages too, start at multiples of 16 bytes.

    A call goes by it as much as by its strides.
    """
    addresses = 0
    for value in values:
        if value is not None:
            tensor = value.data if isinstance(value, PAGES) else value
            if isinstance(tensor, Tensor):
                addresses |= tensor.data_ptr()
    return addresses % 16 == 0


def rows_at_16_bytes(*values: Any) -> bool:
    """Whether also all of their rows do, those of quantized pages at their fixed sizes."""
    tensors = [value.data if isinstance(value, PAGES) else value for value in values]
    strides = [stride * t.itemsize for t in tensors if t is not None for stride in t.stride()[:-1]]
    return at_16_bytes(*values) and all(stride % 16 == 0 for stride in strides)


def clear() -> None:
    """Drop all cached calls."""
    _CACHE.clear()


def _cached_call(launches: Sequence[Launch], arguments: Mapping[str, Any]) -> CachedCall:
    pages = {name: value.data for name, value in arguments.items() if isinstance(value, PAGES)}
    tensors = {**arguments, **pages}
    views: dict[str, tuple[str, View]] = {}
    cached = tuple(_cached_launch(launch, tensors, views) for launch in launches)
    made = {
        name: (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        for name in MADE
        if (tensor := tensors.get(name)) is not None
    }
    device = next(t.get_device() for t in tensors.values() if isinstance(t, Tensor))
    return CachedCall(device, cached, views, made, tuple(pages), *_places(cached, views))


def _places(
    launches: Sequence[CachedLaunch], views: Mapping[str, tuple[str, View]]
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, Place]]:
    """Pointers, descriptors and places of a CachedCall."""
    taken = dict.fromkeys(source for launch in launches for source in launch.sources)
    descriptors = [n for n in taken if n in views and views[n][1].descriptor is not None]
    of = {n: views[n][0] if n in views else n for n in taken if n not in descriptors}
    pointers = list(dict.fromkeys(of.values()))
    places = {n: Place(pointers.index(source)) for n, source in of.items()}
    places |= {n: Place(len(pointers) + i) for i, n in enumerate(descriptors)}
    return tuple(pointers), tuple(descriptors), places


def _cached_launch(
    launch: Launch, tensors: Mapping[str, Any], views: dict[str, tuple[str, View]]
) -> CachedLaunch:
    constants, passed, tuples = {}, [], []
    for name, value in launch.arguments.items():
        if _is_tensor(value):
            passed.append((name, _source(name, value, tensors, views)))
            continue
        fields = tuple(
            (_source(of, field, tensors, views), None) if _is_tensor(field) else ("", field)
            for of, field in launching.fields(name, value)
        )
        if any(source for source, _ in fields):
            tuples.append((name, type(value), fields))
        else:
            constants[name] = value
    return CachedLaunch(launch.kernel, launch.grid, constants, tuple(passed), tuple(tuples))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, TensorDescriptor))


def _source(
    name: str, value: Any, tensors: Mapping[str, Any], views: dict[str, tuple[str, View]]
) -> str:
    """The name of the call's argument that ``value`` is, or of the view that it is of one.

    For an argument that the call does not have, another one's tensor stands in.
    """
    source = name if name in tensors else NAMES[name]
    if tensors[source] is None:
        at = value.data_ptr()
        named = [n for n, t in tensors.items() if isinstance(t, Tensor) and t.data_ptr() == at]
        # That of another shape may lie at the same address, and elsewhere in a later call.
        source = next((name for name in named if tensors[name] is value), named[0])
    view = _view(value, tensors[source])
    if view is None:
        return source
    seen = next((known for known, same in views.items() if same == (source, view)), name)
    # Primed where that names an argument, or what another launch sees by it.
    while seen in tensors or views.setdefault(seen, (source, view)) != (source, view):
        seen += "'"
    return seen


def _view(value: torch.Tensor | TensorDescriptor, source: torch.Tensor) -> View | None:
    """How ``value`` is seen of ``source``; None: as it is."""
    if isinstance(value, TensorDescriptor):
        assert value.base is source
        return View(descriptor={k: v for k, v in vars(value).items() if k != "base"})
    # A copy would be that of the first such call for ever.
    assert value.data_ptr() == source.data_ptr()
    return None if value.dtype == source.dtype else View(value.dtype)
