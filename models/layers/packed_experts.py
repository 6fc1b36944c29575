"""Matrices, and routed experts, that stay quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels import expert_mlp
from quire.kernels.common.dequantize import FP4_GROUP

from .basic import empty_parameter

FP8_BLOCK = 128


def packed_shapes(
    kind: str, rows: int, columns: int
) -> tuple[tuple[int, int], torch.dtype, tuple[int, int], torch.dtype]:
    """How a [rows, columns] matrix is stored: shape and dtype of its values, then of its scales.

    Args:
        kind: "fp8" (scales are kept as fp32) or "fp4" (as E8M0 bytes).

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
        self, kind: str, lead: tuple[int, ...], rows: int, columns: int, device: torch.device
    ) -> None:
        super().__init__()
        shape, dtype, scale_shape, scale_dtype = packed_shapes(kind, rows, columns)
        self.weight = empty_parameter(*lead, *shape, device=device, dtype=dtype)
        self.scale = empty_parameter(*lead, *scale_shape, device=device, dtype=scale_dtype)


class PackedExperts(nn.Module):
    """Routed experts that stay as small as they are stored, and are dequantized as they are used.

    Args:
        kind: "fp8" or "fp4".
        options: activation, limit, alpha and up_offset, as of `quire.kernels.gated_product`.
    """

    def __init__(
        self, kind: str, num_experts: int, hidden_size: int, width: int,
        options: dict[str, Any], device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.options = options
        # Gate and up apart: their scale blocks do not share a row, whatever the width.
        self.gate_up_proj = PackedMatrices(kind, (num_experts, 2), width, hidden_size, device)
        self.down_proj = PackedMatrices(kind, (num_experts,), hidden_size, width, device)

    def forward(self, x: Tensor, ids: Tensor, impl: str | None = None) -> Tensor:
        """What each expert of each row gives.

        Args:
            x: [num_tokens, hidden_size].
            ids: [num_tokens, k] of the router.
            impl: "triton" or "torch"; default: by device.

        Returns:
            [num_tokens * k, hidden_size], as of `quire.kernels.expert_mlp`.
        """
        gate_up, down = self.gate_up_proj, self.down_proj
        return expert_mlp(
            x, ids, gate_up.weight, down.weight, gate_up_scale=gate_up.scale,
            down_scale=down.scale, impl=impl, **self.options,
        )  # fmt: skip
