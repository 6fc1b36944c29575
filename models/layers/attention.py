"""The attention operator of all layers of one step, over pages.

A layer calls ``attend(layer, q, k, v)`` with the rows that it just computed. Keys of earlier tokens
come from pages, those of the step from k and v, in one softmax; then the rows are written. The
block table is that of the last commit, and new rows lie in free pages or behind the context. So
attention never reads a row that its own step writes, but in layers that share an earlier layer's
keys (`shared_layers`).

To restore the windows of sliding layers, a step may compute rows again that full attention has in
its pages (`quire.kvcore.Match.replay_from`). Keys and values of the first of them are wrong after
the first window. Full layers take the rows from their pages instead, and do not write them.

In pages of e4m3 rows are quantized, a step's own rows are not. So logits of a prompt depend on its
cut into steps, by the quantization's error; with the same cuts they are equal bit for bit, whether
the rows before were computed for this request or found cached.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.kernels import attention_for, write_kv
from quire.kvcore.device import AttnMetadata

from ..config.model import ModelConfig
from .kv_cache import PageTensors


class Attend(Protocol):
    """Attention of one step, such as `PagedAttend`, `SharedAttend` and `UnpagedAttend`.

    Attributes:
        rows: the rows that layers without own keys and values run for; None = all.
        impl: "triton" or "torch" for all kernels of the step; None = by device.
    """

    rows: Tensor | None
    impl: str | None

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of one layer.

        Args:
            q: [num_tokens, num_heads, head_dim].
            k, v: [num_tokens, num_kv_heads, head_dim]; None in a layer that shares those of its
                donor (`shared_layers`).
            sinks: [num_heads] fp32.

        Returns:
            [num_tokens, num_heads, head_dim].
        """


class PagedAttend:
    """Attention of one ragged step through `quire.kernels`."""

    rows: Tensor | None = None

    def __init__(
        self, config: ModelConfig, attn: AttnMetadata, pool: PageTensors, *, impl: str | None = None
    ) -> None:
        self._attn, self._pool, self.impl = attn, pool, impl
        self._softmax_scale = config.softmax_scale

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend over pages and the rows ``k``, ``v``, then write these: `Attend.__call__`."""
        assert k is not None and v is not None, "a layer that shares keys needs `SharedAttend`"
        if self._attn.replay_rows is not None:
            k, v = self._with_cached(layer, k, v)
        out = self._attend(layer, q, k, v, sinks)
        self._write(layer, k, v)
        return out

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        attn, cache = self._attn, self._pool.layers[layer]
        return attention_for(cache.sliding_window)(
            q,
            cache.k_pages,
            cache.v_pages,
            attn.block_tables[cache.group],
            attn.seq_lens,
            attn.cu_seqlens_q,
            max_seqlen_q=attn.max_seqlen_q,
            k=k,
            v=v,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            max_seq_len=attn.max_seq_len,
            num_decodes=attn.num_decodes,
            softmax_scale=self._softmax_scale,
            sinks=sinks,
            impl=self.impl,
        )

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        cache = self._pool.layers[layer]
        write_kv(
            k,
            v,
            cache.k_pages,
            cache.v_pages,
            self._attn.slot_mappings[cache.group],
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            impl=self.impl,
        )

    def _with_cached(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v; in a full layer, replayed rows as its pages have them."""
        rows, cache = self._attn.replay_rows, self._pool.layers[layer]
        if cache.sliding_window is not None:
            return k, v
        assert rows is not None and self._attn.replay_slots is not None
        slots = self._attn.replay_slots[cache.group]
        page, row = slots.clamp(min=0) // cache.k_pages.shape[1], slots % cache.k_pages.shape[1]
        kept_k, kept_v = cache.rows(page, row, k.dtype)
        return k.index_copy(0, rows, kept_k), v.index_copy(0, rows, kept_v)
