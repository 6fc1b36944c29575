"""`KVCache`: requests, their block tables, and the cached prefixes that they share.

A *segment* is the smallest part of a prompt that is cached: `alignment` tokens, with one key.
A *boundary* is a multiple of the alignment, in tokens; its *depth* is the same in segments.
A *resume point* is what window and state groups keep so that a request can start at a boundary.

The life of a request is ``match -> admit -> (plan -> run the model -> commit)* -> release``. A step
treats the whole batch:

    plan     the planner counts pages, cached ones that no running request needs are evicted where
             too few are free, and the slot mapping is laid out. No table changes
    commit   tokens make the keys of whole segments (`Sequences`), the tables take the step's pages
             (`StepPlanner.commit`), and whole segments and resume points can be found (`Chains`)

So a step's attention reads the tables as the last step left them; a page that the step starts is in
its slot mapping only. A request with 31 tokens, blocks of 16, whose first pages are 2 and 1:

    token         seq_lens   table       keys in pages   slot of the new row
    31            32         [2, 1]      0 .. 30         31 = 1 * 16 + 15
    32            33         [2, 1]      0 .. 31         48 = 3 * 16
    33            34         [2, 1, 3]   0 .. 32         49 = 3 * 16 + 1

`plan` and `commit` are the quick way through four calls, for an engine that schedules a step before
it knows the tokens of the one before, or asks for one request at a time:

    reserve    pages leave the pool and wait beside the tables (`Reservations`)
    arrays     what the kernels need; it reads only
    advance    pages enter the tables: rows count as computed, whatever the tokens are
    publish    the tokens are known: whole segments and their resume points can be found

No page of a step in flight is handed out again: pages that it writes have left the pool; pages that
it reads belong to its requests or to what these lock, and until it advances none of its requests
can be in another step, rolled back or released. What `advance`, `publish` or `release` free goes to
later steps: work must be queued in the order of the reservations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .arrays import NO_ROWS, NO_VALUES, ONE, Int32, Int64, as_ints, as_token_ids, ragged_arange
from .debug import Checks
from .event_writer import EventWriter
from .events import EventLog
from .invariants import check_invariants
from .ownership import check_log, check_policy, take_ownership
from .pages import PagePool
from .plan import OutOfPages, PagesNeeded, StepPlan, without_last
from .policies.adaptive import Adaptive
from .policies.base import EvictionPolicy
from .policies.retention import Retention, parse_retention
from .prefix.chains import NONE_KEPT, NOTHING_COMPLETED, Chains, Completed
from .prefix.evict_pages import evict_pages
from .prefix.extra_keys import ExtraKeys
from .prefix.index import PrefixIndex
from .prefix.keys import KEY_BYTES, Prompt, root_key
from .prefix.lookup import Lookup, Match
from .prefix.pins import expiry_of
from .prefix.requests import Sequences
from .spec import MOST_TOKENS, GroupSpec, Layout, as_int, as_seconds
from .stats import count_admission, describe, new_counters, stats
from .tables.linear import LinearTables
from .tables.planner import NO_COPIES, StepChanges, StepPlanner
from .tables.reserved import Reservations
from .tables.rows import Tables

if TYPE_CHECKING:
    from .tier.tiers import Tiers

SETTLED = -1  # in `KVCache._known`: all computed tokens are published


class KVCache:
    """Retention-aware allocator of one page pool for all cache groups of a model.

    Args:
        groups: the cache groups; tables are numbered in this order.
        num_pages: pages of the pool, page 0 (never owned) included.
        max_requests: requests admitted at once.
        max_model_len: longest sequence, tokens.
        retention: which boundaries inside a prompt stay resumable: ``"auto"``, ``"latest"``,
            ``"dense"``, an interval in tokens, or one of these for each of some groups (see
            `policies.retention`).
        hash_seed: start of every key chain; processes with equal seeds agree on keys.
        enable_caching: False never caches and never hits.
        max_draft_tokens: tokens of a step that may be rejected, or taken back by `rollback`. Rows
            of state groups must tolerate tokens that are taken back.
        replay_tokens: tokens before a boundary after which all window layers are exact there: the
            sum of (sliding_window - 1) over them. With it, a request whose dense blocks are cached
            much further than any resume point computes these again (see `prefix.replays`).
        policy: eviction policy, of this cache alone; `Adaptive` by default.
        max_pinned_pages: budget of `pin`; all pages by default.
        reads: where queries find the rows of their own step. ``"step"``: in its tensors, and window
            groups have pages only for rows that outlive it. ``"pages"``: in pages, written before
            attention reads them.
        adopt: a request that computes a segment cached meanwhile by another takes the cached pages
            and gives its own back. False: it keeps its own until it is released.
        append_only: tables are lists that only grow (`tables.linear`), for engines whose workers
            append what `reserve` returns, count requests back without a call, and let one request
            hit what another computes in the same step. Needs ``reads="pages"`` and ``adopt=False``;
            dense and window groups alone; no tables, plans, events, drafts or replays.
        track_deltas: collect table changes for `take_deltas`.
        events: where to write what is stored and removed, of this cache alone.
        debug: check each call: two threads at once raise RuntimeError, tokens that differ from the
            prompt's ValueError, and writes to page 0 AssertionError. Costs time, and the tokens of
            prompts.

    Attributes:
        layout: the groups, and what follows from them.
        alignment: tokens of a segment: hits are multiples of it.
        pool, index, sequences: the pages, what is cached, and the running requests.
        counters: since the start, see `stats`.
        tiers: memory behind the pool (`tier.Tiers` puts itself here); None without.

    A cache has no lock: one call at a time, `match` included, from any thread. `stats`, `describe`,
    `num_*` and `counters` may be read during a call. A `Match`, its prompt and an `OutOfPages`
    never change.

    Raises:
        ValueError: an argument is out of range, page sizes differ, retention is not aligned, or
            replay_tokens is given with a state group (a state depends on all tokens before it).
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
        reads: str = "step",
        adopt: bool = True,
        append_only: bool = False,
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
        pinned = num_pages if max_pinned_pages is None else max_pinned_pages
        self.max_pinned_pages = as_int("max_pinned_pages", pinned, 0)
        flags = {"enable_caching": enable_caching, "adopt": adopt, "append_only": append_only}
        flags |= {"track_deltas": track_deltas, "debug": debug}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise ValueError(f"{name}: expected True or False, got {flag!r}")
        if reads not in ("step", "pages"):
            raise ValueError(f"reads: expected 'step' or 'pages', got {reads!r}")
        if append_only and (
            (reads, adopt) != ("pages", False)
            or track_deltas or events is not None or max_draft_tokens or replay_tokens is not None
        ):  # fmt: skip
            raise ValueError(
                "append_only: expected False but with reads='pages' and adopt=False, without "
                "track_deltas, events, max_draft_tokens and replay_tokens"
            )
        policy = Adaptive() if policy is None else policy
        check_log(events)
        check_policy(policy)
        self.layout = layout = Layout(groups, max_model_len, max_draft_tokens, reads == "pages")
        self.alignment, self.hybrid = layout.alignment, layout.hybrid
        span = layout.span(exact=replay_tokens is not None)
        self.interval = parse_retention(retention, layout, span)
        self.retention = dict(retention) if isinstance(retention, Mapping) else retention
        if replay_tokens is not None and any(g.kind == "state" for g in layout.groups):
            raise ValueError("replay_tokens: expected None with a state group, got a number")
        root_key(hash_seed, b"")  # refuses a seed that is not bytes
        self.max_requests, self.max_model_len, self.reads = max_requests, max_model_len, reads
        self._longest: Int64 = np.array(max_model_len)
        self.max_draft_tokens, self.replay_tokens = max_draft_tokens, replay_tokens
        self.enable_caching, self.hash_seed = enable_caching, hash_seed
        self.append_only = append_only
        self.pool = PagePool(num_pages)
        self.index = PrefixIndex(
            self.pool, layout.pages_per_segment, self.hybrid, policy, span, layout.tail_between,
            self.max_pinned_pages,
        )  # fmt: skip
        self.sequences = Sequences(max_requests, self.alignment, layout.lookahead)
        self._linear = LinearTables(layout, max_requests, self.pool) if append_only else None
        rows = 1 if append_only else max_requests  # of which an append-only cache uses none
        self._tables = Tables(layout, rows, self.pool, track_deltas)
        self._planner = StepPlanner(self._tables)
        self._event_writer = None if events is None else EventWriter(events, layout, self.sequences)
        self.index.event_writer = self._event_writer
        self.counters = new_counters(layout)
        self._chains = Chains(
            self.interval, self.sequences, self._linear or self._tables, self.index,
            self._event_writer, self.counters, adopt,
        )  # fmt: skip
        self._lookup = Lookup(
            self.index, layout, hash_seed, enable_caching, replay_tokens, max_model_len,
            debug or events is not None,
        )  # fmt: skip
        self.tiers: Tiers | None = None
        self._no_replays = NO_ROWS, np.empty((len(layout.groups), 0), dtype=np.int64)
        self._planned: StepPlan | None = None  # the one plan that `commit` takes
        # Tokens of each slot's request below which no rollback may go.
        self._floor: Int64 = np.zeros(max_requests, dtype=np.int64)
        self._reserved = Reservations(self._planner, self.pool, max_requests)
        # Tokens of each slot's request that are published, if not all computed ones are.
        self._known: Int64 = np.full(max_requests, SETTLED, dtype=np.int64)
        # No request was ever in a step of the four calls, or admitted with keys: `plan` need not
        # check for reserved pages and unpublished tokens.
        self._only_plans = True
        # The most tokens that start at most one block a table, none dead after the step: `reserve`
        # of so few needs no arrays.
        sizes = [g.block_size for g in layout.groups if g.kind != "state"]
        self._few = min([max_draft_tokens + 1, layout.alignment, *sizes])
        take_ownership(policy, events)
        self._checks = Checks(layout, self) if debug else None

    # Sizes and tables.

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
        """[max_requests] int64 tokens of each slot's request whose rows are valid; read-only."""
        return self.sequences.lengths

    @property
    def tables(self) -> Int32:
        """[max_requests, columns] int32: all block tables side by side; not to be written to."""
        self._expect_tables("tables")
        return self._tables.array

    def table(self, group: int) -> Int32:
        """Block table of `group`: [max_requests, width] int32 view, not to be written to.

        Block b is in column ``b % width``. A state group has its live page, which its kernel
        updates in place, in column 0. Entries at or past a request's length, and behind its window,
        are not to be read.
        """
        self._expect_tables("table")
        offset, width = self.layout.columns(group)
        return self.tables[:, offset : offset + width]

    def take_deltas(self) -> tuple[Int64, Int32]:
        """Table entries that changed since the last call, for a copy of `tables` on a device: flat
        indices [m] int64 and values [m] int32, later changes of an entry last.

        Raises:
            ValueError: the cache was made without track_deltas.
        """
        deltas = self._tables.deltas
        if deltas is None:
            raise ValueError(
                "track_deltas: expected True at construction to take deltas, got False"
            )
        if not deltas:
            return NO_ROWS, NO_VALUES
        indices, pages = zip(*deltas, strict=True)
        deltas.clear()
        return np.concatenate(indices), np.concatenate(pages)

    def _expect_tables(self, call: str) -> None:
        if self._linear is not None:
            raise ValueError(
                f"{call}: expected a cache with tables, got one with append_only=True: see "
                "`reserve`, `advance` and `publish`"
            )

    # A request starts.

    def match(
        self,
        token_ids: Any = None,
        *,
        salt: bytes | None = None,
        extra_keys: ExtraKeys | None = None,
        max_tokens: int | None = None,
        keys: bytes | None = None,
        num_tokens: int | None = None,
    ) -> Match:
        """Longest cached prefix of a prompt, with at least one token left to compute. Changes no
        cached content.

        Args:
            token_ids: [num_tokens] ints in [0, 2**31), or the `prompt` of an earlier match (not
                hashed again).
            salt: tenant or other identity of the whole prompt; requests with different salts never
                share. None: that of the prompt, and b"" of token ids.
            extra_keys: (start, stop, key) of tokens [start, stop) that stand for more than their
                ids, such as an image: prompts share what is before them whatever the key, and what
                is after only with the same one. stop None: to the end, the answer included. None:
                those of the prompt, and none of token ids.
            max_tokens: no longer hit, in `admit` and `pin` neither. None: as long as there is.
            keys, num_tokens: in place of token ids, salt and extra keys, the caller's own hashes of
                whole segments, 32 bytes each, and the length of the prompt. `publish` takes the
                keys of what comes after.

        Raises:
            ValueError: an argument is out of range, empty or longer than max_model_len; a prompt is
                of another salt, other extra keys, or a cache with other segments or another
                hash_seed; or keys are given beside tokens, or with events or debug.
        """
        if keys is None:
            prompt = self._lookup.prompt(token_ids, salt, extra_keys)
        elif any(
            x is not None for x in (token_ids, salt, extra_keys, self._event_writer, self._checks)
        ):
            raise ValueError("keys: expected None beside tokens, or with events or debug, got keys")
        else:
            n = as_int("num_tokens", num_tokens, 1)
            layout = self.layout
            prompt = Prompt.of_keys(keys, n, layout.alignment, layout.lookahead, self.hash_seed)
        return self._lookup.find(prompt, max_tokens)[0]

    def admit(
        self, request_id: Hashable, match: Match, *, resumed: bool = False, least: int = 0
    ) -> int | OutOfPages:
        """Give a request a slot and the pages of its hit, which is looked up again. Takes
        no free pages.

        Args:
            request_id: any hashable that is not admitted now.
            match: from `match`.
            resumed: it was preempted before; it is counted apart.
            least: refuse unless this many pages are free or evictable beside those of the hit.

        Returns:
            The slot; ``num_computed[slot]`` tokens are already valid. Or OutOfPages, for want of
            `least`, and nothing has changed.

        Raises:
            ValueError: the id is admitted already or not hashable, all slots are taken, or `match`
                is of another cache. Nothing has changed, neither if the policy's `asked` raises.
        """
        if request_id in self.sequences:
            raise ValueError(f"request_id: expected a new id, got {request_id!r}, already admitted")
        if not self.sequences.num_free:
            raise ValueError(f"request_id: all max_requests = {self.max_requests} slots are taken")
        match, run = self._lookup.find_again(match)
        hit, uses_point = match.replay_to or match.num_tokens, not match.replay_to
        if least > self.pool.num_free:
            evictable = self.index.num_evictable
            evictable -= self.index.taken_by_hit(
                run, hit // self.alignment, uses_point=bool(hit and uses_point)
            )
            if least > self.pool.num_free + evictable:
                group = self.layout.groups[0].name
                return OutOfPages(least, self.pool.num_free, evictable, group, {})
        keep = self._chains.ask(match)
        self._changed()
        prompt = match.prompt
        slot = self.sequences.add(request_id, prompt, match.num_saved_tokens, hit)
        if prompt.is_keyed:
            self._only_plans = False
        elif self._linear is not None and self.enable_caching:
            self._known[slot] = hit
        self._floor[slot] = hit
        if self._event_writer is not None:
            self._event_writer.admitted(slot, prompt, request_id)
        self._chains.start(slot, match, run, keep)
        if self._checks is not None:
            assert prompt.tokens is not None
            self._checks.prompts[slot] = prompt.tokens
        count_admission(self.counters, match, resumed)
        return slot

    def slot_of(self, request_id: Hashable) -> int:
        """Slot of an admitted request; ValueError if the id is unknown."""
        return self.sequences.slot_of(request_id)

    # A step in four calls: see the top of this file.

    def room(self, slot: int) -> int:
        """Tokens up to which a request needs neither a page nor a key: nothing need be reserved or
        published for a step that ends there or before. ValueError if the slot is unknown.
        """
        self._expect_admitted(slot)
        a, most = self.alignment, self.max_model_len
        if self._linear is not None:
            most = self._linear.room[slot]
        if self.enable_caching:
            known = self._chains.runs[slot].depth * a + a - 1  # then a segment ends
            most = known if known < most else most
        if self._linear is not None:
            return most
        start = self.sequences.num_computed.item(slot)
        if start < self._chains.replays.stop.item(slot) or not self._tables.has_states(slot):
            return start
        if self._tables.states:  # a state is kept at a boundary
            most = min(most, start // a * a + a - 1)
        open_to = min(-(-start // size) * size for size in self._planner.sizes or [most])
        return max(start, min(most, open_to))

    @overload
    def reserve(self, slots: int, ends: int, least: int = 0) -> list[list[int]] | OutOfPages: ...

    @overload
    def reserve(
        self, slots: Sequence[int] | Int64, ends: Sequence[int] | Int64, least: int = 0
    ) -> list[list[list[int]]] | OutOfPages: ...

    def reserve(self, slots: Any, ends: Any, least: int = 0) -> Any:
        """Take pages for the tokens of requests up to `ends`, which are theirs until they advance
        (or, of an append-only cache, end).

        When free pages run short, cached entries are evicted, and only if that is enough. Reserved
        pages are not taken again. An end may be lowered, and no page is given back; if it falls by
        more than max_draft_tokens, other window blocks survive and take pages. It voids the newest
        plan.

        Args:
            slots: [n] ints, distinct, from `admit`; or one int.
            ends: [n] ints or one: tokens of each request after the step, drafts included.
            least: refuse unless this many pages are free or evictable before the call.

        Returns:
            The new pages of each slot and table (row of a slot mapping), in the order of their
            blocks; of one int, of each table. (What a state takes is in `StepPlan.state_pages`.) Or
            OutOfPages, and nothing has changed.

        Raises:
            ValueError: an unknown or repeated slot, an end past max_model_len, or a request in a
                step that has not advanced. Nothing has changed.
        """
        if slots.__class__ is not int or ends.__class__ is not int:
            if np.ndim(slots):
                return self._reserve(*self._pairs(slots, ends), least)
            slots, ends = as_int("slots", slots, 0), as_int("ends", ends, 0)
        slot, end = slots, ends
        self._expect_admitted(slot)
        if end > self.max_model_len:
            raise self._too_long(slot, end)
        if self._linear is not None:
            counts = self._linear.lacking(slot, end)
            if max(sum(counts), least) <= self.pool.num_free:
                return self._linear.extend(slot, end, counts)
            given = self._extend([slot], [end], least)
            return given if isinstance(given, OutOfPages) else given[0]
        self._expect_landed(slot, "slots")
        start = self.sequences.num_computed.item(slot)
        is_few = 0 < end - start <= self._few and start >= self._chains.replays.stop.item(slot)
        if self._tables.states:
            a = self.alignment
            is_few = is_few and start // a == end // a and self._tables.has_states(slot)
        if not is_few:
            given = self._reserve(np.array([slot]), np.array([end]), least)
        else:
            given = self._take([slot], [end], {slot: self._planner.few(start, end)}, least)
        return given if isinstance(given, OutOfPages) else given[0]

    def _reserve(self, slots: Int64, ends: Int64, least: int) -> list[list[list[int]]] | OutOfPages:
        self.sequences.check(slots)
        if int(ends.max()) > self.max_model_len:
            i = int(ends.argmax())
            raise self._too_long(int(slots[i]), int(ends[i]))
        listed, until = slots.tolist(), ends.tolist()
        if self._linear is not None:
            return self._extend(listed, until, least)
        self._reserved.expect_not_in_flight(slots, "slots")
        counts = ends - self.sequences.num_computed[slots]
        more = (counts > 0).nonzero()[0]
        refs: dict[int, list[int]] = {}
        if more.size:
            changes = self._changes_of(slots[more], counts[more])
            for i, ref in zip(*(x.tolist() for x in self._planner.wanted(changes)), strict=True):
                refs.setdefault(listed[more[i]], []).append(ref)
        return self._take(listed, until, {s: refs[s] for s in listed if s in refs}, least)

    def _take(
        self, slots: list[int], ends: list[int], block_refs: dict[int, list[int]], least: int
    ) -> list[list[list[int]]] | OutOfPages:
        """Take pages for the `block_refs` of each slot as far as they are not reserved yet."""
        new = {slot: self._reserved.missing(slot, refs) for slot, refs in block_refs.items()}
        needed = sum(map(len, new.values()))
        lacks = self._make_room(
            needed,
            lambda: self._planner.per_group(np.array([*chain(*new.values())], dtype=np.int64)),
            least,
        )
        if lacks is not None:
            return lacks
        self._planned, self._only_plans = None, False  # it may name these pages
        pages, add = iter(self.pool.pop(needed)), self._reserved.add
        return [
            add(slot, end, new.get(slot, []), pages) for slot, end in zip(slots, ends, strict=True)
        ]

    def arrays(self, slots: Any, starts: Any, ends: Any) -> StepPlan:
        """The arrays of a step whose pages are reserved. No table changes; until they advance, its
        requests are in no other step and cannot be released. Asked again with other ends, it gives
        the same step with more or fewer tokens.

        Args:
            slots: [n] ints, distinct.
            starts: [n] ints: tokens of each request before the step, its ``num_computed``.
            ends: [n] ints: tokens after it. At most max_draft_tokens fewer than were reserved.

        Raises:
            ValueError: an unknown or repeated slot, a start that is not ``num_computed``, an end
                without its pages, or the cache is append-only: its workers have the tables.
        """
        self._expect_tables("arrays")
        slots, ends = self._pairs(slots, ends)
        starts = self._pairs(slots, starts)[1]
        self._batch(slots, ends - starts)
        start, full = self.sequences.num_computed[slots], self._reserved.step_ends(slots, ends)
        if np.count_nonzero(starts != start):
            raise ValueError(
                f"starts: expected num_computed {start.tolist()}, got {starts.tolist()}"
            )
        self._expect_ends(start, ends, full)
        changes = self._changes_of(slots, full - start)
        plan = self._arrays(changes, self._reserved.pages_of(changes))
        self._reserved.launch(slots, full)
        self._planned, self._only_plans = None, False
        if np.count_nonzero(full != ends):
            plan = without_last(plan, full - ends)
        if self._checks is not None:
            self._checks.expect_pages(plan)
        return plan

    def _expect_ends(self, start: Int64, ends: Int64, full: Int64) -> None:
        """Raise ValueError if a step of `full` [n] tokens cannot end at `ends`."""
        least = np.maximum(start + 1, full - self.max_draft_tokens)
        if np.count_nonzero(ends < least):
            raise ValueError(
                f"ends: expected at least {least.tolist()}, got {ends.tolist()}: at most "
                f"max_draft_tokens {self.max_draft_tokens} fewer than were reserved"
            )

    def advance(
        self, slots: Any, ends: Any, oldest_query: Any = None, *, keep_tails: bool = True
    ) -> Int32:
        """The tokens of a step count as computed: reserved pages enter the tables, and those that
        no later query sees are free for later steps.

        To be called once the work of the step is queued on the device, which has read the tables by
        then or was given a copy. The tokens need not be known: nothing of them is findable before
        `publish`.

        Args:
            slots: [n] ints, distinct; or one int.
            ends: [n] ints or one: tokens after the step; at most max_draft_tokens fewer than were
                reserved. A request that stays where it is (``num_computed``) leaves its step, which
                does not run: its reserved pages are free again.
            oldest_query: of an append-only cache, [n] ints or one: no query from now on, in steps
                in flight neither, is before this token; `ends` by default. There `ends` may fall.
            keep_tails: of an append-only cache, keep what a resume point at the last boundary
                needs, when the request ends. False gives more pages back.

        Returns:
            [m, 2] int32 pages to copy after this step and before the next: snapshots of states.

        Raises:
            ValueError: an unknown or repeated slot, or an end that was not reserved. Nothing has
                changed.
        """
        if self._linear is not None:
            return self._advance_linear(slots, ends, oldest_query, keep_tails)
        if oldest_query is not None or not keep_tails:
            raise ValueError(
                "oldest_query, keep_tails: expected None and True without append_only: rings have "
                "what queries of steps in flight see, in the order of these"
            )
        slots, ends = self._pairs(slots, ends)
        self.sequences.check(slots)
        start, full = self.sequences.num_computed[slots], self._reserved.step_ends(slots, ends)
        moving = (ends != start).nonzero()[0]
        changes, pages = None, NO_ROWS
        if moving.size:
            self._expect_ends(start[moving], ends[moving], full[moving])
            changes = self._changes_of(slots[moving], (full - start)[moving])
            pages = self._reserved.pages_of(changes)
        self._changed()
        self._only_plans = False
        self._reserved.end(slots, pages)
        if changes is None:
            return NO_COPIES
        self._planner.give(changes, pages)
        if self.enable_caching:
            known = self._known[changes.slots]
            self._known[changes.slots] = np.where(known == SETTLED, changes.start, known)
        end = ends[moving]
        copies, done = self._advance(changes, end, np.array_equal(end, changes.end))
        self._chains.wait(done)
        return copies

    def publish(
        self, slots: Any, upto: Any, tokens: Any = None, *, keys: bytes | None = None
    ) -> None:
        """The tokens of requests are known `upto` some position: whole segments become findable,
        and the boundaries that are kept resumable.

        Requests must have advanced; of an append-only cache, the step that writes the rows must be
        queued before any that reads them.

        Args:
            slots: [n] ints, distinct; or one int.
            upto: [n] ints; or one.
            tokens: the ids of each request's tokens from where the last `publish` or `commit`
                stopped (at first ``num_computed``) to `upto`, one request after another.
            keys: of one request, admitted with keys, in place of tokens: those of segments past the
                last that has one (the hit, at first), up to `upto`.

        Raises:
            ValueError: an unknown or repeated slot, a position past what has advanced or before
                what is known, or as many tokens or keys as are not expected. Nothing has changed.
        """
        if keys is not None:
            return self._publish_keys(slots, upto, keys)
        is_one = slots.__class__ is int and upto.__class__ is int
        if is_one:
            self._expect_admitted(slots)
            listed, ends = [slots], [upto]
        else:
            slots, upto = self._pairs(slots, upto)
            self.sequences.check(slots)
            listed, ends = slots.tolist(), upto.tolist()
        if not self.enable_caching:
            return None
        most = [self._most_published(slot) for slot in listed]
        start = [
            high if low == SETTLED else low
            for low, high in zip(self._known[listed].tolist(), most, strict=True)
        ]
        for slot, low, end, high in zip(listed, start, ends, most, strict=True):
            if not low <= end <= high or slot in self.sequences.keyed:
                raise ValueError(
                    f"upto: expected {low}..{high} of slot {slot}, a request that was admitted "
                    f"with tokens, got {end}"
                )
        counts = [end - low for low, end in zip(start, ends, strict=True)]
        ids = as_token_ids("tokens", () if tokens is None else tokens)
        if len(ids) != sum(counts):
            raise ValueError(
                f"tokens: expected {sum(counts)}, {counts} of each request, got {len(ids)}"
            )
        if self._checks is not None:
            self._checks.expect_tokens("tokens", listed, start, counts, ids)
        self._changed()
        if is_one:
            self.sequences.feed_one(slots, start[0], ids)
        else:
            begin, first = np.array(start), np.array([0, *counts[:-1]]).cumsum()
            self.sequences.feed(slots, begin, upto, ids, first.astype(np.int32))
        if self._event_writer is not None:
            each = np.array(counts)
            _, positions = ragged_arange(np.array(start), each)
            self._event_writer.computed(
                np.array(listed), each, positions, ids, np.array(ends, dtype=np.int64)
            )
        if self._linear is None:
            pairs = zip(ends, most, strict=True)
            self._known[listed] = [SETTLED if end == high else end for end, high in pairs]
            return self._chains.publish_known(listed, ends)
        self._known[listed] = ends
        for slot, end in zip(listed, ends, strict=True):
            first = self._chains.runs[slot].depth
            self._chains.publish_ahead(
                slot, self.sequences.keys(slot, first, end // self.alignment)
            )

    def _publish_keys(self, slot: int, upto: int, keys: bytes) -> None:
        self._expect_admitted(slot)
        if slot not in self.sequences.keyed:
            raise ValueError(f"keys: expected None, as slot {slot} was admitted with tokens")
        if not self.enable_caching:
            return
        most, is_linear = self._most_published(slot), self._linear is not None
        known = self._chains.runs[slot].depth if is_linear else self.sequences.num_keys(slot)
        missing = upto // self.alignment - known
        if upto > most or len(keys) % KEY_BYTES or len(keys) > max(0, missing) * KEY_BYTES:
            raise ValueError(
                f"keys: expected at most {max(0, missing)} up to token {upto} of at most {most}, "
                f"got {len(keys) / KEY_BYTES:.4g}"
            )
        if is_linear:
            return self._chains.publish_ahead(slot, keys)
        self.sequences.give_keys(slot, keys)
        self._changed()
        self._known[slot] = SETTLED if upto == most else upto
        self._chains.publish_known([slot], [upto])

    def _most_published(self, slot: int) -> int:
        if self._linear is not None:
            return self._linear.room[slot]
        return self.sequences.num_computed.item(slot)

    def num_published(self, slot: int) -> int:
        """Tokens of a request that others find; ValueError if the slot is unknown."""
        self._expect_admitted(slot)
        return self._chains.runs[slot].depth * self.alignment

    def pages_of(self, slot: int) -> list[list[int]]:
        """Of an append-only cache, the pages of a request in each group, 0 where a block has left
        the window; not to be written to. ValueError if the slot is unknown, or the cache has arrays
        (see `table`).
        """
        self._expect_admitted(slot)
        if self._linear is None:
            raise ValueError("pages_of: expected a cache with append_only=True; see `table`")
        return self._linear.pages[slot]

    # A step of the whole batch: plan and commit.

    def plan(self, slots: Any, num_new_tokens: Any) -> StepPlan | OutOfPages:
        """Plan a step: which pages and rows the new tokens of each request get. No request changes
        before `commit`. When free pages run short, cached entries are evicted, and only if that is
        enough.

        Args:
            slots: [n] ints, distinct, from `admit`.
            num_new_tokens: [n] ints >= 1.

        Raises:
            ValueError: an unknown or repeated slot, one with reserved pages or tokens that were not
                published, a count below 1, or a sequence past max_model_len.
        """
        self._expect_tables("plan")
        changes = self._changes_of(slots, num_new_tokens)
        if not self._only_plans:
            for slot in changes.slots.tolist():
                self._expect_settled(slot)
        lacks = self._make_room(
            changes.num_new,
            lambda: self._planner.per_group(self._planner.wanted(changes)[1]),
        )
        if lacks is not None:
            return lacks
        self._planned = plan = self._arrays(changes, self.pool.peek(changes.num_new))
        if self._checks is not None:
            self._checks.expect_pages(plan)
        return plan

    def commit(self, plan: StepPlan, input_ids: Any, accepted: Any = None) -> Int32:
        """Make a planned step real: its rows become context, whole segments become findable.

        Args:
            plan: the newest plan of this cache, with no change since (see `StepPlan`).
            input_ids: [total] ints, the tokens whose rows the step computed, in the plan's order.
            accepted: [n] ints, how many of each request's new tokens stay; all by default. At most
                max_draft_tokens of a request may be rejected.

        Returns:
            [m, 2] int32 pages (source, destination) to copy after this step and before the next:
            snapshots of states. Empty without state groups.

        Raises:
            ValueError: the plan is not the newest, or void, or an argument has the wrong size.
                Nothing has changed.
        """
        if plan.__class__ is not StepPlan:
            raise ValueError(f"plan: expected a StepPlan, got {plan!r}")
        ids = as_token_ids("input_ids", input_ids)
        if plan is not self._planned:
            raise ValueError(
                "plan: expected the newest plan of this cache, got another cache's, or one made "
                "before another plan or change"
            )
        if len(ids) != len(plan.positions):
            raise ValueError(
                f"input_ids: expected {len(plan.positions)} tokens as planned, got {len(ids)}"
            )
        if self._checks is not None:
            slots, counts = plan.slots.tolist(), plan.num_new_tokens.tolist()
            start = plan.changes.start.tolist()
            self._checks.expect_tokens("input_ids", slots, start, counts, ids)
        end = plan.changes.end if accepted is None else self._end_of(plan, accepted)
        self.pool.take(plan.changes.num_new)
        self._changed()
        if self.enable_caching:
            self.sequences.feed(plan.slots, plan.changes.start, end, ids, plan.cu_seqlens_q[:-1])
            if self._event_writer is not None:
                self._event_writer.computed(
                    plan.slots, plan.num_new_tokens, plan.positions, ids, end
                )
        copies, done = self._advance(plan.changes, end, accepted is None)
        self._chains.publish(done)
        return copies

    def _end_of(self, plan: StepPlan, accepted: Any) -> Int64:
        """[n] tokens after a step of which `accepted` tokens stay."""
        taken, most = as_ints("accepted", accepted), plan.num_new_tokens
        least = np.maximum(1, most - self.max_draft_tokens)
        if taken.shape != most.shape or ((taken < least) | (taken > most)).any():
            raise ValueError(
                f"accepted: expected between {least.tolist()} and {most.tolist()}, "
                f"got {taken.tolist()}"
            )
        end: Int64 = plan.changes.start + taken
        return end

    def cut(self, slots: Any, num_new_tokens: Any) -> Int64:
        """Shorten chunks so that each ends at its next kept boundary, or else at its last boundary:
        the state of a state group can be kept only where a step ends. Without state groups the
        counts come back.

        Args:
            slots, num_new_tokens: [n] as for `plan`, with its errors.

        Returns:
            [n] int64 counts, at least 1 each.
        """
        slots, counts, _ = self._batch(slots, num_new_tokens)
        if not (self._tables.states and self.enable_caching):
            return counts.copy()
        start = self.sequences.num_computed[slots]
        shortened: Int64 = self._chains.stops(slots, start, start + counts) - start
        return shortened

    def needed(self, slots: Any, num_new_tokens: Any) -> PagesNeeded:
        """The pages that `plan` would need for a step, with its errors. Changes nothing."""
        self._expect_tables("needed")
        changes = self._changes_of(slots, num_new_tokens)
        per_group = self._planner.per_group(self._planner.wanted(changes)[1])
        return PagesNeeded(changes.num_new, self.pool.num_free, self.index.num_evictable, per_group)

    # What `plan` and the four calls share.

    def _batch(self, slots: Any, num_new_tokens: Any) -> tuple[Int64, Int64, int]:
        """Check the requests of a step; return them as arrays [n], perhaps the caller's own, which
        are not to be kept, and the largest count.
        """
        slots, counts = as_ints("slots", slots), as_ints("num_new_tokens", num_new_tokens)
        if slots.ndim != 1 or counts.shape != slots.shape or not len(slots):
            raise ValueError(
                f"slots, num_new_tokens: expected two vectors of one length > 0, "
                f"got {list(slots.shape)} and {list(counts.shape)}"
            )
        longest = int(counts.max())
        if np.count_nonzero(counts < ONE) or longest > MOST_TOKENS:  # sums would overflow
            raise ValueError(
                f"num_new_tokens: expected at least 1 and at most {MOST_TOKENS} each, "
                f"got {counts.tolist()}"
            )
        self.sequences.check(slots)
        return slots, counts, longest

    def _changes_of(self, slots: Any, num_new_tokens: Any) -> StepChanges:
        """Count the pages of a step, and list its changes; nothing changes here."""
        slots, counts, longest = self._batch(slots, num_new_tokens)
        slots = slots.copy()  # the caller may use its buffer again
        start = self.sequences.num_computed[slots]
        end = start + counts
        if np.count_nonzero(end > self._longest):
            i = int(end.argmax())
            raise ValueError(
                f"num_new_tokens: slot {slots[i]} would reach {end[i]} tokens, "
                f"expected at most max_model_len = {self.max_model_len}"
            )
        written = start
        if self.replay_tokens is not None:
            written = self._chains.replays.written_from(slots, start)
        kept, snapshots = NONE_KEPT, NO_ROWS
        if self.enable_caching:
            kept, snapshots = self._chains.boundaries(slots, start, end, longest)
        return self._planner.plan(slots, start, end, written, longest, kept, snapshots)

    def _make_room(
        self, needed: int, per_group: Callable[[], dict[str, int]], least: int = 0
    ) -> OutOfPages | None:
        """Evict until `needed` pages are free; or say what lacks for these, or for `least` pages
        that are free or evictable, and nothing has changed.
        """
        wanted, free = max(needed, least), self.pool.num_free
        if wanted <= free:
            return None
        evictable = self.index.num_evictable
        if wanted > free + evictable:
            each = per_group()
            worst = max(each, key=lambda name: each[name])
            return OutOfPages(wanted, free, evictable, worst, each)
        if needed > free:
            self._evict(needed - free)
        return None

    def _evict(self, num_pages: int) -> None:
        """Free `num_pages` evictable pages."""
        # The newest plan names pages that lie deeper in the stack of free ones from here on.
        self._planned = None
        self.index.evict(num_pages)

    def _arrays(self, changes: StepChanges, pages: Int64) -> StepPlan:
        """Give `pages` to a step, and lay out its arrays; no table changes here."""
        counts = changes.end - changes.start
        if changes.longest == 1:
            cu, positions = np.arange(len(counts) + 1, dtype=np.int32), changes.start
        else:
            cu = np.zeros(len(counts) + 1, dtype=np.int32)
            np.cumsum(counts, out=cu[1:])
            positions = np.arange(int(cu[-1])) + (changes.start - cu[:-1]).repeat(counts)
        self._planner.give(changes, pages)
        mapping = self._planner.mapping(changes, cu, positions)
        replays = self._no_replays
        if changes.replaying:
            replays = self._planner.cached_rows(changes, cu)
            mapping[:, replays[0]] = np.where(replays[1] >= 0, -1, mapping[:, replays[0]])
        return StepPlan(
            changes.slots, counts, cu, changes.end.astype(np.int32), positions, mapping, *replays,
            changes.copies, changes.state_pages, changes,
        )  # fmt: skip

    def _advance(self, changes: StepChanges, end: Int64, all_stay: bool) -> tuple[Int32, Completed]:
        """Count the tokens of a step up to `end` [n] as computed; `all_stay`: all are. Returns the
        pages [m, 2] to copy after the step, and what to publish once its tokens are known.
        """
        slots, done = changes.slots, NOTHING_COMPLETED
        if self.max_draft_tokens:
            floor = changes.end - self.max_draft_tokens
            self._floor[slots] = np.maximum(self._floor[slots], floor)
        if self.enable_caching:
            done = self._chains.completed(changes, end)
        effects = self._planner.commit(changes, end, done.kept, all_stay)
        self._chains.hold(slots, done, effects.tails)
        self._planner.free_unheld(effects)
        self.sequences.num_computed[slots] = end
        return effects.copies, done

    def _changed(self) -> None:
        """Void the newest plan; uses from here on are newer."""
        self._planned = None
        self.index.tick += 1

    # Append-only tables.

    def _extend(
        self, slots: list[int], ends: list[int], least: int
    ) -> list[list[list[int]]] | OutOfPages:
        """Append the pages up to each of `ends` to the linear tables of each slot."""
        assert self._linear is not None
        counts = list(map(self._linear.lacking, slots, ends))

        def per_group() -> dict[str, int]:
            each = zip(self.layout.groups, zip(*counts, strict=True), strict=True)
            return {group.name: sum(n) for group, n in each}

        lacks = self._make_room(sum(map(sum, counts)), per_group, least)
        if lacks is not None:
            return lacks
        return list(map(self._linear.extend, slots, ends, counts))

    def _advance_linear(self, slots: Any, ends: Any, oldest_query: Any, keep_tails: bool) -> Int32:
        assert self._linear is not None
        oldest = ends if oldest_query is None else oldest_query
        if slots.__class__ is int and ends.__class__ is int and oldest.__class__ is int:
            self._expect_admitted(slots)
            each = [(slots, ends, oldest)]
        else:
            slots, ends = self._pairs(slots, ends)
            oldest = self._pairs(slots, oldest)[1]
            self.sequences.check(slots)
            each = list(zip(slots.tolist(), ends.tolist(), oldest.tolist(), strict=True))
        for slot, end, _ in each:
            room = self._linear.room[slot]
            if not 0 <= end <= room:
                raise ValueError(
                    f"ends: expected 0..{room} of slot {slot}, as many as have pages, got {end}"
                )
        keeps = self.enable_caching and keep_tails
        for slot, end, oldest in each:
            self.sequences.num_computed[slot] = end
            cached = self._chains.runs[slot].depth * self.alignment if keeps else None
            self._linear.let_go(slot, oldest, cached)
        return NO_COPIES

    # Checks of arguments.

    def _pairs(self, slots: Any, values: Any) -> tuple[Int64, Int64]:
        """Slots and a number of each, as new arrays [n]; one int is one request."""
        some = np.atleast_1d(as_ints("slots", slots)).copy()
        numbers = np.atleast_1d(as_ints("ends", values)).copy()
        if some.ndim != 1 or numbers.shape != some.shape or not len(some):
            raise ValueError(
                f"slots, ends: expected two vectors of one length > 0, got {list(some.shape)} and "
                f"{list(numbers.shape)}"
            )
        return some, numbers

    def _expect_admitted(self, slot: int) -> None:
        if slot.__class__ is not int or slot < 0 or slot >= self.max_requests:
            self.sequences.checked(slot)  # raises, or it is a numpy int
        elif not self.sequences.active.item(slot):
            self.sequences.checked(slot)

    def _too_long(self, slot: int, end: int) -> ValueError:
        return ValueError(
            f"ends: slot {slot} would reach {end} tokens, expected at most max_model_len = "
            f"{self.max_model_len}"
        )

    def _expect_landed(self, slot: int, name: str) -> None:
        if self._reserved.in_flight.item(slot):
            self._reserved.expect_not_in_flight(np.array([slot]), name)

    def _expect_settled(self, slot: int) -> None:
        """Raise ValueError if `plan` or `rollback` would pass over what the other calls left."""
        self._expect_landed(slot, "slots")
        if self._reserved.until.item(slot):
            raise ValueError(
                f"slots: expected a request without reserved pages, got slot {slot}: advance it"
            )
        if self._known.item(slot) != SETTLED:
            raise ValueError(
                f"slots: expected a request whose tokens are published, got slot {slot}, of which "
                f"{self._known[slot]} are"
            )
        if slot in self.sequences.keyed:
            raise ValueError(
                f"slots: expected a request admitted with tokens, got slot {slot}, with keys"
            )

    # Tokens are taken back.

    def rollback(self, slot: int, num_tokens: int) -> None:
        """Forget the last computed tokens of a request.

        Args:
            slot: from `admit`.
            num_tokens: how many, at least 1.

        Raises:
            ValueError: the slot is unknown, or has reserved pages or tokens that were not
                published; or the tokens are cached already (or the lookahead of cached ones), or
                more than max_draft_tokens before the furthest position reached.
        """
        self._expect_tables("rollback")
        slot, num_tokens = self.sequences.checked(slot), as_int("num_tokens", num_tokens, 1)
        self._expect_settled(slot)
        computed = int(self.sequences.num_computed[slot])
        most = computed - self._lowest(slot)
        if num_tokens > most:
            possible = f"1..{most}" if most else "none to be taken back"
            raise ValueError(
                f"num_tokens: expected {possible} (computed {computed}, last boundary "
                f"{self._chains.cached[slot]}, max_draft_tokens {self.max_draft_tokens}), "
                f"got {num_tokens}; to go back further, release the request and admit it again "
                f"with the tokens that stay as its prompt"
            )
        self._changed()
        self._tables.shrink(slot, computed, computed - num_tokens)
        self.sequences.num_computed[slot] = computed - num_tokens

    def lowest_rollback(self, slot: int) -> int:
        """The fewest tokens that `rollback` can leave; ValueError if the slot is unknown."""
        return self._lowest(self.sequences.checked(slot))

    def _lowest(self, slot: int) -> int:
        computed = int(self.sequences.num_computed[slot])
        if not self.max_draft_tokens or computed < self._chains.replays.stop[slot]:
            return computed
        known = int(self._chains.cached[slot])
        if known and computed > self.sequences.prompt_len[slot]:
            # Tokens that the last key covers stay; those of the prompt come back as they were.
            known = max(known, min(computed, known + self.layout.lookahead))
        return max(int(self._floor[slot]), known)

    # Requests end.

    def release(self, request_id: Hashable, *, discard: bool = False) -> None:
        """End a request: finished, aborted or preempted. What is cached of it stays findable, and
        the last boundary it reached becomes a resume point: there the next turn of a chat resumes,
        or the same request after preemption.

        Args:
            request_id: from `admit`.
            discard: nothing becomes findable by this: no resume point, no pin of `pin_request`.
                What its commits made findable stays (see `evict_pages`).

        Raises:
            ValueError: the id is unknown, or the request is in a step that has not advanced.
        """
        slot = self.sequences.slot_of(request_id)
        self._expect_landed(slot, "request_id")
        self._changed()
        if self._reserved.until.item(slot):
            self._reserved.end(np.array([slot]), NO_ROWS)
        self._known[slot] = SETTLED
        computed = int(self.sequences.lengths[slot]) if self._linear is None else MOST_TOKENS
        run, depth = self._chains.end(slot, computed, not discard)
        if discard:
            self.index.pins.at_release.pop(slot, None)
        self.index.pins.released(slot, run, depth)
        self.sequences.remove(request_id)
        if self._event_writer is not None:
            self._event_writer.released(slot)

    def reset(self, *, end_requests: bool = False) -> list[Hashable]:
        """Forget everything cached, pinned or not, in tiers too: for new weights, or lost rows. All
        pages are free afterwards. A `Match` made before may still be admitted, and hits nothing.

        Args:
            end_requests: release running requests, as with ``discard=True``. False refuses while
                there are any.

        Returns:
            The ids of the requests that this ended, the one admitted first first.

        Raises:
            ValueError: requests are running, and end_requests is False; or tiers have open jobs.
                Nothing has changed.
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
            self._expect_landed(self.sequences.slot_of(request_id), "end_requests")
        for request_id in running:
            self.release(request_id, discard=True)
        self.clear()
        return running

    # Pins.

    def pin(self, match: Match, *, now: float, ttl: float) -> int:
        """Keep a cached prefix until everything unpinned is gone, or `ttl` seconds have passed.

        Pins never block an admission: under pressure, and beyond max_pinned_pages, the oldest are
        demoted.

        Args:
            match: from `match`; its hit is looked up again.
            now: seconds on the caller's clock.
            ttl: seconds from now; inf for ever.

        Returns:
            Tokens of the pinned prefix; 0 if nothing is cached or it alone exceeds the budget.

        Raises:
            ValueError: `ttl` is not positive, or `now` not a finite number.
        """
        expiry = expiry_of(now, ttl)
        match, run = self._lookup.find_again(match)
        self.index.tick += 1
        depth = match.num_tokens // self.alignment
        return self.index.pins.pin(run, depth, expiry) * self.alignment

    def pin_request(self, request_id: Hashable, *, now: float, ttl: float) -> None:
        """Pin what is cached of a running request when it is released. ValueError as of `pin`, or
        if the id is unknown.
        """
        self.index.pins.at_release[self.sequences.slot_of(request_id)] = expiry_of(now, ttl)

    def unpin(self, match: Match) -> bool:
        """End the pin of the prefix that `match` finds; False if it is not pinned."""
        match, run = self._lookup.find_again(match)
        if not match.num_tokens:
            return False
        self.index.tick += 1
        return self.index.pins.unpin(run, match.num_tokens // self.alignment)

    def expire_pins(self, now: float) -> int:
        """End the pins whose time has passed; return their number. ValueError if `now` is not
        finite.
        """
        return self.index.pins.expire(as_seconds("now", now))

    # Eviction.

    def evict(self, num_pages: int) -> int:
        """Free at least `num_pages` cached pages now, as pressure would, or all that running
        requests do not need; return how many.
        """
        num_pages = as_int("num_pages", num_pages, 0)
        before = self.pool.num_free
        self._evict(min(num_pages, self.index.num_evictable))
        return self.pool.num_free - before

    def evict_pages(self, pages: Any) -> Int64:
        """Free certain pages, with what cannot be found without them and copies of them in tiers:
        to give them back, or because their rows turned out wrong. Looks at all that is cached.

        Args:
            pages: [n] ints in 1..num_pages - 1, in any order; repeats and free pages allowed.

        Returns:
            [m] int64, ascending: those of them that running requests need. They are not free, and
            what is cached of them stays findable.

        Raises:
            ValueError: not integers, or out of range. Nothing has changed.
        """
        ids = as_ints("pages", pages)
        if ids.ndim != 1 or (ids < 1).any() or (ids >= self.pool.num_pages).any():
            raise ValueError(
                f"pages: expected a vector of 1..{self.pool.num_pages - 1}, got {ids.tolist()}"
            )
        self._planned = None
        is_wanted = np.zeros(self.pool.num_pages, dtype=np.bool_)
        is_wanted[ids] = True
        if self.tiers is not None:
            self.tiers.forget_copies(is_wanted)
        evict_pages(self.index, is_wanted)
        is_wanted[self.pool.free_pages()] = False
        needed: Int64 = is_wanted.nonzero()[0]
        return needed

    def clear(self) -> None:
        """Forget everything cached that no running request needs, pinned or not, in tiers too."""
        self._changed()
        if self.tiers is not None:
            self.tiers.clear()
        self.index.clear()

    # Reports.

    def announce(self) -> None:
        """Write events that tell everything cached now to a reader that is late or lost track. They
        replace the events in the log, and may exceed its capacity: each is made when it is taken.

        Raises:
            ValueError: the cache was made without events.
        """
        if self._event_writer is None:
            raise ValueError(
                "events: expected an EventLog at construction to announce to, got None"
            )
        others = [] if self.tiers is None else self.tiers.snapshot_events()
        self._event_writer.everything(self.index.runs(), others)

    def describe(self) -> str:
        """Describe this cache in words: print it at start-up."""
        return describe(self)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and pages by state now."""
        return stats(self)

    def check_invariants(self) -> None:
        """Recount everything; AssertionError if a page is leaked, shared wrongly or counted
        wrongly.
        """
        check_invariants(self)
