"""What a step's layers attend through: wrappers that are planned, and rows to gather before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..layers.kv_cache import LayerCache

GATHERED_BLOCK = 16  # rows of a page of gathered keys


@dataclass(frozen=True)
class Gathered:
    """Where the keys come from that some sequences of a step see in a window, when not all of them
    will be in pages: copies of those in pages, and the step's own.

    Attributes:
        pages, rows: [num_kept] int64, where rows of the context are.
        kept_at, new_at: [num_kept], [num_new] int64, rows of the copies.
        first_token: of the step's tokens, the first of these sequences.
        num_pages: of `GATHERED_BLOCK` rows each.
    """

    pages: Tensor
    rows: Tensor
    kept_at: Tensor
    new_at: Tensor
    first_token: int
    num_pages: int

    def copies(self, cache: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Pages [num_pages, GATHERED_BLOCK, num_kv_heads, head_dim] of keys and of values.

        Args:
            cache: of the layer, before the step's rows are written: then it does not matter where
                these go.
            k, v: [num_tokens, num_kv_heads, head_dim].
        """
        kept_k, kept_v = cache.rows(self.pages, self.rows, k.dtype)
        return self._copy(kept_k, k), self._copy(kept_v, v)

    def _copy(self, kept: Tensor, new: Tensor) -> Tensor:
        copies = new.new_empty(self.num_pages * GATHERED_BLOCK, *new.shape[1:])
        copies[self.kept_at] = kept
        copies[self.new_at] = new[self.first_token :]
        return copies.view(self.num_pages, GATHERED_BLOCK, *new.shape[1:])


@dataclass(frozen=True)
class GroupStep:
    """How the layers of one cache group attend in a step.

    Attributes:
        decode, prefill: planned wrappers for the sequences of one query that come first, and for
            those behind them; None where there are none.
        gathered: what the prefill reads instead of pages, or None.
    """

    decode: Any = None
    prefill: Any = None
    gathered: Gathered | None = None


@dataclass(frozen=True)
class PreparedStep:
    """A step that is planned for all layers.

    Attributes:
        num_decodes: sequences, and rows, of `GroupStep.decode`.
        groups: one for each cache group.
    """

    num_decodes: int
    groups: tuple[GroupStep, ...]
