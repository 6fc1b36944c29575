"""Matrices, and routed experts, that stay quantized.

Those that a step needs are dequantized, some experts at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quire.kernels import combine_experts
from quire.kernels.common.dequantize import DEQUANTIZE, FP4_GROUP

from .basic import empty_parameter
from .capture import must_be_capturable
from .moe import run_experts

FP8_BLOCK = 128
EXPERTS_AT_ONCE = 16  # experts whose dequantized weights exist at one time


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
        self.kind = kind
        shape, dtype, scale_shape, scale_dtype = packed_shapes(kind, rows, columns)
        self.weight = empty_parameter(*lead, *shape, device=device, dtype=dtype)
        self.scale = empty_parameter(*lead, *scale_shape, device=device, dtype=scale_dtype)

    def dequantize(self, which: Tensor, dtype: torch.dtype) -> Tensor:
        """Matrices ``which`` [n] int64 of the first dimension.

        [n, *, rows, columns] in ``dtype``.
        """
        # Indexing knows no fp8 dtype: take bytes.
        weight = self.weight.view(torch.uint8)[which].view(self.weight.dtype)
        return DEQUANTIZE[self.kind](weight, self.scale[which], dtype)


class PackedExperts(nn.Module):
    """Routed experts that stay as small as they are stored.

    Those that a step needs are dequantized, a few at a time.

    The result is that of `run_experts` on all dequantized weights. The experts of a step are looked
    up on the host; while a CUDA graph is captured, the expert of each row is dequantized by itself.

    Args:
        kind: "fp8" or "fp4".
        activation: (gate, up) -> product.
    """

    def __init__(
        self, kind: str, num_experts: int, hidden_size: int, width: int,
        activation: Callable[[Tensor, Tensor], Tensor], device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation = activation
        # Gate and up apart: their scale blocks do not share a row, whatever the width.
        self.gate_up_proj = PackedMatrices(kind, (num_experts, 2), width, hidden_size, device)
        self.down_proj = PackedMatrices(kind, (num_experts,), hidden_size, width, device)

    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, addend: Tensor | None = None,
        impl: str | None = None,
    ) -> Tensor:  # fmt: skip
        """The weighted sum of every row's experts.

        Args:
            x: [num_tokens, hidden_size].
            ids, weights: [num_tokens, k] of the router.
            addend: [num_tokens, hidden_size], added to the sum; None = nothing.
            impl: "triton" or "torch" for the sum; default: by device.

        Returns:
            The shape of x.
        """
        k, flat = ids.shape[1], ids.flatten()
        if must_be_capturable():
            rows = self.each_row(x, flat, k)
            return combine_experts(rows, weights, addend=addend, impl=impl)
        y = x.new_empty(len(flat), x.shape[1])
        for some in flat.unique().split(EXPERTS_AT_ONCE):
            rows = torch.isin(flat, some).nonzero()[:, 0]
            local = torch.searchsorted(some, flat[rows])[:, None]
            gate_up = self.gate_up_proj.dequantize(some, x.dtype).flatten(1, 2)
            down = self.down_proj.dequantize(some, x.dtype)
            one = weights.new_ones(local.shape)
            y[rows] = run_experts(x[rows // k], local, one, gate_up, down, self.activation)
        return combine_experts(y, weights, addend=addend, impl=impl)

    def each_row(self, x: Tensor, ids: Tensor, k: int) -> Tensor:
        """Rows [num_tokens * k, hidden_size] of a token's experts in turn.

        Nothing that the host must know.

        Args:
            ids: [num_tokens * k].
        """
        tokens = torch.arange(len(ids), device=x.device) // k
        rows = []
        for some, token in zip(
            ids.split(EXPERTS_AT_ONCE), tokens.split(EXPERTS_AT_ONCE), strict=True
        ):
            gate_up = self.gate_up_proj.dequantize(some, x.dtype).flatten(1, 2)
            both = torch.bmm(gate_up, x[token, :, None]).squeeze(2)
            down = self.down_proj.dequantize(some, x.dtype)
            rows.append(torch.bmm(down, self.activation(*both.chunk(2, dim=-1))[..., None]))
        return torch.cat(rows).squeeze(2)
