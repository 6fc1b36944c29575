"""An implementation that the benchmarks call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..cases.problem import Problem
from ..cases.shapes import AttentionShape, LatentShape

Call = Callable[[], tuple[Tensor, ...]]
"""Compute one copy. Returns arguments of ``Expected.wrong``, for attention (out,) or (out, lse):
[num_tokens, num_heads, head_dim] and [num_heads, num_tokens] in natural log.
"""


class Unsupported(Exception):
    """An implementation cannot run a case; the message is the reason."""


@dataclass(frozen=True)
class Peer:
    """An implementation.

    Attributes:
        name: short, for tables and ``--impl``.
        version: version of the package.
        note: differences of its work, or "".
        prepare: problem -> one call for each copy; raises Unsupported. Work that depends on lengths
            alone (plans, masks, contiguous copies of pages) is done here and is not timed.
        shapes: types of the shapes that it is compared on.
        ours: whether a wrong result is a bug of this repository.
    """

    name: str
    version: str
    note: str
    prepare: Callable[[Problem], list[Call]]
    shapes: tuple[type, ...] = (AttentionShape,)
    ours: bool = False

    def calls(self, problem: Problem) -> list[Call]:
        """One call for each copy; raises Unsupported."""
        shape = problem.case.shape
        if not self.ours and isinstance(shape, AttentionShape) and shape.fp8:
            raise Unsupported("e4m3 pages with a scale for each row")
        return self.prepare(problem)


BOTH_SHAPES = (AttentionShape, LatentShape)
