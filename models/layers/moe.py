"""Matrices and routed experts that stay quantized, as they are stored."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.kernels import expert_mlp
from quire.kernels.common.dequantize import FP4_GROUP

from .basic import WeightPlacement

FP8_BLOCK = 128


def packed_shapes(
    kind: str, rows: int, columns: int
) -> tuple[tuple[int, int], torch.dtype, tuple[int, int], torch.dtype]:
    """Storage of a [rows, columns] matrix: shape and dtype of its values, then of its scales.

    Args:
        kind: "fp8" (a scale for each 128 x 128, kept as fp32) or "fp4" (for 32 columns, E8M0).

    Raises:
        ValueError: an fp4 row is no multiple of 32 columns.
    """
    if kind == "fp8":
        blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        return (rows, columns), torch.float8_e4m3fn, blocks, torch.float32
    if columns % FP4_GROUP:
        raise ValueError(f"columns: expected a multiple of {FP4_GROUP} for fp4, got {columns}")
    return (rows, columns // 2), torch.uint8, (rows, columns // FP4_GROUP), torch.uint8


class PackedMatrices(nn.Module):
    """A stack of quantized matrices [*lead, rows, columns]: values, and scales beside them."""

    def __init__(
        self, kind: str, lead: tuple[int, ...], rows: int, columns: int, place: WeightPlacement
    ) -> None:
        super().__init__()
        shape, dtype, scale_shape, scale_dtype = packed_shapes(kind, rows, columns)
        self.weight = place.empty(*lead, *shape, dtype=dtype)
        self.scale = place.empty(*lead, *scale_shape, dtype=scale_dtype)


class PackedExperts(nn.Module):
    """Routed experts with SiLU, "fp8" or "fp4", that are dequantized as they are used."""

    def __init__(
        self, kind: str, num_experts: int, hidden_size: int, width: int, place: WeightPlacement,
        *, limit: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.limit = limit
        # Gate and up apart: their scale blocks do not share a row, whatever the width.
        self.gate_up_proj = PackedMatrices(kind, (num_experts, 2), width, hidden_size, place)
        self.down_proj = PackedMatrices(kind, (num_experts,), hidden_size, width, place)

    def forward(self, x: Tensor, ids: Tensor, impl: str | None = None) -> Tensor:
        """Rows [num_tokens * k, hidden_size] as of `quire.kernels.expert_mlp`."""
        gate_up, down = self.gate_up_proj, self.down_proj
        return expert_mlp(
            x, ids, gate_up.weight, down.weight, gate_up_scale=gate_up.scale,
            down_scale=down.scale, activation="silu", limit=self.limit, impl=impl,
        )  # fmt: skip
