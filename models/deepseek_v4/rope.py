"""Rotary embedding of DeepSeek-V4: adjacent pairs of the last channels of a head.

Source: transformers ``modeling_deepseek_v4``; DeepSeek-V4 report 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import write_latent

from ..config.model import RopeConfig
from ..layers.rotary import inverse_frequencies
from .config import DeepseekV4Config


def rope_frequencies(config: DeepseekV4Config, *, compressed: bool) -> Tensor:
    """Radians per position of each pair of adjacent rotated channels (2i, 2i + 1).

    Args:
        compressed: of CSA and HCA layers, whose frequencies YaRN interpolates, without its factor
            of cosine and sine.

    Returns:
        [rope_dim // 2] fp32, CPU.
    """
    base, yarn = config.compress_rope_theta if compressed else config.rope_theta, config.yarn
    rope = RopeConfig("default", base)
    if compressed and yarn is not None:
        rope = RopeConfig(
            "yarn",
            base,
            factor=yarn.factor,
            original_max_positions=yarn.original_max_position_embeddings,
            low=yarn.beta_slow,
            high=yarn.beta_fast,
        )
    return inverse_frequencies(rope, config.rope_dim)


def rope_table(frequencies: Tensor, num_positions: int) -> Tensor:
    """Cosines, then sines, of every position's angles.

    [num_positions, rope_dim] fp32, as `quire.kernels` reads them.
    """
    if frequencies.is_meta:  # the first sum there makes torch load its decompositions, seconds
        return frequencies.new_empty(num_positions, 2 * len(frequencies))
    angles = torch.arange(num_positions, device=frequencies.device)[:, None].float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotated_heads(
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    impl: str | None,
) -> Tensor:
    """Heads of queries, normed and rotated in place.

    Args:
        x: [num_tokens, num_heads, head_dim], contiguous.
        positions: [num_tokens] int64.
        cos_sin: [max_positions, rope_dim] fp32, a `rope_table`.
        norm_weight: [head_dim], of an RMS norm of each head; None = no norm.
        eps: of the norm.
        impl: "triton" or "torch"; None = by device.

    Returns:
        x.
    """
    rows = x.flatten(0, 1)
    write_latent(
        rows, None, None, positions=positions, cos_sin=cos_sin, norm_weight=norm_weight, eps=eps,
        out=rows, impl=impl,
    )  # fmt: skip
    return x


def apply_rope(x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotates the trailing channels of every row, in adjacent pairs, by its angles.

    Args:
        x: [num_tokens, ..., head_dim].
        cos_sin: [num_tokens, rope_dim] fp32 rows of a `rope_table`.
        inverse: rotate by the negative angles: the inverse RoPE.

    Returns:
        The shape and dtype of x; the arithmetic is fp32.
    """
    num_tokens, rope_dim = cos_sin.shape
    cos, sin = cos_sin.view(num_tokens, *[1] * (x.ndim - 2), rope_dim).chunk(2, dim=-1)
    if inverse:
        sin = -sin
    even, odd = x[..., -rope_dim::2].float(), x[..., 1 - rope_dim :: 2].float()
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :-rope_dim], rotated.to(x.dtype)), dim=-1)
