"""Gemma-3 and Gemma-4 text models: dense, E, and mixture of experts. One layer::

    x = x + post_attention_layernorm(attention(input_layernorm(x)))
    x = x + post_feedforward_layernorm(feedforward(x))
    x = x + post_per_layer_input_norm(per_layer_branch(x))                  # Gemma-4 E
    x = x * layer_scalar                                                    # Gemma-4

    feedforward(x) = mlp(pre_feedforward_layernorm(x))        # or with experts:
    feedforward(x) = post_feedforward_layernorm_1(mlp(pre_feedforward_layernorm(x)))
                   + post_feedforward_layernorm_2(
                         experts(pre_feedforward_layernorm_2(x), router(x)))

Source: transformers ``modeling_gemma3``, ``modeling_gemma4``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels import (
    combine_experts,
    expert_mlp,
    gated_product,
    norm_rope,
    residual_norm,
    route_tokens,
)

from ..config.model import ModelConfig
from ..layers.attention import Attend
from ..layers.basic import MLP, Linear, RMSNorm, Stacked, WeightPlacement
from ..layers.per_layer import HostEmbedding
from .decoder import Decoder, Rotary


class Router(nn.Module):
    """Choose experts by softmax over all of them, make their weights sum to one, and scale each.

    In fp32: in bf16, near ties would choose other experts.
    """

    def __init__(self, config: ModelConfig, place: WeightPlacement) -> None:
        super().__init__()
        assert config.moe is not None
        self.top_k = config.moe.top_k
        self.eps = config.rms_norm_eps
        self.proj = Linear(config.hidden_size, config.moe.num_experts, place)
        self.scale = place.empty(config.hidden_size)
        self.per_expert_scale = place.empty(config.moe.num_experts)

    def forward(self, x: Tensor, impl: str | None = None) -> tuple[Tensor, Tensor]:
        """(expert_ids int64, weights fp32) of rows x, both [num_tokens, top_k]."""
        wide = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        z = residual_norm(x, self.scale, eps=self.eps, out=wide, impl=impl)
        return route_tokens(
            F.linear(z, self.proj.matrix(torch.float32)), top_k=self.top_k, score="softmax",
            logits_factor=x.shape[-1] ** -0.5, expert_scale=self.per_expert_scale, impl=impl,
        )  # fmt: skip


class Experts(nn.Module):
    def __init__(self, config: ModelConfig, place: WeightPlacement) -> None:
        super().__init__()
        self.group = place.group
        assert config.moe is not None
        num_experts, width = config.moe.num_experts, config.moe.intermediate_size
        self.gate_up_proj = place.empty(num_experts, 2 * width, config.hidden_size)
        self.down_proj = place.empty(num_experts, config.hidden_size, width)

    def forward(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, impl: str | None = None
    ) -> Tensor:
        """The weighted sum [num_tokens, hidden_size] of the experts that the router chose."""
        gate_up = self.gate_up_proj.unflatten(1, (2, -1))
        rows = expert_mlp(x, expert_ids, gate_up, self.down_proj, activation="gelu_tanh", impl=impl)
        out = combine_experts(rows, weights, impl=impl)
        return out if self.group is None else self.group.sum(out)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, place: WeightPlacement) -> None:
        super().__init__()
        shape, size, offset = config.attention(layer), config.hidden_size, config.norm_offset
        self.layer = layer
        self.head_dim = shape.head_dim
        self.eps = config.rms_norm_eps
        self.has_v_norm = config.family == "gemma4"
        self.owns_kv = config.kv_donor(layer) == layer
        self.num_kv_heads = shape.num_kv_heads if self.owns_kv else 0
        self.has_v_proj = self.owns_kv and not shape.k_eq_v
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = Linear(size, q_size, place)
        self.o_proj = Linear(q_size, size, place, group=place.group)
        self.q_norm = RMSNorm(shape.head_dim, self.eps, place, offset=offset)
        projections = [self.q_proj]
        if self.owns_kv:
            self.k_proj = Linear(size, kv_size, place)
            self.k_norm = RMSNorm(shape.head_dim, self.eps, place, offset=offset)
            projections.append(self.k_proj)
        if self.has_v_proj:
            self.v_proj = Linear(size, kv_size, place)
            projections.append(self.v_proj)
        self.qkv = Stacked(*projections)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Attention of x [num_tokens, hidden_size], projections included."""
        qkv, count = self.qkv(x).view(x.shape[0], -1, self.head_dim), self.num_kv_heads
        norm_v = self.has_v_norm and self.owns_kv
        out = norm_rope(
            qkv, *rotary, num_kv_heads=count, has_v=self.has_v_proj, q_weight=self.q_norm.weight,
            k_weight=self.k_norm.weight if self.owns_kv else None, norm_v=norm_v, eps=self.eps,
            offset=self.q_norm.offset, impl=attend.impl,
        )  # fmt: skip
        if self.owns_kv:
            # Without v_proj, values are what k_proj gives, before K's norm weight and RoPE.
            qk, v = (out[:, :-count], out[:, -count:]) if norm_v else (out, qkv[:, -count:])
            out = attend(self.layer, qk[:, :-count], qk[:, -count:], v)
        else:
            out = attend(self.layer, out)
        return self.o_proj(out.flatten(1))


class DecoderLayer(nn.Module):
    """One layer; the docstring of the module has the formula."""

    def __init__(self, config: ModelConfig, layer: int, place: WeightPlacement) -> None:
        super().__init__()
        size, width = config.hidden_size, config.per_layer_input_size

        def norm() -> RMSNorm:
            return RMSNorm(size, config.rms_norm_eps, place, offset=config.norm_offset)

        self.kind = config.layer_types[layer]
        self.has_experts = config.moe is not None
        self.self_attn = Attention(config, layer, place)
        self.mlp = MLP(size, config.mlp_size(layer), place, group=place.group)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()
        if self.has_experts:
            self.router = Router(config, place)
            self.experts = Experts(config, place)
            self.post_feedforward_layernorm_1 = norm()
            self.post_feedforward_layernorm_2 = norm()
            self.pre_feedforward_layernorm_2 = norm()
        if width:
            self.per_layer_input_gate = Linear(size, width, place)
            self.per_layer_projection = Linear(width, size, place)
            self.post_per_layer_input_norm = norm()
        # A buffer in checkpoints, but loading fills parameters.
        self.layer_scalar = place.empty(1) if config.family == "gemma4" else None

    def forward(
        self, x: Tensor, residual: Tensor, rotary: Rotary, attend: Attend, norm: RMSNorm,
        per_layer_input: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As `decoder.DecoderLayer`; per_layer_input: [num_tokens, per_layer_input_size]."""
        impl = attend.impl
        x, post = self.self_attn(x, rotary, attend), self.post_attention_layernorm
        x = self.pre_feedforward_layernorm.after(x, residual, post=post, impl=impl)
        x, post = self.feedforward(x, residual, impl), self.post_feedforward_layernorm
        if per_layer_input is not None:
            post.add_to(residual, x, impl=impl)
            gate, activation = self.per_layer_input_gate(residual), self.mlp.activation
            gated = gated_product(gate, per_layer_input, activation=activation, impl=impl)
            x, post = self.per_layer_projection(gated), self.post_per_layer_input_norm
        return norm.after(x, residual, post=post, scalar=self.layer_scalar, impl=impl)

    def feedforward(self, x: Tensor, residual: Tensor, impl: str | None) -> Tensor:
        """The MLP, and beside it the experts, which with their router read the residual."""
        out = self.mlp(x, impl)
        if self.has_experts:
            x = self.pre_feedforward_layernorm_2.after(residual, impl=impl)
            chosen = self.experts(x, *self.router(residual, impl), impl)
            out = self.post_feedforward_layernorm_1.after(out, impl=impl)
            self.post_feedforward_layernorm_2.add_to(out, chosen, impl=impl)
        return out


class Gemma(Decoder):
    """A Gemma-3 or Gemma-4 text model; the table of per-layer embeddings stays on the host."""

    def __init__(self, config: ModelConfig, **placement: Any) -> None:
        super().__init__(config, **placement, embedding_scale=config.hidden_size**0.5)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, self.place) for layer in range(config.num_layers)
        )
        if width := config.per_layer_input_size:
            size = config.num_layers * width
            self.embed_tokens_per_layer = HostEmbedding(
                config.vocab_size, size, self.place, scale=width**0.5
            )
            self.per_layer_model_projection = Linear(config.hidden_size, size, self.place)
            self.per_layer_projection_norm = RMSNorm(
                width, config.rms_norm_eps, self.place, offset=config.norm_offset
            )

    def per_layer_inputs(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """As `Decoder.per_layer_inputs`: a projection of x plus the token's own rows."""
        width = self.config.per_layer_input_size
        context = self.per_layer_model_projection(x) * self.config.hidden_size**-0.5
        context = self.per_layer_projection_norm(context.unflatten(1, (-1, width)))
        token = self.embed_tokens_per_layer(input_ids).unflatten(1, (-1, width))
        return (context + token.to(x.dtype)) * 2.0**-0.5
