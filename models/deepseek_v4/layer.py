"""One layer of DeepSeek-V4: attention and a mixture of experts, each between the same N residual
streams (mHC)::

    u, post, comb = attn_hc.collapse(streams)
    streams = attn_hc.expand(streams, attention(input_layernorm(u)), post, comb)
    u, post, comb = ffn_hc.collapse(streams)
    streams = ffn_hc.expand(streams, moe(post_attention_layernorm(u)), post, comb)

Attention has one KV head whose rows are key and value at once. Besides a sliding window of raw
rows, one of each token, queries see compressed entries: in HCA layers all of them, in CSA layers
those that the indexer selects. Where raw rows, entries and index keys live is not the model's
business: a layer hands its projections of the step to ``attend``, which
`models.deepseek_v4.paged_attention` provides for caches, and `models.deepseek_v4.unpaged_attention`
for whole sequences without any.

Source: transformers ``modeling_deepseek_v4``; DeepSeek-V4 report 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from quire.kernels import residual_norm

from ..layers.basic import Linear, RMSNorm, empty_parameter, linear_fp32
from .config import CSA, SLIDING, DeepseekV4Config
from .hyper_connections import HyperConnection
from .moe import MoE
from .rope import rotated_heads


@dataclass(frozen=True)
class IndexerInputs:
    """What the projections of a CSA layer's indexer make of a step.

    Attributes:
        q: [num_tokens, index_num_heads, index_head_dim], rotated.
        weights: [num_tokens, index_num_heads] fp32, every factor of the score included.
        kv, gate: [num_tokens, 2 * index_head_dim] fp32, which are pooled into index keys.
    """

    q: Tensor
    weights: Tensor
    kv: Tensor
    gate: Tensor


@dataclass(frozen=True)
class AttentionInputs:
    """What a layer's projections make of a step, before anything is cached.

    Attributes:
        positions: [num_tokens] int64.
        cos_sin: [max_positions, rope_dim] fp32, the layer's rotary table: of CSA and HCA layers the
            one of compress_rope_theta, by which they rotate queries, raw rows, entries and index
            keys alike.
        q: [num_tokens, num_heads, head_dim], normed and rotated.
        kv: [num_tokens, head_dim], the raw rows, neither normed nor rotated yet.
        compressor: (kv, gate) of `GatedPooling.project`, which are pooled into entries; None in
            sliding layers.
        indexer: of CSA layers, else None.
    """

    positions: Tensor
    cos_sin: Tensor
    q: Tensor
    kv: Tensor
    compressor: tuple[Tensor, Tensor] | None
    indexer: IndexerInputs | None


class Attend(Protocol):
    """The attention operator of a step.

    Attributes:
        impl: "triton" or "torch" for all kernels of the step; None = by device.
    """

    impl: str | None

    def __call__(self, attention: Attention, inputs: AttentionInputs) -> Tensor:
        """Attention of one layer.

        Returns:
            [num_tokens, num_heads, head_dim], the trailing channels under the inverse RoPE of the
            query's position.
        """
        ...


class GatedPooling(nn.Module):
    """Weights of a compressor.

    Gated pooling of ``ratio`` tokens, a compression window, to one entry. In each of ``width``
    channels an entry is the sum of kv over the window's tokens, weighted by the softmax of gate +
    position_bias; `quire.kernels.compress` does it.

    Args:
        overlap: whether an entry pools the window before its own too. Then a token has kv and gate
            twice, side by side: series a for the entry of the next window, then series b for that
            of its own.
    """

    def __init__(
        self, config: DeepseekV4Config, width: int, ratio: int, overlap: bool,
        device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ratio, self.overlap = ratio, overlap
        channels = width * (1 + overlap)
        self.kv_proj = Linear(config.hidden_size, channels, device, dtype)
        self.gate_proj = Linear(config.hidden_size, channels, device, dtype)
        self.position_bias = empty_parameter(ratio, channels, device=device, dtype=torch.float32)
        self.kv_norm = RMSNorm(width, config.rms_norm_eps, device, torch.float32)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What is pooled of every token, and by which gate, its position's bias not added yet.

        Args:
            x: [num_tokens, hidden_size].

        Returns:
            (kv, gate), each [num_tokens, width * (1 + overlap)] fp32.
        """
        kv = linear_fp32(x, self.kv_proj.matrix(x.dtype))
        return kv, linear_fp32(x, self.gate_proj.matrix(x.dtype))


class Scorer(nn.Module):
    """Weights of the index heads in a score."""

    def __init__(self, config: DeepseekV4Config, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights_proj = Linear(config.hidden_size, config.index_num_heads, device, dtype)


class Indexer(GatedPooling):
    """Queries and keys of the score by which a CSA query selects its entries.

    score = sum_h weight_h relu(q_h . k). There is a key for each entry, pooled from the same tokens
    by weights of its own: those of the `GatedPooling` that the indexer is.
    """

    def __init__(self, config: DeepseekV4Config, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, config.index_head_dim, config.csa_ratio, True, device, dtype)
        self.head_dim = config.index_head_dim
        self.score_scale = (config.index_num_heads * config.index_head_dim) ** -0.5
        q_size = config.index_num_heads * config.index_head_dim
        self.q_b_proj = Linear(config.q_lora_rank, q_size, device, dtype)
        self.scorer = Scorer(config, device, dtype)

    def inputs(
        self, x: Tensor, q_latent: Tensor, positions: Tensor, cos_sin: Tensor, impl: str | None
    ) -> IndexerInputs:
        """Queries of a step, their weights, and what keys are pooled from.

        Args:
            x: [num_tokens, hidden_size].
            q_latent: [num_tokens, q_lora_rank].
            positions, cos_sin: as in `AttentionInputs`.
            impl: of the kernels.
        """
        q = self.q_b_proj(q_latent).unflatten(-1, (-1, self.head_dim))
        q = rotated_heads(q, positions, cos_sin, None, self.kv_norm.eps, impl)
        weights = linear_fp32(x, self.scorer.weights_proj.matrix(x.dtype)) * self.score_scale
        kv, gate = self.project(x)
        return IndexerInputs(q, weights, kv, gate)


class Compressor(GatedPooling):
    """The compressor of a CSA or HCA layer.

    In CSA layers the indexer is in it, as in checkpoints.
    """

    def __init__(
        self, config: DeepseekV4Config, kind: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        csa = kind == CSA
        ratio = config.csa_ratio if csa else config.hca_ratio
        super().__init__(config, config.head_dim, ratio, csa, device, dtype)
        self.indexer = Indexer(config, device, dtype) if csa else None


class Attention(nn.Module):
    """Projections around the attention operator of one layer.

    Queries and the output go through narrow matrices.
    """

    def __init__(
        self, config: DeepseekV4Config, layer: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer = layer
        self.kind = config.all_layer_types[layer]
        self.eps = config.rms_norm_eps
        self.head_dim = config.head_dim
        heads, groups, rank = config.num_heads, config.o_groups, config.o_lora_rank
        self.q_a_proj = Linear(config.hidden_size, config.q_lora_rank, device, dtype)
        self.q_a_norm = RMSNorm(config.q_lora_rank, self.eps, device, torch.float32)
        self.q_b_proj = Linear(config.q_lora_rank, heads * config.head_dim, device, dtype)
        self.kv_proj = Linear(config.hidden_size, config.head_dim, device, dtype)
        self.kv_norm = RMSNorm(config.head_dim, self.eps, device, torch.float32)
        self.sinks = empty_parameter(heads, device=device, dtype=torch.float32)
        # One matrix for each group of heads, stacked: [o_groups * o_lora_rank, heads of a group *
        # head_dim].
        self.o_a_proj = Linear(heads * config.head_dim // groups, groups * rank, device, dtype)
        self.o_b_proj = Linear(groups * rank, config.hidden_size, device, dtype)
        self.num_groups = groups
        # Of the heads' norm, which has none.
        self._no_weight = torch.ones(config.head_dim, device=device)
        sliding = self.kind == SLIDING
        self.compressor = None if sliding else Compressor(config, self.kind, device, dtype)

    def forward(self, x: Tensor, positions: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        """Attention of every row, projections included.

        Args:
            x: [num_tokens, hidden_size].
            positions: [num_tokens] int64.
            cos_sin: as in `AttentionInputs`.
            attend: the attention operator, over pages or over one sequence.

        Returns:
            The shape of x.
        """
        impl = attend.impl
        q_latent = residual_norm(self.q_a_proj(x), self.q_a_norm.weight, eps=self.eps, impl=impl)
        q = self.q_b_proj(q_latent).unflatten(-1, (-1, self.head_dim))
        compressor = self.compressor
        indexer = None if compressor is None else compressor.indexer
        inputs = AttentionInputs(
            positions=positions,
            cos_sin=cos_sin,
            q=rotated_heads(q, positions, cos_sin, self._no_weight, self.eps, impl),
            kv=self.kv_proj(x),
            compressor=None if compressor is None else compressor.project(x),
            indexer=None
            if indexer is None
            else indexer.inputs(x, q_latent, positions, cos_sin, impl),
        )
        out = attend(self, inputs).reshape(len(x), self.num_groups, -1)
        weight = self.o_a_proj.matrix(x.dtype).unflatten(0, (self.num_groups, -1))
        narrow = torch.bmm(out.transpose(0, 1), weight.transpose(1, 2))
        return self.o_b_proj(narrow.transpose(0, 1).flatten(1))


class DecoderLayer(nn.Module):
    """Attention and experts between the residual streams.

    The formula is in the file's docstring.
    """

    def __init__(
        self, config: DeepseekV4Config, layer: int, mlp_kind: str,
        device: torch.device, dtype: torch.dtype, expert_format: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, layer, device, dtype)
        self.mlp = MoE(config, mlp_kind, device, dtype, expert_format)
        self.attn_hc = HyperConnection(config, device)
        self.ffn_hc = HyperConnection(config, device)
        self.input_layernorm = RMSNorm(hidden, eps, device, torch.float32)
        self.post_attention_layernorm = RMSNorm(hidden, eps, device, torch.float32)

    def forward(
        self, streams: Tensor, input_ids: Tensor, positions: Tensor, cos_sin: Tensor, attend: Attend
    ) -> Tensor:
        """Attention, then experts, each read from and written to the streams.

        Args:
            streams: [num_tokens, hc_mult, hidden_size].
            input_ids: [num_tokens] int64, for hash layers.
            positions, cos_sin, attend: as in `Attention.forward`.

        Returns:
            The shape of streams.
        """
        impl = attend.impl
        x, post, comb = self.attn_hc.collapse(streams, self.input_layernorm, impl)
        y = self.self_attn(x, positions, cos_sin, attend)
        streams = self.attn_hc.expand(streams, y, post, comb, impl)
        x, post, comb = self.ffn_hc.collapse(streams, self.post_attention_layernorm, impl)
        y = self.mlp(x, input_ids, impl)
        return self.ffn_hc.expand(streams, y, post, comb, impl)
