"""A launch without Triton's dispatch: a compiled kernel, and where each address goes.

``kernel[grid](...)`` finds out at each call what it has to launch: the type of each argument, which
integers are 1 or divisible by 16, which addresses are; then it looks for the kernel compiled for
that. In calls that look alike (``launch_cache``) all of this is the same but the addresses. So once
Triton has launched one of them, the compiled kernel that it returned serves the others, as long as
the same addresses are divisible by 16. A launch over

    x: Rows(at 4096, stride 64)    factor: 2.0    out: at 8192    BLOCK: 128, a constant

is bound to places among its values [4096, 8192, 64, 2.0, 128]: those of x are (0, 2), and x is the
sixth value, so those of the arguments are (5, 3, 1, 4). Over x at 5120 and out at 6144 it runs the
same compiled kernel with ((5120, 64), 2.0, 6144, 128). Over x at 5124 it does not: bound launches
are kept by ``divisible(addresses)``, here (True, True), and Triton launches the first call of
(False, True).

It launches all of them while launches are ``observed``, and with a version that is not among
VERSIONS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

# Those of which tests/kernels/common/test_recorded_launches.py has passed.
VERSIONS = ("3.6.", "3.7.", "3.8.", "3.9.")
_RUN = JITFunction.run
Take = Callable[[list[Any]], tuple[Any, ...]]


class Place(int):
    """In place of a tensor among a launch's arguments: where its address is among addresses."""


@dataclass(frozen=True)
class BoundLaunch:
    """A compiled kernel, its grid, and its arguments but for addresses.

    Attributes:
        compiled: the kernel, loaded on one device.
        grid: its programs, in three dimensions.
        constants: values that follow the addresses.
        tuples: of each tuple that has addresses, takes it from these; the tuples follow them.
        arguments: takes all arguments from what there is then.
    """

    compiled: CompiledKernel
    grid: tuple[int, int, int]
    constants: list[Any]
    tuples: list[Take]
    arguments: Take

    def run(self, stream: int, addresses: list[Any]) -> None:
        """Launch on a stream of the kernel's device, which has to be the current one.

        Args:
            stream: as ``current_stream`` returns it.
            addresses: of tensors, and tensor descriptors.
        """
        values = addresses + self.constants
        values += [take(values) for take in self.tuples]
        compiled = self.compiled
        compiled.run(
            *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *self.arguments(values),
        )  # fmt: skip


def bind(
    compiled: Any, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], addresses: int
) -> BoundLaunch | None:
    """A launch by Triton as a bound one; None if Triton has to make all like it.

    Args:
        compiled: what ``kernel[grid](**arguments)`` returned.
        kernel: what was launched.
        grid: its programs, at least one.
        arguments: of the launch, by name, each tensor and tensor descriptor as its Place.
        addresses: how many there are.
    """
    if (
        not triton.__version__.startswith(VERSIONS)
        or type(compiled) is not CompiledKernel
        or compiled.metadata.target.backend not in ("cuda", "hip")
        or kernel.pre_run_hooks
    ):
        return None
    constants: list[Any] = []

    def place(value: Any) -> int:
        if isinstance(value, Place):
            return value
        constants.append(value)
        return addresses + len(constants) - 1

    values = [arguments[name] for name in kernel.arg_names]
    fields = {i: list(map(place, value)) for i, value in enumerate(values) if _has_place(value)}
    places = [-1 if i in fields else place(value) for i, value in enumerate(values)]
    for index, i in enumerate(fields):
        places[i] = addresses + len(constants) + index
    tuples = [_taker(of) for of in fields.values()]
    x, y, z = (*grid, 1, 1)[:3]
    return BoundLaunch(compiled, (x, y, z), constants, tuples, _taker(places))


def _has_place(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(field, Place) for field in value)


def _taker(places: Sequence[int]) -> Take:
    """Takes a tuple of the values at some places."""
    return itemgetter(*places) if len(places) > 1 else lambda values: (values[places[0]],)


def divisible(addresses: list[int]) -> tuple[bool, ...]:
    """Which of them are divisible by 16: for each answer, Triton compiles another kernel."""
    return tuple([address % 16 == 0 for address in addresses])


def observed() -> bool:
    """Whether someone has hooked into Triton's launches, as profilers do, or wants kernels
    compiled in another way."""
    runtime = knobs.runtime
    return bool(
        JITFunction.run is not _RUN
        or runtime.debug
        or runtime.add_stages_inspection_hook
        or getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
        or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
    )


def current_stream(device: int) -> int:
    """The one that Triton launches on."""
    stream: int = driver.active.get_current_stream(device)
    return stream
