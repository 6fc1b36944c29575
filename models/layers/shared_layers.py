"""Attention of models with last layers that have no keys and values of their own (Gemma-4 E).

Such a layer calls ``attend(layer, q)`` for ``attend.rows`` only, the rows with wanted logits. Each
becomes a sequence of one query over the keys of its donor, an earlier layer. Keys of a sliding
donor are gathered once for all layers that share them; a full donor's pages serve as they are once
the step's rows are in them. Where pages are e4m3, these rows are read quantized.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import paged_attention
from quire.kvcore.device import AttnMetadata

from ..config.model import ModelConfig
from .attention import PagedAttend
from .kv_cache import LayerCache, PageTensors

GATHERED_BLOCK = 16  # rows of a page of gathered keys


@dataclass(frozen=True)
class _Gathered:
    """Keys and values of chosen rows, each a sequence with one query that sees all of them."""

    pages: LayerCache
    block_table: Tensor
    seq_lens: Tensor
    max_seq_len: int


class SharedAttend(PagedAttend):
    """`PagedAttend` of a model with shared layers.

    Args:
        config, attn, pool, impl: as of `PagedAttend`; groups of full attention write every row
            that is not replayed.
        positions: [num_tokens] int64.
        rows: [num_rows] int64, rows that shared layers run for; None = all.
    """

    def __init__(
        self,
        config: ModelConfig,
        attn: AttnMetadata,
        pool: PageTensors,
        *,
        positions: Tensor,
        rows: Tensor | None = None,
        impl: str | None = None,
    ) -> None:
        super().__init__(config, attn, pool, impl=impl)
        self._config, self.rows = config, rows
        self._positions = positions
        self._donors = config.kv_donors
        self._new: dict[int, tuple[Tensor, Tensor]] = {}
        self._gathered: dict[int, _Gathered] = {}

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As `Attend.__call__`."""
        if k is not None and v is not None:
            return super().__call__(layer, q, k, v, sinks=sinks)
        donor = self._config.kv_donor(layer)
        if self.rows is not None:
            return self._attend_gathered(self._gathered[donor], q, sinks)
        return self._attend(donor, q, *self._new[donor], sinks)

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the rows of a layer; keep a donor's for the layers that share them."""
        super()._write(layer, k, v)
        if layer not in self._donors:
            return
        if self.rows is None:
            self._new[layer] = k, v
        elif self._pool.layers[layer].sliding_window is None:
            self._gathered[layer] = self._whole_context(self._pool.layers[layer])
        else:
            self._gathered[layer] = self._gather_window(layer, k, v)

    def _attend_gathered(self, kv: _Gathered, q: Tensor, sinks: Tensor | None) -> Tensor:
        return paged_attention(
            q,
            kv.pages.k_pages,
            kv.pages.v_pages,
            kv.block_table,
            kv.seq_lens,
            torch.arange(len(q) + 1, dtype=torch.int32, device=q.device),
            max_seqlen_q=1,
            k_scale=kv.pages.k_scale,
            v_scale=kv.pages.v_scale,
            max_seq_len=kv.max_seq_len,
            num_decodes=len(q),
            softmax_scale=self._softmax_scale,
            sinks=sinks,
            impl=self.impl,
        )

    def _sequence_of(self, rows: Tensor) -> Tensor:
        """[num_rows] int64, the sequence that each row belongs to."""
        return torch.searchsorted(self._attn.cu_seqlens_q[1:].long(), rows, right=True)

    def _whole_context(self, cache: LayerCache) -> _Gathered:
        """Keys [0, position] of each chosen row, in pages; slots name those that the step fills."""
        assert self.rows is not None
        table = self._attn.block_tables[cache.group].clone()
        slots, block_size = self._attn.slot_mappings[cache.group], cache.k_pages.shape[1]
        if self._attn.replay_rows is not None:
            assert self._attn.replay_slots is not None
            replayed = self._attn.replay_slots[cache.group]
            slots = slots.index_copy(0, self._attn.replay_rows, replayed)
        every = torch.arange(len(slots), device=slots.device)
        table[self._sequence_of(every), self._positions // block_size] = (slots // block_size).int()
        # Rows of padding are in no page, and see nothing.
        num_keys = torch.where(slots < 0, 0, self._positions + 1)
        table, lengths = table[self._sequence_of(self.rows)], num_keys[self.rows].int()
        return _Gathered(cache, table, lengths, self._attn.max_seq_len)

    def _gather_window(self, layer: int, k: Tensor, v: Tensor) -> _Gathered:
        """Copies of the keys that each chosen row sees, from pages and from the step's new rows."""
        assert self.rows is not None
        attn, cache = self._attn, self._pool.layers[layer]
        window = cache.sliding_window
        assert window is not None
        device, sequence = k.device, self._sequence_of(self.rows)
        start = attn.cu_seqlens_q.long()[sequence]
        context = attn.seq_lens.long()[sequence] - attn.cu_seqlens_q.diff().long()[sequence]
        last = self._positions[self.rows]
        first = (last - window + 1).clamp(min=0)
        num_blocks = -(-window // GATHERED_BLOCK)
        position = first[:, None] + torch.arange(num_blocks * GATHERED_BLOCK, device=device)
        is_new = position >= context[:, None]
        new = (start[:, None] + position - context[:, None]).clamp(0, len(k) - 1)
        table, block_size = attn.block_tables[cache.group], cache.k_pages.shape[1]
        entry = position // block_size % table.shape[1]
        page = torch.where(is_new, 0, table[sequence[:, None], entry].long())
        row = position % block_size

        def gather(kept: Tensor, rows: Tensor) -> Tensor:
            both = torch.where(is_new[..., None, None], rows[new], kept)
            return both.view(-1, GATHERED_BLOCK, *rows.shape[1:])

        kept_k, kept_v = cache.rows(page, row, k.dtype)
        gathered = LayerCache(gather(kept_k, k), gather(kept_v, v), cache.group)
        blocks = torch.arange(len(first) * num_blocks, dtype=torch.int32, device=device)
        lengths, longest = (last - first + 1).int(), min(window, attn.max_seq_len)
        return _Gathered(gathered, blocks.view(-1, num_blocks), lengths, longest)
