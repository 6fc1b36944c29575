"""Rotary embedding: frequencies of channel pairs, and a rotation in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config.model import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each channel pair, without ``amplitude``: [head_dim // 2] fp32, CPU.

    Pairs are (i, i + head_dim / 2) in `norm_rope`, (2i, 2i + 1) in DeepSeek-V4.

    Source: transformers ``modeling_rope_utils``.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.rope_theta**exponent
    if rope.rope_type == "proportional":
        frequencies[int(rope.partial_rotary_factor * head_dim // 2) :] = 0.0
    if rope.rope_type in ("linear", "proportional"):
        return frequencies / (rope.factor or 1.0)
    if rope.rope_type in ("llama3", "yarn"):
        share = _unscaled_share(rope, frequencies)
        return frequencies * (share + (1 - share) / rope.factor)
    return frequencies


def _unscaled_share(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """[head_dim // 2] fp32: 1 for high frequencies, 0 for low ones, a ramp between: llama3's is
    linear in the turns within the trained tokens, yarn's in the channel pair."""
    trained, num_pairs = rope.original_max_position_embeddings, len(frequencies)
    if rope.rope_type == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        return ((frequencies * (trained / (2 * math.pi)) - low) / (high - low)).clamp(0, 1)

    def pair_that_turns(turns: float) -> float:
        return num_pairs * math.log(trained / (2 * math.pi * turns)) / math.log(rope.rope_theta)

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The upper limit is in channels, not pairs, as in the paper's code; it matters where no
    # frequency is low.
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    width = last - first or 0.001
    return 1 - ((torch.arange(num_pairs, dtype=torch.float32) - first) / width).clamp(0, 1)


def apply_rope(x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the trailing channels of every row of x, in adjacent pairs, by its angles, in fp32.

    cos_sin: [num_tokens, rope_dim] fp32, cosines, then sines. inverse: by the negative angles.
    """
    num_tokens, rope_dim = cos_sin.shape
    cos, sin = cos_sin.view(num_tokens, *[1] * (x.ndim - 2), rope_dim).chunk(2, dim=-1)
    if inverse:
        sin = -sin
    even, odd = x[..., -rope_dim::2].float(), x[..., 1 - rope_dim :: 2].float()
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :-rope_dim], rotated.to(x.dtype)), dim=-1)
