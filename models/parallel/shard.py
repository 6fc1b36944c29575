"""Sharding: the part of each weight that a rank holds.

The axis in which the shapes of the whole model and of the rank's differ is cut, rank after rank;
weights of equal shapes (norms, routers, compressors, indexers) are on every rank. q, k, v, gate and
up projections are cut by rows, o and down projections by columns, experts by width, embeddings by
ids. With fewer KV heads than ranks, a head is on several ranks; a width that is no multiple is
filled up with zeros, which add nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .group import Group

_KV = re.compile(r"\.[kv]_proj\.")


@dataclass(frozen=True)
class Cut:
    """A rank's part of one axis of a tensor.

    Attributes:
        axis: the axis.
        start, stop: range of its elements, in each of ``runs`` parts of equal length.
        runs: 2 where the axis holds the rows of gates, then those of ups.
    """

    axis: int
    start: int
    stop: int
    runs: int = 1

    def of(self, whole: Tensor) -> Tensor:
        """The rank's part of a whole tensor; a view where the part is in one run."""
        length = self.stop - self.start
        runs = whole.chunk(self.runs, dim=self.axis)
        parts = [run.narrow(self.axis, self.start, length) for run in runs]
        return parts[0] if self.runs == 1 else torch.cat(parts, self.axis)

    def fill(self, place: Tensor, part: Tensor) -> None:
        """Copy ``part`` into the rank's tensor ``place``, and fill the rest with zeros."""
        if place.shape == part.shape:
            place.copy_(part)
            return
        place.zero_()
        runs = part.chunk(self.runs, dim=self.axis)
        for to, run in zip(place.chunk(self.runs, dim=self.axis), runs, strict=True):
            to.narrow(self.axis, 0, run.shape[self.axis]).copy_(run)


def cut_of(name: str, whole: Sequence[int], part: Sequence[int], group: Group) -> Cut | None:
    """A rank's part of a weight, from its shapes in the whole model and on the rank; None = all."""
    axes = [
        axis for axis, sizes in enumerate(zip(whole, part, strict=True)) if sizes[0] != sizes[1]
    ]
    if not axes:
        return None
    [axis] = axes
    runs = 2 if name.endswith(".gate_up_proj") and (len(whole), axis) == (3, 1) else 1
    length, count = whole[axis] // runs, part[axis] // runs
    # Of K and V there may be fewer heads than ranks.
    start = length // count * group.rank // group.size if _KV.search(name) else group.rank
    return Cut(axis, *(min(length, count * end) for end in (start, start + 1)), runs)


def cuts_of(
    whole: Mapping[str, Tensor], part: Mapping[str, Tensor], group: Group | None
) -> dict[str, Cut]:
    """Cuts of the weights that are divided among ranks, by name; weights may be on "meta"."""
    if group is None:
        return {}
    cuts = {name: cut_of(name, w.shape, part[name].shape, group) for name, w in whole.items()}
    return {name: cut for name, cut in cuts.items() if cut is not None}
