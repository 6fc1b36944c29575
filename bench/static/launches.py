"""Record what a public operator launches for an architecture, over tensors without storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from triton.runtime.jit import KernelInterface

from quire.kernels.common import launching
from quire.kernels.common.arch import Arch

from .limits import NUM_SMS


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments and launch options by name."""

    kernel: Any
    arguments: dict[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        """Arguments and options by name, with the fields of named tuples among them."""
        found = dict(self.arguments)
        for value in self.arguments.values():
            if hasattr(value, "_asdict"):
                found |= value._asdict()
        return found

    @property
    def name(self) -> str:
        return self.kernel.__name__.strip("_")


def record(call: Callable[[], object], arch: Arch) -> list[Launch]:
    """Make a call whose tensors are on the device "meta"; return its launches. None runs."""
    found = []

    def getitem(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            found.append(Launch(kernel, dict(zip(kernel.arg_names, args)) | kwargs))  # noqa: B905

        return launch

    with (
        mock.patch.object(KernelInterface, "__getitem__", getitem),
        mock.patch.object(launching, "INTERPRETER_ARCH", arch),
        mock.patch.object(launching, "INTERPRETER_SMS", NUM_SMS[arch.name]),
    ):
        call()
    return found
