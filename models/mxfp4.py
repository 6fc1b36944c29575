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
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    table = torch.tensor([*magnitudes, *(-m for m in magnitudes)], device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.int() - EXPONENT_BIAS
    return torch.ldexp(table[codes.long()], exponents[..., None]).flatten(-2)
