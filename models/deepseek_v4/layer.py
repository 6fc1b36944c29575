"""One layer of DeepSeek-V4: attention and a mixture of experts, each between the same N residual
streams (mHC)::

    x, post, comb = attn_hc.collapse(streams, input_layernorm)             # one row a token, normed
    streams = attn_hc.expand(streams, attention(x), post, comb)
    x, post, comb = ffn_hc.collapse(streams, post_attention_layernorm)
    y, rows, weights = moe(x)                                              # what makes up its result
    streams = ffn_hc.expand(streams, y, post, comb, rows, weights)

Attention has one KV head whose rows are key and value at once. Besides a sliding window of raw
rows, one of each token, queries see compressed entries: in HCA layers (ratio 128 as released) all
of them, in CSA layers (ratio 4) those that the indexer selects. Both may cover the same tokens. The
layers that are neither are sliding: raw rows only. Where raw rows, entries and index keys live is
not the model's business: a layer hands its projections of the step to ``attend``, one for a forward
pass, which `models.deepseek_v4.paged_attention` provides for caches, and
`models.deepseek_v4.unpaged_attention` for whole sequences without any.

Over pages, a layer calls these operators of `quire.kernels`, in this order, the first and
expand_streams around both halves; between them are plain products of torch. Each is in a folder of
``kernels/``, its kernels too (that of splits is in ``common/``). Groups of pages are those of `models.deepseek_v4.cache_plan`::

    operator              folder             kernels                     pages
    collapse_streams      hyper_connections  _products_kernel _collapse_kernel
    residual_norm         norms              _residual_norm_kernel       (q_a_norm)
    write_latent          latent_write       _write_latent_kernel        writes window
    copy_overlap  CSA     overlap_copy       _copy_overlap_kernel        reads, writes overlap; ring
    compress      CSA HCA compressor         _compress_kernel            writes compressed; ring
    index_topk    CSA     indexer            index_scores_kernel index_select_kernel
                                                                         reads compressed
    compressed_attention  latent             latent_kernel
                                             merge_splits_kernel         reads window, compressed
    expand_streams        hyper_connections  _expand_kernel
    route_tokens          routing            _route_kernel
    gated_product         gating             _gated_product_kernel       (shared expert)
    expert_mlp            experts            _order_kernel _gate_up_kernel _down_kernel

CSA runs copy_overlap and compress twice: for entries, and for the indexer's keys. write_latent also
norms and rotates the heads of queries, and of the indexer's, without pages. expand_streams adds up
what experts give; ranks that have parts of each expert add it up with combine_experts before.

Source: transformers ``modeling_deepseek_v4``; DeepSeek-V4 report 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from quire.kernels import residual_norm

from ..layers.basic import Linear, RMSNorm, Stacked, empty_parameter
from ..parallel.group import Group
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
            one of compress_rope_theta with YaRN, by which they rotate queries, raw rows, entries and
            index keys alike; of sliding layers the one of rope_theta without. Cosines first, then
            sines, as in `quire.kernels.write_latent`.
        q: [num_tokens, num_heads, head_dim], normed and rotated (`rotated_heads`: in place, by
            `quire.kernels.write_latent` without pages).
        kv: [num_tokens, head_dim], the raw rows, neither normed nor rotated yet.
        compressor: (kv, gate) of `Compressor.project`, which are pooled into entries; None in
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
            query's position: rows are values too, rotated by their own positions.
        """
        ...


class GatedPooling(nn.Module):
    """Weights of a compressor.

    Gated pooling of ``ratio`` tokens, a compression window, to one entry. In each of ``width``
    channels an entry is the sum of kv over the window's tokens, weighted by the softmax of gate +
    position_bias; then kv_norm, and RoPE of the window's first token. `quire.kernels.compress` does
    it.

    Args:
        overlap: whether an entry pools the window before its own too. Then a token has kv and gate
            twice, side by side: series a for the entry of the next window, then series b for that
            of its own. Entry 0, which has no window before it, pools series b alone.
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
        self.num_heads, self.head_dim = config.index_num_heads, config.index_head_dim
        self.score_scale = (config.index_num_heads * config.index_head_dim) ** -0.5
        q_size = config.index_num_heads * config.index_head_dim
        self.q_b_proj = Linear(config.q_lora_rank, q_size, device, dtype)
        self.scorer = Scorer(config, device, dtype)

    def inputs(
        self, q_latent: Tensor, projected: Sequence[Tensor], positions: Tensor,
        cos_sin: Tensor, impl: str | None,
    ) -> IndexerInputs:  # fmt: skip
        """Queries of a step, their weights, and what keys are pooled from.

        Args:
            q_latent: [num_tokens, q_lora_rank].
            projected: kv and gate of the keys' compressor, and the weights of the heads, not scaled
                yet, each [num_tokens, channels] fp32.
            positions: [num_tokens] int64.
            cos_sin: as in `AttentionInputs`.
            impl: of the kernels.
        """
        q = self.q_b_proj(q_latent).unflatten(-1, (-1, self.head_dim))
        q = rotated_heads(q, positions, cos_sin, None, self.kv_norm.eps, impl)
        kv, gate, weights = projected
        return IndexerInputs(q, weights * self.score_scale, kv, gate)


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
        layers = [self.kv_proj, self.gate_proj]
        if self.indexer is not None:
            indexer = self.indexer
            layers += [indexer.kv_proj, indexer.gate_proj, indexer.scorer.weights_proj]
        self.stacked = Stacked(*layers)

    def project(self, x: Tensor) -> list[Tensor]:
        """What is pooled of every token, and by which gate, its position's bias not added yet: one
        product in the model's dtype with results in fp32.

        Args:
            x: [num_tokens, hidden_size].

        Returns:
            [kv, gate], each [num_tokens, width * (1 + overlap)] fp32; in CSA layers those of the
            indexer follow, and the weights of its heads.
        """
        return self.stacked.fp32(x)


class Attention(nn.Module):
    """Projections around the attention operator of one layer.

    Queries and the output go through narrow matrices.
    """

    def __init__(
        self, config: DeepseekV4Config, layer: int, device: torch.device, dtype: torch.dtype,
        group: Group | None = None,
    ) -> None:  # fmt: skip
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
        self.o_b_proj = Linear(groups * rank, config.hidden_size, device, dtype, group=group)
        self.num_groups = groups
        self.q_a_kv = Stacked(self.q_a_proj, self.kv_proj)
        # Each query head is normed without a weight; to `write_latent` None means no norm.
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
        q_latent, kv = self.q_a_kv(x).split([len(self.q_a_proj.weight), self.head_dim], dim=-1)
        # Without a residual a plain RMS norm.
        q_latent = residual_norm(q_latent, self.q_a_norm.weight, eps=self.eps, impl=impl)
        q = self.q_b_proj(q_latent).unflatten(-1, (-1, self.head_dim))
        compressor = self.compressor
        indexer = None if compressor is None else compressor.indexer
        projected = [] if compressor is None else compressor.project(x)
        inputs = AttentionInputs(
            positions=positions,
            cos_sin=cos_sin,
            q=rotated_heads(q, positions, cos_sin, self._no_weight, self.eps, impl),
            kv=kv,
            compressor=None if compressor is None else (projected[0], projected[1]),
            indexer=None
            if indexer is None
            else indexer.inputs(q_latent, projected[2:], positions, cos_sin, impl),
        )
        out = attend(self, inputs).reshape(len(x), self.num_groups, -1)
        weight = self.o_a_proj.matrix(x.dtype).unflatten(0, (self.num_groups, -1))
        narrow = x.new_empty(len(x), *weight.shape[:2])
        # Written where it is read: the product of each group is a column block of the rows.
        torch.bmm(out.transpose(0, 1), weight.transpose(1, 2), out=narrow.transpose(0, 1))
        return self.o_b_proj(narrow.flatten(1))


class DecoderLayer(nn.Module):
    """Attention and experts between the residual streams.

    The formula is in the file's docstring.
    """

    def __init__(
        self, config: DeepseekV4Config, layer: int, mlp_kind: str,
        device: torch.device, dtype: torch.dtype, expert_format: str | None = None,
        group: Group | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, layer, device, dtype, group)
        self.mlp = MoE(config, mlp_kind, device, dtype, expert_format, group)
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
        streams = self.attn_hc.expand(streams, y, post, comb, impl=impl)
        x, post, comb = self.ffn_hc.collapse(streams, self.post_attention_layernorm, impl)
        y, rows, weights = self.mlp(x, input_ids, impl)
        return self.ffn_hc.expand(streams, y, post, comb, rows, weights, impl)
