"""Llama text models.

Grouped-query attention and a SiLU MLP, each after its norm and before its residual sum.

Source: transformers ``modeling_llama``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.kernels import norm_rope

from ..config.named import ModelConfig
from ..layers.attention import Attend
from ..layers.basic import MLP, Linear, RMSNorm, Stacked, empty_parameter
from ..parallel.group import Group
from .decoder import Decoder, Rotary


class Attention(nn.Module):
    """Projections and RoPE around the attention operator of one layer.

    Args:
        has_sinks: give every head a logit that joins the denominator of its softmax only (gpt-oss).
        group: as in `quire.models.layers.basic.Linear`, of the output projection.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        has_sinks: bool = False,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        shape, size = config.attention(layer), config.hidden_size
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.layer = layer
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim

        def linear(in_size: int, out_size: int, group: Group | None = None) -> Linear:
            bias = config.attention_bias
            return Linear(in_size, out_size, device, dtype, bias=bias, group=group)

        self.q_proj = linear(size, q_size)
        self.k_proj = linear(size, kv_size)
        self.v_proj = linear(size, kv_size)
        self.o_proj = linear(q_size, size, group)
        self.qkv = Stacked(self.q_proj, self.k_proj, self.v_proj)
        self.sinks = None
        if has_sinks:
            self.sinks = empty_parameter(shape.num_heads, device=device, dtype=dtype)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Attention of every row, projections included.

        Args:
            x: [num_tokens, hidden_size].

        Returns:
            The same shape.
        """
        sinks = None if self.sinks is None else self.sinks.float()
        qkv, count = self.qkv(x).view(len(x), -1, self.head_dim), self.num_kv_heads
        qk = norm_rope(qkv, *rotary, num_kv_heads=count, impl=attend.impl)
        q, k, v = qk[:, :-count], qk[:, -count:], qkv[:, -count:]
        out = attend(self.layer, q, k, v, sinks=sinks)
        return self.o_proj(out.reshape(len(x), -1))


class DecoderLayer(nn.Module):
    """Attention and ``mlp`` branches of one layer, with a norm before each."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        mlp: nn.Module,
        has_sinks: bool = False,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        self.kind = config.layer_types[layer]
        self.self_attn = Attention(config, layer, device, dtype, has_sinks=has_sinks, group=group)
        self.mlp = mlp
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, device, dtype, offset=config.norm_offset)
        self.post_attention_layernorm = RMSNorm(size, eps, device, dtype, offset=config.norm_offset)

    def forward(
        self, x: Tensor, residual: Tensor, rotary: Rotary, attend: Attend, norm: RMSNorm
    ) -> Tensor:
        """The layer.

        Args:
            x: [num_tokens, hidden_size], ``residual`` after `input_layernorm`.
            residual: [num_tokens, hidden_size], updated in place.
            norm: the one that comes after the layer.

        Returns:
            The updated residual after ``norm``.
        """
        impl = attend.impl
        x = self.self_attn(x, rotary, attend)
        x = self.post_attention_layernorm.after(x, residual, impl=impl)
        return norm.after(self.mlp(x, impl), residual, impl=impl)


class Llama(Decoder):
    """A Llama model with uninitialized weights; `models.loading.weights` fills them.

    Arguments as in `Decoder`.
    """

    def __init__(
        self, config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype,
        group: Group | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, device=device, dtype=dtype, group=group)
        device = torch.device(device)
        size, width = config.hidden_size, config.intermediate_size
        self.layers = nn.ModuleList(
            DecoderLayer(
                config,
                layer,
                device,
                dtype,
                mlp=MLP(size, width, device, dtype, activation="silu", group=group),
                group=group,
            )
            for layer in range(config.num_layers)
        )
