"""Norms, linear layers, embeddings and MLPs of the text models.

Weights keep the names and shapes of Hugging Face checkpoints; nothing is initialized here. Rows are
tokens of a ragged batch: [num_tokens, ...], without a batch dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels import gated_product, residual_norm
from quire.kernels.common.dequantize import dequantize_fp8

from ..parallel.group import Group


@dataclass(frozen=True)
class WeightPlacement:
    """Device and data type of weights, and the ranks that share a model; None = one rank."""

    device: torch.device
    dtype: torch.dtype
    group: Group | None = None

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialized, frozen parameter."""
        weight = torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        return nn.Parameter(weight, requires_grad=False)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32; in the dtype of x.

    Source: transformers ``modeling_gemma3``, ``modeling_gemma4``.
    """
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a stored weight; offset: added to it in fp32, 1.0 in Gemma-3."""

    def __init__(
        self, size: int, eps: float, place: WeightPlacement, *, offset: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = place.empty(size, dtype=dtype)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """The norm of every row of x [..., size]."""
        return rms_norm(x, self.weight.float() + self.offset, self.eps)

    def after(
        self, x: Tensor, residual: Tensor | None = None, *, post: RMSNorm | None = None,
        scalar: Tensor | None = None, impl: str | None,
    ) -> Tensor:  # fmt: skip
        """The norm of the residual stream after a branch of a layer, in one launch.

        Args:
            x: [num_tokens, size], result of the branch.
            residual: [num_tokens, size], becomes (residual + post(x)) * scalar in place; None: the
                norm is that of x.
            scalar: [1] or None for 1.
        """
        return residual_norm(
            x, self.weight, eps=self.eps, offset=self.offset, residual=residual,
            post_weight=None if post is None else post.weight, scalar=scalar, impl=impl,
        )  # fmt: skip

    def add_to(self, residual: Tensor, x: Tensor, *, impl: str | None) -> None:
        """Add the norm of x to ``residual`` in place, both [num_tokens, size], in one launch."""
        residual_norm(
            x, None, eps=self.eps, offset=self.offset, residual=residual, post_weight=self.weight,
            impl=impl,
        )  # fmt: skip


class Linear(nn.Module):
    """x W^T + b; weight [out_size, in_size], in fp8 after `keep_fp8`.

    group: ranks with the other columns, which add their products up; None = all are here.
    """

    def __init__(
        self, in_size: int, out_size: int, place: WeightPlacement, *, bias: bool = False,
        group: Group | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.group = group
        self.weight = place.empty(out_size, in_size)
        self.bias = place.empty(out_size) if bias else None
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, out_size] of x [num_tokens, in_size]."""
        weight = self.weight if self.scale is None else self.matrix(x.dtype)
        if self.group is None:
            return F.linear(x, weight, self.bias)
        out = self.group.sum(F.linear(x, weight))
        return out if self.bias is None else out + self.bias

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The weight [out_size, in_size] in ``dtype``, dequantized."""
        if self.scale is None:
            return self.weight.to(dtype)
        return dequantize_fp8(self.weight, self.scale, dtype)

    def keep_fp8(self, weight: Tensor, scale: Tensor) -> None:
        """Hold the weight [out_size, in_size] in fp8; each forward pass dequantizes it."""
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = scale


class Stacked:
    """Linear layers that read the same rows, as one product over adjacent memory.

    Each layer keeps its part of the weight under its own name, as checkpoints have it. Layers have
    one in_size, all have a bias or none; they get new weights, uninitialized.

    Attributes:
        out_sizes: of each layer.
    """

    def __init__(self, *layers: Linear) -> None:
        self.layers = layers
        self.allocate(layers[0].weight.device)

    def allocate(self, device: torch.device) -> None:
        """Give the layers new weights, uninitialized, on ``device``."""
        first, self.out_sizes = self.layers[0], [len(layer.weight) for layer in self.layers]
        names = ("weight",) if first.bias is None else ("weight", "bias")
        whole = {}
        for name in names:
            like = getattr(first, name)
            whole[name] = like.new_empty(sum(self.out_sizes), *like.shape[1:], device=device)
            for layer, part in zip(self.layers, whole[name].split(self.out_sizes), strict=True):
                setattr(layer, name, nn.Parameter(part, requires_grad=False))
        self._weight, self._bias = whole["weight"], whole.get("bias")
        owners = [(layer._parameters, name) for layer in self.layers for name in names]
        self._addresses = [(own, name, own[name].data_ptr()) for own, name in owners]

    def __call__(self, x: Tensor, *, fp32: bool = False) -> Tensor:
        """The products side by side: [num_tokens, sum of ``out_sizes``].

        fp32: those of `linear_fp32`, without biases.
        """
        for own, name, address in self._addresses:
            if own[name] is None or own[name].data_ptr() != address:
                # A layer was given another weight, such as an fp8 one.
                if fp32:
                    each = [linear_fp32(x, layer.matrix(x.dtype)) for layer in self.layers]
                else:
                    each = [layer(x) for layer in self.layers]
                return torch.cat(each, dim=-1)
        return linear_fp32(x, self._weight) if fp32 else F.linear(x, self._weight, self._bias)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in fp32, without rounding to the model's dtype, for routers and compressors."""
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


class Embedding(nn.Module):
    """Token embedding; tied models use it, unscaled, as output projection too.

    Each rank has ``num_rows`` rows. Those past the vocabulary are zeros, and give no logits.

    scale: factor of the rows, rounded to the weight dtype first, as the models were trained: in
    bf16 sqrt(5376) is 73.5.
    """

    def __init__(
        self, vocab_size: int, size: int, place: WeightPlacement, *, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.vocab_size, self.group = vocab_size, place.group
        self.num_rows = vocab_size if place.group is None else -(-vocab_size // place.group.size)
        self.weight = place.empty(self.num_rows, size)
        self.scale = torch.tensor(scale, dtype=place.dtype).item()

    def forward(self, input_ids: Tensor, table: Tensor | None = None) -> Tensor:
        """Scaled rows [num_tokens, size] of input_ids [num_tokens] int64.

        table: view of the weight on the device of the ids; None = the weight.
        """
        table, group = self.weight if table is None else table, self.group
        if group is None:
            rows = F.embedding(input_ids, table)
        else:
            local = input_ids - group.rank * self.num_rows
            foreign = (local < 0) | (local >= self.num_rows)
            rows = F.embedding(local.masked_fill(foreign, 0), table)
            rows = group.sum(rows.masked_fill_(foreign[:, None], 0.0))
        return rows if self.scale == 1.0 else rows * self.scale

    def logits(
        self, x: Tensor, projection: Linear | None = None, *, softcap: float | None = None
    ) -> Tensor:
        """Logits [num_rows, vocab_size] fp32 of normed rows x [num_rows, size].

        projection: output projection; None = this table. softcap: logits become softcap *
        tanh(logits / softcap).
        """
        logits = F.linear(x, self.weight) if projection is None else projection(x)
        if self.group is not None:
            logits = self.group.gather(logits)[:, : self.vocab_size].contiguous()
        logits = logits.float()
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)).

    limit: clamps gate from above and up on both sides; group: ranks with the rest of the width.
    """

    def __init__(
        self, hidden_size: int, width: int, place: WeightPlacement, *,
        activation: str = "gelu_tanh", limit: float | None = None, group: Group | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate_proj = Linear(hidden_size, width, place)
        self.up_proj = Linear(hidden_size, width, place)
        self.down_proj = Linear(width, hidden_size, place, group=group)
        self.gate_up = Stacked(self.gate_proj, self.up_proj)
        self.activation, self.limit = activation, limit

    def forward(self, x: Tensor, impl: str | None = None) -> Tensor:
        """The MLP of every row of x [num_tokens, hidden_size]; impl: "triton" or "torch"."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        x = gated_product(gate, up, activation=self.activation, limit=self.limit, impl=impl)
        return self.down_proj(x)
