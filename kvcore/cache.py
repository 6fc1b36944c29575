"""`KVCache`: requests, their block tables, and what is cached of them.

The life of a request is ``match -> admit -> (plan -> run the model -> commit)* -> release``. Steps
treat the whole batch. The calls are here, in `stepping` (steps) and in `requests` (one request);
what they do is in `plan` (steps planned and committed), `step` (steps built request by request),
`tables.planner` (pages), `prefix.requests` (tokens), `prefix.lookup` (hits),
`prefix.index` (what is cached), `prefix.tracker` (how what requests compute gets there) and
`contents` (pins, eviction, announcements).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from .announcer import Announcer
from .arrays import NO_ROWS, NO_VALUES, Int32, Int64
from .attachments import attach, check_log, check_policy
from .debug import CALLS, Checks
from .events import EventLog
from .invariants import check_invariants
from .open_steps import OpenSteps
from .pages import PagePool
from .plan import Steps
from .policies.adaptive import Adaptive
from .policies.base import EvictionPolicy
from .policies.retention import Retention, parse_retention
from .prefix.index import PrefixIndex
from .prefix.keys import root_key
from .prefix.lookup import Lookup
from .prefix.pins import Pins
from .prefix.requests import Sequences
from .prefix.tracker import Chains
from .requests import RequestCalls
from .spec import MOST_TOKENS, GroupSpec, Layout, as_int
from .stats import describe, new_counters, stats
from .stepping import CacheSteps
from .tables.planner import Tables


class KVCache(CacheSteps, RequestCalls):
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
        max_draft_tokens: tokens of a step that `commit(accepted=)` may reject or `rollback` take
            back. Rows of state groups must then tolerate tokens that are taken back (rows
            addressed by position do).
        replay_tokens: tokens that must be computed before a boundary so that all window layers are
            exact there: the sum of (sliding_window - 1) over them. With it, a request whose dense
            blocks are cached much further than any resume point computes these again instead (see
            `prefix.replays`); None never does.
        policy: eviction policy, of this cache alone; `Adaptive` by default.
        max_pinned_pages: budget of `pin`; all pages by default.
        reads: where a step's queries find the rows of the step: ``"step"``, in its tensors ``k``
            and ``v``, so that window groups keep only rows that outlive it; or ``"pages"``, for
            engines that write rows to pages before attention reads them (see `linear_table`).
        adopt: a request that computes a segment which somebody else has cached meanwhile takes the
            cached pages into its table and gives its own back. False: its tables are append-only,
            and it keeps its own until it is released.
        track_deltas: collect table changes for `take_deltas`.
        events: where to write what is stored and removed, of this cache alone; None keeps no
            events and no tokens.
        debug: check each call (see `debug`): two threads at once raise RuntimeError with both
            names, `commit` refuses input_ids that differ from the prompt's, and a step that would
            write page 0 raises AssertionError. Costs time, and the tokens of prompts.

    Attributes:
        layout: the groups, and what follows from them.
        alignment: tokens of a segment: hits are multiples of it.
        pool, index, sequences: the pages, what is cached, and the running requests.
        counters: since the start, see `stats`.

    One call at a time, from any thread: a cache has no lock, and `match` reads what others change.
    `stats`, `describe`, `num_*` and `counters` are numbers that any thread may read at any time;
    they may be a call old. A `Match`, its prompt and an `OutOfPages` never change; a `StepPlan` may
    be read in other threads. An `EventLog` belongs to the thread that is in a call.

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
        flags = {"enable_caching": enable_caching, "adopt": adopt}
        flags |= {"track_deltas": track_deltas, "debug": debug}
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise ValueError(f"{name}: expected True or False, got {flag!r}")
        if reads not in ("step", "pages"):
            raise ValueError(f"reads: expected 'step' or 'pages', got {reads!r}")
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
        self.max_draft_tokens, self.replay_tokens = max_draft_tokens, replay_tokens
        self.enable_caching, self.hash_seed = enable_caching, hash_seed
        self.pool = PagePool(num_pages)
        self.index = PrefixIndex(
            self.pool, layout.pages_per_segment, self.hybrid, policy, span, layout.tail_between
        )
        self.sequences = Sequences(max_requests, self.alignment, layout.lookahead)
        self._tables = Tables(layout, max_requests, self.pool, track_deltas)
        self._announcer = None if events is None else Announcer(events, layout, self.sequences)
        self.index.announcer = self._announcer
        self.counters = new_counters(layout)
        self._chains = Chains(
            self.interval, self.sequences, self._tables, self.index, self._announcer, self.counters,
            adopt,
        )  # fmt: skip
        has_replays = replay_tokens is not None
        self._steps = Steps(
            self._chains, self._tables, self._announcer, max_model_len, enable_caching, has_replays
        )
        self._open = OpenSteps(
            self._steps, self._chains, self._tables, self._announcer,
            max_model_len, enable_caching, has_replays,
        )  # fmt: skip
        self._lookup = Lookup(
            self.index, layout, hash_seed, enable_caching, replay_tokens, max_model_len,
            debug or events is not None,
        )  # fmt: skip
        self._pins = Pins(self.index, self.max_pinned_pages)
        attach(policy, events)
        if debug:
            self._steps.checks = checks = Checks(layout)
            checks.expect_one_thread(self, CALLS)

    # What can be read.

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
        return self._tables.array

    def table(self, group: int, part: int = 0) -> Int32:
        """Block table of `group`: [max_requests, width] int32 view; column = block % width.

        A group with pages_per_block > 1 has a table for each part of its blocks. A state group's
        table names the live page of each request in column 0.

        Between `plan` and `commit` it describes the context before the step. Entries at or past a
        request's length, and of a window group those behind its window, are not to be read. A view,
        not to be written to.
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

    def take_deltas(self) -> tuple[Int64, Int32]:
        """Table entries that changed since the last call, for a copy of `tables` on a device.

        Returns:
            (flat indices into `tables` [m] int64, values [m] int32), later changes of an entry
            last.

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

    # Reports.

    def describe(self) -> str:
        """What this cache can reuse, in words: print it at start-up."""
        return describe(self)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and pages by state now."""
        return stats(self)

    def check_invariants(self) -> None:
        """Recount everything; for tests.

        Raises:
            AssertionError: a page is leaked, shared wrongly or counted wrongly.
        """
        check_invariants(self)
