"""Calls on one request: its prompt is looked up, it starts, and it ends."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from .contents import CacheContents
from .open_steps import OpenSteps
from .prefix.extra_keys import ExtraKeys
from .prefix.lookup import Match
from .prefix.tracker import Chains
from .spec import Layout
from .stats import count_admission
from .tables.planner import Tables


@dataclass(frozen=True)
class PagesNeeded:
    """What a step would need; nothing was changed.

    Attributes:
        needed, free, evictable: pages that the step needs, that are free, that eviction could free.
        per_group: pages that each group needs.
    """

    needed: int
    free: int
    evictable: int
    per_group: dict[str, int]

    @property
    def fits(self) -> bool:
        """Whether `KVCache.plan` would plan it."""
        return self.needed <= self.free + self.evictable


class RequestCalls(CacheContents):
    """The part of `KVCache` that starts and ends requests.

    Attributes:
        layout: the groups.
        max_requests: requests admitted at once.
        counters: since the start, see `stats`.
    """

    layout: Layout
    max_requests: int
    counters: dict[str, int]
    _tables: Tables
    _chains: Chains
    _open: OpenSteps

    def match(
        self,
        token_ids: Any,
        *,
        salt: bytes | None = None,
        extra_keys: ExtraKeys | None = None,
        max_tokens: int | None = None,
    ) -> Match:
        """Longest cached prefix of a prompt. Changes nothing.

        Args:
            token_ids: [num_tokens] ints in [0, 2**31), or the `prompt` of an earlier match (not
                hashed again).
            salt: tenant or other identity of the whole prompt; requests with different salts never
                share. None: that of the prompt, and b"" of token ids.
            extra_keys: (start, stop, key) of tokens [start, stop) that stand for more than their
                ids, such as an image or an adapter: prompts share what is before them whatever the
                key, and what is after only with the same one. stop None: to the end, the answer
                included. None: those of the prompt, and none of token ids.
            max_tokens: no longer hit; 0 for a request that is to compute everything. `admit` and
                `pin` keep to it. None: as long as there is.

        Returns:
            Match; at least the last token of the prompt is left to compute.

        Raises:
            ValueError: empty or longer than max_model_len, not integers, ids out of range, extra
                keys out of the prompt, a negative max_tokens, or a prompt of another salt or other
                extra keys, or of a cache with other segments or another hash_seed.
        """
        prompt = self._lookup.prompt(token_ids, salt, extra_keys)
        return self._lookup.find(prompt, max_tokens)[0]

    def admit(self, request_id: Hashable, match: Match, *, resumed: bool = False) -> int:
        """Give a request a slot and the pages of its hit (looked up again). Allocates nothing.

        Args:
            request_id: any hashable that is not admitted now.
            match: from `match`.
            resumed: it was admitted before and then preempted: it counts as resumed, not as one
                more request with a prompt and a hit.

        Returns:
            The slot; ``num_computed[slot]`` tokens are already valid.

        Raises:
            ValueError: the id is admitted already or not hashable, all slots are taken, or `match`
                is of a cache with other segments or another hash_seed. Nothing changed, neither if
                the policy's `asked` raises.
        """
        if request_id in self.sequences:
            raise ValueError(f"request_id: expected a new id, got {request_id!r}, already admitted")
        if not self.sequences.num_free:
            raise ValueError(f"request_id: all max_requests = {self.max_requests} slots are taken")
        match, run = self._lookup.again(match)
        keep = self._chains.ask(match)
        self._steps.changed()
        slot = self.sequences.add(request_id, match.prompt, match.num_saved_tokens)
        self._steps.rollbacks.floor[slot] = match.replay_to or match.num_tokens
        if self._announcer is not None:
            self._announcer.admitted(slot, match.prompt, request_id)
        self._chains.start(slot, match, run, keep)
        if self._steps.checks is not None:
            assert match.prompt.tokens is not None
            self._steps.checks.prompts[slot] = match.prompt.tokens
        count_admission(self.counters, match, resumed)
        return slot

    def needed(self, slots: Any, num_new_tokens: Any) -> PagesNeeded:
        """The pages that a step would need. A plan made before stays good.

        Args:
            slots, num_new_tokens: [n] as for `plan`, which evicts what the step needs at once.

        Raises:
            ValueError: as `plan`.
        """
        changes = self._steps.changes_of(slots, num_new_tokens)
        free, per_group = self.pool.num_available, self._tables.per_group(changes)
        return PagesNeeded(changes.num_new, free, self.index.num_evictable, per_group)

    def release(self, request_id: Hashable, *, discard: bool = False) -> None:
        """End a request: finished, aborted or preempted. What is cached of it stays findable.

        The last boundary it reached becomes a resume point, so that the next turn of a chat, or the
        same request after preemption, resumes there.

        Args:
            request_id: from `admit`.
            discard: nothing becomes findable by this: no resume point, no pin of `pin_request`.
                What its commits made findable stays, as others may have hit it; if its rows turned
                out wrong, `evict_pages` removes them.

        Raises:
            ValueError: the id is unknown.
        """
        slot = self.sequences.slot_of(request_id)
        self._open.leave(slot, "request_id")
        self._steps.changed()
        run, depth = self._chains.end(slot, int(self.sequences.lengths[slot]), not discard)
        if discard:
            self._pins.at_release.pop(slot, None)
        self._pins.released(slot, run, depth)
        self.sequences.remove(request_id)
        if self._announcer is not None:
            self._announcer.released(slot)

    def reset(self, *, end_requests: bool = False) -> list[Hashable]:
        """Forget everything cached, pinned or not, in tiers too: for new weights, or pages that lost their rows.

        All pages are free afterwards. Counters go on; a `Match` made before may
        still be admitted, and hits nothing.

        Args:
            end_requests: release running requests, as with ``discard=True``. False refuses while
                there are any.

        Returns:
            The ids of the requests that this ended, the one admitted first first.

        Raises:
            ValueError: requests are running, and end_requests is False; or tiers have open jobs.
                Nothing changed.
        """
        running = self.sequences.ids
        if running and end_requests is not True:
            raise ValueError(
                f"end_requests: expected True while requests are running, got {end_requests!r} "
                f"with {running}"
            )
        if self.tiers is not None and self.tiers.jobs:
            raise ValueError(
                f"reset: expected no open jobs of tiers, got {len(self.tiers.jobs)}: end them with "
                f"`done` or `cancel`"
            )
        for request_id in running:  # before anything changes
            if (slot := self.sequences.slot_of(request_id)) in self._open.by_slot:
                raise self._open.busy("end_requests", slot)
        for request_id in running:
            self.release(request_id, discard=True)
        self.clear()
        return running
