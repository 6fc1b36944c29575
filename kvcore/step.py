"""Steps built request by request: `Step`.

A step reserves pages as requests are added, gets them all when its plan is asked for, advances once
its work is queued on the device, and is published when its tokens are known:

    step t      begin, add, add, drop, add | plan | launch | advance | ........... | commit
    step t + 1                                                begin, add .. plan | launch | advance
    pages       reserved, a number           taken from        those out of reach    segments become
                                             the pool          become free           findable

`advance` is of use where a next step begins before the tokens are known; else `commit` does it
too. What keeps the pages of an open step from being handed out again:

* pages that it writes have left the pool with its plan;
* pages that it reads belong to its requests, or to what these lock. Until it advances, none of its
  requests can be in another step, released or rolled back;
* what an advance, a publication or a release frees goes to plans made later, whose work the device
  does later. So work must be queued in the order in which the plans were asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .arrays import NO_ROWS, Int32, Int64, as_ints, as_token_ids
from .part import Part
from .plan import OutOfPages, StepPlan
from .prefix.chains import Publication
from .spec import as_int
from .tables.planner import NO_COPIES

if TYPE_CHECKING:
    from .open_steps import OpenSteps

BUILDING, PLANNED, ADVANCED, OVER = "being built", "planned", "advanced", "over"


class Step:
    """One step, built request by request; from `KVCache.begin`.

    ``add`` and ``drop`` build it, ``plan`` ends that, ``commit`` or ``cancel`` ends the step.
    Between ``plan`` and ``commit`` requests may be admitted, released and evicted for, and other
    steps begun; what would harm this step is refused by name.

    Attributes:
        layout: the groups of the cache.
        num_reserved: pages reserved for it. pages: those that its plan took.
    """

    def __init__(self, steps: OpenSteps) -> None:
        self._open, self.layout = steps, steps.layout
        self._parts: dict[int, Part] = {}
        self._state = BUILDING
        self._full: StepPlan | None = None  # with the tokens of lookaheads
        self._shown: StepPlan | None = None  # without
        self._is_shown: npt.NDArray[np.bool_] | None = None  # which rows of `_full`
        self._rows: dict[int, int] = {}
        self._has_lookahead = False
        self._end: Int64 = NO_ROWS
        self._publication: Publication | None = None
        self._gone: set[int] = set()
        self.num_reserved, self.pages = 0, NO_ROWS

    # Building.

    def add(self, slot: int, num_new_tokens: int = 1, lookahead: int = 0) -> Part | OutOfPages:
        """Add a request, with pages for its new tokens.

        When free pages run short, cached entries are evicted here, and only if that is enough.

        Args:
            slot: from `admit`.
            num_new_tokens: at least 1.
            lookahead: tokens past these that get pages too, as drafts do that are proposed within
                the step; at most max_draft_tokens. They do not count as computed, and their pages
                come back at the commit. Fewer where the sequence would be longer than
                max_model_len.

        Returns:
            Its part; or OutOfPages, and nothing has changed.

        Raises:
            ValueError: the slot is unknown, or in a step that has not advanced (this one, say), a
                number is out of range, the sequence would be longer than max_model_len, or the
                step's plan was asked for. Nothing has changed.
        """
        steps = self._open
        if self._state is not BUILDING:
            raise self._unexpected("add", "a step whose plan was not asked for")
        if slot.__class__ is not int or num_new_tokens.__class__ is not int or lookahead:
            slot = steps.sequences.checked(slot)
            num_new_tokens = as_int("num_new_tokens", num_new_tokens, 1)
            lookahead = as_int("lookahead", lookahead, 0, steps.most_lookahead)
        elif slot < 0 or slot >= steps.max_requests or not steps.active[slot]:
            steps.sequences.checked(slot)
        if slot in steps.by_slot:
            raise steps.busy("slot", slot)
        start = steps.num_computed.item(slot)
        room = steps.max_model_len - start - num_new_tokens
        if num_new_tokens < 1 or room < 0:
            raise ValueError(
                f"num_new_tokens: expected at least 1 and at most {room + num_new_tokens} (slot "
                f"{slot} has {start} tokens, max_model_len is {steps.max_model_len}), "
                f"got {num_new_tokens}"
            )
        if lookahead > room:
            lookahead = room
        num = num_new_tokens + lookahead
        pages = 0
        if num > 1 or not start % steps.quiet or not (steps.plain or steps.is_quiet(slot, start)):
            reserved = steps.reserve(slot, start, num)
            if isinstance(reserved, OutOfPages):
                return reserved
            pages = reserved
            self.num_reserved += pages
        if lookahead:
            self._has_lookahead = True
        part = Part(self, slot, start, num_new_tokens, lookahead, pages)
        self._parts[slot] = steps.by_slot[slot] = part
        return part

    def drop(self, slot: int) -> None:
        """Take a request out again, preempted for another one, say. Its pages are free again.

        Raises:
            ValueError: it is not in the step, or the step's plan was asked for.
        """
        if self._state is not BUILDING:
            raise self._unexpected("drop", "a step whose plan was not asked for")
        if slot not in self._parts:
            raise ValueError(f"slot: expected one of {list(self._parts)}, got {slot!r}")
        pages = self._parts.pop(slot).num_new_pages
        self.num_reserved -= pages
        self._open.pool.num_reserved -= pages
        del self._open.by_slot[slot]

    @property
    def parts(self) -> list[Part]:
        """What was added and not dropped, in that order."""
        return list(self._parts.values())

    def plan(self) -> StepPlan:
        """The arrays of the step, made the first time: from then on nothing is added or dropped.

        Raises:
            ValueError: the step is empty or over.
        """
        if self._shown is None:
            if self._state is not BUILDING or not self._parts:
                raise self._unexpected("plan", "a step with a request")
            self._full = plan = self._open.planned(self)
            self._state = PLANNED
            self._end = plan.changes.end
            self._shown = plan
            if self._has_lookahead:
                ahead = np.array([p.lookahead for p in self._parts.values()])
                self._end = self._end - ahead
                self._shown, self._is_shown = without(plan, ahead)
        return self._shown

    def full_plan(self) -> StepPlan:
        """`plan`, in which tokens of lookaheads count as new ones."""
        self.plan()
        assert self._full is not None
        return self._full

    def row_of(self, slot: int) -> int:
        """Which request of the plan has `slot`."""
        if not self._rows:
            self._rows = {slot: i for i, slot in enumerate(self._parts)}
        return self._rows[slot]

    # What becomes of it.

    def advance(self) -> Int32:
        """Its tokens count as computed: a next step may take its requests further.

        To be called once its work is queued on the device, which has read the tables by then or
        was given a copy: they describe the context after the step from now on. What the tokens are
        is not known: nothing of them is findable before `commit`.

        Returns:
            [m, 2] int32 pages to copy after this step and before the next: snapshots of states.

        Raises:
            ValueError: the step's plan was not asked for, or it has advanced.
        """
        if self._state is not PLANNED:
            raise self._unexpected("advance", "a planned step")
        assert self._full is not None
        copies, self._publication = self._open.advance(self._full, self._end)
        self._state = ADVANCED
        self._open.has_advanced(self)
        return copies

    def commit(self, input_ids: Any, accepted: Any = None) -> Int32:
        """End the step: its tokens are known, whole segments become findable.

        Args:
            input_ids: [total] ints, the tokens whose rows the step computed, in the plan's order;
                of requests that were released meanwhile, anything.
            accepted: [n] ints, how many of each request's new tokens stay; all by default. At most
                max_draft_tokens of a request may be rejected (those of its lookahead counted), and
                none once the step has advanced.

        Returns:
            [m, 2] int32 as of `advance`; empty if the step has advanced.

        Raises:
            ValueError: the step's plan was not asked for, it is over, an earlier step of one of its
                requests is not committed, or an argument has the wrong size. Nothing has changed.
        """
        if not self.is_planned:
            raise self._unexpected("commit", "a planned step")
        shown, full = self.plan(), self.full_plan()
        ids = as_token_ids("input_ids", input_ids)
        cache, counts = self._open.cache, shown.num_new_tokens
        if len(ids) != len(shown.positions):
            raise ValueError(
                f"input_ids: expected {len(shown.positions)} tokens as planned, got {len(ids)}"
            )
        end = self._end
        if accepted is not None:
            taken = as_ints("accepted", accepted)
            if taken.shape == counts.shape and np.count_nonzero(taken > counts):
                raise ValueError(
                    f"accepted: expected at most {counts.tolist()}, got {taken.tolist()}"
                )
            end = cache._end_of(full, taken)
            if self._state is ADVANCED and np.count_nonzero(taken < counts):
                raise ValueError(
                    f"accepted: expected all of {counts.tolist()} tokens of a step that has "
                    f"advanced, got {taken.tolist()}: with drafts, commit without `advance`"
                )
        self._open.expect_in_order(self)
        if cache._checks is not None:
            cache._checks.expect_tokens(shown, ids, self.slots)
        if self._is_shown is not None:
            known, ids = ids, np.zeros(len(full.positions), dtype=np.int32)
            ids[self._is_shown] = known
        copies = NO_COPIES
        if self._state is PLANNED:
            copies = self._open.finish(full, ids, end)
        else:
            self._open.publish(full, self._publication, ids, end, self._gone)
        self._end_here()
        return copies

    def cancel(self) -> None:
        """End the step as if it had not begun: its pages are free again.

        Raises:
            ValueError: it has advanced: release its requests, or commit it.
        """
        if self._state is ADVANCED:
            raise self._unexpected("cancel", "a step that has not advanced")
        if self._state is not OVER:
            self._open.give_back(self)
            self._end_here()

    def _end_here(self) -> None:
        self._open.is_over(self)
        self._state, self._publication, self.pages = OVER, None, NO_ROWS

    def _unexpected(self, call: str, expected: str) -> ValueError:
        kind = "empty" if not self._parts and self._state is BUILDING else self._state
        return ValueError(f"{call}: expected {expected}, got one that is {kind}")

    # What `OpenSteps` asks.

    @property
    def is_planned(self) -> bool:
        """Whether it may be committed."""
        return self._state in (PLANNED, ADVANCED)

    @property
    def slots(self) -> set[int]:
        """Slots of its requests, but those released since it advanced."""
        return self._parts.keys() - self._gone

    def leave(self, slot: int) -> None:
        """A request is released after the step has advanced."""
        if slot in self._parts and slot not in self._gone:
            self._gone.add(slot)
            if self._publication is not None:
                self._open.forget(self._publication, slot)

    @property
    def held(self) -> list[Int32]:
        """Pages of resume points that are to be published."""
        return [] if self._publication is None else self._publication.tails


def without(plan: StepPlan, lookahead: Int64) -> tuple[StepPlan, npt.NDArray[np.bool_]]:
    """A plan without the last `lookahead` [n] tokens of each request, and which rows stay."""
    counts = plan.num_new_tokens - lookahead
    cu = np.zeros_like(plan.cu_seqlens_q)
    cu[1:] = np.add.accumulate(counts)
    number = np.arange(len(plan.positions)) - plan.cu_seqlens_q[:-1].repeat(plan.num_new_tokens)
    stays = number < counts.repeat(plan.num_new_tokens)
    replays = stays[plan.replay_rows]
    rows = (stays.cumsum() - 1)[plan.replay_rows[replays]]
    shown = StepPlan(
        plan.slots, counts, cu, (plan.seq_lens - lookahead).astype(np.int32),
        plan.positions[stays], plan.slot_mapping[:, stays], rows, plan.replay_slots[:, replays],
        plan.copies, plan.state_pages, plan.changes,
    )  # fmt: skip
    return shown, stays
