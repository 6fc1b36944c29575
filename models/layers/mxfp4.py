"""mxfp4 weights: blocks of 32 values of 4 bits with one power of two each.

Source: OCP Microscaling formats 1.0, 5.3; the ``_blocks`` and ``_scales`` tensors of gpt-oss checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXPONENT_BIAS = 127


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The values of e2m1 codes, times two to the power of their block's exponent; exact.

    blocks: [..., num_blocks, 16] uint8, two codes a byte, the earlier one in the low bits.
    scales: [..., num_blocks] uint8, exponent + 127.

    Returns: [..., num_blocks * 32] fp32.
    """
    # What each code stands for: one bit of sign, two of exponent, one of mantissa. Computed, as no CUDA graph can hold a copy from the host.
    code = torch.arange(16, device=blocks.device)
    low = code & 7
    magnitude = torch.where(low < 2, low / 2, torch.ldexp(1 + (low & 1) / 2, (low >> 1) - 1))
    table = torch.where(code < 8, magnitude, -magnitude)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.int() - EXPONENT_BIAS
    return torch.ldexp(table[codes.long()], exponents[..., None]).flatten(-2)
