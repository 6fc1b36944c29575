"""Weights are checked as they are loaded.

One NaN row of an embedding would win every argmax, and nothing would say so.

The least and the greatest element of a tensor are finite only if all are: one pass over what was
just written, no copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.common.dequantize import DEQUANTIZE, scale_values

from .checkpoint import Stored

CHUNK = 2**20  # elements that are looked at together where a copy is needed
_LARGEST = {"fp8": 448.0, "fp4": 6.0}


def expect_finite(weight: Tensor, stored: Stored) -> None:
    """Refuses weights that are NaN or infinite.

    The error names file and tensor, how many elements are so, and the first one.

    Args:
        weight: what was made of the tensor, of any floating-point dtype; what is finite in the file
            may have overflowed. Waits for the device.
    """
    if weight.numel() == 0 or _is_finite(weight):
        return
    weight = weight.detach()
    flat = torch.cat([chunk.float().isfinite().logical_not() for chunk in _chunks(weight)])
    [first] = flat.nonzero()[:1, 0].tolist()
    index, left = [], first
    for size in reversed(weight.shape):
        left, at = divmod(left, size)
        index.insert(0, at)
    value = weight[tuple(index)].float().item()
    raise ValueError(
        f"path: expected finite weights, got {int(flat.sum())} in {weight.dtype} that are not, of "
        f"{stored.name!r} "
        f"({stored.dtype}) in {str(stored.file)!r}; the first is {value} at {index}"
    )


def expect_finite_packed(
    kind: str, values: Tensor, scale: Tensor, of: tuple[Stored, Stored], dtype: torch.dtype
) -> None:
    """Raises as `expect_finite` for weights that stay quantized.

    For their values, scales, and products in ``dtype``.

    Args:
        kind: "fp8" or "fp4", no value of which is NaN.
        values, scale: as `quire.models.layers.moe` has them.
        of: where both come from.
    """
    if kind == "fp8":
        expect_finite(values, of[0])
    numbers = scale_values(scale)
    expect_finite(numbers, of[1])
    # No product needs to be made where the largest possible one is finite.
    if _LARGEST[kind] * numbers.abs().max().item() > torch.finfo(dtype).max:
        expect_finite(DEQUANTIZE[kind](values, scale, dtype), of[0])


def expect_ids(table: Tensor, num_ids: int, stored: Stored) -> None:
    """Refuses a table of indices that are not in 0..num_ids - 1.

    Raises:
        ValueError: naming file and tensor, and the first such element.
    """
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
