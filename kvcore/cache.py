"""`KVCache`: requests, their block tables, and the cached prefixes that they share.

A *segment* is the smallest cached part of a prompt: `alignment` tokens, with one key. A *boundary*
is a multiple of the alignment, in tokens; its *depth* is the same in segments. A *resume point* is
what window and state groups keep so that a request can start at a boundary. A *replay* computes
cached tokens once more, to restore windows (`prefix.replays`); CUDA graphs and traces have nothing
to do with it. A *slot* is the row of a request in the tables; an entry of a *slot mapping* is the
place of one token's row in the pages. A request lives through
``match -> admit -> (plan -> run the model -> commit)* -> release``.

A step's attention reads the tables as the last step left them: `plan` changes none, and a page that
the step starts is in its slot mapping alone. 31 tokens in blocks of 16 in pages 2 and 1:

    token         seq_lens   table       keys in pages   slot of the new row
    31            32         [2, 1]      0 .. 30         31 = 1 * 16 + 15
    32            33         [2, 1]      0 .. 31         48 = 3 * 16
    33            34         [2, 1, 3]   0 .. 32         49 = 3 * 16 + 1

Some engines schedule a step before they know the tokens of the last one, or one request at a time.
They make four calls instead of `plan` and `commit`:

    reserve    pages leave the pool and wait beside the tables (`Reservations`)
    arrays     what the kernels need; the requests are in flight until they advance
    advance    pages enter the tables: rows count as computed, whatever the tokens are
    publish    the tokens are known: whole segments and their resume points become findable

What a call frees goes to later steps: queue work in the order of the reservations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .arguments import (
    as_bytes,
    as_flag,
    as_int,
    as_ints,
    as_seconds,
    as_token_ids,
    as_unused,
    refusal,
    take_ownership,
)
from .arrays import NO_ROWS, NO_VALUES, Int32, Int64, ragged_arange
from .debug import Checks
from .event_writer import EventWriter
from .events import EventLog
from .invariants import check_invariants
from .pages import PagePool
from .plan import OutOfPages, StepPlan, without_last
from .policies.adaptive import Adaptive
from .policies.base import EvictionPolicy, is_policy
from .policies.retention import Retention, parse_retention
from .prefix.chains import NONE_KEPT, NOTHING_COMPLETED, Chains, Completed
from .prefix.evict_pages import evict_pages
from .prefix.extra_keys import ExtraKeys
from .prefix.index import PrefixIndex
from .prefix.keys import KEY_BYTES, Prompt
from .prefix.lookup import Lookup, Match
from .prefix.pins import expiry_of
from .prefix.requests import Sequences
from .spec import MOST_TOKENS, GroupSpec, Layout
from .stats import count_admission, describe, new_counters, stats
from .tables.linear import LinearTables
from .tables.planner import NO_COPIES, StepChanges, StepPlanner
from .tables.reserved import Reservations
from .tables.rows import Tables

if TYPE_CHECKING:
    from .tier.tiers import Tiers

SETTLED = -1  # in `KVCache._known`


class KVCache:
    """Retention-aware allocator of one page pool for all cache groups of a model.

    Args:
        groups: cache groups; tables are numbered in this order.
        num_pages: pages of the pool, page 0 (never owned) included.
        max_requests: requests admitted at once.
        max_model_len: longest sequence, tokens.
        retention: further boundaries of prompt and answer that stay resumable: ``"auto"``,
            ``"latest"``, ``"dense"`` or an interval in tokens (see `policies.retention`).
        hash_seed: start of every key chain; processes with equal seeds agree on keys.
        enable_caching: False never caches and never hits.
        max_draft_tokens: tokens of a step that may be rejected, or taken back by `rollback`; rows
            of state groups must tolerate tokens that are taken back.
        replay_tokens: tokens before a boundary after which all window layers are exact there: the
            sum of (sliding_window - 1) over them. Requests whose dense blocks reach much further
            than any resume point then compute these tokens again (see `prefix.replays`).
        policy: eviction policy, of this cache alone; `Adaptive` by default.
        max_pinned_pages: budget of `pin`; all pages by default.
        reads: place of a step's own rows for its queries. ``"step"``: its tensors, so window groups
            need pages only for rows that outlive the step. ``"pages"``: pages, written before
            attention reads them.
        adopt: a request that computes a segment cached meanwhile by another takes the cached pages
            and gives its own back. False: it keeps its own until it is released.
        append_only: lists of pages that only grow (`pages_of`) replace `tables`. For engines whose
            workers append what `reserve` returns, and that lower the number of computed tokens
            without a call. A request may hit what another computes in the same step. Needs
            ``reads="pages"`` and ``adopt=False``; dense and window groups; no plans, deltas,
            events, drafts, replays.
        track_deltas: collect table changes for `take_deltas`.
        events: log of blocks stored and removed, for this cache alone.
        debug: check each call: RuntimeError for two threads at once, ValueError for tokens that
            differ from the prompt's, AssertionError for writes to page 0. Costs time and memory.

    Attributes:
        layout: the groups, and sizes that follow from them.
        alignment: tokens of a segment: hits are multiples of it.
        pool, index, sequences: pages, cached content, and running requests.
        num_computed: [max_requests] int64 tokens of each slot's request whose rows are valid;
            read-only.
        counters: since the start, see `stats`.
        tiers: memory behind the pool (`tier.Tiers` puts itself here); None without.

    A cache has no lock: one call at a time, `match` included, from any thread. `stats`, `describe`,
    `num_*` and `counters` may be read during a call. A `Match`, its prompt and an `OutOfPages`
    never change.

    Raises:
        ValueError: in all calls, a wrong argument, such as an unknown slot or a number out of
            range. Nothing has changed.
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
        self.pool = PagePool(as_int("num_pages", num_pages, 2, 2**31 - 1))  # ids are int32
        self.max_requests = as_int("max_requests", max_requests, 1, 2**31 - 1)
        self.max_model_len = as_int("max_model_len", max_model_len, 1, MOST_TOKENS)
        self.max_draft_tokens = as_int("max_draft_tokens", max_draft_tokens, 0, self.max_model_len)
        self.replay_tokens = replay_tokens
        if replay_tokens is not None:
            self.replay_tokens = as_int("replay_tokens", replay_tokens, 1)
        pinned = self.num_pages if max_pinned_pages is None else max_pinned_pages
        self.max_pinned_pages = as_int("max_pinned_pages", pinned, 0)
        self.enable_caching = as_flag("enable_caching", enable_caching)
        self.append_only = as_flag("append_only", append_only)
        as_flag("adopt", adopt), as_flag("track_deltas", track_deltas), as_flag("debug", debug)
        if reads not in ("step", "pages"):
            raise refusal("reads", "'step' or 'pages'", repr(reads))
        others = track_deltas, events is not None, max_draft_tokens, replay_tokens is not None
        if append_only and (reads != "pages" or adopt or any(others)):
            raise refusal(
                "append_only",
                "False but with reads='pages' and adopt=False, without track_deltas, events, "
                "max_draft_tokens and replay_tokens",
                True,
            )
        policy = Adaptive() if policy is None else policy
        as_unused("policy", policy, "an eviction policy, such as LRU()", is_policy(policy))
        if events is not None:
            as_unused("events", events, "an EventLog or None", isinstance(events, EventLog))
        self.reads, self.hash_seed = reads, as_bytes("hash_seed", hash_seed)
        self.layout = layout = Layout(
            groups, self.max_model_len, self.max_draft_tokens, reads == "pages"
        )
        self.alignment, self.hybrid = layout.alignment, layout.hybrid
        span = layout.span(exact=replay_tokens is not None)
        self.retention, self.interval = retention, parse_retention(retention, layout, span)
        if replay_tokens is not None and any(g.kind == "state" for g in layout.groups):
            raise refusal("replay_tokens", "None with a state group", replay_tokens)
        self.index = PrefixIndex(
            self.pool, layout.pages_per_segment, self.hybrid, policy, span, layout.tail_between,
            self.max_pinned_pages,
        )  # fmt: skip
        self.sequences = Sequences(self.max_requests, self.alignment, layout.lookahead)
        self.num_computed: Int64 = self.sequences.lengths
        self._linear = LinearTables(layout, max_requests, self.pool) if append_only else None
        rows = 1 if append_only else max_requests  # unused if append_only
        self._tables = Tables(layout, rows, self.pool, track_deltas)
        self._planner = StepPlanner(self._tables)
        self._reserved = Reservations(self._planner, self.pool, max_requests)
        self._event_writer = None if events is None else EventWriter(events, layout, self.sequences)
        self.index.event_writer = self._event_writer
        self.counters = new_counters(layout)
        self._chains = Chains(
            self.interval, self.sequences, self._linear or self._tables, self.index,
            self._event_writer, self.counters, adopt,
        )  # fmt: skip
        self._lookup = Lookup(
            self.index, layout, hash_seed, enable_caching, self.replay_tokens, self.max_model_len,
            debug or events is not None,
        )  # fmt: skip
        self.tiers: Tiers | None = None
        self._longest: Int64 = np.array(self.max_model_len)
        self._planned: StepPlan | None = None  # the one plan that `commit` takes
        # Tokens of each slot's request below which no rollback may go.
        self._floor: Int64 = np.zeros(max_requests, dtype=np.int64)
        # Published tokens of each slot's request: SETTLED, all computed ones, as after `commit`; or
        # fewer, after `advance`; in an append-only cache, without keys, always their number.
        self._known: Int64 = np.full(max_requests, SETTLED, dtype=np.int64)
        # No request was ever in a step of the four calls, or admitted with keys: `plan` need not
        # check for reserved pages and unpublished tokens.
        self._only_plans = True
        # Most tokens of a step that starts at most one block a table, and one that outlives it:
        # `reserve` needs no arrays for it.
        sizes = [g.block_size for g in layout.groups if g.kind != "state"]
        self._few = min([self.max_draft_tokens + 1, layout.alignment, *sizes])
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
    def tables(self) -> Int32:
        """[max_requests, columns] int32: all block tables side by side; not to be written to."""
        self._expect_tables("tables")
        return self._tables.array

    def table(self, group: int) -> Int32:
        """Block table of `group`: [max_requests, width] int32 view, not to be written to.

        Block b is in column ``b % width``; the live page of a state group, which its kernel updates
        in place, in column 0. Entries past a request's length or behind its window are undefined.
        """
        self._expect_tables("table")
        offset, width = self.layout.columns(group)
        return self._tables.array[:, offset : offset + width]

    def take_deltas(self) -> tuple[Int64, Int32]:
        """Take the changes of `tables` since the last call: flat indices [m] int64 and values [m]
        int32, later changes of a cell last. Needs ``track_deltas=True``.
        """
        deltas = self._tables.deltas
        if deltas is None:
            raise refusal("track_deltas", "True at construction to take deltas", False)
        if not deltas:
            return NO_ROWS, NO_VALUES
        indices, pages = zip(*deltas, strict=True)
        deltas.clear()
        return np.concatenate(indices), np.concatenate(pages)

    def _expect_tables(self, call: str) -> None:
        if self._linear is not None:
            came = "append_only=True: see `reserve`, `advance`, `publish`"
            raise refusal(call, "a cache with tables", came)

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
        """Find the longest cached prefix of a prompt, with at least one token left to compute.
        Changes no cached content.

        Args:
            token_ids: [num_tokens] ints in [0, 2**31), or the `prompt` of an earlier match (not
                hashed again).
            salt: tenant or other identity of the whole prompt; requests with different salts never
                share. None: that of the prompt, and b"" of token ids.
            extra_keys: (start, stop, key) for tokens [start, stop) that stand for more than their
                ids, such as an image: prompts share tokens after `start` only with the same key.
                stop None: to the end, the answer included. None: those of the prompt, if any.
            max_tokens: longest hit, in `admit` and `pin` too; None for no limit.
            keys, num_tokens: instead of tokens, the caller's own hashes of whole segments, 32 bytes
                each, and the length of the prompt, without events and debug. `publish` takes the
                keys of later segments.
        """
        if keys is None:
            prompt = self._lookup.to_prompt(token_ids, salt, extra_keys)
        elif any(
            x is not None for x in (token_ids, salt, extra_keys, self._event_writer, self._checks)
        ):
            raise refusal("keys", "None beside tokens, or with events or debug", "keys")
        else:
            n, layout = as_int("num_tokens", num_tokens, 1), self.layout
            prompt = Prompt.of_keys(keys, n, layout.alignment, layout.lookahead, self.hash_seed)
        return self._lookup.find(prompt, max_tokens)[0]

    def admit(
        self, request_id: Hashable, match: Match, *, resumed: bool = False, least: int = 0
    ) -> int | OutOfPages:
        """Give a request a slot and the pages of its hit, which is looked up again. Takes no free
        pages.

        Args:
            request_id: any hashable that is not admitted now.
            match: from `match`.
            resumed: it was preempted before, and is counted apart.
            least: refuse unless this many pages are free or evictable beside those of the hit.

        Returns:
            The slot; ``num_computed[slot]`` tokens are already valid. Or OutOfPages, for want of
            `least`, and nothing has changed. (ValueError if all slots are taken.)
        """
        if request_id in self.sequences:
            raise refusal("request_id", "a new id", f"{request_id!r}, already admitted")
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
        """Slot of an admitted request."""
        return self.sequences.slot_of(request_id)

    # A step in four calls: see the top of this file.

    def room(self, slot: int) -> int:
        """Tokens up to which a request needs neither a page nor a key: a step that ends there or
        before need not be reserved or published.
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
        open_to = min((-(-start // size) * size for size in self._planner.sizes), default=most)
        return max(start, min(most, open_to))

    @overload
    def reserve(self, slots: int, ends: int, least: int = 0) -> list[list[int]] | OutOfPages: ...

    @overload
    def reserve(
        self, slots: Sequence[int] | Int64, ends: Sequence[int] | Int64, least: int = 0
    ) -> list[list[list[int]]] | OutOfPages: ...

    def reserve(self, slots: Any, ends: Any, least: int = 0) -> Any:
        """Take pages for the tokens of requests up to `ends`, which are theirs until they advance
        (or, in an append-only cache, end). Voids the newest plan.

        Cached entries are evicted where free pages run short, and only if that is enough. Reserved
        pages are not taken again. Ends may be lowered: no page is given back, and a fall by more
        than max_draft_tokens may take pages for other window blocks.

        Args:
            slots: [n] ints, distinct, from `admit`; or one int.
            ends: [n] ints or one: tokens of each request after the step, drafts included.
            least: refuse unless this many pages are free or evictable before the call.

        Returns:
            New pages of each slot and table (row of a slot mapping), in the order of their blocks;
            for one int, of each table. (Pages of states are in `StepPlan.state_pages`.) Or
            OutOfPages, and nothing has changed.
        """
        if slots.__class__ is not int or ends.__class__ is not int:
            if np.ndim(slots):
                return self._reserve(*self._pairs(slots, "ends", ends), least)
            slots, ends = as_int("slots", slots, 0), as_int("ends", ends, 0)
        self._expect_admitted(slots)
        if ends > self.max_model_len:
            raise self._too_long("ends", slots, ends)
        given = self._reserve_one(slots, ends, least)
        return given if isinstance(given, OutOfPages) else given[0]

    def _reserve_one(self, slot: int, end: int, least: int) -> list[list[list[int]]] | OutOfPages:
        if self._linear is not None:
            counts = self._linear.lacking(slot, end)
            if max(sum(counts), least) <= self.pool.num_free:
                return [self._linear.extend(slot, end, counts)]
            return self._extend([slot], [end], least)
        self._expect_landed(slot, "slots")
        start = self.sequences.num_computed.item(slot)
        is_few = 0 < end - start <= self._few and start >= self._chains.replays.stop.item(slot)
        if self._tables.states:
            a = self.alignment
            is_few = is_few and start // a == end // a and self._tables.has_states(slot)
        if not is_few:
            return self._reserve(np.array([slot]), np.array([end]), least)
        return self._take([slot], [end], {slot: self._planner.few(start, end)}, least)

    def _reserve(self, slots: Int64, ends: Int64, least: int) -> list[list[list[int]]] | OutOfPages:
        if int(ends.max()) > self.max_model_len:
            i = int(ends.argmax())
            raise self._too_long("ends", slots[i], ends[i])
        listed, until = slots.tolist(), ends.tolist()
        if self._linear is not None:
            return self._extend(listed, until, least)
        self._reserved.expect_not_in_flight(slots, "slots")
        start = self.sequences.num_computed[slots]
        more = (ends > start).nonzero()[0]
        refs: dict[int, list[int]] = {}
        if more.size:
            changes = self._changes_of(slots[more], start[more], ends[more])
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
        """Make the arrays of a step whose pages are reserved. No table changes. Until they advance,
        its requests are in no other step and cannot be released; with other ends it can be asked
        for again.

        Args:
            slots: [n] ints, distinct.
            starts: [n] ints: tokens of each request before the step, its ``num_computed``.
            ends: [n] ints: tokens after it. At most max_draft_tokens fewer than were reserved.
        """
        self._expect_tables("arrays")
        slots, ends = self._pairs(slots, "ends", ends)
        starts = self._pairs(slots, "starts", starts)[1]
        start, full = self.sequences.num_computed[slots], self._reserved.step_ends(slots, ends)
        if np.count_nonzero(starts != start):
            raise refusal("starts", f"num_computed {start.tolist()}", starts.tolist())
        self._expect_ends(start, ends, full)
        changes = self._changes_of(slots, start, full)
        plan = self._planner.arrays(changes, self._reserved.pages_of(changes))
        self._reserved.launch(slots, full)
        self._planned, self._only_plans = None, False
        if np.count_nonzero(full != ends):
            plan = without_last(plan, full - ends)
        if self._checks is not None:
            self._checks.expect_pages(plan)
        return plan

    def _expect_ends(self, start: Int64, ends: Int64, full: Int64) -> None:
        least = np.maximum(start + 1, full - self.max_draft_tokens)
        if np.count_nonzero(ends < least):
            raise ValueError(
                f"ends: expected at least {least.tolist()}, got {ends.tolist()}: at most "
                f"max_draft_tokens {self.max_draft_tokens} fewer than were reserved"
            )

    def advance(
        self, slots: Any, ends: Any, oldest_query: Any = None, *, keep_tails: bool = True
    ) -> Int32:
        """Count the tokens of a step as computed: reserved pages enter the tables, and pages that
        no later query sees are free for later steps.

        To be called once the work of the step is queued on the device, which has read the tables by
        then or was given a copy. The tokens need not be known: nothing of them is findable before
        `publish`.

        Args:
            slots: [n] ints, distinct; or one int.
            ends: [n] ints or one: tokens after the step; at most max_draft_tokens fewer than were
                reserved. A request that stays where it is (``num_computed``) leaves its step, which
                does not run: its reserved pages are free again.
            oldest_query: append-only caches: [n] ints or one: no query from now on, in steps in
                flight neither, is before this token; `ends` by default. There `ends` may fall.
            keep_tails: append-only caches: keep what a resume point at the last boundary needs
                when the request ends. False gives more pages back.

        Returns:
            [m, 2] int32 pages to copy after this step and before the next: snapshots of states.
        """
        if self._linear is not None:
            return self._advance_linear(slots, ends, oldest_query, keep_tails)
        if oldest_query is not None or not keep_tails:
            raise ValueError(
                "oldest_query, keep_tails: expected None and True without append_only: rings have "
                "what queries of steps in flight see, in the order of these"
            )
        slots, ends = self._pairs(slots, "ends", ends)
        start, full = self.sequences.num_computed[slots], self._reserved.step_ends(slots, ends)
        moving = (ends != start).nonzero()[0]
        changes, pages = None, NO_ROWS
        if moving.size:
            self._expect_ends(start[moving], ends[moving], full[moving])
            changes = self._changes_of(slots[moving], start[moving], full[moving])
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
        """Tell the tokens of requests `upto` some position: whole segments become findable, and the
        boundaries that are kept resumable.

        Requests must have advanced; in an append-only cache, the step that writes the rows must be
        queued before any that reads them.

        Args:
            slots: [n] ints, distinct; or one int.
            upto: [n] ints; or one.
            tokens: ids of each request's tokens from the end of the last `publish` or `commit` (at
                first ``num_computed``) to `upto`, one request after another.
            keys: instead of tokens, for one request admitted with keys: those of the segments past
                the last published one (the hit, at first) up to `upto`.
        """
        if keys is not None:
            return self._publish_keys(slots, upto, keys)
        is_one = slots.__class__ is int and upto.__class__ is int
        if is_one:
            self._expect_admitted(slots)
            listed, ends = [slots], [upto]
        else:
            slots, upto = self._pairs(slots, "upto", upto)
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
                expected = f"{low}..{high} of slot {slot}, a request that was admitted with tokens"
                raise refusal("upto", expected, end)
        counts = [end - low for low, end in zip(start, ends, strict=True)]
        ids = as_token_ids("tokens", () if tokens is None else tokens)
        if len(ids) != sum(counts):
            raise refusal("tokens", f"{sum(counts)}, {counts} of each request", len(ids))
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
        missing = max(0, upto // self.alignment - known)
        if upto > most or len(keys) % KEY_BYTES or len(keys) > missing * KEY_BYTES:
            expected = f"at most {missing} up to token {upto} of at most {most}"
            raise refusal("keys", expected, f"{len(keys) / KEY_BYTES:.4g}")
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

    def pages_of(self, slot: int) -> list[list[int]]:
        """Pages of a request of an append-only cache in each group, 0 where a block has left the
        window; not to be written to.
        """
        self._expect_admitted(slot)
        if self._linear is None:
            raise refusal("pages_of", "a cache with append_only=True", "one with tables")
        return self._linear.pages[slot]

    # A step of the whole batch: plan and commit.

    def plan(self, slots: Any, num_new_tokens: Any) -> StepPlan | OutOfPages:
        """Plan a step: pages and rows of the new tokens of each request. No request changes before
        `commit`. Cached entries are evicted where free pages run short, and only if that is enough.

        Args:
            slots: [n] ints, distinct, from `admit`, without reserved pages or unpublished tokens.
            num_new_tokens: [n] ints >= 1.
        """
        self._expect_tables("plan")
        slots, counts = self._pairs(slots, "num_new_tokens", num_new_tokens, least=1)
        start = self.sequences.num_computed[slots]
        beyond = counts - (self._longest - start)
        if np.count_nonzero(beyond > 0):
            i = int(beyond.argmax())
            raise self._too_long("num_new_tokens", slots[i], int(start[i]) + int(counts[i]))
        changes = self._changes_of(slots, start, start + counts)
        if not self._only_plans:
            for slot in changes.slots.tolist():
                self._expect_settled(slot)
        pages = NO_ROWS
        if changes.num_new:
            lacks = self._make_room(
                changes.num_new, lambda: self._planner.per_group(self._planner.wanted(changes)[1])
            )
            if lacks is not None:
                return lacks
            pages = self.pool.peek(changes.num_new)
        self._planned = plan = self._planner.arrays(changes, pages)
        if self._checks is not None:
            self._checks.expect_pages(plan)
        return plan

    def commit(self, plan: StepPlan, input_ids: Any, accepted: Any = None) -> Int32:
        """Make a planned step real: its rows become context, whole segments become findable.

        Args:
            plan: newest plan of this cache, with no change since (see `StepPlan`).
            input_ids: [total] ints, tokens whose rows the step computed, in the plan's order.
            accepted: [n] ints, new tokens of each request that stay; all by default. At most
                max_draft_tokens of a request may be rejected.

        Returns:
            [m, 2] int32 pages (source, destination) to copy after this step and before the next:
            snapshots of states. Empty without state groups.
        """
        if plan.__class__ is not StepPlan:
            raise refusal("plan", "a StepPlan", repr(plan))
        ids = as_token_ids("input_ids", input_ids)
        if plan is not self._planned:
            raise refusal(
                "plan", "the newest plan of this cache",
                "another cache's, or one made before another plan or change",
            )  # fmt: skip
        if len(ids) != len(plan.positions):
            raise refusal("input_ids", f"{len(plan.positions)} tokens as planned", len(ids))
        if self._checks is not None:
            slots, counts = plan.slots.tolist(), plan.num_new_tokens.tolist()
            start = plan.changes.start.tolist()
            self._checks.expect_tokens("input_ids", slots, start, counts, ids)
        end = plan.changes.end if accepted is None else self._end_of(plan, accepted)
        if plan.changes.num_new:
            self.pool.take(plan.changes.num_new)
        self._changed()
        if self.enable_caching:
            self.sequences.feed(plan.slots, plan.changes.start, end, ids, plan.cu_seqlens_q[:-1])
            if self._event_writer is not None:
                self._event_writer.computed(
                    plan.slots, plan.num_new_tokens, plan.positions, ids, end
                )
        copies, done = self._advance(plan.changes, end, accepted is None)
        if done is not NOTHING_COMPLETED:
            self._chains.publish(done)
        return copies

    def _end_of(self, plan: StepPlan, accepted: Any) -> Int64:
        taken, most = as_ints("accepted", accepted), plan.num_new_tokens
        least = np.maximum(1, most - self.max_draft_tokens)
        if taken.shape != most.shape or ((taken < least) | (taken > most)).any():
            between = f"between {least.tolist()} and {most.tolist()}"
            between += f", as max_draft_tokens={self.max_draft_tokens} may be rejected"
            raise refusal("accepted", between, taken.tolist())
        end: Int64 = plan.changes.start + taken
        return end

    def cut(self, slots: Any, num_new_tokens: Any) -> Int64:
        """Shorten chunks so that each ends at its next kept boundary, or else at its last boundary:
        states can be kept only where a step ends. Without state groups counts stay as they are.

        Args:
            slots, num_new_tokens: [n] as for `plan`.

        Returns:
            [n] int64 counts, at least 1 each.
        """
        slots, counts = self._pairs(slots, "num_new_tokens", num_new_tokens, least=1)
        if not (self._tables.states and self.enable_caching):
            return counts.copy()
        start = self.sequences.num_computed[slots]
        end = start + np.minimum(counts, MOST_TOKENS)
        shortened: Int64 = self._chains.stops(slots, start, end) - start
        return shortened

    # What `plan` and the four calls share.

    def _pairs(
        self, slots: Any, name: str, values: Any, least: int | None = None
    ) -> tuple[Int64, Int64]:
        """Distinct slots [n] or one, and their numbers; perhaps the caller's own arrays."""
        slots, numbers = as_ints("slots", slots), as_ints(name, values)
        slots = slots if slots.ndim else slots[None]
        numbers = numbers if numbers.ndim else numbers[None]
        if slots.ndim != 1 or numbers.shape != slots.shape or not len(slots):
            shapes = f"{list(slots.shape)} and {list(numbers.shape)}"
            raise refusal(f"slots, {name}", "two vectors of one length > 0", shapes)
        self.sequences.check(slots)
        if least is not None and np.count_nonzero(numbers < least):
            raise refusal(name, f"at least {least} each", numbers.tolist())
        return slots, numbers

    def _changes_of(self, slots: Int64, start: Int64, end: Int64) -> StepChanges:
        slots = slots.copy()  # the caller may use its buffer again
        written, longest = start, int((end - start).max())
        if self.replay_tokens is not None:
            written = self._chains.replays.written_from(slots, start)
        kept, snapshots = NONE_KEPT, NO_ROWS
        if self.enable_caching and self.hybrid:
            most_after = self.layout.drafts + 1
            if self._tables.states:  # requests that may end at a boundary
                since = np.minimum(end - start, most_after)
                snapshots = (end % self.alignment < since).nonzero()[0]
            # Of a boundary in a shorter step, the ring keeps the tail.
            if longest > most_after:
                kept = self._chains.boundaries(slots, start, end)
        return self._planner.plan(slots, start, end, written, longest, kept, snapshots)

    def _make_room(
        self, needed: int, per_group: Callable[[], dict[str, int]], least: int = 0
    ) -> OutOfPages | None:
        """Evict until `needed` pages are free; OutOfPages if these or `least` cannot be."""
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
        # The newest plan names pages that lie deeper in the stack of free ones from here on.
        self._planned = None
        self.index.evict(num_pages)

    def _advance(self, changes: StepChanges, end: Int64, all_stay: bool) -> tuple[Int32, Completed]:
        """Count tokens up to `end` [n] as computed; returns the pages [m, 2] to copy after the
        step, and what to publish once its tokens are known."""
        slots, done = changes.slots, NOTHING_COMPLETED
        if self.max_draft_tokens:
            floor = changes.end - self.max_draft_tokens
            self._floor[slots] = np.maximum(self._floor[slots], floor)
        ends_segment = np.count_nonzero(end - self._chains.cached[slots] >= self.alignment)
        if self.enable_caching and (ends_segment or changes.replaying):
            done = self._chains.completed(changes, end)
        effects = self._planner.commit(changes, end, done.kept, all_stay)
        if done is not NOTHING_COMPLETED:
            self._chains.hold(slots, done, effects.tails)
        if effects.gone or effects.new:
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
            slots, ends = self._pairs(slots, "ends", ends)
            oldest = self._pairs(slots, "oldest_query", oldest)[1]
            each = list(zip(slots.tolist(), ends.tolist(), oldest.tolist(), strict=True))
        for slot, end, _ in each:
            room = self._linear.room[slot]
            if not 0 <= end <= room:
                raise refusal("ends", f"0..{room} of slot {slot}, as many as have pages", end)
        keeps = self.enable_caching and keep_tails
        for slot, end, oldest in each:
            self.sequences.num_computed[slot] = end
            cached = self._chains.runs[slot].depth * self.alignment if keeps else None
            self._linear.let_go(slot, oldest, cached)
        return NO_COPIES

    # States in which a request cannot be used.

    def _expect_admitted(self, slot: int) -> None:
        is_slot = slot.__class__ is int and 0 <= slot < self.max_requests
        if not is_slot or not self.sequences.active.item(slot):
            self.sequences.checked(slot)  # raises, or it is a numpy int

    def _too_long(self, name: str, slot: int, end: int) -> ValueError:
        return ValueError(
            f"{name}: slot {slot} would reach {end} tokens, expected at most max_model_len = "
            f"{self.max_model_len}"
        )

    def _expect_landed(self, slot: int, name: str) -> None:
        if self._reserved.in_flight.item(slot):
            self._reserved.expect_not_in_flight(np.array([slot]), name)

    def _expect_settled(self, slot: int) -> None:
        self._expect_landed(slot, "slots")
        if self._reserved.until.item(slot):
            raise refusal("slots", "a request without reserved pages", f"slot {slot}: advance it")
        if self._known.item(slot) != SETTLED:
            got = f"slot {slot}, of which {self._known[slot]} are"
            raise refusal("slots", "a request whose tokens are published", got)
        if slot in self.sequences.keyed:
            raise refusal("slots", "a request admitted with tokens", f"slot {slot}, with keys")

    # Tokens are taken back.

    def rollback(self, slot: int, num_tokens: int) -> None:
        """Forget the last `num_tokens` >= 1 computed tokens of a request.

        Raises:
            ValueError: the request has reserved pages or unpublished tokens; or the tokens are
                cached (or the lookahead of cached ones), or more than max_draft_tokens before the
                furthest position reached.
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
        """End a request: finished, aborted or preempted. Its cached segments stay findable, and the
        last boundary it reached becomes a resume point: there the next turn of a chat resumes, or
        the same request after preemption.

        Args:
            request_id: from `admit`.
            discard: keep no resume point. What was published stays findable (see `evict_pages`).

        Raises:
            ValueError: the request is in a step that has not advanced.
        """
        slot = self.sequences.slot_of(request_id)
        self._expect_landed(slot, "request_id")
        self._changed()
        if self._reserved.until.item(slot):
            self._reserved.end(np.array([slot]), NO_ROWS)
        self._known[slot] = SETTLED
        computed = int(self.sequences.lengths[slot]) if self._linear is None else MOST_TOKENS
        self._chains.end(slot, computed, not discard)
        self.sequences.remove(request_id)
        if self._event_writer is not None:
            self._event_writer.released(slot)

    def reset(self, *, end_requests: bool = False) -> list[Hashable]:
        """Forget everything cached, pinned or not, in tiers too: for new weights, or lost rows. All
        pages are free afterwards. A `Match` made before may still be admitted, and hits nothing.

        Args:
            end_requests: release running requests, as with ``discard=True``.

        Returns:
            Ids of the requests that this ended, in the order of their admission.

        Raises:
            ValueError: requests are running, and end_requests is False; or tiers have open jobs.
        """
        running = self.sequences.ids
        if running and end_requests is not True:
            got = f"{end_requests!r} with {running}"
            raise refusal("end_requests", "True while requests are running", got)
        if self.tiers is not None and self.tiers.jobs:
            got = f"{len(self.tiers.jobs)}: end them with `done` or `cancel`"
            raise refusal("reset", "no open jobs of tiers", got)
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
        """
        expiry = expiry_of(now, ttl)
        match, run = self._lookup.find_again(match)
        self.index.tick += 1
        depth = match.num_tokens // self.alignment
        return self.index.pins.pin(run, depth, expiry) * self.alignment

    def unpin(self, match: Match) -> bool:
        """End the pin of the prefix that `match` finds; False if it is not pinned."""
        match, run = self._lookup.find_again(match)
        if not match.num_tokens:
            return False
        return self.index.pins.unpin(run, match.num_tokens // self.alignment)

    def expire_pins(self, now: float) -> int:
        """End the pins whose time has passed at `now` seconds; return their number."""
        return self.index.pins.expire(as_seconds("now", now))

    # Eviction.

    def evict(self, num_pages: int) -> int:
        """Free at least `num_pages` cached pages now, or all that running requests do not need;
        return their number.
        """
        num_pages = as_int("num_pages", num_pages, 0)
        before = self.pool.num_free
        self._evict(min(num_pages, self.index.num_evictable))
        return self.pool.num_free - before

    def evict_pages(self, pages: Any) -> Int64:
        """Free certain pages, with entries that cannot be found without them: to give the pages
        back, or because their rows turned out wrong. Tiers, which may have copies of them, forget
        everything. Looks at all cached content.

        Args:
            pages: [n] ints in 1..num_pages - 1, in any order; repeats and free pages allowed.

        Returns:
            [m] int64, ascending: pages among them that running requests need. They are not free,
            and what is cached of them stays findable.
        """
        ids = as_ints("pages", pages)
        if ids.ndim != 1 or (ids < 1).any() or (ids >= self.pool.num_pages).any():
            raise refusal("pages", f"a vector of 1..{self.pool.num_pages - 1}", ids.tolist())
        self._planned = None
        is_wanted = np.zeros(self.pool.num_pages, dtype=np.bool_)
        is_wanted[ids] = True
        if self.tiers is not None and ids.size:
            self.tiers.clear()
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
        """Write events of everything cached now, for a reader that is late or lost track. They
        replace the events in the log, and may exceed its capacity: each is made when it is taken.
        """
        if self._event_writer is None:
            raise refusal("events", "an EventLog at construction to announce to", None)
        others = [] if self.tiers is None else self.tiers.snapshot_events()
        self._event_writer.everything(self.index.runs(), others)

    def describe(self) -> str:
        """Describe this cache in words: print it at start-up."""
        return describe(self)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and pages by state now."""
        return stats(self)

    def check_invariants(self) -> None:
        """Recount everything; AssertionError if a page is leaked, shared or counted wrongly."""
        check_invariants(self)
