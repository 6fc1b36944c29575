"""Stored tensors into a model's weights: read, dequantized unless they stay quantized, and checked.

One NaN row of an embedding would win every argmax, and nothing would say so: the least and the
greatest element of a tensor are finite only if all are, one pass over what was just written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from quire.kernels.common.dequantize import DEQUANTIZE, dequantize_mxfp4, scale_values

from ..parallel.shard import Cut
from .checkpoint import Stored, open_tensors
from .names import UP, WHOLE, TensorSource, TensorTarget, part_of
from .shards import Piece, fill_up

SetQuantized = Callable[[Tensor, Tensor], None]
"""Set the quantized values of a layer's weight and their scales, both on its device."""
CHUNK = 2**20  # elements that are looked at together where a copy is needed
_LARGEST = {"fp8": 448.0, "fp4": 6.0}


def fill(
    model: nn.Module, sources: list[TensorSource], kept: Mapping[str, SetQuantized],
    pieces: Mapping[TensorTarget, Piece | None],
) -> None:  # fmt: skip
    """Read tensors file by file, each into its place, and check it.

    Files are mapped into memory: a rank reads only its part of a tensor, unless it dequantizes it.

    kept: of `weights.kept_as_stored`; pieces: ranges that a rank keeps; of other tensors, all.
    """
    by_file: dict[Path, list[TensorSource]] = defaultdict(list)
    for source in sources:
        by_file[source.value.file].append(source)
    parameters = dict(model.named_parameters())
    for file, members in by_file.items():
        with open_tensors(file) as tensors:
            for source in members:
                piece, name = pieces.get(source.target), source.target.parameter
                value, scale = tensors.get_tensor(source.value.name), None
                if source.scale is not None and source.scale.file == file:
                    scale = tensors.get_tensor(source.scale.name)
                elif source.scale is not None:
                    with open_tensors(source.scale.file) as others:
                        scale = others.get_tensor(source.scale.name)
                if name in parameters and name not in kept:
                    _dequantize(parameters, source, value, scale, model, piece and piece.cut)
                    continue
                if piece is not None:
                    value, scale = piece.packed(value, scale)
                if name not in kept:
                    _pack(parameters, source, value, scale, model)
                    continue
                if piece is not None:
                    value, scale = piece.filled_up(value, scale, parameters[name].shape)
                _keep(kept[name], source, value, scale, model)


def _keep(
    keep: SetQuantized, source: TensorSource, value: Tensor, scale: Tensor, model: nn.Module
) -> None:
    value, scale = value.to(model.device, copy=True), scale.to(model.device, copy=True)
    kind = source.kind
    if kind == "mxfp4":  # its blocks of columns lie one behind the other
        kind, value = "fp4", value.flatten(-2)
    _expect_finite_packed(kind, value, scale, source, model.dtype)
    keep(value, scale)


def _pack(
    parameters: Mapping[str, Tensor], source: TensorSource, value: Tensor, scale: Tensor,
    model: nn.Module,
) -> None:  # fmt: skip
    """Copy an expert that stays quantized to its place in `PackedMatrices`."""
    target, kind = source.target, source.kind
    assert target.expert is not None
    at = (target.expert,) if target.part == WHOLE else (target.expert, int(target.part == UP))
    packed = parameters[f"{target.parameter}.weight"][at]
    packed_scale = parameters[f"{target.parameter}.scale"][at]
    fill_up(packed, value.view(packed.dtype))
    fill_up(packed_scale, scale_values(scale) if kind == "fp8" else scale.view(torch.uint8))
    _expect_finite_packed(kind, packed, packed_scale, source, model.dtype)


def _dequantize(
    parameters: Mapping[str, Tensor], source: TensorSource, value: Tensor, scale: Tensor | None,
    model: nn.Module, cut: Cut | None,
) -> None:  # fmt: skip
    weight = part_of(parameters, source.target)
    assert weight is not None
    device = weight.device
    if source.kind == "ids":
        weight.copy_(value)
        _expect_ids(weight, model.num_ids, source.value)
        return
    if source.kind == "mxfp4":
        for i in range(len(weight)):  # expert by expert
            each = dequantize_mxfp4(value[i].to(device), scale[i].to(device)).T
            _copy(weight[i : i + 1], each[None], cut)
    else:
        if scale is not None:
            dequantize = DEQUANTIZE[source.kind]
            value = dequantize(value.to(device), scale.to(device), weight.dtype)
        _copy(weight, value, cut)
    _expect_finite(weight, source.value)


def _copy(place: Tensor, whole: Tensor, cut: Cut | None) -> None:
    if cut is None:
        place.copy_(whole)
    else:
        cut.fill(place, cut.of(whole))


def _expect_finite(weight: Tensor, stored: Stored) -> None:
    if weight.numel() == 0 or _is_finite(weight):
        return
    weight = weight.detach()
    flat = torch.cat([chunk.float().isfinite().logical_not() for chunk in _chunks(weight)])
    first = flat.nonzero()[0].item()
    index = [int(i) for i in np.unravel_index(first, weight.shape)]
    value = weight[tuple(index)].float().item()
    raise ValueError(
        f"path: expected finite weights, got {int(flat.sum())} in {weight.dtype} that are not, of "
        f"{stored.name!r} ({stored.dtype}) in {str(stored.file)!r}; the first is {value} at {index}"
    )


def _expect_finite_packed(
    kind: str, values: Tensor, scale: Tensor, source: TensorSource, dtype: torch.dtype
) -> None:
    """As `_expect_finite`, of weights that stay quantized, their scales, and their products."""
    assert source.scale is not None
    if kind == "fp8":
        _expect_finite(values, source.value)
    numbers = scale_values(scale)
    _expect_finite(numbers, source.scale)
    # No product needs to be made where the largest possible one is finite.
    if _LARGEST[kind] * numbers.abs().max().item() > torch.finfo(dtype).max:
        _expect_finite(DEQUANTIZE[kind](values, scale, dtype), source.value)


def _expect_ids(table: Tensor, num_ids: int, stored: Stored) -> None:
    low, high = (bound.item() for bound in table.detach().aminmax())
    if low < 0 or high >= num_ids:
        outside = (table < 0) | (table >= num_ids)
        index = outside.nonzero()[0].tolist()
        raise ValueError(
            f"path: expected indices in 0..{num_ids - 1}, got {int(outside.sum())} outside, of "
            f"{stored.name!r} in {str(stored.file)!r}; "
            f"the first is {table[tuple(index)].item()} at {index}"
        )


def _is_finite(weight: Tensor) -> bool:
    if weight.dtype == torch.float8_e4m3fn:  # NaN alone: all bits but the sign
        patterns = (chunk.view(torch.uint8).bitwise_and(0x7F).max() for chunk in _chunks(weight))
        return torch.stack(list(patterns)).max().item() < 0x7F
    return bool(torch.stack(weight.detach().aminmax()).isfinite().all())


def _chunks(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.reshape(-1).split(CHUNK)
