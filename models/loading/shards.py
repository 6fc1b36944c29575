"""Read the part of a stored tensor that one rank needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.kernels.common.dequantize import FP4_GROUP, block_size

from ..parallel.group import Group
from ..parallel.shard import Cut, cut_of
from .names import TensorSource, TensorTarget, part_of


@dataclass(frozen=True)
class Piece:
    """Range that a rank reads of a stored tensor and its scales, for one part of a weight.

    Attributes:
        value, scale: ranges of each; None = all of it.
        cut: the rank's range of the dequantized part; None = all of it.
        block: elements along the cut that share a scale.
        is_aligned: False where blocks are cut: all is read, and cut after it is dequantized.
    """

    value: Cut | None = None
    scale: Cut | None = None
    cut: Cut | None = None
    block: int = 1
    is_aligned: bool = True

    @property
    def is_empty(self) -> bool:
        """True if the rank has zeros alone in the weight's place."""
        return self.cut is not None and self.cut.start >= self.cut.stop

    def fill(self, place: Tensor, part: Tensor) -> None:
        """Copy what was read, dequantized, to its place."""
        if self.cut is None:
            place.copy_(part)
        else:
            self.cut.fill(place, part if self.is_aligned else self.cut.of(part))

    def filled_up(
        self, value: Tensor, scale: Tensor | None, shape: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Pad the values and scales of a weight that stays quantized to ``shape``, with zeros."""
        if self.cut is None:
            return value, scale
        length = shape[self.cut.axis]
        blocks = -(-length // self.block)
        value = _with_length(value, self.value, blocks if self.value is self.scale else length)
        return value, scale if scale is None else _with_length(scale, self.scale, blocks)


ENTIRE = Piece()


def piece_of(source: TensorSource, whole: Tensor, part: Tensor, group: Group) -> Piece:
    """Range of ``source`` that a rank with ``part`` of the weight ``whole`` reads."""
    cut = cut_of(source.target.parameter, whole.shape, part.shape, group)
    if cut is None:
        return ENTIRE
    length, axis, kind = whole.shape[cut.axis] // cut.runs, cut.axis, source.kind
    if kind == "mxfp4":  # stored by output channel
        axis = 3 - cut.axis
    packed = kind in ("fp4", "mxfp4") and axis == whole.ndim - 1
    scales = 0 if source.scale is None else _length(source.scale.shape, axis)
    block = 1
    if packed:
        block = FP4_GROUP
    elif cut.runs < scales < length * cut.runs:
        block = block_size(length * cut.runs, scales)
    start, stop = (cut.start, cut.stop) if cut.start < cut.stop else (0, 0)
    ends = [start, length if cut.runs > 1 else 0, 0 if stop == length else stop]
    if any(end % block for end in ends):
        return Piece(cut=cut, block=block, is_aligned=False)
    value = replace(cut, axis=axis, start=start, stop=stop)
    scale = None
    if scales > 1 or packed:
        scale = replace(value, start=start // block, stop=-(-stop // block))
    if packed and kind == "fp4":
        value = replace(value, start=start // 2, stop=stop // 2)
    elif packed:
        value = scale
    return Piece(value, scale, cut, block)


def pieces_of(
    sources: list[TensorSource],
    whole: Mapping[str, Tensor],
    part: Mapping[str, Tensor],
    group: Group,
) -> dict[TensorTarget, Piece]:
    """Ranges of the sources that a rank reads in part; whole, part: weights of model and rank."""
    pieces = {}
    for source in sources:
        target = source.target
        both = [part_of(weights, target) for weights in (whole, part)]
        pieces[target] = piece_of(source, *both, group)
    return {target: piece for target, piece in pieces.items() if piece is not ENTIRE}


def shared_columns(source: TensorSource, whole: Tensor) -> int:
    """Rows or columns of a part of a weight that share a scale: no width is cut between them."""
    if source.kind == "mxfp4":
        return FP4_GROUP
    if source.kind != "fp8" or source.scale is None:
        return 1
    sizes = zip(whole.shape, source.scale.shape, strict=False)
    return max([1, *(block_size(size, n) for size, n in sizes if 1 < n < size)])


def read(tensors: Any, name: str, cut: Cut | None) -> Tensor:
    """A tensor of an open safetensors file, or what a cut leaves of it."""
    if cut is None:
        return tensors.get_tensor(name)
    stored = tensors.get_slice(name)
    length = stored.get_shape()[cut.axis] // cut.runs
    parts = []
    for run in range(cut.runs):
        at = slice(run * length + cut.start, run * length + cut.stop)
        parts.append(stored[(*[slice(None)] * cut.axis, at)])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=cut.axis)


def fill_up(place: Tensor, part: Tensor) -> None:
    """Copy ``part`` to the first elements of each axis of ``place``, and zeros to the others."""
    if place.shape != part.shape:
        place.zero_()
        place = place[tuple(slice(size) for size in part.shape)]
    place.copy_(part)


def _with_length(part: Tensor, cut: Cut | None, length: int) -> Tensor:
    if cut is None or part.shape[cut.axis] == length:
        return part
    place = part.new_empty([length if i == cut.axis else n for i, n in enumerate(part.shape)])
    fill_up(place, part)
    return place


def _length(shape: Sequence[int], axis: int) -> int:
    return shape[axis] if axis < len(shape) else 1
