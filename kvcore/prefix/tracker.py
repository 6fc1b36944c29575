"""What is cached of running requests: their chains, and where they leave resume points.

A request's dense blocks up to its last boundary always belong to the prefix index (a segment that
was cached before keeps its old pages); the blocks after it are its own.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ..announcer import Announcer
from ..arrays import NO_ROWS, ONE, Int32, Int64
from ..policies.retention import kept_boundaries, kept_of_one, replay_boundaries
from ..tables.decode import NOBODY, DecodeBatch, Ending
from ..tables.drafts import DraftBatch
from ..tables.groups import StepChanges, Tables
from .index import PrefixIndex
from .lookup import Match
from .replays import Replays
from .requests import Sequences
from .tree import Run, Source

FOREVER = 1 << 62  # steps


class Chains:
    """Caches segments and resume points as steps complete them.

    Args:
        interval: tokens between kept boundaries, from `policies.retention`.
        sequences, tables, index: what the requests are, where their pages are, what is cached.
        announcer: told of what becomes findable; None if nobody listens.
        counters: of resume points kept and used, counted up here.

    Attributes:
        cached: [max_requests] int64 tokens of each request that are in the index.
        runs: where each request's cached prefix ends.
        replays: which tokens the requests compute again.
    """

    def __init__(
        self,
        interval: int,
        sequences: Sequences,
        tables: Tables,
        index: PrefixIndex,
        announcer: Announcer | None,
        counters: dict[str, int],
    ) -> None:
        self.layout = layout = tables.layout
        self.alignment, self.interval = layout.alignment, interval
        self._drafts = layout.drafts
        self._segment: Int64 = np.array(layout.alignment)
        self.sequences, self._tables, self.index = sequences, tables, index
        self._announcer, self._counters = announcer, counters
        n = sequences.max_requests
        self.runs: list[Run] = [index.root] * n
        self._sources: list[Source] = [partial(tables.segment_pages, slot) for slot in range(n)]
        self.cached: Int64 = np.zeros(n, dtype=np.int64)
        self.replays = Replays(n)
        self._keep: Int64 = np.zeros((n, 4), dtype=np.int64)  # replay boundaries, junction; 0: none
        self._keep_end: Int64 = np.zeros(n, dtype=np.int64)  # the last of these
        # The ends that a chunk may have: with and without its drafts, with and without the key of
        # its last segment.
        late = {0, layout.lookahead}
        self._late = sorted(late | {k + layout.drafts for k in late})
        self._uncertain = np.array(self._late)

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
        self._keep[slot], self._keep_end[slot] = keep or 0, max(keep, default=0)
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

    def fork(self, source: int, slot: int) -> None:
        """A request starts where that of slot `source` is."""
        replays = self.replays
        for of_slot in (self.cached, replays.start, replays.stop, self._keep, self._keep_end):
            of_slot[slot] = of_slot[source]
        self.runs[slot] = run = self.runs[source]
        self.index.lock(run)
        self._tables.fill_dense(slot, 0, self.index.pages_between(run, 0, run.depth))

    def end(self, slot: int, computed: int, keep: bool = True) -> tuple[Run, int]:
        """A request ends after `computed` tokens: its last boundary becomes a resume point, if it
        is to `keep` one.

        Returns:
            (a run on whose path its prefix ends, segments of the prefix).
        """
        cached, run = int(self.cached[slot]), self.runs[slot]
        if keep and self.layout.hybrid and 0 < cached <= computed:
            self._add_points([slot], [cached], [self._tables.tail(slot, cached)])
        run = self.index.unlock(run)
        self._tables.release(slot, cached, computed)
        self.runs[slot] = self.index.root
        self.cached[slot] = 0
        return run, cached // self.alignment

    # Before a step.

    def stops(self, slots: Int64, start: Int64, end: Int64) -> Int64:
        """Where chunks from `start` to at most `end` [n] should end so that the states there can be
        kept."""
        stops = [self._keep[slots], (end // self.alignment * self.alignment)[:, None]]
        if self.interval:
            stops.append(((start // self.interval + 1) * self.interval)[:, None])
        after = np.concatenate(stops, axis=1)
        after[after <= start[:, None]] = np.iinfo(np.int64).max
        nearest: Int64 = np.minimum(end, after.min(axis=1))
        return nearest

    def boundaries(
        self, slots: Int64, start: Int64, end: Int64, chunks: Int64, batch: DecodeBatch | None
    ) -> tuple[tuple[Int64, Int64], Int64]:
        """What a step must not lose.

        Args:
            slots, start, end: [n] requests and their tokens before and after the step.
            chunks: rows that compute several tokens, or cached ones again.
            batch: of the other rows, if there are no chunks.

        Returns:
            ((index in chunks, boundary) of tails that must survive the step, rows that may need a
            snapshot of their state).
        """
        none = (NO_ROWS, NO_ROWS)
        if not self.layout.hybrid:
            return none, NO_ROWS
        a = self.alignment
        snapshot = NO_ROWS
        if self._tables.states:
            if batch is not None:
                snapshot = batch.reaching if isinstance(batch, DraftBatch) else batch.ending.rows
            else:
                within = end % self._segment
                most = np.minimum(end - start, self._drafts + 1) if self._drafts else ONE
                snapshot = (within < most).nonzero()[0]
        if not chunks.size:
            return none, snapshot
        if len(chunks) == 1:
            i = chunks[0]
            kept = self._boundaries_of_one(int(slots[i]), int(start[i]), int(end[i]))
            return kept, snapshot
        slots, start, end = slots[chunks], start[chunks], end[chunks]
        # The windows are not exact before the end of a replay.
        start = self.replays.exact_after(slots, start, end)
        if self._tables.states:  # no state is kept but where a step may end
            start = np.maximum(start, end - (self._drafts + 1))
        # The last boundary, and the last that has its key, stay in the ring, whatever is accepted.
        ends = (end[:, None] - self._uncertain) // a * a
        always = np.concatenate([self._keep[slots], ends], axis=1)
        return kept_boundaries(start, end, always, self.interval), snapshot

    def _boundaries_of_one(self, slot: int, start: int, end: int) -> tuple[Int64, Int64]:
        """The tails of `boundaries` for one chunk."""
        a = self.alignment
        start = min(end, max(start, int(self.replays.stop[slot]) - 1))
        if self._tables.states:
            start = max(start, end - (self._drafts + 1))
        ends = [(end - known) // a * a for known in self._late]
        return kept_of_one(start, end, self._keep[slot].tolist() + ends, self.interval)

    # After a step.

    def commit(
        self, step: StepChanges, end: Int64, made: list[bytes] | None, ending: Ending | None = None
    ) -> Int32:
        """Make a step real up to `end` [n], and cache what it completed.

        Args:
            made, ending: keys of the segments that end here and who completes them, if a step
                with drafts knows.

        Returns:
            [m, 2] pages to copy after the step.
        """
        slots = step.slots
        ending = ending or self._ending(slots, end)
        rows = kept = NO_ROWS
        if ending.slot_list and self.layout.hybrid:
            rows, kept = self._kept(None if step.chunk_rows.size else step.batch, end, ending)
        if step.replaying:
            rows, kept = self.replays.finished(step, end, rows, kept)
        in_chunk = (NO_ROWS, NO_ROWS)
        if rows.size:
            several = (step.end - step.start)[rows] > 1
            if step.drafts is not None:  # the rings keep these tails
                several[:] = False
            in_chunk = (step.chunk_rows.searchsorted(rows[several]), kept[several])
        effects = self._tables.commit(step, end, in_chunk)
        if ending.slot_list:
            self._cache_segments(ending, step.chunk_rows.size > 0, made)
        if rows.size:
            tails = iter(effects.tails)
            where, boundaries = slots[rows].tolist(), kept.tolist()
            pages = [
                next(tails) if chunk else self._tables.tail(slot, boundary)
                for slot, boundary, chunk in zip(where, boundaries, several.tolist(), strict=True)
            ]
            self._add_points(where, boundaries, pages)
        self._tables.settle(step, effects)
        return effects.copies

    def due(self, batch: DecodeBatch) -> tuple[Ending, Int64, Int64]:
        """What a decode step completes; to be asked before its tables are committed.

        Returns:
            (whose segments end, rows that keep resume points, and at which boundaries).
        """
        ending = self._ending(batch.slots, batch.end) if self.layout.lookahead else batch.ending
        if ending.slot_list and self.layout.hybrid:
            return ending, *self._kept(batch, batch.end, ending)
        return ending, NO_ROWS, NO_ROWS

    def cache(
        self,
        batch: DecodeBatch,
        ending: Ending,
        rows: Int64,
        kept: Int64,
        made: list[bytes] | None,
    ) -> None:
        """Cache what a decode step completed, as `due` said, once its tables are committed.

        Args:
            made: keys of the segments that end, if they are known (`Sequences.feed_one`).
        """
        if ending.slot_list:
            self._cache_segments(ending, False, made)
        if rows.size:
            where, boundaries = batch.slots[rows].tolist(), kept.tolist()
            self._add_points(where, boundaries, [*map(self._tables.tail, where, boundaries)])

    def _ending(self, slots: Int64, end: Int64) -> Ending:
        """Which of the requests `slots` have segments to cache, and up to which token."""
        rows = (end - self.cached[slots] >= self._segment).nonzero()[0]
        if not rows.size:
            return NOBODY
        slots, to = slots[rows], end[rows]
        to = to - to % self._segment
        if self.layout.lookahead:
            known = np.array([*map(self.sequences.num_keys, slots.tolist())]) * self._segment
            ready = known > self.cached[slots]
            rows, slots, to = rows[ready], slots[ready], np.minimum(to, known)[ready]
        return Ending(rows, slots, slots.tolist(), to)

    def _kept(self, batch: DecodeBatch | None, end: Int64, ending: Ending) -> tuple[Int64, Int64]:
        """Rows of those `ending` segments that keep a resume point, and at which boundaries;
        `batch`: of all rows, if there are no chunks."""
        slots = ending.slots
        if batch is not None:
            if batch.age >= batch.quiet_until:
                batch.quiet_until = batch.age + self._quiet_steps(batch)
            if batch.age < batch.quiet_until:
                return NO_ROWS, NO_ROWS
        rows, kept = kept_boundaries(
            self.cached[slots], ending.end, self._keep[slots], self.interval
        )
        if rows.size and self._tables.states:
            known = kept == end[ending.rows[rows]]
            known |= kept == self._tables.snapshot_at[slots[rows]]
            rows, kept = rows[known], kept[known]
        return ending.rows[rows], kept

    def _quiet_steps(self, batch: DecodeBatch) -> int:
        """In how many steps from this one on no request of `batch` keeps a boundary."""
        cached = self.cached[batch.slots]
        if np.count_nonzero(self._keep_end[batch.slots] > cached):
            return 0
        if not self.interval:
            return FOREVER
        tokens = cached // self.interval * self.interval + self.interval - batch.start
        return (int(tokens.min()) - 1) // batch.size

    def _cache_segments(self, ending: Ending, chunks: bool, made: list[bytes] | None) -> None:
        """Cache the segments that end; one each unless there are `chunks`."""
        slots, to = ending.slots, ending.end
        if not chunks:
            self.cached[slots] = to
            self._cache_one_each(ending.slot_list, to, made)
            return
        whole, first = to // self._segment, self.cached[slots] // self._segment
        self.cached[slots] = to
        several = (whole - first > ONE).nonzero()[0]
        if several.size < len(slots):
            one = slice(None) if not several.size else whole - first == 1
            self._cache_one_each(slots[one].tolist(), to[one])
        for i in several.tolist():
            slot, begin, end = int(slots[i]), int(first[i]), int(whole[i])
            keys = self.sequences.keys(slot, begin, end)
            found = self.index.insert(self.runs[slot], keys, self._sources[slot])
            self.runs[slot], known = found
            if known:
                self._adopt(slot, begin, known)
            if self._announcer is not None and begin + known < end:
                self._announcer.segments(slot, begin + known, end)

    def _cache_one_each(self, where: list[int], to: Int64, keys: list[bytes] | None = None) -> None:
        """Cache the segment of each of the slots `where` that ends at token `to` [n]."""
        if keys is None:
            newest = self.sequences.newest_key
            ends = (to // self.alignment).tolist()
            keys = [newest(slot, end - 1) for slot, end in zip(where, ends, strict=True)]
        known = self.index.append(self.runs, where, keys, self._sources)
        for i in known:
            self._adopt(where[i], int(to[i]) // self.alignment - 1, 1)
        if self._announcer is not None:
            for i in sorted(set(range(len(where))) - set(known)):
                end = int(to[i]) // self.alignment
                self._announcer.segments(where[i], end - 1, end)

    def _adopt(self, slot: int, first: int, n: int) -> None:
        """The `n` segments from `first` on were cached by someone else: keep one copy, theirs."""
        self.index.pool.put(self._sources[slot](first, first + n).ravel())
        theirs = self.index.pages_between(self.runs[slot], first, first + n)
        self._tables.fill_dense(slot, first, theirs)

    def _add_points(self, slots: list[int], boundaries: list[int], tails: list[Int32]) -> None:
        """Keep resume points with their pages, but none where the state was not copied."""
        a, states, made = self.alignment, bool(self._tables.states), []
        for slot, boundary, pages in zip(slots, boundaries, tails, strict=True):
            if states and self._tables.snapshot_at[slot] != boundary:
                continue
            if self.index.add_point(self.runs[slot], boundary // a, pages):
                made.append(pages)
                if self._announcer is not None:
                    self._announcer.point(self.runs[slot], boundary // a)
        if made:
            self._counters["resume_points_kept"] += len(made)
            self.index.pool.hold(np.concatenate(made))
