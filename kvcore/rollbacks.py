"""How far computed tokens may be taken back: rejected drafts of a step, and rollbacks after it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import Int64, as_ints
from .prefix.tracker import Chains
from .tables.planner import Tables


class Rollbacks:
    """Rollbacks of the requests of one cache.

    Args:
        chains: what of the requests is cached, and stays. tables: where their pages are.

    Attributes:
        floor: [max_requests] int64 tokens below which no rollback may go.
    """

    def __init__(self, chains: Chains, tables: Tables) -> None:
        self._chains, self._sequences, self._tables = chains, chains.sequences, tables
        self._lookahead = tables.layout.lookahead
        self._max_drafts = tables.layout.drafts
        self.floor: Int64 = np.zeros(chains.sequences.max_requests, dtype=np.int64)

    def reached(self, slots: Int64, end: Int64) -> None:
        """A step takes the requests `slots` to `end` [n] tokens, rejected ones counted."""
        self.floor[slots] = np.maximum(self.floor[slots], end - self._max_drafts)

    def checked(self, most: Int64, accepted: Any) -> Int64:
        """`accepted` as [n] of the `most` [n] tokens of a step.

        Raises:
            ValueError: as `KVCache.commit`.
        """
        taken = as_ints("accepted", accepted)
        least = np.maximum(1, most - self._max_drafts)
        if taken.shape != most.shape or ((taken < least) | (taken > most)).any():
            raise ValueError(
                f"accepted: expected between {least.tolist()} and {most.tolist()}, "
                f"got {taken.tolist()}"
            )
        return taken

    def expect(self, slot: int, num_tokens: int) -> None:
        """Raise ValueError, as `KVCache.rollback`, unless a checked slot can forget so many."""
        computed = int(self._sequences.num_computed[slot])
        most = computed - self.lowest(slot)
        if num_tokens > most:
            possible = f"1..{most}" if most else "none to be taken back"
            raise ValueError(
                f"num_tokens: expected {possible} (computed {computed}, last boundary "
                f"{self._chains.cached[slot]}, max_draft_tokens {self._max_drafts}), "
                f"got {num_tokens}; to go back further, release the request and admit it again "
                f"with the tokens that stay as its prompt"
            )

    def take_back(self, slot: int, num_tokens: int) -> None:
        """Forget the last tokens of a slot, as many as `expect` allows."""
        old = int(self._sequences.num_computed[slot])
        self._tables.shrink(slot, old, old - num_tokens)
        self._sequences.num_computed[slot] = old - num_tokens

    def lowest(self, slot: int) -> int:
        """`KVCache.lowest_rollback` of a checked slot."""
        old = int(self._sequences.num_computed[slot])
        if not self._max_drafts or old < self._chains.replays.stop[slot]:
            return old
        known = int(self._chains.cached[slot])
        if known and old > self._sequences.prompt_len[slot]:
            # Tokens that the last key covers stay; those of the prompt come back as they were.
            known = max(known, min(old, known + self._lookahead))
        return max(int(self.floor[slot]), known)
