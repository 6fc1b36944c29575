"""Attention of DeepSeek-V4: the weights of a layer, and the operator over pages.

There is one KV head; its rows are keys and values at once. In one softmax, a query sees a sliding
window of raw rows, one a token, and compressed entries: those that the indexer selects of the
entries of 4 tokens (CSA), all entries of 128 tokens (HCA), or none.

Source: transformers ``modeling_deepseek_v4``; DeepSeek-V4 report 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from quire.kernels import (
    compress,
    compressed_attention,
    copy_overlap,
    index_topk,
    residual_norm,
    write_latent,
)
from quire.kvcore.device import AttnMetadata

from ..layers.basic import Linear, RMSNorm, Stacked, WeightPlacement
from .cache import COMPRESSED, OVERLAP, CompressorCache, V4PagePool
from .config import CSA, SLIDING, DeepseekV4Config


def rope_table(frequencies: Tensor, num_positions: int) -> Tensor:
    """Cosines, then sines, of every position's angles: [num_positions, rope_dim] fp32."""
    if frequencies.is_meta:  # the first sum there makes torch load its decompositions, seconds
        return frequencies.new_empty(num_positions, 2 * len(frequencies))
    angles = torch.arange(num_positions, device=frequencies.device)[:, None].float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class GatedPooling(nn.Module):
    """Weights that pool a window of ``ratio`` tokens into one entry.

    In each of ``width`` channels an entry is the sum of kv over the tokens, weighted by the softmax
    of gate + position_bias; then kv_norm, and RoPE of the window's first token.

    Args:
        overlap: an entry pools the window before its own too. A token then has kv and gate twice:
            series a for the entry of the next window, and after it series b for that of its own.
            Entry 0 pools series b alone.
    """

    def __init__(
        self, config: DeepseekV4Config, width: int, ratio: int, overlap: bool,
        place: WeightPlacement,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ratio, self.overlap = ratio, overlap
        channels = width * (1 + overlap)
        self.kv_proj = Linear(config.hidden_size, channels, place)
        self.gate_proj = Linear(config.hidden_size, channels, place)
        self.position_bias = place.empty(ratio, channels, dtype=torch.float32)
        self.kv_norm = RMSNorm(width, config.rms_norm_eps, place, dtype=torch.float32)


class Indexer(GatedPooling):
    """Weights of the score by which a CSA query selects entries: sum_h weight_h relu(q_h . k).

    Keys are pooled from the same tokens as entries, by weights of their own.
    """

    def __init__(self, config: DeepseekV4Config, place: WeightPlacement) -> None:
        super().__init__(config, config.index_head_dim, config.csa_ratio, True, place)
        num_heads, self.head_dim = config.index_num_heads, config.index_head_dim
        self.score_scale = (num_heads * self.head_dim) ** -0.5
        self.q_b_proj = Linear(config.q_lora_rank, num_heads * self.head_dim, place)
        weights_proj = Linear(config.hidden_size, num_heads, place)
        self.scorer = nn.ModuleDict({"weights_proj": weights_proj})


class Compressor(GatedPooling):
    """Weights that make the entries of a CSA or HCA layer; a CSA layer's indexer is in it."""

    def __init__(self, config: DeepseekV4Config, kind: str, place: WeightPlacement) -> None:
        csa = kind == CSA
        ratio = config.csa_ratio if csa else config.hca_ratio
        super().__init__(config, config.head_dim, ratio, csa, place)
        self.indexer = Indexer(config, place) if csa else None
        layers = [self.kv_proj, self.gate_proj]
        if self.indexer is not None:
            index = self.indexer
            layers += [index.kv_proj, index.gate_proj, index.scorer["weights_proj"]]
        self.stacked = Stacked(*layers)


@dataclass
class AttentionInputs:
    """Projections of a step's tokens, before anything is cached.

    Attributes:
        cos_sin: [max_positions, rope_dim] fp32, the layer's `rope_table`.
        q, index_q: [num_tokens, heads, head_dim], rotated.
        kv: [num_tokens, head_dim], raw rows, neither normed nor rotated.
        pooled, index_pooled: (kv, gate) of compressor and indexer, [num_tokens, channels] fp32.
        index_weights: [num_tokens, index_num_heads] fp32, with every factor of the score.
    """

    positions: Tensor
    cos_sin: Tensor
    q: Tensor
    kv: Tensor
    pooled: tuple[Tensor, Tensor] | None = None
    index_q: Tensor | None = None
    index_weights: Tensor | None = None
    index_pooled: tuple[Tensor, Tensor] | None = None


class LatentAttend(Protocol):
    """The attention of a step: `PagedLatentAttend`, or that of a sequence without a cache."""

    impl: str | None

    def __call__(self, attention: Attention, inputs: AttentionInputs) -> Tensor:
        """[num_tokens, num_heads, head_dim], under the inverse RoPE of the query's position."""
        ...


class Attention(nn.Module):
    """Projections around the attention operator of one layer, queries and output in low rank."""

    def __init__(self, config: DeepseekV4Config, layer: int, place: WeightPlacement) -> None:
        super().__init__()
        self.layer = layer
        self.kind = config.all_layer_types[layer]
        self.eps = config.rms_norm_eps
        self.head_dim = config.head_dim
        self.num_groups = config.o_groups
        heads, groups, rank = config.num_heads, config.o_groups, config.o_lora_rank
        fp32 = torch.float32
        self.q_a_proj = Linear(config.hidden_size, config.q_lora_rank, place)
        self.q_a_norm = RMSNorm(config.q_lora_rank, self.eps, place, dtype=fp32)
        self.q_b_proj = Linear(config.q_lora_rank, heads * config.head_dim, place)
        self.kv_proj = Linear(config.hidden_size, config.head_dim, place)
        self.kv_norm = RMSNorm(config.head_dim, self.eps, place, dtype=fp32)
        self.sinks = place.empty(heads, dtype=fp32)
        # One matrix for each group of heads: [groups * rank, heads of a group * head_dim].
        self.o_a_proj = Linear(heads * config.head_dim // groups, groups * rank, place)
        self.o_b_proj = Linear(groups * rank, config.hidden_size, place, group=place.group)
        self.q_a_kv = Stacked(self.q_a_proj, self.kv_proj)
        # A query head is normed without a weight; None would mean no norm.
        self._ones = torch.ones(config.head_dim, device=place.device)
        self.compressor = None
        if self.kind != SLIDING:
            self.compressor = Compressor(config, self.kind, place)

    def forward(
        self, x: Tensor, positions: Tensor, cos_sin: Tensor, attend: LatentAttend
    ) -> Tensor:
        """Attention of every row of x [num_tokens, hidden_size], in the same shape."""
        impl = attend.impl
        q_latent, kv = self.q_a_kv(x).split([len(self.q_a_proj.weight), self.head_dim], dim=-1)
        q_latent = residual_norm(q_latent, self.q_a_norm.weight, eps=self.eps, impl=impl)
        q = self.q_b_proj(q_latent).unflatten(-1, (-1, self.head_dim))
        _rotate_heads(q, positions, cos_sin, self._ones, self.eps, impl)
        inputs = AttentionInputs(positions, cos_sin, q, kv)
        compressor, indexer = self.compressor, None
        if compressor is not None:
            stacked = compressor.stacked
            pooled_kv, pooled_gate, *index = stacked(x, fp32=True).split(stacked.out_sizes, dim=-1)
            inputs.pooled, indexer = (pooled_kv, pooled_gate), compressor.indexer
        if indexer is not None:
            index_kv, index_gate, weights = index
            inputs.index_q = indexer.q_b_proj(q_latent).unflatten(-1, (-1, indexer.head_dim))
            _rotate_heads(inputs.index_q, positions, cos_sin, None, self.eps, impl)
            inputs.index_weights = weights * indexer.score_scale
            inputs.index_pooled = index_kv, index_gate
        out = attend(self, inputs).reshape(len(x), self.num_groups, -1)
        weight = self.o_a_proj.matrix(x.dtype).unflatten(0, (self.num_groups, -1))
        narrow = x.new_empty(len(x), *weight.shape[:2])
        # The product of each group is a column block of the rows that o_b_proj reads.
        torch.bmm(out.transpose(0, 1), weight.transpose(1, 2), out=narrow.transpose(0, 1))
        return self.o_b_proj(narrow.flatten(1))


def _rotate_heads(
    q: Tensor, positions: Tensor, cos_sin: Tensor, norm_weight: Tensor | None, eps: float,
    impl: str | None,
) -> None:  # fmt: skip
    """Norm (with a weight) and rotate heads [num_tokens, num_heads, head_dim] in place."""
    rows = q.flatten(0, 1)
    write_latent(
        rows, None, None, positions=positions, cos_sin=cos_sin, norm_weight=norm_weight, eps=eps,
        out=rows, impl=impl,
    )  # fmt: skip


@dataclass(frozen=True)
class OverlapCopies:
    """Copies of a step between rings and pages of the group "overlap", for all CSA layers.

    Save: series a of each of a block's last ``ratio`` tokens goes to the block's page. Load: a
    sequence that starts at a block's end copies that page to its ring. Shapes give the number of
    copies, so no step waits for the host; unwanted ones have page 0 or ring -1.
    """

    tokens: Tensor  # [num_copies], ratio of a block one after the other
    to_pages: Tensor  # [num_copies]
    from_pages: Tensor  # [num_seqs]
    state_index: Tensor  # [num_seqs], rings
    state_rows: Tensor  # [num_seqs, ratio], rows of a ring


class PagedLatentAttend:
    """Attention of one ragged step through `quire.kernels`; a `LatentAttend` for one forward pass.

    A layer writes its raw rows, then the entries that the step closes, and attends last: it takes
    the window table without the blocks of this step, and the table of entries with them.
    """

    def __init__(self, attn: AttnMetadata, pool: V4PagePool, *, impl: str | None = None) -> None:
        self.attn, self.pool, self.impl = attn, pool, impl

    # Layers with entries share these, and a chain of drafts needs none of them.

    @cached_property
    def _entries(self) -> tuple[Tensor, dict[int, Tensor]]:
        """Table of entries with the blocks of this step; by ratio, the slots of tokens' entries."""
        attn, plan, config = self.attn, self.pool.plan, self.pool.config
        group = plan.index[COMPRESSED]
        slots, table = attn.slot_mappings[group], attn.block_tables[group]
        block_size, num_tokens = plan.groups[group].block_size, len(slots)
        q_lens = attn.cu_seqlens_q.diff().long()
        seq = torch.arange(len(q_lens), device=slots.device)
        seq = torch.repeat_interleave(seq, q_lens, output_size=num_tokens)
        token = torch.arange(num_tokens, device=slots.device)
        positions = token - attn.cu_seqlens_q[seq] + (attn.seq_lens - q_lens)[seq]
        block = positions.clamp(min=0) // block_size
        pages = torch.where(slots >= 0, slots // block_size, table[seq, block])
        # Rounded down, -1 stays -1.
        csa, hca = config.csa_ratio, config.hca_ratio
        return table.index_put((seq, block), pages.int()), {csa: slots // csa, hca: slots // hca}

    @cached_property
    def _copies(self) -> OverlapCopies:
        attn, pool, group = self.attn, self.pool, self.pool.plan.index[OVERLAP]
        block_size, ratio = pool.plan.groups[group].block_size, pool.config.csa_ratio
        slots, table = attn.slot_mappings[group], attn.block_tables[group]
        ends = attn.seq_lens.long()
        starts = ends - attn.cu_seqlens_q.diff().long()

        # The last tokens of every block that the longest chunk may touch.
        num_blocks = (attn.max_seqlen_q + block_size - 2) // block_size + 1
        block_starts = (starts // block_size * block_size)[:, None]
        blocks = torch.arange(1, num_blocks + 1, device=slots.device)
        back = torch.arange(-ratio, 0, device=slots.device)
        positions = (block_starts + blocks * block_size)[:, :, None] + back  # [seqs, blocks, ratio]
        first, end = starts[:, None, None], ends[:, None, None]
        in_step = (positions >= first) & (positions < end)
        tokens = positions - first + attn.cu_seqlens_q[:-1, None, None]
        tokens = torch.where(in_step, tokens, 0).flatten()
        kept = in_step.flatten() & (slots[tokens] >= 0)

        at_boundary = (starts > 0) & (starts % block_size == 0)
        before = (starts // block_size - 1).clamp(min=0) % table.shape[1]
        from_pages = table.gather(1, before[:, None])[:, 0]
        return OverlapCopies(
            tokens=tokens,
            to_pages=torch.where(kept, slots[tokens] // block_size, 0),
            from_pages=torch.where(at_boundary, from_pages, 0).long(),
            state_index=torch.where(at_boundary, attn.request_slots, -1).long(),
            state_rows=(starts[:, None] + back) % pool.csa_ring_size,
        )

    def __call__(self, attention: Attention, inputs: AttentionInputs) -> Tensor:
        """Write the rows and entries of a layer, then attend over them."""
        attn, cache = self.attn, self.pool.layers[attention.layer]
        kv = write_latent(
            inputs.kv,
            cache.window,
            attn.slot_mappings[cache.window_group],
            positions=inputs.positions,
            cos_sin=inputs.cos_sin,
            norm_weight=attention.kv_norm.weight,
            eps=attention.eps,
            # empty_like of one row would keep the row stride of the product that kv is part of.
            out=torch.empty_like(inputs.kv, memory_format=torch.contiguous_format),
            impl=self.impl,
        )
        compressor, indexer = attention.compressor, None
        compressed_pages = compressed_table = topk_indices = topk_lens = None
        if compressor is not None:
            self._write_entries(compressor, inputs.pooled, cache.compressed, inputs.cos_sin)
            compressed_pages, compressed_table = cache.compressed.pages, self._entries[0]
            indexer = compressor.indexer
        if indexer is not None:
            self._write_entries(indexer, inputs.index_pooled, cache.index_keys, inputs.cos_sin)
            topk_indices, topk_lens = index_topk(
                inputs.index_q,
                inputs.index_weights,
                cache.index_keys.pages,
                compressed_table,
                attn.seq_lens,
                attn.cu_seqlens_q,
                topk=self.pool.config.index_topk,
                compress_ratio=indexer.ratio,
                max_seqlen_q=attn.max_seqlen_q,
                max_seq_len=attn.max_seq_len,
                impl=self.impl,
            )
        # Without max_seq_len, so that short steps take the kernels of long ones, as graphs do.
        return compressed_attention(
            inputs.q,
            cache.window,
            attn.block_tables[cache.window_group],
            attn.seq_lens,
            attn.cu_seqlens_q,
            sliding_window=self.pool.config.sliding_window,
            max_seqlen_q=attn.max_seqlen_q,
            kv=kv,
            compressed_pages=compressed_pages,
            compressed_table=compressed_table,
            compress_ratio=None if compressor is None else compressor.ratio,
            topk_indices=topk_indices,
            topk_lens=topk_lens,
            sinks=attention.sinks,
            cos_sin=inputs.cos_sin,
            num_decodes=attn.num_decodes,
            impl=self.impl,
        )

    def _write_entries(
        self, pooling: GatedPooling, pooled: tuple[Tensor, Tensor], cache: CompressorCache,
        cos_sin: Tensor,
    ) -> None:  # fmt: skip
        """Pool each window that the step closes into its page; the newest tokens go to the ring."""
        attn, (kv, gate) = self.attn, pooled
        if cache.overlap is not None:  # before `compress` reads the ring
            copies = self._copies
            copy_overlap(
                kv,
                gate,
                pooling.position_bias,
                cache.ring,
                cache.overlap,
                from_pages=copies.from_pages,
                state_index=copies.state_index,
                state_rows=copies.state_rows,
                tokens=copies.tokens,
                to_pages=copies.to_pages,
                impl=self.impl,
            )
        compress(
            kv,
            gate,
            pooling.position_bias,
            cache.ring,
            attn.request_slots,
            attn.seq_lens,
            attn.cu_seqlens_q,
            ratio=pooling.ratio,
            overlap=pooling.overlap,
            norm_weight=pooling.kv_norm.weight,
            eps=pooling.kv_norm.eps,
            cos_sin=cos_sin,
            pages=cache.pages,
            slot_mapping=self._entries[1][pooling.ratio],
            max_seqlen_q=attn.max_seqlen_q,
            impl=self.impl,
        )
