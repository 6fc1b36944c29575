"""Building blocks of Gemma text models. Weights keep the names and shapes of Hugging Face checkpoints; nothing is initialised here.

Rows are tokens of a ragged batch: [num_tokens, ...], no batch dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.models.configs import RopeConfig


def empty_parameter(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised, frozen parameter of ``shape``, allocated on its final device."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32.

    x: [..., size]. weight: [size] fp32 or None for 1.

    Returns: [..., size] in the dtype of x.
    Source: transformers ``modeling_gemma3``, ``modeling_gemma4``.
    """
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each channel pair (i, i + head_dim / 2).

    Proportional: the exponent's denominator is head_dim, not the rotated width, and pairs past
    ``partial_rotary_factor`` do not turn at all (frequency 0).

    Returns: [head_dim // 2] fp32, CPU.
    Source: transformers ``modeling_rope_utils``.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.base**exponent
    if rope.kind == "proportional":
        frequencies[int(rope.partial_rotary_factor * head_dim // 2) :] = 0.0
    if rope.kind != "default":
        frequencies = frequencies / rope.factor
    return frequencies


def rotary_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles.

    positions: [num_tokens] int64. frequencies: [head_dim // 2] fp32.

    Returns: (cos, sin), each [num_tokens, 1, head_dim // 2] fp32; the 1 broadcasts over heads.
    """
    angles = positions.float()[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the channel pairs (i, i + head_dim / 2) of every head by its token's angles.

    x: [num_tokens, heads, head_dim]. rotary: (cos, sin) of :func:`rotary_angles`.

    Returns: [num_tokens, heads, head_dim] in the dtype of x; the arithmetic is fp32.
    """
    cos, sin = rotary
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    """:func:`rms_norm` with a stored weight.

    offset: added to the stored weight; 1.0 in Gemma-3 (weights stored around 0), 0.0 in Gemma-4.
    """

    def __init__(
        self, size: int, eps: float, offset: float, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(size, device=device, dtype=dtype)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size]. Returns the same shape and dtype."""
        # The sum is taken in fp32: 1 + w in bf16 would round away small weights.
        return rms_norm(x, self.weight.float() + self.offset, self.eps)


class Linear(nn.Module):
    """x W^T without bias. weight: [out_size, in_size]."""

    def __init__(
        self, in_size: int, out_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_size, in_size, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in_size]. Returns [num_tokens, out_size]."""
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """Token embedding scaled by sqrt(hidden_size), tied with the output projection, which is not scaled.

    weight: [vocab_size, hidden_size].
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, device=device, dtype=dtype)
        # Rounded to the weight dtype first, as the models were trained: in bf16 sqrt(5376) is 73.5.
        self.scale = torch.tensor(hidden_size**0.5, dtype=dtype).item()

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: [num_tokens] int. Returns [num_tokens, hidden_size]."""
        return F.embedding(input_ids, self.weight) * self.scale

    def logits(self, x: Tensor) -> Tensor:
        """x: [num_rows, hidden_size]. Returns [num_rows, vocab_size] fp32."""
        return F.linear(x, self.weight).float()


class MLP(nn.Module):
    """down(gelu_tanh(gate(x)) * up(x))."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, device, dtype)
        self.up_proj = Linear(hidden_size, intermediate_size, device, dtype)
        self.down_proj = Linear(intermediate_size, hidden_size, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size]. Returns the same shape."""
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
