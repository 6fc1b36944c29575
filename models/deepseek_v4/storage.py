"""How DeepSeek-V4 checkpoints store tensors; `models.deepseek_v4.names` has how they name them.

Matrices are plain, fp8 in blocks of 128 x 128, or fp4 in groups of 32 columns; experts are stored
one by one, or as the stacks that the model has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from ..layers.moe import packed_shapes
from ..loading.checkpoint import FLOATS, FP8, Stored, differs
from ..loading.match import GATE, UP, WHOLE, Form, Target
from .names import target

_KINDS = {FP8: "fp8", "I8": "fp4", "U8": "fp4"}


class V4Storage:
    """`quire.models.loading.match.Storage` of DeepSeek-V4."""

    forms: ClassVar[dict[str, Form]] = {
        "plain": Form(FLOATS),
        "plain or fp8": Form((*FLOATS, FP8)),  # what a matrix may be that is stored as neither
        "ids": Form(("I64", "I32")),  # experts by token id
        "fp8": Form((FP8,), ("F32", "F8_E8M0", "U8")),
        "fp4": Form(("I8", "U8"), ("F8_E8M0", "U8")),
    }

    def target(self, stored: str) -> Target | None:
        """See `Storage`."""
        return target(stored)

    def kind(self, stored: Stored, part: Tensor) -> str:
        """See `Storage`."""
        if not part.is_floating_point():
            return "ids"
        kind = _KINDS.get(stored.dtype, "plain")
        if kind == "plain" or part.ndim != 2:
            return "plain"
        return "plain or fp8" if kind == "fp4" and part.shape[1] % 32 else kind

    def shape(self, kind: str, shape: Sequence[int]) -> tuple[int, ...]:
        """See `Storage`."""
        return packed_shapes(kind, *shape)[0] if kind in ("fp8", "fp4") else tuple(shape)

    def scale_misfit(self, kind: str, scale: Stored, shape: Sequence[int]) -> list[str]:
        """See `Storage`."""
        return differs(scale, scale.shape, packed_shapes(kind, *shape)[2])

    def scale_name(self, stored: Stored) -> str | None:
        """See `Storage`."""
        return f"{stored.name.removesuffix('weight')}scale"

    def parts(self, name: str, weight: Tensor) -> list[Target]:
        """See `Storage`."""
        if ".mlp.experts." not in name:
            return []
        parts = (GATE, UP) if name.endswith("gate_up_proj") else (WHOLE,)
        return [Target(name, expert, part) for expert in range(len(weight)) for part in parts]


def format_of_experts(found: Mapping[Target, Stored]) -> str | None:
    """How the routed experts are quantized: "fp8", "fp4" or None.

    Raises:
        NotImplementedError: they are not all the same.
    """
    formats: dict[str | None, Stored] = {}
    for where, stored in found.items():
        if ".mlp.experts." in where.parameter and not where.is_scale:
            formats.setdefault(_KINDS.get(stored.dtype), stored)
    if len(formats) > 1:
        of = " and ".join(f"{stored.dtype} of {stored}" for stored in formats.values())
        raise NotImplementedError(f"experts: expected one format for all, got {of}")
    return next(iter(formats), None)
