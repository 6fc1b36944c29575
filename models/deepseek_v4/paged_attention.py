"""The attention operator of a DeepSeek-V4 layer over pages, through `quire.kernels`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quire.kernels import compress, compressed_attention, index_topk, write_latent

from ..engine.batch import AttnMetadata
from .cache import COMPRESSED, OVERLAP, CompressorCache, LayerCache, V4PagePool
from .layer import Attention, AttentionRows, Compressor, GatedPooling


class PagedStep:
    """Attention of one ragged step through `quire.kernels`.

    Context from pages, the step's own raw rows from the projections.

    A layer writes its rows first, then the entries that the step closes, and attends last, for a
    token sees the entry that it closes. Raw rows may be written before attention reads the context:
    the pages that `quire.kvcore` hands out in a step are pages that no table names, and a slot of a
    ring is taken over only from a block that has left the window (a ring is wider than its live
    blocks).

    Args:
        attn: this step's tables, lengths and slots.
        pool: pages and rings, read and written.
        impl: "triton" or "torch" for the kernels; default: by device.
    """

    def __init__(self, attn: AttnMetadata, pool: V4PagePool, *, impl: str | None = None) -> None:
        self.attn, self.pool, self.impl = attn, pool, impl
        self._rows = {
            "seq_lens": attn.seq_lens,
            "cu_seqlens_q": attn.cu_seqlens_q,
            "max_seqlen_q": attn.max_seqlen_q,
            "impl": impl,
        }
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

    @cached_property
    def _overlaps(self) -> OverlapRows:
        group = self.pool.plan.group(OVERLAP)
        assert group is not None
        block_size = self.pool.plan.groups[group].block_size
        return OverlapRows.of_step(self.attn, group, block_size, self.pool.config.csa_ratio)

    def __call__(self, attention: Attention, rows: AttentionRows) -> Tensor:
        """Attention of one layer; see `models.deepseek_v4.layer.Attend`."""
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
        """Writes the entries that the step closes, and selects those that attention sees.

        Returns:
            The arguments of attention that say so.
        """
        assert rows.compressor is not None and cache.entries is not None
        self._pool_windows(pooling, *rows.compressor, cache.entries, rows.cos_sin)
        arguments = {
            "compressed_pages": cache.entries.pages,
            "compressed_table": self._entry_table,
            "compress_ratio": pooling.ratio,
        }
        if rows.index is not None:
            index, indexer = rows.index, pooling.indexer
            assert indexer is not None and cache.index is not None
            self._pool_windows(indexer, index.kv, index.gate, cache.index, rows.cos_sin)
            topk_indices, topk_lens = index_topk(
                index.q,
                index.weights,
                cache.index.pages,
                self._entry_table,
                topk=self.pool.config.index_topk,
                compress_ratio=pooling.ratio,
                max_seq_len=self.attn.max_seq_len,
                **self._rows,
            )
            arguments |= {"topk_indices": topk_indices, "topk_lens": topk_lens}
        return arguments

    def _pool_windows(
        self,
        pooling: GatedPooling,
        kv: Tensor,
        gate: Tensor,
        cache: CompressorCache,
        cos_sin: Tensor,
    ) -> None:
        if cache.overlap is not None:
            self._overlaps.load(cache.overlap, cache.ring)
        compress(
            kv,
            gate,
            pooling.position_bias,
            cache.ring,
            self.attn.request_slots,
            ratio=pooling.ratio,
            overlap=bool(pooling.overlap),
            norm_weight=pooling.kv_norm.weight,
            eps=pooling.kv_norm.eps,
            cos_sin=cos_sin,
            pages=cache.pages,
            slot_mapping=self._entry_slots[pooling.ratio],
            **self._rows,
        )
        if cache.overlap is not None:
            self._overlaps.save(kv, gate, pooling.position_bias, cache.overlap)


@dataclass(frozen=True)
class OverlapRows:
    """Which rows of a step go to pages of the group "overlap", and which come back from them.

    The page of a block keeps its last ``ratio`` rows. A sequence that starts at a boundary reads
    those before it: it may have been admitted there by a hit. If it came there by itself, its ring
    has them already, and nothing changes. What is not to be kept goes to page 0, and what is not to
    be read to the last row of the rings: no request owns these, and no step waits for the host.

    Attributes:
        tokens: [num_kept] int64, rows of the step that may be kept, ``ratio`` of a block one after
            the other.
        pages: [num_kept] int64.
        from_pages, requests: [num_seqs] int64, pages to read, and rows of the rings.
        starts: [num_seqs] int64, tokens before the step.
    """

    tokens: Tensor
    pages: Tensor
    from_pages: Tensor
    requests: Tensor
    starts: Tensor
    ratio: int

    @classmethod
    def of_step(cls, attn: AttnMetadata, group: int, block_size: int, ratio: int) -> OverlapRows:
        """The rows of a step.

        Args:
            attn: the step.
            group: index of the group.
            block_size: tokens of its pages.
        """
        slots, table = attn.slot_mappings[group], attn.block_tables[group]
        q_lens = attn.cu_seqlens_q.diff().long()
        ends = attn.seq_lens.long()
        starts = ends - q_lens
        # The last rows of all blocks that the longest chunk may touch: [num_seqs, blocks, ratio].
        num_blocks = (attn.max_seqlen_q + block_size - 2) // block_size + 1
        device = slots.device
        blocks = torch.arange(1, num_blocks + 1, device=device)[:, None] * block_size
        positions = (starts // block_size * block_size)[:, None, None] + blocks
        positions = positions + torch.arange(-ratio, 0, device=device)
        inside = (positions >= starts[:, None, None]) & (positions < ends[:, None, None])
        tokens = positions - starts[:, None, None] + attn.cu_seqlens_q[:-1, None, None]
        tokens = torch.where(inside, tokens, 0).flatten()
        kept = inside.flatten() & (slots[tokens] >= 0)
        pages = torch.where(kept, slots[tokens] // block_size, 0)

        at_boundary = (starts > 0) & (starts % block_size == 0)
        before = (starts // block_size - 1).clamp(min=0) % table.shape[1]
        from_pages = table.gather(1, before[:, None])[:, 0]
        from_pages = torch.where(at_boundary, from_pages, 0).long()
        requests = torch.where(at_boundary, attn.request_slots, -1).long()
        return cls(tokens, pages, from_pages, requests, starts, ratio)

    def load(self, overlap: Tensor, ring: Tensor) -> None:
        """Copies rows from pages into a ring.

        Args:
            overlap: pages [num_pages, ratio, 2, width].
            ring: [max_requests + 1, rows, 2, 2 * width].
        """
        back = torch.arange(-self.ratio, 0, device=ring.device)
        rows = (self.starts[:, None] + back) % ring.shape[1]
        ring[self.requests[:, None], rows, :, : overlap.shape[-1]] = overlap[self.from_pages]

    def save(self, kv: Tensor, gate: Tensor, ape: Tensor, overlap: Tensor) -> None:
        """Copies series a of the step into pages.

        Args:
            kv, gate: [num_tokens, 2 * width] of the step.
            ape: [ratio, 2 * width], added to the gate.
            overlap: pages [num_pages, ratio, 2, width].
        """
        width = overlap.shape[-1]
        kv, gate = kv[self.tokens, :width], gate[self.tokens, :width].unflatten(0, (-1, self.ratio))
        # A block starts where a window does, so row r of the last ones is token r of its window.
        gate = (gate + ape[:, :width]).flatten(0, 1)
        row = torch.arange(self.ratio, device=kv.device).repeat(len(kv) // self.ratio)
        overlap[self.pages, row] = torch.stack([kv, gate], dim=1)


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
