"""Dequantization of stored weights: values of 8 or 4 bits times the scales of their blocks.

    fp8      e4m3 [.., out, in]; a scale for all, for each row, or for each block of the matrix
    fp4      two e2m1 values a byte [.., out, in / 2], the even column in the low four bits;
             an E8M0 scale for 32 columns
    mxfp4    the same in blocks: [.., num_blocks, 16] bytes and [.., num_blocks] scales

Source: OCP Microscaling Formats 1.0 (E2M1, E8M0); ``weight_scale_inv`` of transformers' fp8;
    ``weight_scale`` of compressed-tensors; gpt-oss and DeepSeek-V4 checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

FP4_GROUP = 32  # columns that share a scale, in fp4 and mxfp4
# Values by their four bits: one of sign, two of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def scale_values(scale: Tensor) -> Tensor:
    """Scales as fp32: floating-point numbers, or E8M0 (float8_e8m0fnu, or its bytes as uint8),
    where byte b is 2^(b - 127) and 255 is NaN."""
    if scale.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return scale.float()
    # Read as bytes: a cast would round. The byte is an fp32 exponent, but that 2^-127 (byte 0) is a
    # subnormal number.
    exponent = scale.view(torch.uint8).int()
    bits = (exponent << 23).clamp(min=0x400000)
    return bits.view(torch.float32).masked_fill(exponent == 255, float("nan"))


def dequantize_fp8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 values [..., out_size, in_size] times their scales, in fp32, rounded once to ``dtype``.

    scale: floating point or E8M0: one number; or the weight's leading axes or all, each of size 1,
    full, or one for each block (a power of two long, the last one may be cut off).
    """
    scale = scale_values(scale)
    if scale.numel() > 1:
        scale = scale.view(*scale.shape, *[1] * (weight.ndim - scale.ndim))
        for axis, size in enumerate(weight.shape):
            if 1 < scale.shape[axis] < size:
                blocks = block_size(size, scale.shape[axis])
                index = torch.arange(size, device=scale.device) // blocks
                scale = scale.index_select(axis, index)
    return (weight.float() * scale).to(dtype)


def block_size(size: int, num_blocks: int) -> int:
    """Length of each of ``num_blocks`` blocks of an axis: the least power of two that is enough."""
    return 1 << (-(-size // num_blocks) - 1).bit_length()


def dequantize_fp4(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """e2m1 values [..., out_size, in_size / 2] int8 or uint8 times E8M0 scales [..., out_size,
    in_size / 32]: [..., out_size, in_size] of ``dtype``; exact in bf16 if that has the exponent."""
    blocks = weight.view(torch.uint8).unflatten(-1, (-1, FP4_GROUP // 2))
    return dequantize_mxfp4(blocks, scale.view(torch.uint8)).to(dtype)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """e2m1 values [..., num_blocks, 16] uint8 times E8M0 scales [..., num_blocks] uint8, exactly:
    [..., num_blocks * 32] fp32."""
    rows = _e2m1_pairs(blocks.device).index_select(0, blocks.flatten().int())
    rows = rows.view(*blocks.shape[:-1], FP4_GROUP)
    return rows.mul_(scale_values(scales)[..., None]).flatten(-2)


@cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """Both values of each byte, [256, 2] fp32."""
    values = torch.tensor(E2M1, device=device)
    high, low = torch.meshgrid(values, values, indexing="ij")
    return torch.stack((low, high), -1).flatten(0, 1)


DEQUANTIZE: dict[str, Callable[[Tensor, Tensor, torch.dtype], Tensor]] = {
    "fp8": dequantize_fp8,
    "fp4": dequantize_fp4,
}
