"""Quantization of rows of keys and values to e4m3, in plain torch.

    value = e4m3(clamp(x / scale, -448, 448)),  x' = value * scale,  scale = max(amax / 448, 2^-126)

Division and scale are fp32, the cast rounds to nearest, ties to even. Infinities count as the
largest fp32 number. A NaN is a NaN; it makes the whole row NaN if the row has a scale of its own.

Source: OCP 8-bit floating point specification; vLLM's and FlashInfer's ``k_scale`` and ``v_scale``.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
MIN_SCALE = 2.0**-126


def quantize(
    rows: torch.Tensor, scale: float | torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows [..., head_dim] bf16, fp16 or fp32.

    Without NaN or saturation |x' - x| <= max(2^-4 |x|, 2^-10 scale), and a rounding of 2^-23 |x|.
    scale: of all rows, a number or fp32 [] or [1]; None gives each row its own.

    Returns:
        (values [..., head_dim] float8_e4m3fn, scales fp32 [...], or [] if one was given).
    """
    x = rows.float()
    # Divisors are tensors on the device: by a host's number, torch multiplies with the reciprocal
    # there, which is rounded.
    if scale is None:
        largest = x.abs().amax(-1).clamp(max=torch.finfo(torch.float32).max)
        scales = (largest / torch.full_like(largest, E4M3_MAX)).clamp(min=MIN_SCALE)
        divisor = scales.unsqueeze(-1)
    else:
        scales = torch.as_tensor(scale, dtype=torch.float32).to(x.device).reshape(())
        divisor = scales.expand(x.shape)
    return (x / divisor).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales


def dequantize(values: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """Rows [..., head_dim] fp32 of float8_e4m3fn values; scale: [...] fp32, or as in `quantize`."""
    if isinstance(scale, torch.Tensor) and scale.dim() == values.dim() - 1:
        scale = scale.unsqueeze(-1)
    return values.float() * scale
