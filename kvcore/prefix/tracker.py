"""What is cached of running requests: their chains, and where they leave resume points.

The dense blocks of a request up to the end of its run belong to the prefix index (a segment that
was cached before keeps its old pages); the blocks after it are its own. The run ends at the last
boundary that the request has passed, or before it while the tokens of a step are not known yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from ..announcer import Announcer
from ..arrays import NO_ROWS, Int32, Int64
from ..policies.retention import replay_boundaries
from ..tables.planner import StepChanges, Tables
from .boundaries import Boundaries, Ending
from .index import PrefixIndex
from .lookup import Match
from .requests import Sequences
from .tree import Run, Source


@dataclass(slots=True, eq=False)
class Passed:
    """What the requests of a step passed, to be cached once its tokens are known.

    Attributes:
        ending: requests whose segments end.
        slots, boundaries, tails: resume points, and their pages, which are held.
    """

    ending: Ending
    slots: list[int]
    boundaries: list[int]
    tails: list[Int32]


class Chains(Boundaries):
    """Caches segments and resume points as steps complete them.

    Args:
        interval: tokens between kept boundaries, from `policies.retention`.
        sequences, tables, index: what the requests are, where their pages are, what is cached.
        announcer: told of what becomes findable; None if nobody listens.
        counters: of resume points kept and used, counted up here.
        adopt: whether a request takes the index's pages of what somebody else cached before it.

    Attributes:
        runs: where each request's cached prefix ends.
        twins: by slot: own pages of such segments, where it does not.
    """

    def __init__(
        self,
        interval: int,
        sequences: Sequences,
        tables: Tables,
        index: PrefixIndex,
        announcer: Announcer | None,
        counters: dict[str, int],
        adopt: bool = True,
    ) -> None:
        super().__init__(interval, sequences, tables)
        self.index, self._announcer, self._counters = index, announcer, counters
        n = sequences.max_requests
        self.adopt = adopt
        self.runs: list[Run] = [index.root] * n
        self.twins: dict[int, list[Int32]] = {}
        self._sources: list[Source] = [partial(tables.segment_pages, slot) for slot in range(n)]

    # A request.

    def ask(self, match: Match) -> tuple[int, ...]:
        """Tell the policy of a prompt before anything changes, as it may raise; returns the
        boundaries that its request keeps."""
        hit, a = match.replay_to or match.num_tokens, self.alignment
        keep: tuple[int, ...] = ()
        if self.layout.hybrid:
            # A replay may end before the dense blocks do, where no longer hit is wanted.
            junction = match.replay_to or match.dense_tokens
            keep = (*replay_boundaries(match.prompt.num_tokens, a), junction)
        self.index.policy.asked(match.prompt.keys, hit // a, [k // a for k in keep])
        return keep

    def start(self, slot: int, match: Match, run: Run, keep: tuple[int, ...]) -> None:
        """A request starts behind the hit of `match`, on the path to `run`; `keep` is from
        `ask`."""
        hit, a = match.replay_to or match.num_tokens, self.alignment
        self.cached[slot] = hit
        self.replays.begin(slot, match.replay_from, match.replay_to)
        self.keep(slot, keep)
        index = self.index
        self.runs[slot] = run = index.end_at(run, hit // a) if hit else index.root
        index.lock(run)
        if hit:
            self._tables.fill_dense(slot, 0, index.pages_between(run, 0, run.depth))
            known = index.num_points
            point = None if match.replay_to else index.use(run)
            if point is not None:
                self._tables.load(slot, hit, point.pages)
                self._counters["resume_points_used"] += 1
                self._counters["resume_points_kept"] += index.num_points - known

    def end(self, slot: int, computed: int, keep: bool = True) -> tuple[Run, int]:
        """A request ends after `computed` tokens: its last boundary becomes a resume point, if it
        is to `keep` one.

        Returns:
            (a run on whose path its prefix ends, segments of the prefix).
        """
        run = self.runs[slot]
        cached = run.depth * self.alignment
        # What steps whose tokens are not known have passed may have taken the place of the tail.
        if keep and self.layout.hybrid and 0 < cached <= computed and cached == self.cached[slot]:
            has_state = not self._tables.states or self._tables.snapshot_at[slot] == cached
            if has_state and not self.index.renew(run):
                self._add_points(*self._hold([slot], [cached], [self._tables.tail(slot, cached)]))
        run = self.index.unlock(run)
        self._tables.release(slot, cached, computed)
        for pages in self.twins.pop(slot, ()):
            self.index.pool.put(pages)
        self.runs[slot] = self.index.root
        self.cached[slot] = 0
        return run, cached // self.alignment

    # After a step.

    def advance(self, step: StepChanges, end: Int64) -> tuple[Int32, Passed | None]:
        """Make a step real up to `end` [n].

        Returns:
            ([m, 2] pages to copy after the step, what to publish once the tokens are known).
        """
        slots = step.slots
        ending = self.ending(slots, end)
        rows = kept = NO_ROWS
        if ending.slot_list and self.layout.hybrid:
            rows, kept = self.kept(end, ending)
        if step.replaying:
            rows, kept = self.replays.finished(step, end, rows, kept)
        effects = self._tables.commit(step, end, (rows, kept))
        passed = None
        if ending.slot_list or rows.size:
            self.cached[ending.slots] = ending.end
            held = self._hold(slots[rows].tolist(), kept.tolist(), list(effects.tails))
            passed = Passed(ending, *held)
        self._tables.settle(effects)
        return effects.copies, passed

    def _hold(
        self, slots: list[int], boundaries: list[int], tails: list[Int32]
    ) -> tuple[list[int], list[int], list[Int32]]:
        """Hold the pages of resume points; returns those points whose state was copied."""
        if self._tables.states:
            known = self._tables.snapshot_at[slots].tolist()
            which = [i for i, b in enumerate(boundaries) if known[i] == b]
            if len(which) < len(slots):
                slots, boundaries = [slots[i] for i in which], [boundaries[i] for i in which]
                tails = [tails[i] for i in which]
        if slots:
            self.index.pool.hold(np.concatenate(tails))
        return slots, boundaries, tails

    # Once the tokens of a step are known.

    def wait(self, passed: Passed) -> None:
        """`publish` comes later: until then nothing that eviction could free holds these pages."""
        if passed.tails:
            self.index.pool.use_held(np.concatenate(passed.tails))

    def publish_late(self, passed: Passed) -> None:
        """`publish`, after `wait`."""
        self.publish(passed)
        if passed.tails:
            self.index.pool.unuse(np.concatenate(passed.tails))

    def publish(self, passed: Passed) -> None:
        """Cache the segments and resume points that a step completed."""
        if passed.ending.slot_list:
            self._cache_segments(passed.ending)
        if passed.slots:
            self._add_points(passed.slots, passed.boundaries, passed.tails)

    def forget(self, passed: Passed, slot: int) -> None:
        """The request of `slot` ends, after `wait`, before what it passed in a step is known."""
        ending = passed.ending
        rows = (ending.slots != slot).nonzero()[0]
        if len(rows) < len(ending.slots):
            slots = ending.slots[rows]
            passed.ending = Ending(ending.rows[rows], slots, slots.tolist(), ending.end[rows])
        while slot in passed.slots:
            i = passed.slots.index(slot)
            del passed.slots[i], passed.boundaries[i]
            tail = passed.tails.pop(i)
            self.index.pool.unhold(tail)
            self.index.pool.unuse(tail)

    def _cache_segments(self, ending: Ending) -> None:
        """Cache the segments that end."""
        ends = (ending.end // self.alignment).tolist()
        ones: list[int] = []
        keys: list[bytes] = []
        for slot, end in zip(ending.slot_list, ends, strict=True):
            begin = self.runs[slot].depth
            if end - begin > 1:
                self._cache_several(slot, begin, end)
            else:
                ones.append(slot)
                keys.append(self.sequences.keys(slot, begin, end))
        known = set(self.index.append(self.runs, ones, keys, self._sources))
        for i, slot in enumerate(ones):
            end = self.runs[slot].depth
            if i in known:
                self._adopt(slot, end - 1, 1)
            elif self._announcer is not None:
                self._announcer.segments(slot, end - 1, end)

    def _cache_several(self, slot: int, begin: int, end: int) -> None:
        """Cache the segments [begin, end) of one request."""
        keys = self.sequences.keys(slot, begin, end)
        self.runs[slot], known = self.index.insert(self.runs[slot], keys, self._sources[slot])
        if known:
            self._adopt(slot, begin, known)
        if self._announcer is not None and begin + known < end:
            self._announcer.segments(slot, begin + known, end)

    def _adopt(self, slot: int, first: int, n: int) -> None:
        """The `n` segments from `first` on were cached by someone else: keep one copy, theirs; or
        this one too until the request ends."""
        own = self._sources[slot](first, first + n).ravel()
        if not self.adopt:
            self.twins.setdefault(slot, []).append(own)
            return
        self.index.pool.put(own)
        theirs = self.index.pages_between(self.runs[slot], first, first + n)
        self._tables.fill_dense(slot, first, theirs)

    def _add_points(self, slots: list[int], boundaries: list[int], tails: list[Int32]) -> None:
        """Keep resume points whose pages are held; let go of those of points that are there."""
        a, known = self.alignment, []
        for slot, boundary, pages in zip(slots, boundaries, tails, strict=True):
            if not self.index.add_point(self.runs[slot], boundary // a, pages):
                known.append(pages)
            elif self._announcer is not None:
                self._announcer.point(self.runs[slot], boundary // a, slot)
        self._counters["resume_points_kept"] += len(slots) - len(known)
        if known:
            self.index.pool.unhold(np.concatenate(known))
