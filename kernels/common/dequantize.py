"""Dequantization of stored weights: values of 8 or 4 bits times the scales of their blocks.

    fp8      e4m3 [.., out, in]; a scale for all, for each row, or for each block of the matrix
    fp4      two e2m1 values a byte [.., out, in / 2], the even column in the low four bits;
             an E8M0 scale for 32 columns
    mxfp4    the same in blocks: [.., num_blocks, 16] bytes and [.., num_blocks] scales

Scales are floating-point numbers, or E8M0: a byte b that stands for 2^(b - 127). E8M0 is read as
bytes: a numeric cast would round or destroy it.

Source: OCP Microscaling Formats 1.0 (E2M1, E8M0); ``weight_scale_inv`` of transformers'
    fine-grained fp8; ``weight_scale`` of compressed-tensors; ``_blocks`` and ``_scales`` of gpt-oss
    checkpoints; DeepSeek-V4 checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FP4_GROUP = 32  # columns that share a scale, in fp4 and mxfp4
E8M0_BIAS = 127


def scale_values(scale: Tensor) -> Tensor:
    """Scales as fp32.

    Args:
        scale: floating-point numbers, which stay as they are, or E8M0 (float8_e8m0fnu, or its bytes
            as uint8), which become powers of two; byte 255 is NaN.
    """
    if scale.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return scale.float()
    exponent = scale.view(torch.uint8).int() - E8M0_BIAS
    values = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    return values.masked_fill(exponent == 255 - E8M0_BIAS, float("nan"))


def dequantize_fp8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 values times their scales, rounded once.

    Args:
        weight: [..., out_size, in_size] fp8.
        scale: floating point or E8M0. One number; or with as many axes as the weight (the last ones
            may be left out: [out_size] is one of each output channel), along each of them 1, all,
            or one of each block. Blocks are powers of two long, the last one of an axis may be cut
            off.
        dtype: of the result; the product is fp32.

    Returns:
        [..., out_size, in_size] of ``dtype``.
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
    """Length of the blocks that ``num_blocks`` scales along an axis of ``size`` are of.

    The least power of two that is enough.
    """
    return 1 << (-(-size // num_blocks) - 1).bit_length()


def dequantize_fp4(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """e2m1 values times the scale of their group.

    Args:
        weight: [..., out_size, in_size / 2] int8 or uint8.
        scale: [..., out_size, in_size / 32] E8M0.
        dtype: of the result; bf16 holds every value exactly whose exponent it holds.

    Returns:
        [..., out_size, in_size] of ``dtype``.
    """
    blocks = weight.view(torch.uint8).unflatten(-1, (-1, FP4_GROUP // 2))
    return dequantize_mxfp4(blocks, scale.view(torch.uint8)).to(dtype)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """e2m1 values, times two to the power of their block's exponent; exact.

    Args:
        blocks: [..., num_blocks, 16] uint8, two values a byte, the earlier one in the low bits.
        scales: [..., num_blocks] uint8, exponent + 127.

    Returns:
        [..., num_blocks * 32] fp32.
    """
    # What each of 16 bit patterns stands for: one bit of sign, two of exponent, one of mantissa.
    # Computed, as no CUDA graph can hold a copy from the host.
    pattern = torch.arange(16, device=blocks.device)
    low = pattern & 7
    magnitude = torch.where(low < 2, low / 2, torch.ldexp(1 + (low & 1) / 2, (low >> 1) - 1))
    table = torch.where(pattern < 8, magnitude, -magnitude)
    patterns = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.int() - E8M0_BIAS
    return torch.ldexp(table[patterns.long()], exponents[..., None]).flatten(-2)


DEQUANTIZE: dict[str, Callable[[Tensor, Tensor, torch.dtype], Tensor]] = {
    "fp8": dequantize_fp8,
    "fp4": dequantize_fp4,
}
