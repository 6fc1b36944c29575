"""A launch without Triton's dispatch: a compiled kernel, and where each address goes.

``kernel[grid](...)`` finds out at each call what it has to launch: the type of each argument, which
integers are 1 or divisible by 16, which addresses are; then it looks for the kernel compiled for
that. In calls that look alike (``launch_cache``) all of this is the same but the addresses. So once
Triton has launched one of them, the compiled kernel that it returned serves the others, as long as
the same addresses are divisible by 16. A launch over

    x: Rows(at 4096, stride 64)    factor: 2.0    out: at 8192    BLOCK: 128, a constant

is bound as ``constants`` (64, 2.0, 128) and ``arguments`` ((0, 2), 3, 1, 4), which are places among
(4096, 8192, 64, 2.0, 128). Over x at 5120 and out at 6144 it runs the same compiled kernel with
((5120, 64), 2.0, 6144, 128). Over x at 5124 it does not: bound launches are kept by
``divisible(addresses)``, here (True, True), and Triton launches the first call of (False, True).

It launches all of them while launches are ``observed``, and with a version that is not among
VERSIONS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

# Those of which tests/kernels/common/test_recorded_launches.py has passed.
VERSIONS = ("3.6.", "3.7.", "3.8.", "3.9.")
_RUN = JITFunction.run


class Place(int):
    """In place of a tensor among a launch's arguments: where its address is among addresses."""


@dataclass(frozen=True)
class BoundLaunch:
    """A compiled kernel, its grid, and its arguments but for addresses.

    Attributes:
        compiled: the kernel, loaded on one device.
        grid: its programs, in three dimensions.
        constants: values of arguments, and of fields of tuples, that are not addresses.
        arguments: of each argument its place among addresses and constants; of a tuple with
            addresses, that of each field.
    """

    compiled: CompiledKernel
    grid: tuple[int, int, int]
    constants: tuple[Any, ...]
    arguments: tuple[int | tuple[int, ...], ...]

    def run(self, stream: int, addresses: tuple[Any, ...]) -> None:
        """Launch on a stream of the kernel's device, which has to be the current one.

        Args:
            stream: as ``current_stream`` returns it.
            addresses: of tensors, and tensor descriptors.
        """
        values = addresses + self.constants
        at = values.__getitem__
        compiled = self.compiled
        compiled.run(
            *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *[tuple(map(at, of)) if of.__class__ is tuple else values[of] for of in self.arguments],
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
        or compiled.metadata.target.backend != "cuda"
        or kernel.pre_run_hooks
    ):
        return None
    constants: list[Any] = []

    def place(value: Any) -> int | tuple[int, ...]:
        if isinstance(value, Place):
            return int(value)
        if isinstance(value, tuple) and any(isinstance(part, Place) for part in value):
            return tuple(map(place, value))
        constants.append(value)
        return addresses + len(constants) - 1

    places = tuple([place(arguments[name]) for name in kernel.arg_names])
    x, y, z = (*grid, 1, 1)[:3]
    return BoundLaunch(compiled, (x, y, z), tuple(constants), places)


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
