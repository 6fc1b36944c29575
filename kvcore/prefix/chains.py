"""Cached chains of running requests, and the boundaries at which they leave resume points.

The dense blocks of a request up to the end of its run belong to the prefix index; those after it
are the request's own. The run ends at the last boundary with a known key: that is before the last
one passed while tokens, or the lookahead of the key, are unknown. In linear tables it may be ahead
of what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from ..arrays import NO_ROWS, Int32, Int64
from ..event_writer import EventWriter
from ..policies.retention import kept_boundaries, kept_of_one, resend_boundaries
from ..tables.linear import LinearTables
from ..tables.planner import StepChanges
from ..tables.rows import Tables
from .index import PrefixIndex
from .keys import KEY_BYTES
from .lookup import Match
from .replays import Replays
from .requests import Sequences
from .tree import ResumePoint, Run, Source

NONE_KEPT = NO_ROWS, NO_ROWS
Point = tuple[int, int, Int32]  # slot, boundary, pages


@dataclass(slots=True, eq=False)
class Completed:
    """Segments and resume points that a step completes; cached once its tokens are known.

    Attributes:
        slots, end: [m] int64 requests, and the token at which their last completed segment ends.
        kept: [k] requests (numbers in the step) and [k] boundaries of resume points, sorted.
        points: these, once `Chains.hold` has their pages.
    """

    slots: Int64
    end: Int64
    kept: tuple[Int64, Int64]
    points: list[Point]


NOTHING_COMPLETED = Completed(NO_ROWS, NO_ROWS, NONE_KEPT, [])


class Chains:
    """Cache segments and resume points of running requests as steps complete them.

    Args:
        interval: tokens between kept boundaries, from `policies.retention`.
        adopt: replace a request's pages by the index's where the segment was cached before.

    Attributes:
        cached: [max_requests] int64 tokens of each request that are in the index, or will be once
            the tokens of all its steps are known.
        runs, replays: end of each request's cached prefix; tokens that requests compute again.
        duplicates: slot -> own pages of segments cached before by another request, without `adopt`.
        waiting: slot -> resume points whose tokens are not known yet; pages are held and in use.
        passing: slot -> resume point at the end of its last chunk, which retention does not keep:
            others may hit it until the next chunk ends, so that equal prompts share the work.
    """

    def __init__(
        self,
        interval: int,
        sequences: Sequences,
        tables: Tables | LinearTables,
        index: PrefixIndex,
        event_writer: EventWriter | None,
        counters: dict[str, int],
        adopt: bool,
    ) -> None:
        self.interval, self.sequences, self.index = interval, sequences, index
        self._tables, self._event_writer, self._counters = tables, event_writer, counters
        self.adopt = adopt
        self.layout = layout = tables.layout
        self.alignment = layout.alignment
        self._a: Int64 = np.array(layout.alignment)
        n = sequences.max_requests
        self.cached: Int64 = np.zeros(n, dtype=np.int64)
        self.runs: list[Run] = [index.root] * n
        self.replays = Replays(n)
        self.duplicates: dict[int, list[Int32]] = {}
        self.waiting: dict[int, list[Point]] = {}
        self.passing: dict[int, ResumePoint] = {}
        self._keep: Int64 = np.zeros((n, 4), dtype=np.int64)  # `ask`; 0: none
        self._sources: list[Source] = [partial(tables.segment_pages, slot) for slot in range(n)]
        # Last tokens of a chunk that may not count towards its last boundary: rejected drafts, the
        # lookahead of the key, both or none.
        late = {0, layout.lookahead}
        self._may_lack = np.array(sorted(late | {k + layout.drafts for k in late}))

    # A request starts and ends.

    def ask(self, match: Match) -> tuple[int, ...]:
        """Tell the policy of a prompt before anything changes, as it may raise. Returns the
        boundaries that its request keeps (see `policies.retention`)."""
        hit, a = match.replay_to or match.num_tokens, self.alignment
        keep: tuple[int, ...] = ()
        if self.layout.hybrid:
            # `max_tokens` may end a replay before the dense blocks.
            junction = match.replay_to or match.dense_tokens
            keep = (*resend_boundaries(match.prompt.num_tokens, a), junction)
        self.index.policy.asked(match.prompt.keys, hit // a, [k // a for k in keep])
        return keep

    def start(self, slot: int, match: Match, run: Run, keep: tuple[int, ...]) -> None:
        """Start a request behind the hit of `match`, on the path to `run`; `keep` is from `ask`."""
        hit, a = match.replay_to or match.num_tokens, self.alignment
        self.cached[slot] = hit
        self.replays.begin(slot, match.replay_from, match.replay_to)
        self._keep[slot] = keep or 0
        index = self.index
        self.runs[slot] = run = index.end_at(run, hit // a) if hit else index.root
        index.lock(run)
        if hit:
            self._tables.fill_dense(slot, 0, index.pages_between(run, 0, run.depth))
            known = index.num_points
            point = None if match.replay_to else index.use(run)
            if match.replay_to:
                assert isinstance(self._tables, Tables)  # an append-only cache has no replays
                self._tables.load_nothing(slot)
            elif point is not None:
                self._tables.load(slot, hit, point.pages)
                self._counters["resume_points_used"] += 1
                self._counters["resume_points_kept"] += index.num_points - known

    def end(self, slot: int, computed: int, keep: bool) -> None:
        """End a request after `computed` tokens; `keep` its last boundary as a resume point."""
        run = self.runs[slot]
        cached = run.depth * self.alignment
        for *_, pages in self.waiting.pop(slot, ()):
            self.index.pool.unhold(pages)
            self.index.pool.unuse(pages)
        # Steps whose tokens are unknown may have replaced the pages of this tail.
        if keep and self.layout.hybrid and 0 < cached <= computed and cached == self.cached[slot]:
            has_state = not self._tables.states or self._tables.snapshot_at[slot] == cached
            if has_state and not self.index.renew(run):
                self._keep_tail(slot, cached)
        self._drop_passing(slot)
        self.index.unlock(run)
        self._tables.release(slot, cached, computed)
        for pages in self.duplicates.pop(slot, ()):
            self.index.pool.put(pages)
        self.runs[slot] = self.index.root

    # Before a step.

    def stops(self, slots: Int64, start: Int64, end: Int64) -> Int64:
        """Ends of chunks, at most `end` [n], at which states can be kept."""
        stops = [self._keep[slots], (end // self.alignment * self.alignment)[:, None]]
        if self.interval:
            stops.append(((start // self.interval + 1) * self.interval)[:, None])
        after = np.concatenate(stops, axis=1)
        after[after <= start[:, None]] = np.iinfo(np.int64).max
        nearest: Int64 = np.minimum(end, after.min(axis=1))
        return nearest

    def boundaries(self, slots: Int64, start: Int64, end: Int64) -> tuple[Int64, Int64]:
        """(requests, boundaries) of tails that must survive a step of `slots` [n]."""
        a, drafts = self.alignment, self.layout.drafts
        # The windows are not exact before the end of a replay.
        start = np.minimum(end, np.maximum(start, self.replays.stop[slots] - 1))
        if self._tables.states:  # no state is kept but where a step may end
            start = np.maximum(start, end - (drafts + 1))
        # The last boundary, and the last with a key, stay resumable whatever is accepted.
        ends = (end[:, None] - self._may_lack) // a * a
        always = np.concatenate([self._keep[slots], ends], axis=1)
        return kept_boundaries(start, end, always, self.interval)

    # When a step's rows count as computed.

    def completed(self, changes: StepChanges, end: Int64) -> Completed:
        requests = (end - self.cached[changes.slots] >= self._a).nonzero()[0]
        slots, to = changes.slots[requests], end[requests]
        if self.layout.lookahead:  # tokens that a key needs past its end: the prompt has them
            to = np.maximum(to, self.sequences.prompt_len[slots]) - self.layout.lookahead
            to = np.minimum(to, end[requests])
        to = to - to % self._a
        if self.layout.lookahead:
            ready = to > self.cached[slots]
            requests, slots, to = requests[ready], slots[ready], to[ready]
        kept = NONE_KEPT
        if requests.size and self.layout.hybrid:
            always, in_prompt = self._keep[slots], to < self.sequences.prompt_len[slots]
            if in_prompt.any():
                always = np.column_stack([always, np.where(in_prompt, to, 0)])
            which, kept_at = kept_boundaries(self.cached[slots], to, always, self.interval)
            if self._tables.states:
                known = kept_at == end[requests[which]]
                known |= kept_at == self._tables.snapshot_at[slots[which]]
                which, kept_at = which[known], kept_at[known]
            kept = requests[which], kept_at
        if changes.replaying:
            kept = self.replays.finished(changes, end, *kept)
        if not (requests.size or kept[0].size):
            return NOTHING_COMPLETED
        return Completed(slots, to, kept, [])

    def hold(self, slots: Int64, done: Completed, tails: Int32) -> None:
        """Hold the `tails` [k, pages_per_point] of what a step of `slots` [n] completed."""
        self.cached[done.slots] = done.end
        requests, boundaries = done.kept
        if requests.size:
            listed = slots[requests].tolist()
            points = list(zip(listed, boundaries.tolist(), tails, strict=True))
            if self._tables.states:  # the state of others was not copied
                at = self._tables.snapshot_at[listed].tolist()
                points = [p for p, known in zip(points, at, strict=True) if p[1] == known]
            done.points = points
            self._hold(points)

    def _hold(self, points: list[Point]) -> None:
        if points:
            self.index.pool.hold(np.concatenate([pages for *_, pages in points]))

    # When the tokens of a step are known.

    def publish(self, done: Completed) -> None:
        for slot, end in zip(done.slots.tolist(), done.end.tolist(), strict=True):
            self._cache(slot, end // self.alignment)
        if done.points:
            self._add_points(done.points)

    def wait(self, done: Completed) -> None:
        """Keep the resume points of a step whose tokens are not known until `publish_known`."""
        for point in done.points:
            self.waiting.setdefault(point[0], []).append(point)
        if done.points:
            self.index.pool.use_held(np.concatenate([pages for *_, pages in done.points]))

    def publish_known(self, slots: list[int], upto: list[int]) -> None:
        """Cache what steps completed of these requests, whose tokens are known `upto` now."""
        for slot, known, cached in zip(slots, upto, self.cached[slots].tolist(), strict=True):
            end = min(min(cached, known) // self.alignment, self.sequences.num_keys(slot))
            if end > self.runs[slot].depth:
                self._cache(slot, end)
        for slot in [slot for slot in slots if slot in self.waiting]:
            reached = self.runs[slot].depth * self.alignment
            points = self.waiting.pop(slot)
            due = [point for point in points if point[1] <= reached]
            if len(due) < len(points):
                self.waiting[slot] = [point for point in points if point[1] > reached]
            if due:
                self._add_points(due)
                self.index.pool.unuse(np.concatenate([pages for *_, pages in due]))

    def publish_ahead(self, slot: int, keys: bytes) -> None:
        """Cache the next segments of a request in linear tables, and the kept boundaries."""
        if not keys:
            return
        a, run = self.alignment, self.runs[slot]
        begin, end = run.depth, run.depth + len(keys) // KEY_BYTES
        self.runs[slot], known = self.index.insert(run, keys, self._sources[slot])
        if known:
            self._adopt(slot, begin, known)
        self.cached[slot] = end * a
        if self.layout.hybrid:
            always = self._keep[slot].tolist()
            _, kept = kept_of_one(begin * a, end * a, always, self.interval)
            for boundary in kept.tolist():
                self._keep_tail(slot, boundary)

    def _drop_passing(self, slot: int) -> None:
        """Drop the resume point that a request left on the way, unless another one uses it."""
        point = self.passing.pop(slot, None)
        if point in self.index.passing:
            self.index.drop_point(point)
            self.index.num_evicted_points -= 1
            self._counters["resume_points_kept"] -= 1

    def _keep_tail(self, slot: int, boundary: int) -> None:
        tail = self._tables.tail(slot, boundary)
        if tail is not None:
            self._hold([(slot, boundary, tail)])
            self._add_points([(slot, boundary, tail)], is_last=True)

    def _cache(self, slot: int, end: int) -> None:
        begin = self.runs[slot].depth
        keys, source = self.sequences.keys(slot, begin, end), self._sources[slot]
        self.runs[slot], known = self.index.insert(self.runs[slot], keys, source)
        if known:
            self._adopt(slot, begin, known)
        if self._event_writer is not None and begin + known < end:
            self._event_writer.segments(slot, begin + known, end)

    def _adopt(self, slot: int, first: int, n: int) -> None:
        """Take the cached pages of `n` segments from `first` on, which another request computed
        too; or, without `adopt`, keep its own until the request ends."""
        own = self._sources[slot](first, first + n).ravel()
        if not self.adopt:
            self.duplicates.setdefault(slot, []).append(own)
            return
        self.index.pool.put(own)
        theirs = self.index.pages_between(self.runs[slot], first, first + n)
        self._tables.fill_dense(slot, first, theirs)

    def _add_points(self, points: list[Point], is_last: bool = False) -> None:
        """Keep resume points whose pages are held; unhold those of points that exist already."""
        a, known = self.alignment, []
        for slot, boundary, pages in points:
            passing = not (is_last or boundary in self._keep[slot])
            if self.interval and boundary % self.interval == 0:
                passing = False
            point = self.index.add_point(self.runs[slot], boundary // a, pages, passing=passing)
            if point is None:
                known.append(pages)
            elif self._event_writer is not None:
                self._event_writer.point(self.runs[slot], boundary // a, slot)
            self._drop_passing(slot)
            if point is not None and passing:
                self.passing[slot] = point
        self._counters["resume_points_kept"] += len(points) - len(known)
        if known:
            self.index.pool.unhold(np.concatenate(known))
