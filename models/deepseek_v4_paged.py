"""The attention operator of a DeepSeek-V4 layer over pages, through `quire.kernels.mla`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.mla import (
    IndexPages,
    LatentPages,
    compress,
    compressed_attention,
    index_topk,
    write_latent,
)
from quire.models.batch import AttnMetadata
from quire.models.deepseek_v4_block import Attention, AttentionRows, Compressor, GatedPooling
from quire.models.deepseek_v4_cache import COMPRESSED, LayerCache, V4PagePool


@dataclass(frozen=True)
class V4Metadata(AttnMetadata):
    """What attention must know about one ragged step; block_tables describe the context before it.

    request_slots: [num_seqs] int32, the requests' places in the rings of the pool.
    """

    request_slots: Tensor


class PagedStep:
    """Attention of one ragged step through `quire.kernels.mla`: context from pages, the step's own raw rows from the projections.

    A layer writes its rows first, then the entries that the step closes, and attends last, for a token sees the entry that it
    closes. Raw rows may be written before attention reads the context, because `quire.kvcore` gives no row a place that a query of
    the same step can still see.

    attn: this step's tables, lengths and slots. pool: pages and rings, read and written. impl: "triton" or "torch" for the kernels; default: by device.
    """

    def __init__(self, attn: V4Metadata, pool: V4PagePool, *, impl: str | None = None) -> None:
        self.attn, self.pool, self.impl = attn, pool, impl
        self._rows = {
            "seq_lens": attn.seq_lens,
            "cu_seqlens_q": attn.cu_seqlens_q,
            "max_seqlen_q": attn.max_seqlen_q,
            "impl": impl,
        }
        self._state_index = attn.request_slots
        group = pool.plan.group(COMPRESSED)
        if group is not None:
            block_size = pool.plan.groups[group].block_size
            slots = attn.slot_mappings[group]
            self._entry_table = with_new_blocks(attn, attn.block_tables[group], slots, block_size)
            # The entries of a page are its tokens' slots, ratio to one; -1 stays -1.
            self._entry_slots = {
                ratio: slots.div(ratio, rounding_mode="floor")
                for ratio in (pool.config.csa_ratio, pool.config.hca_ratio)
            }

    def __call__(self, attention: Attention, rows: AttentionRows) -> Tensor:
        """Attention of one layer; see `models.deepseek_v4_block.Attend`."""
        config, attn = self.pool.config, self.attn
        cache = self.pool.layers[attention.layer]
        kv = write_latent(
            rows.kv,
            cache.window,
            attn.slot_mappings[cache.window_group],
            positions=rows.positions,
            cos_sin=rows.cos_sin,
            norm_weight=attention.kv_norm.weight,
            eps=attention.eps,
            out=torch.empty_like(rows.kv),
            impl=self.impl,
        )
        compressed = {}
        if attention.compressor is not None:
            compressed = self._compress(attention.compressor, cache, rows)
        return compressed_attention(
            rows.q,
            cache.window,
            attn.block_tables[cache.window_group],
            kv=kv,
            sliding_window=config.sliding_window,
            sinks=attention.sinks,
            softmax_scale=config.softmax_scale,
            cos_sin=rows.cos_sin,
            max_seq_len=attn.max_seq_len,
            num_decodes=attn.num_decodes,
            **compressed,
            **self._rows,
        )

    def _compress(
        self, pooling: Compressor, cache: LayerCache, rows: AttentionRows
    ) -> dict[str, Any]:
        """Writes the entries that the step closes, and picks. Returns the arguments that attention needs of them."""
        assert rows.compressor is not None and cache.compressed is not None
        self._pool_windows(pooling, *rows.compressor, cache.state, cache.compressed, rows.cos_sin)
        arguments = {
            "compressed_pages": cache.compressed,
            "compressed_table": self._entry_table,
            "compress_ratio": pooling.ratio,
        }
        if rows.index is not None:
            index, indexer = rows.index, pooling.indexer
            self._pool_windows(indexer, index.kv, index.gate, cache.index_state, cache.index, rows.cos_sin)  # fmt: skip
            picks, lens = index_topk(
                index.q,
                index.weights,
                cache.index,
                self._entry_table,
                topk=self.pool.config.index_topk,
                compress_ratio=pooling.ratio,
                max_seq_len=self.attn.max_seq_len,
                **self._rows,
            )
            arguments |= {"topk_indices": picks, "topk_lens": lens}
        return arguments

    def _pool_windows(
        self, pooling: GatedPooling, kv: Tensor, gate: Tensor, state: Tensor,
        pages: LatentPages | IndexPages, cos_sin: Tensor,
    ) -> None:  # fmt: skip
        compress(
            kv,
            gate,
            pooling.position_bias,
            state,
            self._state_index,
            ratio=pooling.ratio,
            overlap=bool(pooling.overlap),
            norm_weight=pooling.kv_norm.weight,
            eps=pooling.kv_norm.eps,
            cos_sin=cos_sin,
            pages=pages,
            slot_mapping=self._entry_slots[pooling.ratio],
            **self._rows,
        )


def with_new_blocks(attn: AttnMetadata, table: Tensor, slots: Tensor, block_size: int) -> Tensor:
    """The block table of a dense group with the blocks of this step: a query sees entries that its own step closes.

    table: [num_seqs, width] int32, the context before the step. slots: [num_tokens] int64, -1 = not written. block_size: tokens.

    Returns: [num_seqs, width] int32, a copy.
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
