"""The part of a stored tensor that one rank keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from quire.kernels.common.dequantize import FP4_GROUP, block_size

from ..parallel.group import Group
from ..parallel.shard import Cut, cut_of
from .names import TensorSource, TensorTarget, part_of


@dataclass(frozen=True)
class Piece:
    """A rank's range of a part of a weight, and of what is stored for it.

    Attributes:
        cut: range of the part, dequantized.
        value, scale: ranges of the values and scales of a part that stays quantized; value None =
            the cut goes through a block.
        block: elements along the cut that share a scale.
    """

    cut: Cut
    value: Cut | None = None
    scale: Cut | None = None
    block: int = 1

    def packed(self, value: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return self.value.of(value), scale if self.scale is None else self.scale.of(scale)

    def filled_up(
        self, value: Tensor, scale: Tensor, shape: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        length = shape[self.cut.axis]
        blocks = -(-length // self.block)
        value = _with_length(value, self.value, blocks if self.value is self.scale else length)
        return value, _with_length(scale, self.scale, blocks)


def piece_of(source: TensorSource, whole: Tensor, part: Tensor, group: Group) -> Piece | None:
    """Range of a rank with ``part`` of the weight ``whole``; None = all of it."""
    cut = cut_of(source.target.parameter, whole.shape, part.shape, group)
    if cut is None:
        return None
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
        return Piece(cut)
    value = replace(cut, axis=axis, start=start, stop=stop)
    scale = None
    if scales > 1 or packed:
        scale = replace(value, start=start // block, stop=-(-stop // block))
    if packed and kind == "fp4":
        value = replace(value, start=start // 2, stop=stop // 2)
    elif packed:
        value = scale
    return Piece(cut, value, scale, block)


def pieces_of(
    sources: list[TensorSource],
    whole: Mapping[str, Tensor],
    part: Mapping[str, Tensor],
    group: Group,
) -> dict[TensorTarget, Piece | None]:
    """Ranges of a rank by target; whole, part: weights of the model and of the rank."""
    return {
        source.target: piece_of(
            source, part_of(whole, source.target), part_of(part, source.target), group
        )
        for source in sources
    }


def shared_columns(source: TensorSource, whole: Tensor) -> int:
    """Rows or columns of a part of a weight that share a scale: no width is cut between them."""
    if source.kind == "mxfp4":
        return FP4_GROUP
    if source.kind != "fp8" or source.scale is None:
        return 1
    sizes = zip(whole.shape, source.scale.shape, strict=False)
    return max([1, *(block_size(size, n) for size, n in sizes if 1 < n < size)])


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
