"""Steps: `StepPlan`, `OutOfPages`, and how steps are planned and committed.

    plan     pages          `Tables.plan` counts them; free ones are a stack: `peek` shows those that
                            `take` will remove
             too few        `PrefixIndex.evict`: cached pages that no running request needs
    commit   tokens, keys   `Sequences.feed`: each token joins the open segment of its request. The
                            last one of a segment (one alignment) makes its key, a hash of the key
                            before and the tokens of the segment: tokens whose rows are computed, so
                            not the one that the step's logits give
             entries        `Tables.commit`
             segments       `Chains.publish`: the dense pages of a segment that ends belong to the
                            index now, under its key; if it has the key already, the request takes
                            the index's pages and gives its own back. A boundary that retention
                            keeps gets a resume point, which holds the pages of windows before it

The tables change in the commit, so a step's attention reads them as the last step left them, and a
page that it starts is in the slot mapping only. A request with 31 tokens, a dense group in blocks
of 16, whose first pages are 2 and 1:

    token         seq_lens   table       keys in pages   slot of the new row
    31            32         [2, 1]      0 .. 30         31 = 1 * 16 + 15
    32            33         [2, 1]      0 .. 31         48 = 3 * 16
    33            34         [2, 1, 3]   0 .. 32         49 = 3 * 16 + 1

A commit *advances* the requests (the rows count as computed, and nothing of that depends on what
the tokens are) and *publishes* what they completed. A `step` that is followed by others before its
tokens are known does one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import NO_ROWS, Int32, Int64, as_token_ids
from .checks import as_batch, check_batch, wrong_size
from .prefix.tracker import Chains, Passed
from .rollbacks import Rollbacks
from .tables.planner import StepChanges, Tables

if TYPE_CHECKING:
    from .announcer import Announcer
    from .debug import Checks


@dataclass(frozen=True)
class OutOfPages:
    """A step that does not fit; nothing was changed.

    Attributes:
        needed, free, evictable: pages that the step needs, that are free, that eviction could free.
        group: name of the group that needs the most pages.
        per_group: pages that each group needs.
    """

    needed: int
    free: int
    evictable: int
    group: str
    per_group: dict[str, int]

    def __str__(self) -> str:
        return (
            f"out of pages: the step needs {self.needed} (most of them in group {self.group!r}), "
            f"{self.free} are free and {self.evictable} evictable"
        )


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step of a batch, as the kernels need it. Arrays are not to be written to.

    From `KVCache.plan` it holds until the cache changes: another plan, an admission, a commit,
    rollback, release or eviction voids it, pins and look-ups do not. `KVCache.commit` refuses a
    void plan. From `Step.plan` it holds until the step advances.

    Attributes:
        slots: [n] int64 request slots, in batch order.
        num_new_tokens: [n] int64.
        cu_seqlens_q: [n + 1] int32 prefix sums of num_new_tokens.
        seq_lens: [n] int32 tokens after the step.
        positions: [total] int64.
        slot_mapping: [num_tables, total] int64, page * block_size + row; -1 = do not write. One row
            a group, or one for each of a group's pages_per_block (`KVCache.table_index`); rows of
            state groups are all -1. Of a window group only the tokens have a slot that queries
            after this step can see, or a kept boundary needs: attention must take the step's own
            keys and values from the step (``k``, ``v``), not from the pages. With
            `KVCache(reads="pages")` all have.
        replay_rows, replay_slots: [m] int64 rows of the step that are computed once more, and
            [num_tables, m] int64 where dense groups hold them already: their attention must take
            these rows from the pages, not from the step.
        copies: [m, 2] int32 pages (source, destination) to copy before the step: state snapshots
            that requests start from. Source 0 is the null page: the initial state.
        state_pages: [num_tables, n] int32 live page of each request in the step, 0 in rows of other
            groups; [0, n] without state groups.
        changes: what the commit will do to the tables.
    """

    slots: Int64
    num_new_tokens: Int64
    cu_seqlens_q: Int32
    seq_lens: Int32
    positions: Int64
    slot_mapping: Int64
    replay_rows: Int64
    replay_slots: Int64
    copies: Int32
    state_pages: Int32
    changes: StepChanges = field(repr=False)


class Steps:
    """Plans and commits of one cache: `KVCache.plan` and `KVCache.commit` only forward here.

    Args:
        chains: what requests add to the index, with its sequences and tables.
        announcer: told of computed tokens; None if nobody listens.
        max_model_len: longest sequence, tokens.
        enable_caching, has_replays: whether anything is cached, and computed once more.

    Attributes:
        planned: the one plan that `commit` takes; None once something changed.
        rollbacks: how far tokens may be taken back.
        checks: of `KVCache(debug=True)`; else None.
    """

    def __init__(
        self,
        chains: Chains,
        tables: Tables,
        announcer: Announcer | None,
        max_model_len: int,
        enable_caching: bool,
        has_replays: bool,
    ) -> None:
        self._chains, self._tables, self._announcer = chains, tables, announcer
        self._sequences, self._index = chains.sequences, chains.index
        self._pool, self._layout = tables.pool, tables.layout
        self._max_model_len, self._enable_caching = max_model_len, enable_caching
        self._has_replays = has_replays
        self._no_replays = NO_ROWS, np.empty((len(tables.layout.tables), 0), dtype=np.int64)
        self.rollbacks = Rollbacks(chains, tables)
        self.planned: StepPlan | None = None
        self.checks: Checks | None = None

    def changed(self) -> None:
        """Something changes: the newest plan is void, and what is used from here on is newer."""
        self.planned = None
        self._index.tick += 1

    # Plan.

    def plan(self, slots: Any, num_new_tokens: Any) -> StepPlan | OutOfPages:
        """`KVCache.plan`."""
        step = self.changes_of(slots, num_new_tokens)
        if step.num_new > self._pool.num_available:
            short = self._make_room(step)
            if short is not None:
                return short
        counts = step.end - step.start
        if step.inside is not None:  # one token each
            cu, positions = np.arange(len(counts) + 1, dtype=np.int32), step.start
        else:
            cu = np.zeros(len(counts) + 1, dtype=np.int32)
            np.cumsum(counts, out=cu[1:])
            positions = np.arange(int(cu[-1])) + (step.start - cu[:-1]).repeat(counts)
        mapping = self._tables.fill(step, self._pool.peek(step.num_new), cu, len(positions))
        replays = self._tables.cached_rows(step, cu) if step.replaying else self._no_replays
        self.planned = plan = StepPlan(
            step.slots, counts, cu, step.end.astype(np.int32), positions, mapping, *replays,
            step.copies, step.state_pages, step,
        )  # fmt: skip
        return plan

    def changes_of(self, slots: Any, num_new_tokens: Any) -> StepChanges:
        """Pages that a step needs, and what it will change; nothing changes here.

        Raises:
            ValueError: as `KVCache.plan`.
        """
        slots, counts = as_batch(slots, num_new_tokens)
        check_batch(slots, counts, self._sequences)
        slots = slots.copy()  # the caller may use its buffer again
        start = self._sequences.num_computed[slots]
        end = start + counts
        if end.max() > self._max_model_len:
            i = int(end.argmax())
            raise ValueError(
                f"num_new_tokens: slot {slots[i]} would reach {end[i]} tokens, "
                f"expected at most max_model_len = {self._max_model_len}"
            )
        written = start
        if self._has_replays:
            written = self._chains.replays.written_from(slots, start)
        kept, snapshot = (NO_ROWS, NO_ROWS), NO_ROWS
        if self._enable_caching:
            kept, snapshot = self._chains.boundaries(slots, start, end)
        return self._tables.plan(slots, start, end, written, kept, snapshot)

    def _make_room(self, changes: StepChanges) -> OutOfPages | None:
        """Evict what a step needs, more than is free, if that is enough; else nothing, and say what
        it lacks."""
        free = self._pool.num_available
        if changes.num_new > free + self._index.num_evictable:
            return self.lacking(changes.num_new, self._tables.per_group(changes))
        self.evict(changes.num_new - free)
        return None

    def lacking(self, needed: int, per_group: dict[str, int]) -> OutOfPages:
        """What a step lacks that needs so many pages."""
        worst = max(per_group, key=lambda name: per_group[name])
        free, evictable = self._pool.num_available, self._index.num_evictable
        return OutOfPages(needed, free, evictable, worst, per_group)

    def evict(self, num_pages: int) -> None:
        """Free `num_pages` evictable pages."""
        # The newest plan names pages that lie deeper in the stack of free ones from here on.
        self.planned = None
        self._index.evict(num_pages)

    # Commit.

    def commit(self, plan: StepPlan, input_ids: Any, accepted: Any) -> Int32:
        """`KVCache.commit`."""
        if plan.__class__ is not StepPlan:
            raise ValueError(f"plan: expected a StepPlan, got {plan!r}")
        ids = as_token_ids("input_ids", input_ids)
        if plan is not self.planned:
            raise ValueError(
                "plan: expected the newest plan of this cache, got another cache's, or one made "
                "before another plan or change"
            )
        if len(ids) != len(plan.positions):
            raise wrong_size(len(plan.positions), ids)
        if self.checks is not None:
            self.checks.expect_tokens(plan, ids, set(plan.slots.tolist()))
        end = plan.changes.end if accepted is None else self.end_of(plan, accepted)
        self._pool.take(plan.changes.num_new)
        return self.finish(plan, ids, end)

    def end_of(self, plan: StepPlan, accepted: Any) -> Int64:
        """[n] tokens after a step of which `accepted` tokens stay.

        Raises:
            ValueError: as `KVCache.commit`.
        """
        end: Int64 = plan.changes.start + self.rollbacks.checked(plan.num_new_tokens, accepted)
        return end

    def finish(self, plan: StepPlan, ids: Int32, end: Int64) -> Int32:
        """Advance and publish a step whose pages are taken, up to `end` [n] tokens; returns the
        copies to run after it."""
        self.changed()
        if self._enable_caching:
            start, first = plan.changes.start, plan.cu_seqlens_q[:-1]
            self._sequences.feed(plan.slots, start, end, ids, first)
            if self._announcer is not None:
                self._announcer.computed(plan, ids, end)
        copies, passed = self.advance(plan, end)
        if passed is not None:
            self._chains.publish(passed)
        return copies

    def advance(self, plan: StepPlan, end: Int64) -> tuple[Int32, Passed | None]:
        """The tokens of a step, whose pages are taken, count as computed up to `end` [n]."""
        changes, passed = plan.changes, None
        if self._layout.drafts:
            self.rollbacks.reached(plan.slots, changes.end)
        if self._enable_caching:
            copies, passed = self._chains.advance(changes, end)
        else:
            effects = self._tables.commit(changes, end, (NO_ROWS, NO_ROWS))
            self._tables.settle(effects)
            copies = effects.copies
        self._sequences.num_computed[plan.slots] = end
        return copies, passed
