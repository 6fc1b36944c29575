"""`KVCache`: requests, their block tables, and what is cached of them.

The life of a request is ``match -> admit -> (plan -> run the model -> commit)* -> release``. Every call
treats the whole batch. Here are the calls and their checks; what they do is in `tables.groups` (pages), `prefix.requests` (tokens),
`prefix.index` (what is cached) and `prefix.tracker` (how what requests compute gets there).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .debug import Watch
from .events import Announcer, EventLog
from .pages import PagePool
from .plan import OutOfPages, StepPlan
from .policies.adaptive import Adaptive
from .policies.base import EvictionPolicy
from .policies.retention import Retention, parse_retention
from .prefix.index import PrefixIndex, Run
from .prefix.keys import Prompt, as_token_ids, root_key
from .prefix.requests import Sequences
from .prefix.tracker import Chains
from .report import Match, check_invariants, describe, limited_by
from .spec import (
    MOST_TOKENS,
    GroupSpec,
    Int32,
    Int64,
    Layout,
    as_int,
    as_ints,
    as_seconds,
    count_true,
)
from .stats import count_admission, new_counters
from .tables.decode import ONE, Ending
from .tables.groups import Tables
from .tables.prefill import NO_ROWS


class KVCache:
    """Retention-aware allocator of one page pool for all cache groups of a model.

    Args:
        groups: the cache groups; tables are numbered in this order.
        num_pages: pages of the pool, page 0 (never owned) included.
        max_requests: requests admitted at once.
        max_model_len: longest sequence, tokens.
        retention: which boundaries inside a prompt stay resumable: ``"auto"``, ``"latest"``, ``"dense"``, an interval
            in tokens, or one of these for each of some groups (see `policies.retention`).
        hash_seed: start of every key chain; processes with equal seeds agree on keys.
        enable_caching: False never caches and never hits.
        max_draft_tokens: tokens of a step that `commit(accepted=)` may reject or `rollback` take back. Rows of state
            groups must then tolerate tokens that are taken back (rows addressed by position do).
        replay_tokens: tokens that must be computed before a boundary so that all window layers are exact there: the
            sum of (sliding_window - 1) over them. With it, a request whose dense blocks are cached much further than
            any resume point computes these again instead (see `Match.replay_from`); None never does.
        policy: eviction policy, of this cache alone; `Adaptive` by default.
        max_pinned_pages: budget of `pin`; all pages by default.
        track_deltas: collect table changes for `take_deltas`.
        events: where to write what is stored and removed, of this cache alone; None keeps no events and no tokens.
        debug: check each call (see `debug`): two threads at once raise RuntimeError with both names, `commit` refuses input_ids that
            differ from the prompt's, and a step that would write page 0 raises AssertionError. Costs time, and the tokens of prompts.

    One call at a time, from any thread: a cache has no lock, and `match` reads what others change. `stats`, `describe`, `num_*` and
    `counters` are numbers that any thread may read at any time; they may be a call old. A `Match`, its prompt and an `OutOfPages`
    never change; a `StepPlan` may be read in other threads. An `EventLog` belongs to the thread that is in a call.

    Raises:
        ValueError: an argument is out of range, page sizes differ, retention is not aligned, or replay_tokens is given
            with a state group (a state depends on all tokens before it).
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        *,
        num_pages: int,
        max_requests: int,
        max_model_len: int,
        retention: Retention = "auto",
        hash_seed: bytes = b"",
        enable_caching: bool = True,
        max_draft_tokens: int = 0,
        replay_tokens: int | None = None,
        policy: EvictionPolicy | None = None,
        max_pinned_pages: int | None = None,
        track_deltas: bool = False,
        events: EventLog | None = None,
        debug: bool = False,
    ) -> None:
        num_pages = as_int("num_pages", num_pages, 2, 2**31 - 1)  # page 0 is null; ids are int32
        max_requests = as_int("max_requests", max_requests, 1, 2**31 - 1)
        max_model_len = as_int("max_model_len", max_model_len, 1, MOST_TOKENS)
        max_draft_tokens = as_int("max_draft_tokens", max_draft_tokens, 0, max_model_len)
        if replay_tokens is not None:
            replay_tokens = as_int("replay_tokens", replay_tokens, 1)
        if max_pinned_pages is None:
            max_pinned_pages = num_pages
        max_pinned_pages = as_int("max_pinned_pages", max_pinned_pages, 0)
        for name, flag in (
            ("enable_caching", enable_caching),
            ("track_deltas", track_deltas),
            ("debug", debug),
        ):
            if not isinstance(flag, bool):
                raise ValueError(f"{name}: expected True or False, got {flag!r}")
        if events is not None and not isinstance(events, EventLog):
            raise ValueError(f"events: expected an EventLog or None, got {events!r}")
        if policy is None:
            policy = Adaptive()
        methods = [getattr(policy, m, None) for m in ("add", "discard", "pop", "asked")]
        if isinstance(policy, type) or not all(map(callable, methods)):
            raise ValueError(f"policy: expected an eviction policy, such as LRU(), got {policy!r}")
        mine = {"policy": policy} if events is None else {"policy": policy, "events": events}
        for name, thing in mine.items():
            if not hasattr(thing, "__dict__"):  # where to note that it is taken
                raise ValueError(f"{name}: expected a class without __slots__, got {thing!r}")
            if getattr(thing, "_has_cache", False):
                raise ValueError(f"{name}: expected one that no cache was made with, got {thing!r}")
        self.layout = layout = Layout(groups, max_model_len, max_draft_tokens)
        self.alignment = layout.alignment
        span = layout.span(exact=replay_tokens is not None)
        self.interval = parse_retention(retention, layout, span)
        self.retention = dict(retention) if isinstance(retention, Mapping) else retention
        self.max_requests, self.max_model_len = max_requests, max_model_len
        self.max_draft_tokens = max_draft_tokens
        self._drafts: Int64 = np.array(max_draft_tokens)
        self.enable_caching = enable_caching
        if replay_tokens is not None and any(g.kind == "state" for g in layout.groups):
            raise ValueError("replay_tokens: expected None with a state group, got a number")
        self.replay_tokens = replay_tokens
        self.hash_seed = hash_seed
        root_key(hash_seed, b"")  # refuses a seed that is not bytes
        self.hybrid = layout.hybrid
        self.pool = PagePool(num_pages)
        self.index = PrefixIndex(
            self.pool, layout.pages_per_segment, self.hybrid, policy,
            span, layout.tail_between,
        )  # fmt: skip
        self.sequences = Sequences(max_requests, self.alignment, layout.lookahead, max_draft_tokens)
        self._tables = Tables(layout, max_requests, self.pool, track_deltas)
        self._announcer = None if events is None else Announcer(events, layout, self.sequences)
        self._keeps_tokens = debug or events is not None
        self.index.announcer = self._announcer
        self._rollback_floor: Int64 = np.zeros(max_requests, dtype=np.int64)
        self.max_pinned_pages = max_pinned_pages
        self._pin_at_release: dict[int, float] = {}  # slot -> expiry
        self._planned: StepPlan | None = None  # the one plan that `commit` takes
        self._lengths = self.sequences.num_computed.view()
        self._lengths.flags.writeable = False
        self._ones_cu: Int32 = np.zeros(1, dtype=np.int32)
        self.counters = new_counters(layout)
        self._chains = Chains(
            layout, self.interval, max_draft_tokens, self.sequences, self._tables, self.index, self._announcer,
            self.counters,
        )  # fmt: skip
        for thing in mine.values():
            thing._has_cache = True  # type: ignore[attr-defined]  # what it remembers is of this cache
        if debug:
            Watch(self)

    # Properties.

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the null page included."""
        return self.pool.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages that hold nothing."""
        return self.pool.num_free

    @property
    def num_evictable_pages(self) -> int:
        """Pages that hold only cached content no running request needs."""
        return self.index.num_evictable

    @property
    def num_free_slots(self) -> int:
        """Requests that can still be admitted."""
        return self.sequences.num_free

    @property
    def num_computed(self) -> Int64:
        """[max_requests] int64 tokens of each slot's request whose rows are valid; a read-only view."""
        return self._lengths

    @property
    def tables(self) -> Int32:
        """[max_requests, columns] int32: all block tables side by side (see `table`). A view, not to be written to."""
        return self._tables.array

    def table(self, group: int, part: int = 0) -> Int32:
        """Block table of `group`: [max_requests, width] int32 view; column = block % width.

        A group with pages_per_block > 1 has a table for each part of its blocks. A state group's table
        names the live page of each request in column 0.

        Between `plan` and `commit` it describes the context before the step. Entries at or past a
        request's length, and of a window group those behind its window, are not to be read. A view, not to be written to.
        """
        offset, width = self.layout.columns(group, part)
        return self.tables[:, offset : offset + width]

    def table_index(self, group: int, part: int = 0) -> int:
        """Row of `StepPlan.slot_mapping` that belongs to `table(group, part)`."""
        return self.layout.table(group, part)

    def slot_of(self, request_id: Hashable) -> int:
        """Slot of an admitted request.

        Raises:
            ValueError: the id is unknown.
        """
        return self.sequences.slot_of(request_id)

    # Life of a request.

    def match(self, token_ids: Any, *, salt: bytes | None = None) -> Match:
        """Longest cached prefix of a prompt. Changes nothing.

        Args:
            token_ids: [num_tokens] ints in [0, 2**31), or the `prompt` of an earlier match (not hashed again).
            salt: tenant, adapter or image identity; requests with different salts never share. None: that of the prompt, and b"" of
                token ids.

        Returns:
            Match; at least the last token of the prompt is left to compute.

        Raises:
            ValueError: empty or longer than max_model_len, not integers, ids out of range, or a prompt of another salt, or of a
                cache with other segments or another hash_seed.
        """
        prompt = token_ids
        if not isinstance(prompt, Prompt):
            salt = b"" if salt is None else salt
            a, k = self.alignment, self.layout.lookahead
            prompt = Prompt(token_ids, a, k, self.hash_seed, salt, self._keeps_tokens)
        elif salt is not None and root_key(prompt.seed, salt) != prompt.root:
            raise ValueError(
                "salt: expected that of the prompt, which its keys were made with, got another"
            )
        return self._match(prompt)[0]

    @staticmethod
    def _prompt_of(match: Match) -> Prompt:
        if not isinstance(match, Match):
            raise ValueError(f"match: expected what `match` returned, got {match!r}")
        return match.prompt

    def _match(self, prompt: Prompt) -> tuple[Match, Run]:
        mine = self.alignment, self.layout.lookahead
        if (prompt.alignment, prompt.lookahead) != mine:
            raise ValueError(
                f"token_ids: expected a prompt of this cache's segments (alignment {mine[0]}, lookahead {mine[1]}), "
                f"got one of another's ({prompt.alignment}, {prompt.lookahead})"
            )
        if prompt.seed != self.hash_seed:
            raise ValueError(
                "token_ids: expected a prompt of this cache's hash_seed, got one of another's"
            )
        if self._keeps_tokens and prompt.tokens is None:
            raise ValueError("token_ids: expected a prompt made by a cache with events or debug")
        if prompt.num_tokens > self.max_model_len:
            raise ValueError(
                f"token_ids: expected at most max_model_len = {self.max_model_len} tokens, "
                f"got {prompt.num_tokens}"
            )
        limit = prompt.num_segments if self.enable_caching else 0
        run, dense = self.index.find(prompt.keys, limit)
        usable = min((prompt.num_tokens - 1) // self.alignment, prompt.num_segments)
        hit = self.index.resumable(run, dense, usable)
        reason = limited_by(self.enable_caching, usable, dense, hit)
        a = self.alignment
        per_group = {g.name: (dense if g.kind == "dense" else hit) * a for g in self.layout.groups}
        match = Match(hit * a, dense * a, reason, per_group, prompt)
        if self.replay_tokens is not None and self.hybrid:
            to = min(dense, usable) * a
            start = max(0, to - self.replay_tokens) // a * a
            if start > hit * a:
                match = replace(match, replay_from=start, replay_to=to)
        return match, run

    def admit(self, request_id: Hashable, match: Match) -> int:
        """Give a request a slot and the pages of its hit (looked up again). Allocates nothing.

        Args:
            request_id: any hashable that is not admitted now.
            match: from `match`.

        Returns:
            The slot; ``num_computed[slot]`` tokens are already valid.

        Raises:
            ValueError: the id is admitted already or not hashable, all slots are taken, or `match` is of a cache with other segments
                or another hash_seed. Nothing changed, neither if the policy's `asked` raises.
        """
        if request_id in self.sequences:
            raise ValueError(f"request_id: expected a new id, got {request_id!r}, already admitted")
        if not self.num_free_slots:
            raise ValueError(f"request_id: all max_requests = {self.max_requests} slots are taken")
        prompt = self._prompt_of(match)
        match, run = self._match(prompt)
        keep = self._chains.ask(match)
        self._changed()
        slot = self.sequences.add(request_id, prompt, match.num_saved_tokens)
        self._rollback_floor[slot] = match.replay_to or match.num_tokens
        if self._announcer is not None:
            self._announcer.admitted(slot, prompt)
        self._chains.start(slot, match, run, keep)
        count_admission(self.counters, match)
        return slot

    def cut(self, slots: Any, num_new_tokens: Any) -> Int64:
        """Shorten chunks so that each ends at its next kept boundary, or else at its last boundary.

        Only needed with state groups, whose state can be kept only where a step ends; without them the counts
        come back as they are.

        Args:
            slots, num_new_tokens: [n] as for `plan`.

        Returns:
            [n] int64 counts, at least 1 each.

        Raises:
            ValueError: as `plan` for the slots and counts.
        """
        slots, counts = self._vectors(slots, num_new_tokens)
        self._check_step(slots, counts)
        if not (self._tables.states and self.enable_caching):
            return counts.copy()
        start = self.num_computed[slots]
        shortened: Int64 = self._chains.stops(slots, start, start + counts) - start
        return shortened

    def plan(self, slots: Any, num_new_tokens: Any) -> StepPlan | OutOfPages:
        """Plan a step: which pages and rows the new tokens of each request get.

        No request changes before `commit`. When free pages run short, cached entries are evicted here
        (as `policy` ranks them), and only if that is enough.

        Args:
            slots: [n] ints, distinct, from `admit`.
            num_new_tokens: [n] ints >= 1.

        Returns:
            StepPlan, or OutOfPages.

        Raises:
            ValueError: an unknown or repeated slot, a count below 1, a sequence past max_model_len.
        """
        slots, counts = self._vectors(slots, num_new_tokens)
        batch = self._tables.batch_again(slots, counts)
        if batch is not None:
            slots, counts = batch.slots, batch.counts
            start, end, longest = batch.start, batch.end, batch.longest
        else:
            slots, counts = slots.copy(), counts.copy()  # the caller may use its buffers again
            self._check_step(slots, counts)
            start = self.num_computed[slots]
            end = start + counts
            longest = int(end[0] if len(slots) == 1 else np.maximum.reduce(end))
        if longest > self.max_model_len:
            i = int(end.argmax())
            raise ValueError(
                f"num_new_tokens: slot {slots[i]} would reach {end[i]} tokens, "
                f"expected at most max_model_len = {self.max_model_len}"
            )
        written, chunks = start, NO_ROWS
        if batch is None:
            several = counts > ONE
            if self.replay_tokens is not None:
                written = np.maximum(start, self._chains.replay_to[slots])
                several |= written > start
            chunks = several.nonzero()[0]
            if len(chunks) == len(slots) and (written is start or not count_true(written > start)):
                batch = self._tables.batch_with_drafts(slots, start, counts)
                if batch is not None:
                    chunks = NO_ROWS
        kept, snapshot = (NO_ROWS, NO_ROWS), NO_ROWS
        if self.enable_caching:
            kept, snapshot = self._chains.boundaries(slots, start, end, chunks, batch)
        step = self._tables.plan(slots, start, end, written, chunks, kept, snapshot, batch)
        if step.needed > self.pool.num_free:
            evictable = self.index.num_evictable
            if step.needed > self.pool.num_free + evictable:
                per_group = self._tables.per_group(step)
                worst = max(per_group, key=lambda name: per_group[name])
                return OutOfPages(step.needed, self.pool.num_free, evictable, worst, per_group)
            # It names pages that lie deeper in the stack of free ones from here on.
            self._planned = None
            self.index.evict(step.needed - self.pool.num_free)
        if step.chunk_rows.size:
            cu = np.zeros(len(slots) + 1, dtype=np.int32)
            cu[1:] = np.add.accumulate(counts)
            if len(slots) == 1:
                positions = np.arange(start[0], longest)
            else:
                positions = np.arange(int(cu[-1])) + (start - cu[:-1]).repeat(counts)
        elif batch is not None and batch.size > 1:
            cu, positions = batch.cu, start.take(batch.row_of) + batch.steps - ONE
        else:
            cu, positions = self._cu_of(len(slots)), start
        pages = self.pool.peek(step.needed)
        mapping = self._tables.fill(step, pages, cu, len(positions))
        seq_lens = end.astype(np.int32)
        self._planned = plan = StepPlan(
            slots, counts, cu, seq_lens, positions, mapping, *self._tables.replays(step, cu), step.copies,
            step.state_pages, step,
        )  # fmt: skip
        return plan

    def _cu_of(self, n: int) -> Int32:
        """cu_seqlens_q of n requests with one token each."""
        if len(self._ones_cu) != n + 1:
            self._ones_cu = np.arange(n + 1, dtype=np.int32)
        return self._ones_cu

    def _vectors(self, slots: Any, num_new_tokens: Any) -> tuple[Int64, Int64]:
        slots, counts = as_ints("slots", slots), as_ints("num_new_tokens", num_new_tokens)
        if slots.ndim != 1 or counts.shape != slots.shape or not len(slots):
            raise ValueError(
                f"slots, num_new_tokens: expected two vectors of one length > 0, "
                f"got {list(slots.shape)} and {list(counts.shape)}"
            )
        return slots, counts

    def _check_step(self, slots: Int64, counts: Int64) -> None:
        # Those below 1 are large without a sign; sums with those past any length would overflow.
        if np.count_nonzero((counts - ONE).view(np.uint64) >= MOST_TOKENS):
            raise ValueError(
                f"num_new_tokens: expected at least 1 and at most {MOST_TOKENS} each, got {counts.tolist()}"
            )
        self.sequences.check(slots)

    def commit(self, plan: StepPlan, input_ids: Any, accepted: Any = None) -> Int32:
        """Make a planned step real: its rows become context, whole segments become findable.

        Args:
            plan: the newest plan of this cache, with no change since (see `StepPlan`).
            input_ids: [total] ints, the tokens whose rows the step computed, in the plan's order.
            accepted: [n] ints, how many of each request's new tokens stay; all by default. At most
                max_draft_tokens of a request may be rejected.

        Returns:
            [m, 2] int32 pages (source, destination) to copy after this step and before the next: snapshots of
            states. Empty without state groups.

        Raises:
            ValueError: the plan is not the newest, or void, or an argument has the wrong size. Nothing changed.
        """
        if plan.__class__ is not StepPlan:
            raise ValueError(f"plan: expected a StepPlan, got {plan!r}")
        ids = as_token_ids("input_ids", input_ids)
        step, slots = plan.step, plan.slots
        if plan is not self._planned:
            raise ValueError(
                "plan: expected the newest plan of this cache, got another cache's, or one made before another plan or change"
            )
        if len(ids) != len(plan.positions):
            raise ValueError(
                f"input_ids: expected {len(plan.positions)} tokens as planned, got {len(ids)}"
            )
        end = step.end
        if accepted is not None:
            end = step.start + self._checked_accepted(plan, accepted)
        self._changed()
        self.pool.take(step.needed)
        if self.max_draft_tokens:
            floor = np.maximum(self._rollback_floor[slots], step.end - self.max_draft_tokens)
            self._rollback_floor[slots] = floor
        if not self.enable_caching:
            effects = self._tables.commit(step, end, (NO_ROWS, NO_ROWS))
            self.sequences.num_computed[slots] = end
            self._tables.settle(step, effects)
            return effects.copies
        made, closing = self._feed(plan, ids, end)
        if self._announcer is not None:
            self._announcer.computed(plan, ids, end)
        copies = self._chains.commit(step, end, made, closing)
        self.sequences.num_computed[slots] = end
        return copies

    def _checked_accepted(self, plan: StepPlan, accepted: Any) -> Int64:
        taken = as_ints("accepted", accepted)
        most = plan.num_new_tokens
        step, batch = plan.step, plan.step.batch
        if step.drafts is not None and batch is not None:
            limit = batch.tokens
        else:
            limit = np.minimum(most, self._drafts + ONE)
        # Fewer than none rejected are, without a sign, very many.
        if taken.shape != most.shape or count_true(
            (most - taken).view(np.uint64) >= limit.view(np.uint64)
        ):
            least = np.maximum(1, most - self.max_draft_tokens)
            raise ValueError(
                f"accepted: expected between {least.tolist()} and {most.tolist()}, "
                f"got {taken.tolist()}"
            )
        return taken

    def _feed(
        self, plan: StepPlan, ids: Int32, end: Int64
    ) -> tuple[list[bytes] | None, Ending | None]:
        """Give the tokens of a step to the key chains; returns what `Chains.commit` need not find out of a decode batch."""
        step, batch = plan.step, plan.step.batch
        if not step.chunk_rows.size:
            assert batch is not None
            if batch.size > 1:
                return self.sequences.feed_drafts(batch, ids, end)
            return self.sequences.feed_one(batch, ids), None
        if batch is not None:
            self.sequences.feed_one(batch, ids[plan.cu_seqlens_q[step.decode_rows]])
        rows = step.chunk_rows
        first = plan.cu_seqlens_q[rows]
        self.sequences.feed_several(step.slots[rows], step.start[rows], end[rows], ids, first)
        return None, None

    def rollback(self, slot: int, num_tokens: int) -> None:
        """Forget the last computed tokens of a request.

        Args:
            slot: from `admit`.
            num_tokens: how many, at least 1.

        Raises:
            ValueError: the slot is unknown, or the tokens are cached already (or are the lookahead of cached
                ones), or more than max_draft_tokens would be taken back from the furthest position reached.
        """
        slot, num_tokens = self._slot(slot), as_int("num_tokens", num_tokens, 1)
        old = int(self.num_computed[slot])
        most = old - self.lowest_rollback(slot)
        new = old - num_tokens
        if num_tokens > most:
            raise ValueError(
                f"num_tokens: expected {f'1..{most}' if most else 'none to be taken back'} (computed {old}, last boundary "
                f"{self._chains.cached[slot]}, max_draft_tokens {self.max_draft_tokens}), got {num_tokens}"
            )
        self._changed()
        self._tables.shrink(slot, old, new)
        self.sequences.num_computed[slot] = new

    def lowest_rollback(self, slot: int) -> int:
        """The fewest tokens that `rollback` can leave the request of `slot`.

        Raises:
            ValueError: the slot is unknown.
        """
        slot = self._slot(slot)
        old = int(self.num_computed[slot])
        if not self.max_draft_tokens or old < self._chains.replay_to[slot]:
            return old
        known = int(self._chains.cached[slot])
        if known and old > self.sequences.prompt_len[slot]:
            # Tokens that the last key covers stay; those of the prompt come back as they were.
            known = max(known, min(old, known + self.layout.lookahead))
        return max(int(self._rollback_floor[slot]), known)

    def _slot(self, slot: int) -> int:
        slot = as_int("slot", slot, 0)
        if not (slot < self.max_requests and self.sequences.active[slot]):
            raise ValueError(f"slot: expected the slot of an admitted request, got {slot}")
        return slot

    def release(self, request_id: Hashable) -> None:
        """End a request: finished, aborted or preempted. What is cached of it stays findable.

        The last boundary it reached becomes a resume point, so that the next turn of a chat, or the same
        request after preemption, resumes there.

        Raises:
            ValueError: the id is unknown.
        """
        slot = self.slot_of(request_id)
        self._changed()
        run, depth = self._chains.end(slot, int(self.num_computed[slot]))
        expiry = self._pin_at_release.pop(slot, None)
        if expiry is not None:
            self._pin(run, depth, expiry)
        self.sequences.remove(request_id)
        if self._announcer is not None:
            self._announcer.released(slot)

    # Pins.

    def pin(self, match: Match, *, now: float, ttl: float) -> int:
        """Keep the cached prefix of a prompt until everything unpinned is gone, or `ttl` seconds have passed.

        Pins never block an admission: under pressure the oldest are demoted and evicted. When the budget
        max_pinned_pages is exceeded, the oldest pins are demoted at once.

        Args:
            match: from `match`; its hit is looked up again.
            now: seconds on the caller's clock.
            ttl: seconds from now; inf for ever.

        Returns:
            Tokens of the pinned prefix; 0 if nothing is cached or it alone exceeds the budget.

        Raises:
            ValueError: `ttl` is not positive, or `now` not a finite number.
        """
        expiry = self._expiry(now, ttl)
        match, run = self._match(self._prompt_of(match))
        self.index.tick += 1
        return self._pin(run, match.num_tokens // self.alignment, expiry) * self.alignment

    def pin_request(self, request_id: Hashable, *, now: float, ttl: float) -> None:
        """Pin what is cached of a running request when it is released.

        Raises:
            ValueError: the id is unknown, `ttl` is not positive, or `now` not a finite number.
        """
        self._pin_at_release[self.slot_of(request_id)] = self._expiry(now, ttl)

    @staticmethod
    def _expiry(now: float, ttl: float) -> float:
        now = as_seconds("now", now)
        if ttl == math.inf:
            return ttl
        if as_seconds("ttl", ttl) <= 0:
            raise ValueError(f"ttl: expected seconds > 0, got {ttl!r}")
        return now + ttl

    def _pin(self, run: Run, depth: int, expiry: float) -> int:
        """Pin the boundary `depth` on the path to `run`; returns the segments pinned."""
        index = self.index
        if not depth:
            return 0
        run = index.end_at(run, depth)
        if index.hybrid and index.point_at(run) is None:
            return 0
        index.pin(run, expiry)
        while index.num_pinned_pages > self.max_pinned_pages:
            if len(index.pins) == 1:
                depth = 0
            index.demote_oldest()
        return depth

    def unpin(self, match: Match) -> bool:
        """End the pin of the prefix that `match` finds; False if it is not pinned."""
        match, run = self._match(self._prompt_of(match))
        if not match.num_tokens:
            return False
        self.index.tick += 1
        run = self.index.end_at(run, match.num_tokens // self.alignment)
        entry = run.points.get(run.depth) if self.hybrid else run
        if entry is None or entry not in self.index.pins:
            return False
        self.index.unpin(entry)
        return True

    def expire_pins(self, now: float) -> int:
        """End the pins whose time has passed; returns how many.

        Raises:
            ValueError: `now` is not a finite number.
        """
        now = as_seconds("now", now)
        expired = [entry for entry, expiry in self.index.pins.items() if expiry <= now]
        for entry in expired:
            self.index.unpin(entry)
        return len(expired)

    def clear(self) -> None:
        """Forget everything cached that no running request needs, pinned or not."""
        self._changed()
        self.index.clear()

    def announce(self) -> None:
        """Write events from which a reader learns everything that is cached now: one that comes late, or lost track.

        They replace those that nobody took yet, and may be more than the log holds: each is made when it is taken
        (`EventLog.take(most=)` takes some).

        Raises:
            ValueError: the cache was made without events.
        """
        if self._announcer is None:
            raise ValueError(
                "events: expected an EventLog at construction to announce to, got None"
            )
        self._announcer.everything(self.index.runs())

    def evict(self, num_pages: int) -> int:
        """Free cached pages now, as pressure would.

        Args:
            num_pages: pages wanted.

        Returns:
            Pages freed: at least `num_pages`, or all that running requests do not need.
        """
        num_pages = as_int("num_pages", num_pages, 0)
        before = self.num_free_pages
        self._planned = None
        self.index.evict(min(num_pages, self.num_evictable_pages))
        return self.num_free_pages - before

    # Device copies.

    def take_deltas(self) -> tuple[Int64, Int32]:
        """Table entries that changed since the last call, for a copy of `tables` on a device.

        Returns:
            (flat indices into `tables` [m] int64, values [m] int32), later changes of an entry last.

        Raises:
            ValueError: the cache was made without track_deltas.
        """
        return self._tables.take_deltas()

    def _changed(self) -> None:
        self._planned = None
        self.index.tick += 1

    # Reports.

    def describe(self) -> str:
        """What this cache can reuse, in words: print it at start-up."""
        return describe(self)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and pages by state now."""
        held = self.num_pages - 1 - self.num_free_pages - self.num_evictable_pages
        return {
            **self.counters,
            "resume_points": self.index.num_points,
            "cached_segments": self.index.num_segments,
            "evicted_resume_points": self.index.num_evicted_points,
            "evicted_segments": self.index.num_evicted_segments,
            "evicted_segments/useless": self.index.num_useless_evicted,
            "evicted_segments/policy": self.index.num_evicted_segments
            - self.index.num_useless_evicted,
            "pins": len(self.index.pins),
            "pinned_pages": self.index.num_pinned_pages,
            "demoted_pins": self.index.num_demoted_pins,
            "free_pages": self.num_free_pages,
            "evictable_pages": self.num_evictable_pages,
            "pages_in_use": held,
        }

    def check_invariants(self) -> None:
        """Recount everything; for tests.

        Raises:
            AssertionError: a page is leaked, shared wrongly or counted wrongly.
        """
        check_invariants(self)
