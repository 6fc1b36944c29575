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

Where the keys and values of earlier tokens live is not the model's business: a layer hands its new
K/V rows to ``attend``, which `models.layers.attention` provides for paged caches and, without any
cache, for whole sequences.

Source: transformers ``modeling_gemma3``, ``modeling_gemma4``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config.named import ModelConfig
from ..layers.attention import Attend
from ..layers.basic import MLP, Linear, RMSNorm, empty_parameter, gelu_tanh, rms_norm
from ..layers.per_layer import HostEmbedding
from ..layers.rotary import apply_rotary
from .decoder import Decoder, Rotary
from .gemma_moe import Experts, Router


class Attention(nn.Module):
    """Projections, per-head norms and RoPE around the attention operator of one layer."""

    def __init__(
        self, config: ModelConfig, layer: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        shape = config.attention(layer)
        self.layer = layer
        self.head_dim = shape.head_dim
        self.eps = config.rms_norm_eps
        self.has_v_norm = config.has_v_norm
        self.owns_kv = config.kv_donor(layer) == layer
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, device, dtype)
        self.o_proj = Linear(q_size, config.hidden_size, device, dtype)
        self.q_norm = RMSNorm(shape.head_dim, self.eps, device, dtype, offset=config.norm_offset)
        if self.owns_kv:
            self.k_proj = Linear(config.hidden_size, kv_size, device, dtype)
            has_v_proj = not shape.k_eq_v
            self.v_proj = Linear(config.hidden_size, kv_size, device, dtype) if has_v_proj else None
            self.k_norm = RMSNorm(
                shape.head_dim, self.eps, device, dtype, offset=config.norm_offset
            )

    def values(self, x: Tensor, k_raw: Tensor) -> Tensor:
        """V rows. Without v_proj they are the K projection before K's norm weight and before RoPE.

        Args:
            x: [num_tokens, hidden_size].
            k_raw: [num_tokens, num_kv_heads, head_dim], the output of k_proj.

        Returns:
            [num_tokens, num_kv_heads, head_dim].
        """
        v = k_raw if self.v_proj is None else self.v_proj(x).view_as(k_raw)
        return rms_norm(v, None, self.eps) if self.has_v_norm else v

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Attention of every row, projections included.

        Args:
            x: [num_tokens, hidden_size].

        Returns:
            The same shape.
        """
        num_tokens = x.shape[0]
        q = self.q_proj(x).view(num_tokens, -1, self.head_dim)
        q = apply_rotary(self.q_norm(q), rotary)
        if self.owns_kv:
            k_raw = self.k_proj(x).view(num_tokens, -1, self.head_dim)
            k = apply_rotary(self.k_norm(k_raw), rotary)
            out = attend(self.layer, q, k, self.values(x, k_raw))
        else:
            out = attend(self.layer, q)
        return self.o_proj(out.reshape(num_tokens, -1))


class DecoderLayer(nn.Module):
    """One layer; the formula is in the file's docstring."""

    def __init__(
        self, config: ModelConfig, layer: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        size, width = config.hidden_size, config.per_layer_input_size

        def norm() -> RMSNorm:
            return RMSNorm(size, config.rms_norm_eps, device, dtype, offset=config.norm_offset)

        self.kind = config.layer_types[layer]
        self.has_experts = config.moe is not None
        self.has_per_layer_input = width > 0
        self.self_attn = Attention(config, layer, device, dtype)
        self.mlp = MLP(size, config.mlp_size(layer), device, dtype)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()
        if config.moe is not None:
            self.router = Router(config, device, dtype)
            self.experts = Experts(config, device, dtype)
            self.post_feedforward_layernorm_1 = norm()
            self.post_feedforward_layernorm_2 = norm()
            self.pre_feedforward_layernorm_2 = norm()
        if self.has_per_layer_input:
            self.per_layer_input_gate = Linear(size, width, device, dtype)
            self.per_layer_projection = Linear(width, size, device, dtype)
            self.post_per_layer_input_norm = norm()
        if config.has_layer_scalar:
            # A parameter here, though a buffer in checkpoints: a loader of parameters cannot miss
            # it.
            self.layer_scalar = empty_parameter(1, device=device, dtype=dtype)
        else:
            self.layer_scalar = None

    def forward(
        self, x: Tensor, rotary: Rotary, attend: Attend, per_layer_input: Tensor | None = None
    ) -> Tensor:
        """The layer.

        Args:
            x: [num_tokens, hidden_size].
            per_layer_input: [num_tokens, per_layer_input_size].

        Returns:
            X's shape.
        """
        x = x + self.post_attention_layernorm(
            self.self_attn(self.input_layernorm(x), rotary, attend)
        )
        x = x + self.post_feedforward_layernorm(self.feedforward(x))
        if self.has_per_layer_input:
            gated = gelu_tanh(self.per_layer_input_gate(x)) * per_layer_input
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x if self.layer_scalar is None else x * self.layer_scalar

    def feedforward(self, x: Tensor) -> Tensor:
        """The MLP, and beside it the experts, which with their router read x as it is.

        Args:
            x: [num_tokens, hidden_size].
        """
        out = self.mlp(self.pre_feedforward_layernorm(x))
        if not self.has_experts:
            return out
        chosen = self.experts(self.pre_feedforward_layernorm_2(x), *self.router(x))
        return self.post_feedforward_layernorm_1(out) + self.post_feedforward_layernorm_2(chosen)


class Gemma(Decoder):
    """A Gemma-3 or Gemma-4 text model with uninitialized weights.

    `models.loading.weights` fills them.

    Args:
        config: shapes.
        device, dtype: of all weights, except that the table of per-layer embeddings stays on the
            host; activations have the same dtype.
    """

    def __init__(
        self, config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__(config, device=device, dtype=dtype, scaled_embedding=True)
        device = torch.device(device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, device, dtype) for layer in range(config.num_layers)
        )
        width = config.per_layer_input_size
        if width:
            size = config.num_layers * width
            self.embed_tokens_per_layer = HostEmbedding(
                config.vocab_size, size, device, dtype, scale=width**0.5
            )
            self.per_layer_model_projection = Linear(config.hidden_size, size, device, dtype)
            self.per_layer_projection_norm = RMSNorm(
                width, config.rms_norm_eps, device, dtype, offset=config.norm_offset
            )

    def run_layers(
        self, input_ids: Tensor, x: Tensor, rotary: dict[str, Rotary], attend: Attend
    ) -> Tensor:
        """See `Decoder.run_layers`.

        From the first shared layer on, only ``attend.rows`` go further.
        """
        inputs = self.per_layer_inputs(input_ids, x)
        for i, layer in enumerate(self.layers):
            if i == self.config.num_kv_owners and (rows := attend.rows) is not None:
                x = x[rows]
                if len(rows) == 0:
                    return x
                rotary = {kind: (cos[rows], sin[rows]) for kind, (cos, sin) in rotary.items()}
                inputs = None if inputs is None else inputs[rows]
            x = layer(x, rotary[layer.kind], attend, None if inputs is None else inputs[:, i])
        return x

    def per_layer_inputs(self, input_ids: Tensor, x: Tensor) -> Tensor | None:
        """What each layer gets of each token.

        The mean, up to sqrt(2), of a projection of x and of the token's own row.

        Args:
            input_ids: [num_tokens] int64.
            x: [num_tokens, hidden_size], embedded and scaled.

        Returns:
            [num_tokens, num_layers, per_layer_input_size]; None where the model has none.
        """
        width = self.config.per_layer_input_size
        if not width:
            return None
        context = self.per_layer_model_projection(x) * self.config.hidden_size**-0.5
        context = self.per_layer_projection_norm(context.unflatten(1, (-1, width)))
        token = self.embed_tokens_per_layer(input_ids).unflatten(1, (-1, width))
        return (context + token.to(x.dtype)) * 2.0**-0.5
