"""Gemma-3 and Gemma-4 text models.

Dense, E (shared keys and values, per-layer embeddings) and mixture of experts.

One layer, with the norms of both families (a norm follows each branch, before its residual sum)::

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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels import gated_product, norm_rope, residual_norm, route_tokens

from ..config.model import ModelConfig
from ..layers.attention import Attend
from ..layers.basic import MLP, Linear, RMSNorm, Stacked, empty_parameter
from ..layers.moe import run_experts
from ..layers.per_layer import HostEmbedding
from ..parallel.group import Group
from .decoder import Decoder, Rotary


class Router(nn.Module):
    """Choose experts by softmax over all of them, make their weights sum to one, and scale each.

    In fp32: in bf16, near ties would choose other experts.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.moe is not None
        self.top_k = config.moe.top_k
        self.eps = config.rms_norm_eps
        self.proj = Linear(config.hidden_size, config.moe.num_experts, device, dtype)
        self.scale = empty_parameter(config.hidden_size, device=device, dtype=dtype)
        self.per_expert_scale = empty_parameter(config.moe.num_experts, device=device, dtype=dtype)

    def forward(self, x: Tensor, impl: str | None = None) -> tuple[Tensor, Tensor]:
        """(expert_ids int64, weights fp32) of rows x, both [num_tokens, top_k]."""
        wide = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        z = residual_norm(x, self.scale, eps=self.eps, out=wide, impl=impl)
        return route_tokens(
            F.linear(z, self.proj.matrix(torch.float32)), top_k=self.top_k, score="softmax",
            logits_factor=x.shape[-1] ** -0.5, expert_scale=self.per_expert_scale, impl=impl,
        )  # fmt: skip


class Experts(nn.Module):
    """Gated MLPs of all experts."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype,
        group: Group | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.group = group
        assert config.moe is not None
        num_experts, width = config.moe.num_experts, config.moe.intermediate_size
        size = config.hidden_size
        self.gate_up_proj = empty_parameter(
            num_experts, 2 * width, size, device=device, dtype=dtype
        )
        self.down_proj = empty_parameter(num_experts, size, width, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, impl: str | None = None
    ) -> Tensor:
        """The weighted sum [num_tokens, hidden_size] of the experts that the router chose."""
        gate_up = self.gate_up_proj.unflatten(1, (2, -1))
        out = run_experts(
            x, expert_ids, weights, gate_up, self.down_proj, activation="gelu_tanh", impl=impl
        )
        return out if self.group is None else self.group.sum(out)


class Attention(nn.Module):
    """Projections, per-head norms and RoPE around the attention operator of one layer."""

    def __init__(
        self, config: ModelConfig, layer: int, device: torch.device, dtype: torch.dtype,
        group: Group | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        shape = config.attention(layer)
        self.layer = layer
        self.head_dim = shape.head_dim
        self.eps = config.rms_norm_eps
        self.has_v_norm = config.family == "gemma4"
        self.owns_kv = config.kv_donor(layer) == layer
        self.num_kv_heads = shape.num_kv_heads if self.owns_kv else 0
        self.has_v_proj = self.owns_kv and not shape.k_eq_v
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, device, dtype)
        self.o_proj = Linear(q_size, config.hidden_size, device, dtype, group=group)
        self.q_norm = RMSNorm(shape.head_dim, self.eps, device, dtype, offset=config.norm_offset)
        if self.owns_kv:
            self.k_proj = Linear(config.hidden_size, kv_size, device, dtype)
            if self.has_v_proj:
                self.v_proj = Linear(config.hidden_size, kv_size, device, dtype)
            self.k_norm = RMSNorm(
                shape.head_dim, self.eps, device, dtype, offset=config.norm_offset
            )
        parts = ("q_proj", "k_proj", "v_proj")[: 1 + self.owns_kv + self.has_v_proj]
        self.qkv = Stacked(*(getattr(self, part) for part in parts))

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Attention of x [num_tokens, hidden_size], projections included."""
        qkv, count = self.qkv(x).view(len(x), -1, self.head_dim), self.num_kv_heads
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
        return self.o_proj(out.reshape(len(x), -1))


class DecoderLayer(nn.Module):
    """One layer; the docstring of the module has the formula."""

    def __init__(
        self, config: ModelConfig, layer: int, device: torch.device, dtype: torch.dtype,
        group: Group | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        size, width = config.hidden_size, config.per_layer_input_size

        def norm() -> RMSNorm:
            return RMSNorm(size, config.rms_norm_eps, device, dtype, offset=config.norm_offset)

        self.kind = config.layer_types[layer]
        self.has_experts = config.moe is not None
        self.has_per_layer_input = width > 0
        self.self_attn = Attention(config, layer, device, dtype, group)
        self.mlp = MLP(size, config.mlp_size(layer), device, dtype, group=group)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()
        if config.moe is not None:
            self.router = Router(config, device, dtype)
            self.experts = Experts(config, device, dtype, group)
            self.post_feedforward_layernorm_1 = norm()
            self.post_feedforward_layernorm_2 = norm()
            self.pre_feedforward_layernorm_2 = norm()
        if self.has_per_layer_input:
            self.per_layer_input_gate = Linear(size, width, device, dtype)
            self.per_layer_projection = Linear(width, size, device, dtype)
            self.post_per_layer_input_norm = norm()
        if config.family == "gemma4":
            # A parameter here, though a buffer in checkpoints: a loader of parameters cannot miss
            # it.
            self.layer_scalar = empty_parameter(1, device=device, dtype=dtype)
        else:
            self.layer_scalar = None

    def forward(
        self, x: Tensor, residual: Tensor, rotary: Rotary, attend: Attend, norm: RMSNorm,
        per_layer_input: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As `llama.DecoderLayer`; per_layer_input: [num_tokens, per_layer_input_size]."""
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
    """A Gemma-3 or Gemma-4 text model; arguments as in `Decoder`.

    The table of per-layer embeddings stays on the host.
    """

    def __init__(
        self, config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype,
        group: Group | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            config, device=device, dtype=dtype, group=group,
            embedding_scale=config.hidden_size**0.5,
        )  # fmt: skip
        device = torch.device(device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, device, dtype, group) for layer in range(config.num_layers)
        )
        width = config.per_layer_input_size
        if width:
            size = config.num_layers * width
            self.embed_tokens_per_layer = HostEmbedding(
                config.vocab_size, size, device, dtype, scale=width**0.5, group=group
            )
            self.per_layer_model_projection = Linear(config.hidden_size, size, device, dtype)
            self.per_layer_projection_norm = RMSNorm(
                width, config.rms_norm_eps, device, dtype, offset=config.norm_offset
            )

    def run_layers(
        self, input_ids: Tensor, x: Tensor, rotary: dict[str, Rotary], attend: Attend
    ) -> Tensor:
        """As `Decoder.run_layers`; from the first shared layer on for ``attend.rows`` only."""
        inputs = self.per_layer_inputs(input_ids, x)
        branch = self.layers[0].input_layernorm.after(x, impl=attend.impl)
        norms = [*(layer.input_layernorm for layer in self.layers[1:]), self.norm]
        for i, (layer, norm) in enumerate(zip(self.layers, norms, strict=True)):
            if i == self.config.num_kv_owners and (rows := attend.rows) is not None:
                branch, x = branch[rows], x[rows]
                if len(rows) == 0:
                    return branch
                rotary = {kind: (cos[rows], sin[rows]) for kind, (cos, sin) in rotary.items()}
                inputs = None if inputs is None else inputs[rows]
            own = None if inputs is None else inputs[:, i]
            branch = layer(branch, x, rotary[layer.kind], attend, norm, own)
        return branch

    def per_layer_inputs(self, input_ids: Tensor, x: Tensor) -> Tensor | None:
        """Per-layer inputs of each token, [num_tokens, num_layers, per_layer_input_size].

        The mean, up to sqrt(2), of a projection of x, embedded and scaled, and of the token's own
        row.
        """
        width = self.config.per_layer_input_size
        if not width:
            return None
        context = self.per_layer_model_projection(x) * self.config.hidden_size**-0.5
        context = self.per_layer_projection_norm(context.unflatten(1, (-1, width)))
        token = self.embed_tokens_per_layer(input_ids).unflatten(1, (-1, width))
        return (context + token.to(x.dtype)) * 2.0**-0.5
