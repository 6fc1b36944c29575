"""Which stored tensor fills which part of a model's weights.

Names, shapes and dtypes compared before anything is read.

A family says how its checkpoints name and store tensors (`Storage`); everything else is the same
for all::

    stored tensor          target                              kind
    x.weight               Target("x.weight")                  plain, or fp8 by its dtype
    x.weight_scale_inv     Target("x.weight", is_scale)
    ...experts.3.w3.weight Target("...gate_up_proj", 3, UP)    an expert of a stack, half its rows
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from .checkpoint import Stored, differs, refuse_misfits

GATE, UP, WHOLE = "gate", "up", "whole"
MISFITS = ("missing", "unexpected", "misshaped", "mistyped", "unscaled", "doubled")


@dataclass(frozen=True)
class Target:
    """Where a stored tensor belongs.

    Attributes:
        parameter: the model's name of the weight.
        expert: which of the stacked experts; None = the whole stack, or no stack.
        part: GATE or UP, the first and second half of an expert's rows in gate_up_proj; else WHOLE.
        is_scale: scales, not values.
    """

    parameter: str
    expert: int | None = None
    part: str = WHOLE
    is_scale: bool = False

    def __str__(self) -> str:
        expert = "" if self.expert is None else f"[{self.expert}]"
        return f"{self.parameter}{expert}" + ("" if self.part == WHOLE else f".{self.part}")


@dataclass(frozen=True)
class Form:
    """How values of one kind are stored.

    Attributes:
        dtypes: of the values, as safetensors calls them.
        scale_dtypes: of their scales; none where they have none.
    """

    dtypes: tuple[str, ...]
    scale_dtypes: tuple[str, ...] = ()


class Storage(Protocol):
    """How a family's checkpoints name and store tensors.

    Attributes:
        forms: by kind: "plain", "ids", "fp8", "fp4" or "mxfp4".
    """

    forms: Mapping[str, Form]

    def target(self, stored: str) -> Target | None:
        """Where the tensor of that name belongs; None = nowhere.

        A name that no rule knows stays as it is.
        """

    def kind(self, stored: Stored, part: Tensor) -> str:
        """How the values for a part of a weight are stored."""

    def shape(self, kind: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The stored shape of values of a kind, for a part of a weight of ``shape``."""

    def scale_misfit(self, kind: str, scale: Stored, shape: Sequence[int]) -> list[str]:
        """That scales have another shape than values for a part of ``shape`` need.

        Nothing where they have it.
        """

    def scale_name(self, stored: Stored) -> str | None:
        """The one name that the scales of these values may have; None = there are several."""

    def parts(self, name: str, weight: Tensor) -> list[Target]:
        """The parts that a weight may be stored in, one by one.

        None where it is always stored whole.
        """


@dataclass(frozen=True)
class Source:
    """What a part of a weight is made from: values of a kind, and their scales."""

    target: Target
    kind: str
    value: Stored
    scale: Stored | None = None


def unique(path: Path, storage: Storage, stored: Iterable[Stored]) -> dict[Target, Stored]:
    """Tensors by where they belong, those for nowhere left out.

    Raises:
        ValueError: two tensors for the same target, naming both.
    """
    found: dict[Target, Stored] = {}
    doubled = []
    for one in stored:
        target = storage.target(one.name)
        if target is not None and (first := found.setdefault(target, one)) is not one:
            doubled.append(f"{first} and {one}")
    refuse_misfits(path, doubled=doubled)
    return found


def part_of(parameters: Mapping[str, Tensor], target: Target) -> Tensor | None:
    """The part of a model's weights that a target names; None = there is no such part."""
    weight = parameters.get(target.parameter)
    if weight is None or target.expert is None:
        return weight
    if target.expert >= len(weight):
        return None
    matrix = weight[target.expert]
    return matrix if target.part == WHOLE else matrix.chunk(2)[target.part == UP]


def match(
    path: Path,
    found: Mapping[Target, Stored],
    parameters: Mapping[str, Tensor],
    storage: Storage,
) -> list[Source]:
    """What each part of the weights is made from.

    Args:
        path: the directory.
        found: of `unique`.
        parameters: the model's weights, not quantized; they may be on the meta device.
        storage: of the family.

    Raises:
        ValueError: naming at once every tensor that is missing, unexpected, there twice, without
            its scales, or of another shape or dtype.
    """
    values = {target: stored for target, stored in found.items() if not target.is_scale}
    scales = {replace(t, is_scale=False): stored for t, stored in found.items() if t.is_scale}
    misfits: dict[str, list[str]] = {name: [] for name in MISFITS}
    for name, weight in parameters.items():
        if Target(name) not in values:
            parts = storage.parts(name, weight) or [Target(name)]
            misfits["missing"] += [str(part) for part in parts if part not in values]
    sources = []
    for target, stored in values.items():
        part, whole = part_of(parameters, target), values.get(Target(target.parameter))
        if target.expert is not None and whole is not None:
            misfits["doubled"].append(f"{whole} and {stored}")
        if part is None:
            misfits["unexpected"].append(str(stored))
            continue
        kind = storage.kind(stored, part)
        form = storage.forms[kind]
        misfits["misshaped"] += differs(stored, stored.shape, storage.shape(kind, part.shape))
        misfits["mistyped"] += differs(stored, stored.dtype, form.dtypes)
        if not form.scale_dtypes:
            sources.append(Source(target, kind, stored))
            continue
        scale = scales.pop(target, None)
        sources.append(Source(target, kind, stored, scale))
        if scale is not None:
            misfits["mistyped"] += differs(scale, scale.dtype, form.scale_dtypes)
            misfits["misshaped"] += storage.scale_misfit(kind, scale, part.shape)
        elif (name := storage.scale_name(stored)) is not None:
            misfits["missing"].append(name)
        else:
            misfits["unscaled"].append(str(stored))
    misfits["unexpected"] += [str(scale) for scale in scales.values()]
    refuse_misfits(path, **misfits)
    return sources
