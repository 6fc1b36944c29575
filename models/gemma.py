"""Dense Gemma-3 and Gemma-4 text models.

One layer, with the four norms of both families (a norm follows each branch, before its residual sum)::

    x = x + post_attention_layernorm(attention(input_layernorm(x)))
    x = x + post_feedforward_layernorm(mlp(pre_feedforward_layernorm(x)))
    x = x * layer_scalar                                                    # Gemma-4

Where the keys and values of earlier tokens live is not the model's business: a layer hands its fresh rows to ``attend``, which
`models.attention` provides for paged caches and, without any cache, for whole sequences.

Source: transformers ``modeling_gemma3``, ``modeling_gemma4``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quire.models.attention import dense_attend, paged_attend
from quire.models.batch import AttnMetadata
from quire.models.cache import PagePool
from quire.models.configs import FULL, SLIDING, ModelConfig
from quire.models.layers import (
    MLP,
    Embedding,
    Linear,
    RMSNorm,
    apply_rotary,
    empty_parameter,
    inverse_frequencies,
    rms_norm,
    rotary_angles,
)

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim]) -> out, shaped like q."""


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
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, device, dtype)
        self.k_proj = Linear(config.hidden_size, kv_size, device, dtype)
        self.v_proj = None if shape.k_eq_v else Linear(config.hidden_size, kv_size, device, dtype)
        self.o_proj = Linear(q_size, config.hidden_size, device, dtype)
        self.q_norm = RMSNorm(shape.head_dim, self.eps, config.norm_offset, device, dtype)
        self.k_norm = RMSNorm(shape.head_dim, self.eps, config.norm_offset, device, dtype)

    def values(self, x: Tensor, k_raw: Tensor) -> Tensor:
        """V rows. Without v_proj they are the K projection before K's norm weight and before RoPE.

        x: [num_tokens, hidden_size]. k_raw: [num_tokens, num_kv_heads, head_dim], the output of k_proj.

        Returns: [num_tokens, num_kv_heads, head_dim].
        """
        v = k_raw if self.v_proj is None else self.v_proj(x).view_as(k_raw)
        return rms_norm(v, None, self.eps) if self.has_v_norm else v

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """x: [num_tokens, hidden_size]. Returns the same shape."""
        num_tokens = x.shape[0]
        q = self.q_proj(x).view(num_tokens, -1, self.head_dim)
        k_raw = self.k_proj(x).view(num_tokens, -1, self.head_dim)
        q = apply_rotary(self.q_norm(q), rotary)
        k = apply_rotary(self.k_norm(k_raw), rotary)
        out = attend(self.layer, q, k, self.values(x, k_raw))
        return self.o_proj(out.reshape(num_tokens, -1))


class DecoderLayer(nn.Module):
    """Attention and MLP branches of one layer; the formula is in the file's docstring."""

    def __init__(
        self, config: ModelConfig, layer: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(
                config.hidden_size, config.rms_norm_eps, config.norm_offset, device, dtype
            )

        self.kind = config.layer_types[layer]
        self.self_attn = Attention(config, layer, device, dtype)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, device, dtype)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()
        if config.has_layer_scalar:
            # A parameter here, though a buffer in checkpoints: a loader of parameters cannot miss it.
            self.layer_scalar = empty_parameter(1, device=device, dtype=dtype)
        else:
            self.layer_scalar = None

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """x: [num_tokens, hidden_size]. Returns the same shape."""
        x = x + self.post_attention_layernorm(
            self.self_attn(self.input_layernorm(x), rotary, attend)
        )
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x if self.layer_scalar is None else x * self.layer_scalar


class Gemma(nn.Module):
    """A Gemma-3 or Gemma-4 text model with uninitialised weights; `models.weights` fills them.

    config: shapes. device, dtype: of all weights; activations have the same dtype.
    """

    def __init__(
        self, config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, device, dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, device, dtype) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, config.norm_offset, device, dtype
        )
        # Never one table for both kinds: base, scaling and head_dim all may differ.
        self.frequencies = {
            kind: inverse_frequencies(shape.rope, shape.head_dim).to(device)
            for kind, shape in ((SLIDING, config.sliding), (FULL, config.full))
        }

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of weights, activations and cache."""
        return self.embed_tokens.weight.dtype

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attn: AttnMetadata,
        pool: PagePool,
        *,
        logits_rows: Tensor | None = None,
        impl: str | None = None,
    ) -> Tensor:
        """One step of a ragged batch: reads the context from ``pool``, writes the rows that somebody will read again.

        input_ids, positions: [num_tokens] int64.
        attn: tables, lengths and slots of this step. pool: the pages of all layers, updated in place.
        logits_rows: [num_rows] int64, the rows to compute logits for; default: all.
        impl: "triton" or "torch" for the kernels; default: by device.

        Returns: [num_rows, vocab_size] fp32 logits.
        """
        attend = paged_attend(self.config, attn, pool, impl=impl)
        return self._run(input_ids, positions, attend, logits_rows)

    def full_forward(self, input_ids: Tensor, *, logits_rows: Tensor | None = None) -> Tensor:
        """One whole sequence without any cache and without `quire.kernels`: what a paged run must agree with.

        input_ids: [num_tokens] int64. logits_rows: as in `forward`.

        Returns: [num_rows, vocab_size] fp32 logits.
        """
        positions = torch.arange(len(input_ids), device=input_ids.device)
        return self._run(input_ids, positions, dense_attend(self.config), logits_rows)

    @torch.inference_mode()
    def _run(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, logits_rows: Tensor | None
    ) -> Tensor:
        x = self.embed_tokens(input_ids)
        rotary = {kind: rotary_angles(positions, freq) for kind, freq in self.frequencies.items()}
        for layer in self.layers:
            x = layer(x, rotary[layer.kind], attend)
        if logits_rows is not None:
            x = x[logits_rows]
        logits = self.embed_tokens.logits(self.norm(x))
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)
