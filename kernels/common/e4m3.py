"""Quantization of rows of keys and values to e4m3, in plain torch.

    value = e4m3(clamp(x / scale, -448, 448)),   x' = value * scale

e4m3 has 3 bits of mantissa and no infinity; 448 is its largest value. Division and the scale are
fp32, and the cast rounds to nearest, ties to even, subnormals included (multiples of 2^-9). Either
one scale serves a whole tensor, or each row (of one token and head) has

    scale = max(amax / 448, 2^-126)

with amax the row's largest magnitude. Whatever the row, nothing but a NaN becomes a NaN:

    zeros               0, scale 2^-126
    infinities          count as the largest fp32 number, so +-448 (the row's other values vanish
                        beside them)
    beyond 448 scales   +-448 (scales of a tensor only; a row's own scale is large enough)
    NaN                 with one scale, a NaN; a row with a NaN has scale NaN, and is NaN all over

Error: |x' - x| <= max(2^-4 |x|, 2^-10 scale) and a rounding of the fp32 division and product
(2^-23 |x|) where nothing saturates; with a scale of the row's own, 2^-10 scale is 2^-18.8 of its
largest magnitude.

Source: OCP 8-bit floating point specification; vLLM's and FlashInfer's ``k_scale`` and ``v_scale``.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
MIN_SCALE = 2.0**-126


def quantize(
    rows: torch.Tensor, scale: float | torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows.

    Args:
        rows: [..., head_dim] bf16, fp16 or fp32.
        scale: of all rows, a number or fp32 [] or [1]; None gives each row its own.

    Returns:
        (values [..., head_dim] float8_e4m3fn, scales fp32 [...], or [] if one was given).
    """
    x = rows.float()
    if scale is None:
        largest = x.abs().amax(-1).clamp(max=torch.finfo(torch.float32).max)
        scales = (largest / E4M3_MAX).clamp(min=MIN_SCALE)
        divisor = scales.unsqueeze(-1)
    else:
        # A tensor on the device: by a host's number, torch multiplies with the reciprocal there.
        scales = torch.as_tensor(scale, dtype=torch.float32).to(x.device).reshape(())
        divisor = scales.expand(x.shape)
    return (x / divisor).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales


def dequantize(values: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """Read quantized rows.

    Args:
        values: [..., head_dim] float8_e4m3fn.
        scale: [...] fp32, or of all rows a number or fp32 [] or [1].

    Returns:
        [..., head_dim] fp32.
    """
    if isinstance(scale, torch.Tensor) and scale.dim() == values.dim() - 1:
        scale = scale.unsqueeze(-1)
    return values.float() * scale
