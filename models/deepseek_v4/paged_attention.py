"""The attention operator of a DeepSeek-V4 layer over pages, through `quire.kernels`."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quire.kernels import compress, compressed_attention, index_topk, write_latent
from quire.kvcore.device import AttnMetadata

from .cache import CompressorCache, LayerCache, V4PagePool
from .cache_plan import COMPRESSED, OVERLAP
from .layer import Attention, AttentionInputs, Compressor, GatedPooling, Indexer
from .overlap import OverlapCopies


class PagedAttend:
    """Attention of one ragged step through `quire.kernels`; an `Attend`.

    There is one for each forward pass, which calls it in every layer. Context comes from pages, the
    step's own raw rows from `write_latent`. So attention takes the window's table without the
    blocks of this step, and the compressed one with them (`with_new_blocks`): entries that the step
    closes are read from their pages.

    A layer writes its raw rows first, then the entries that the step closes, and attends last, for
    a token sees the entry that it closes. Raw rows may be written first, for none lands on a row
    that the step reads as context: each goes to a free row of the newest page, to a new page, or to
    the page of a block that has left the window.

    Args:
        attn: the step. Of each group it has the table of the context before the step
            (block_tables) and where each new row goes (slot_mappings: page * block_size + row, -1 =
            nowhere); request_slots number the rings.
        pool: pages and rings, read and written.
        impl: "triton" or "torch" for the kernels; default: by device.
    """

    def __init__(self, attn: AttnMetadata, pool: V4PagePool, *, impl: str | None = None) -> None:
        self.attn, self.pool, self.impl = attn, pool, impl
        self._lengths = {
            "seq_lens": attn.seq_lens,
            "cu_seqlens_q": attn.cu_seqlens_q,
            "max_seqlen_q": attn.max_seqlen_q,
        }
        group = pool.plan.group_index(COMPRESSED)
        if group is not None:
            block_size = pool.plan.groups[group].block_size
            slots = attn.slot_mappings[group]
            # Of entries and of index keys: their pages are the same.
            self._compressed_table = with_new_blocks(
                attn, attn.block_tables[group], slots, block_size
            )
            # The entries of a page are its tokens' slots, ratio to one; -1 stays -1.
            self._entry_slots = {
                ratio: slots.div(ratio, rounding_mode="floor")
                for ratio in (pool.config.csa_ratio, pool.config.hca_ratio)
            }

    @cached_property
    def _overlap_copies(self) -> OverlapCopies:
        group = self.pool.plan.group_index(OVERLAP)
        assert group is not None
        block_size = self.pool.plan.groups[group].block_size
        # All CSA compressors and indexers have rings of the same length.
        ring = next(cache.index_keys.ring for cache in self.pool.layers if cache.index_keys)
        ratio = self.pool.config.csa_ratio
        return OverlapCopies.of_step(self.attn, group, block_size, ratio, ring.shape[1])

    def __call__(self, attention: Attention, inputs: AttentionInputs) -> Tensor:
        """Attention of one layer; see `models.deepseek_v4.layer.Attend`."""
        attn, cache = self.attn, self.pool.layers[attention.layer]
        kv = write_latent(
            inputs.kv,
            cache.window,
            attn.slot_mappings[cache.window_group],
            positions=inputs.positions,
            cos_sin=inputs.cos_sin,
            norm_weight=attention.kv_norm.weight,
            eps=attention.eps,
            # Of one row, empty_like would keep the row stride of the product that kv is part of.
            out=torch.empty_like(inputs.kv, memory_format=torch.contiguous_format),
            impl=self.impl,
        )
        compressed = {}
        if attention.compressor is not None:
            compressed = self._compress(attention.compressor, cache, inputs)
        # Without max_seq_len: short steps take the kernels of long ones, as graphs do.
        return compressed_attention(
            inputs.q,
            window_pages=cache.window,
            window_table=attn.block_tables[cache.window_group],
            kv=kv,
            sliding_window=self.pool.config.sliding_window,
            num_decodes=attn.num_decodes,
            sinks=attention.sinks,
            cos_sin=inputs.cos_sin,
            impl=self.impl,
            **self._lengths,
            **compressed,
        )

    def _compress(
        self, compressor: Compressor, cache: LayerCache, inputs: AttentionInputs
    ) -> dict[str, Any]:
        """Writes the entries that the step closes, and in CSA layers selects those to attend to.

        Returns:
            The arguments of `compressed_attention` that say which entries it sees.
        """
        assert inputs.compressor is not None and cache.compressed is not None
        kv, gate = inputs.compressor
        self._write_entries(compressor, kv, gate, cache.compressed, inputs.cos_sin)
        arguments = {
            "compressed_pages": cache.compressed.pages,
            "compressed_table": self._compressed_table,
            "compress_ratio": compressor.ratio,
        }
        if compressor.indexer is not None:
            arguments |= self._select(compressor.indexer, cache, inputs)
        return arguments

    def _select(
        self, indexer: Indexer, cache: LayerCache, inputs: AttentionInputs
    ) -> dict[str, Tensor]:
        """Writes the index keys that the step closes, and scores the visible ones.

        Returns:
            topk_indices and topk_lens of `compressed_attention`.
        """
        index = inputs.indexer
        assert index is not None and cache.index_keys is not None
        self._write_entries(indexer, index.kv, index.gate, cache.index_keys, inputs.cos_sin)
        topk_indices, topk_lens = index_topk(
            index.q,
            index.weights,
            cache.index_keys.pages,
            self._compressed_table,
            topk=self.pool.config.index_topk,
            compress_ratio=indexer.ratio,
            max_seq_len=self.attn.max_seq_len,
            impl=self.impl,
            **self._lengths,
        )
        return {"topk_indices": topk_indices, "topk_lens": topk_lens}

    def _write_entries(
        self,
        compressor: GatedPooling,
        kv: Tensor,
        gate: Tensor,
        cache: CompressorCache,
        cos_sin: Tensor,
    ) -> None:
        """Pools each compression window that the step closes into an entry, or an index key.

        It goes to its page. The newest tokens go to the ring, whether their window is closed or
        not: later steps close open windows from there, and drafts of closed ones may be rejected.
        In CSA layers an entry also pools series a of the window before. A sequence that starts at a
        prefix hit has no such rows in its ring: they are loaded from pages of the group "overlap"
        before `compress` reads the ring. The step's own are saved there for later hits, in the same
        launch.

        Args:
            compressor: of the layer, or its indexer.
            kv, gate: [num_tokens, channels] fp32, its projections of the step.
            cache: its pages and ring.
            cos_sin: [max_positions, rope_dim].
        """
        if cache.overlap is not None:
            self._overlap_copies.run(
                kv, gate, compressor.position_bias, cache.overlap, cache.ring, self.impl
            )
        compress(
            kv,
            gate,
            ape=compressor.position_bias,
            state=cache.ring,
            state_index=self.attn.request_slots,
            ratio=compressor.ratio,
            overlap=compressor.overlap,
            norm_weight=compressor.kv_norm.weight,
            eps=compressor.kv_norm.eps,
            cos_sin=cos_sin,
            pages=cache.pages,
            slot_mapping=self._entry_slots[compressor.ratio],
            impl=self.impl,
            **self._lengths,
        )


def with_new_blocks(attn: AttnMetadata, table: Tensor, slots: Tensor, block_size: int) -> Tensor:
    """The block table of a dense group with the blocks of this step.

    A query sees entries that its own step closes.

    Args:
        table: [num_seqs, width] int32, the context before the step.
        slots: [num_tokens] int64, -1 = not written.
        block_size: tokens.

    Returns:
        [num_seqs, width] int32, a copy.
    """
    num_tokens = len(slots)
    q_lens = attn.cu_seqlens_q.diff().long()
    seq = torch.arange(len(q_lens), device=slots.device)
    seq = torch.repeat_interleave(seq, q_lens, output_size=num_tokens)
    token = torch.arange(num_tokens, device=slots.device)
    positions = token - attn.cu_seqlens_q[seq] + (attn.seq_lens - q_lens)[seq]
    block = positions.clamp(min=0) // block_size
    pages = torch.where(slots >= 0, slots // block_size, table[seq, block])
    return table.index_put((seq, block), pages.int())
