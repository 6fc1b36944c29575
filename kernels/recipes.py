"""What calls that look alike have in common: that their arguments pass the checks, and what is launched for them.

A model makes the same call for each of its layers, over other tensors. Checks and launch arguments depend on sizes, strides, dtypes, devices and
host values alone, so they are worked out for the first such call and remembered, without any tensor. Values in device memory are never
looked at, here or there.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime import JITFunction

from quire.kernels._launch import Launch

# Remembered calls; all are forgotten when there are more.
LIMIT = 4096
# Launch arguments that go by another name in the call.
NAMES = {"k_fresh": "k", "v_fresh": "v"}


@dataclass(frozen=True)
class Step:
    """One launch without its tensors.

    tensors: (launch argument, the call's argument, whether it is seen as bytes). scratch: (launch argument, first and last + 1 element of
    the workspace).
    """

    kernel: JITFunction
    grid: tuple[int, ...]
    constants: dict[str, Any]
    tensors: tuple[tuple[str, str, bool], ...]
    scratch: tuple[tuple[str, int, int], ...]

    def run(self, tensors: Mapping[str, Any], workspace: torch.Tensor | None) -> None:
        """Launch it over the tensors of a call."""
        arguments = dict(self.constants)
        for name, source, as_bytes in self.tensors:
            tensor = tensors[source]
            arguments[name] = tensor.view(torch.uint8) if as_bytes else tensor
        for name, start, stop in self.scratch:
            assert workspace is not None
            arguments[name] = workspace[start:stop]
        Launch(self.kernel, self.grid, arguments).run()


_REMEMBERED: dict[Hashable, tuple[Step, ...]] = {}


def key(what: Hashable, arguments: Mapping[str, Any]) -> Hashable:
    """What decides of a call: all of its arguments but the addresses of tensors. None if that cannot be told.

    what: which function this is, and what else its launches depend on.
    """
    parts: list[Hashable] = [what]
    for value in arguments.values():
        if isinstance(value, torch.Tensor):
            parts.append((value.shape, value.stride(), value.dtype, value.device))
        else:
            parts.append((value.__class__, value))  # True is no 1
    found = tuple(parts)
    try:
        hash(found)
    except TypeError:
        return None
    return found


def recall(key: Hashable) -> tuple[Step, ...] | None:
    """The launches of an earlier call with this key."""
    return _REMEMBERED.get(key)


def remember(
    key: Hashable,
    launches: Sequence[Launch],
    tensors: Mapping[str, Any],
    workspace: torch.Tensor | None = None,
) -> None:
    """Remember the launches of a call that passed its checks.

    tensors: the call's arguments by name, defaults filled in. workspace: of which launches may take slices; None: they take them of one
    that was made for them.
    """
    if key is None:
        return
    if len(_REMEMBERED) >= LIMIT:
        _REMEMBERED.clear()
    _REMEMBERED[key] = tuple(_step(launch, tensors, workspace) for launch in launches)


def forget() -> None:
    """Forget all calls."""
    _REMEMBERED.clear()


def _step(launch: Launch, tensors: Mapping[str, Any], workspace: torch.Tensor | None) -> Step:
    constants, passed, scratch = {}, [], []
    for name, value in launch.arguments.items():
        if not isinstance(value, torch.Tensor):
            constants[name] = value
            continue
        source = tensors.get(NAMES.get(name, name))
        if source is not None:
            as_bytes = value.dtype != source.dtype
            assert value.data_ptr() == source.data_ptr() and value.stride() == source.stride()
            passed.append((name, NAMES.get(name, name), as_bytes))
        else:
            assert value.dim() == 1 and value.dtype == torch.float32
            start = value.storage_offset() - (
                workspace.storage_offset() if workspace is not None else 0
            )
            scratch.append((name, start, start + value.numel()))
    return Step(launch.kernel, launch.grid, constants, tuple(passed), tuple(scratch))
