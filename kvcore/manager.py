"""`KVCache`: requests, their block tables, and what is cached of them.

The life of a request is ``match -> admit -> (plan -> run the model -> commit)* -> release``. Every call
treats the whole batch. A request's dense blocks up to its last boundary always belong to the prefix
index (a segment that was cached before keeps its old pages); the blocks after it are its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .eviction import LRU, EvictionPolicy
from .hashing import KEY_BYTES, Prompt, as_token_ids, next_key, root_key
from .index import PrefixIndex, Run
from .pages import PagePool
from .report import Match, check_invariants, describe, limited_by
from .retention import kept_boundaries, parse_retention
from .spec import GroupSpec, Int32, Int64, Layout
from .steps import Chunk, ClassState, Decode


@dataclass(frozen=True)
class OutOfPages:
    """A plan that does not fit; nothing was changed.

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


@dataclass(frozen=True)
class StepPlan:
    """One step of a batch, as the kernels need it.

    Attributes:
        slots: [n] int64 request slots, in batch order.
        num_new_tokens: [n] int64.
        cu_seqlens_q: [n + 1] int32 prefix sums of num_new_tokens.
        seq_lens: [n] int32 tokens after the step.
        positions: [total] int64.
        slot_mapping: [num_groups, total] int64, page * block_size + row; -1 = do not write.
    """

    slots: Int64
    num_new_tokens: Int64
    cu_seqlens_q: Int32
    seq_lens: Int32
    positions: Int64
    slot_mapping: Int64
    _start: Int64 = field(repr=False)
    _version: int = field(repr=False)
    _num_pages: int = field(repr=False)
    _decode_rows: Int64 = field(repr=False)
    _decode_slots: Int64 = field(repr=False)
    _chunk_rows: Int64 = field(repr=False)
    _decodes: list[Decode] = field(repr=False)
    _chunks: list[Chunk] = field(repr=False)


class KVCache:
    """Retention-aware allocator of one page pool for all cache groups of a model.

    Args:
        groups: the cache groups; tables are numbered in this order.
        num_pages: pages of the pool, page 0 (never owned) included.
        max_requests: requests admitted at once.
        max_model_len: longest sequence, tokens.
        retention: ``"latest"``, ``"dense"``, or an interval in tokens (see `retention`).
        hash_seed: start of every key chain; processes with equal seeds agree on keys.
        enable_caching: False never caches and never hits.
        max_draft_tokens: tokens of a step that `commit(accepted=)` may reject or `rollback` take back.
        policy: eviction policy; `LRU` by default.
        track_deltas: collect table changes for `take_deltas`.

    Raises:
        ValueError: an argument is out of range, page sizes differ, or retention is not aligned.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        *,
        num_pages: int,
        max_requests: int,
        max_model_len: int,
        retention: str | int = "latest",
        hash_seed: bytes = b"",
        enable_caching: bool = True,
        max_draft_tokens: int = 0,
        policy: EvictionPolicy | None = None,
        track_deltas: bool = False,
    ) -> None:
        for name, value, low in (
            ("max_requests", max_requests, 1),
            ("max_model_len", max_model_len, 1),
            ("max_draft_tokens", max_draft_tokens, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
                raise ValueError(f"{name}: expected an int >= {low}, got {value!r}")
        self.layout = Layout(groups, max_model_len, max_draft_tokens)
        self.alignment = self.layout.alignment
        self.interval = parse_retention(retention, self.alignment)
        self.retention = retention
        self.max_requests, self.max_model_len = max_requests, max_model_len
        self.max_draft_tokens = max_draft_tokens
        self.enable_caching = enable_caching
        self.hash_seed = hash_seed
        root_key(hash_seed, b"")  # refuses a seed that is not bytes
        self.hybrid = bool(self.layout.windows)
        self.pool = PagePool(num_pages)
        self.index = PrefixIndex(
            self.pool, self.layout.pages_per_segment, self.hybrid, policy or LRU()
        )
        self.tables: Int32 = np.zeros((max_requests, self.layout.num_columns), dtype=np.int32)
        self.num_groups = len(self.layout.groups)
        self._next_slots: Int64 = np.zeros((max_requests, self.num_groups), dtype=np.int64)
        self.classes: list[ClassState] = []
        self._class_order: Int64 = np.concatenate([c.groups for c in self.layout.classes])
        done = 0
        for c in self.layout.classes:
            part = self._next_slots[:, done : done + c.num_groups]
            done += c.num_groups
            self.classes.append(ClassState(c, self.tables, part, self.alignment, self.pool))
        self.num_computed: Int64 = np.zeros(max_requests, dtype=np.int64)
        self.active = np.zeros(max_requests, dtype=bool)
        self._prompt_len: Int64 = np.zeros(max_requests, dtype=np.int64)
        self._cached: Int64 = np.zeros(max_requests, dtype=np.int64)  # tokens in the index
        self._rollback_floor: Int64 = np.zeros(max_requests, dtype=np.int64)
        self._keep: Int64 = np.zeros((max_requests, 3), dtype=np.int64)  # replay x2, junction
        self._open_tokens: Int32 = np.zeros((max_requests, self.alignment), dtype=np.int32)
        self._runs: list[Run] = [self.index.root] * max_requests
        self._prompts: list[Prompt | None] = [None] * max_requests
        self._last_keys: list[bytes] = [b""] * max_requests
        self._slots: dict[Hashable, int] = {}
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._mark: Int64 = np.zeros(max_requests, dtype=np.int64)
        self._checked: Int64 | None = None  # slots that `plan` found valid and distinct
        self._version = 0
        self._track_deltas = track_deltas
        self._deltas: list[tuple[Int64, Int32]] = []
        self.counters = {
            "requests": 0, "prompt_tokens": 0, "hit_tokens": 0, "tokens_without_resume_point": 0,
            "resume_points_kept": 0, "resume_points_used": 0,
        }  # fmt: skip

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
        return len(self._free_slots)

    def table(self, group: int) -> Int32:
        """Block table of `group`: [max_requests, width] int32 view; column = block % width.

        Between `plan` and `commit` it describes the context before the step. Entries at or past a
        request's length, and of a window group those behind its window, are not to be read.
        """
        offset, width = self.layout.columns(group)
        return self.tables[:, offset : offset + width]

    def slot_of(self, request_id: Hashable) -> int:
        """Slot of an admitted request.

        Raises:
            ValueError: the id is unknown.
        """
        try:
            return self._slots[request_id]
        except KeyError:
            raise ValueError(
                f"request_id: expected an admitted request, got {request_id!r}"
            ) from None

    # Life of a request.

    def match(self, token_ids: Any, *, salt: bytes = b"") -> Match:
        """Longest cached prefix of a prompt. Changes nothing.

        Args:
            token_ids: [num_tokens] ints in [0, 2**31), or the `prompt` of an earlier match (not hashed
                again; `salt` is not looked at).
            salt: tenant, adapter or image identity; requests with different salts never share.

        Returns:
            Match; at least the last token of the prompt is left to compute.

        Raises:
            ValueError: empty or longer than max_model_len, not integers, ids out of range.
        """
        prompt = token_ids
        if not isinstance(prompt, Prompt):
            prompt = Prompt(token_ids, self.alignment, root_key(self.hash_seed, salt))
        if prompt.num_tokens > self.max_model_len:
            raise ValueError(
                f"token_ids: expected at most max_model_len = {self.max_model_len} tokens, "
                f"got {prompt.num_tokens}"
            )
        return self._match(prompt)[0]

    def _match(self, prompt: Prompt) -> tuple[Match, Run]:
        limit = prompt.num_segments if self.enable_caching else 0
        run, dense = self.index.find(prompt.keys, limit)
        usable = (prompt.num_tokens - 1) // self.alignment
        hit = self.index.resumable(run, dense, usable)
        reason = limited_by(self.enable_caching, prompt.num_segments, usable, dense, hit)
        a = self.alignment
        per_group = {g.name: (dense if g.kind == "dense" else hit) * a for g in self.layout.groups}
        return Match(hit * a, dense * a, reason, per_group, prompt), run

    def admit(self, request_id: Hashable, match: Match) -> int:
        """Give a request a slot and the pages of its hit (looked up again). Allocates nothing.

        Args:
            request_id: any hashable that is not admitted now.
            match: from `match`.

        Returns:
            The slot; ``num_computed[slot]`` tokens are already valid.

        Raises:
            ValueError: the id is admitted already, or all slots are taken.
        """
        if request_id in self._slots:
            raise ValueError(f"request_id: expected a new id, got {request_id!r}, already admitted")
        if not self._free_slots:
            raise ValueError(f"request_id: all max_requests = {self.max_requests} slots are taken")
        prompt = match.prompt
        match, run = self._match(prompt)
        self._changed()
        self._checked = None
        slot = self._slots[request_id] = self._free_slots.pop()
        hit = match.num_tokens
        self.active[slot] = True
        self.num_computed[slot] = self._cached[slot] = self._rollback_floor[slot] = hit
        self._prompt_len[slot] = prompt.num_tokens
        self._prompts[slot], self._last_keys[slot] = prompt, prompt.last_key
        self._open_tokens[slot, : len(prompt.tail)] = prompt.tail
        a = self.alignment
        self._keep[slot] = 0
        if self.hybrid and self.enable_caching:
            replay = ((prompt.num_tokens - 1) // a * a, prompt.num_tokens // a * a)
            self._keep[slot] = (*replay, match.dense_tokens)
        if hit:
            run = self.index.end_at(run, hit // a)
            self.index.lock(run)
            self._load(slot, run)
        else:
            run = self.index.root
        self._runs[slot] = run
        self.counters["requests"] += 1
        self.counters["prompt_tokens"] += prompt.num_tokens
        self.counters["hit_tokens"] += hit
        if match.limited_by == "resume-point":
            self.counters["tokens_without_resume_point"] += match.dense_tokens - hit
        return slot

    def _load(self, slot: int, run: Run) -> None:
        """Fill the tables of `slot` with what the path to the end of `run` caches."""
        self._fill_dense(slot, 0, self.index.pages_between(run, 0, run.depth))
        point = self.index.use(run)
        if point is None:
            return
        self.counters["resume_points_used"] += 1
        self.pool.use(point.pages[point.pages != 0])
        slots = np.array([slot])
        for state in self.classes:
            c = state.spec
            if c.is_window and c.tail:
                pages = point.pages[c.tail_offset : c.tail_offset + c.num_groups * c.tail]
                blocks = run.depth * c.per_segment - np.arange(c.tail, 0, -1)
                valid = blocks >= 0
                where = np.repeat(slots, int(valid.sum()))
                pages = pages.reshape(c.num_groups, c.tail).T[valid]
                self._delta(where, state.write(where, blocks[valid], pages), pages)

    def _fill_dense(self, slot: int, first: int, pages: Int32) -> None:
        """Set the dense table entries of segments from `first` on to `pages` [n, pages_per_segment]."""
        for state in self.classes:
            c = state.spec
            if not c.is_window:
                part = pages[:, c.segment_offset : c.segment_offset + c.num_groups * c.per_segment]
                part = part.reshape(len(pages), c.num_groups, c.per_segment).transpose(0, 2, 1)
                part = part.reshape(-1, c.num_groups)
                blocks = first * c.per_segment + np.arange(len(part))
                where = np.full(len(part), slot)
                self._delta(where, state.write(where, blocks, part), part)

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
        slots = np.asarray(slots, dtype=np.int64)
        counts = np.asarray(num_new_tokens, dtype=np.int64)
        max_count = self._check_step(slots, counts)
        n = len(slots)
        start = self.num_computed[slots]
        end = start + counts
        if end.max() > self.max_model_len:
            i = int(end.argmax())
            raise ValueError(
                f"num_new_tokens: slot {slots[i]} would reach {end[i]} tokens, "
                f"expected at most max_model_len = {self.max_model_len}"
            )
        if max_count == 1:
            decode_rows, chunk_rows = np.arange(n), slots[:0]
        else:
            decode_rows, chunk_rows = (counts == 1).nonzero()[0], (counts > 1).nonzero()[0]
        decodes, chunks = [], []
        if len(decode_rows):
            some = start if max_count == 1 else start[decode_rows]
            decodes = [state.plan_decode(some) for state in self.classes]
        if len(chunk_rows):
            chunks = self._plan_chunks(slots[chunk_rows], start[chunk_rows], end[chunk_rows])
        sizes = [len(d.starts) * k for d, k in zip(decodes, self.layout.class_sizes, strict=False)]
        sizes += [
            int(p.is_new.sum()) * k for p, k in zip(chunks, self.layout.class_sizes, strict=False)
        ]
        needed = sum(sizes)
        if needed > self.pool.num_free:
            if needed > self.pool.num_free + self.index.num_evictable:
                return self._out_of_pages(needed, decodes, chunks)
            self.index.evict(needed - self.pool.num_free)
        pages = self.pool.peek(needed)
        if chunks:
            cu = np.zeros(n + 1, dtype=np.int32)
            np.cumsum(counts, out=cu[1:])
            positions = np.arange(cu[-1]) + np.repeat(start - cu[:-1], counts)
            mapping = np.full((self.num_groups, len(positions)), -1, dtype=np.int64)
        else:
            cu, positions = np.arange(n + 1, dtype=np.int32), start
            mapping = np.empty((self.num_groups, n), dtype=np.int64)
        rows = slots[:0]
        if decodes:
            where = slots if max_count == 1 else slots[decode_rows]
            rows, pages = self._fill_decodes(decodes, where, pages)
            mapping[self._class_order[:, None], cu[decode_rows]] = rows.T
        for chunk, state, size in zip(chunks, self.classes, sizes[len(decodes) :], strict=False):
            offset = cu[chunk_rows].astype(np.int64)
            tokens, where = state.fill_chunk(
                chunk, slots[chunk_rows], start[chunk_rows], end[chunk_rows], offset, pages[:size]
            )
            mapping[state.spec.groups[:, None], tokens] = where
            pages = pages[size:]
        return StepPlan(
            slots, counts, cu, end.astype(np.int32), positions, mapping,
            start, self._version, needed, decode_rows, rows, chunk_rows, decodes, chunks,
        )  # fmt: skip

    def _fill_decodes(
        self, decodes: list[Decode], slots: Int64, pages: Int32
    ) -> tuple[Int64, Int32]:
        """Slots of one new token of each of `slots`: ([n, num_groups] in class order, unused pages)."""
        rows = self._next_slots[slots]
        column = 0
        for decode, state in zip(decodes, self.classes, strict=True):
            k, n = state.spec.num_groups, len(decode.starts)
            if n:
                decode.pages, pages = pages[: n * k].reshape(n, k), pages[n * k :]
                rows[decode.starts, column : column + k] = decode.pages * np.int64(
                    state.spec.block_size
                )
            column += k
        return rows, pages

    def _check_step(self, slots: Int64, counts: Int64) -> int:
        """Refuse bad arguments of `plan`; returns the largest count."""
        n = len(slots)
        if slots.ndim != 1 or counts.shape != slots.shape or not n:
            raise ValueError(
                f"slots, num_new_tokens: expected two vectors of one length > 0, "
                f"got {list(slots.shape)} and {list(counts.shape)}"
            )
        if int(counts.min()) < 1:
            raise ValueError(f"num_new_tokens: expected at least 1 each, got {counts.tolist()}")
        if self._checked is None or not np.array_equal(slots, self._checked):
            if int(slots.min()) < 0 or int(slots.max()) >= self.max_requests:
                raise ValueError(
                    f"slots: expected 0..{self.max_requests - 1}, got {slots.tolist()}"
                )
            if not self.active[slots].all():
                bad = slots[~self.active[slots]].tolist()
                raise ValueError(f"slots: expected slots of admitted requests, got {bad}")
            every = np.arange(n)
            self._mark[slots] = every
            if (self._mark[slots] != every).any():
                raise ValueError(f"slots: expected distinct slots, got {slots.tolist()}")
            self._checked = slots.copy()
        return int(counts.max())

    def _kept(self, slots: Int64, start: Int64, end: Int64) -> tuple[Int64, Int64]:
        """Boundaries in (start, end] that get a resume point: (rows, boundaries)."""
        if not (self.hybrid and self.enable_caching):
            return slots[:0], slots[:0]
        return kept_boundaries(start, end, self._keep[slots], self.interval)

    def _plan_chunks(self, slots: Int64, start: Int64, end: Int64) -> list[Chunk]:
        rows, kept = self._kept(slots, start, end)
        if self.hybrid and self.enable_caching:
            # The last boundary stays resumable in the ring, whatever part of the drafts is accepted.
            a = self.alignment
            last = np.stack([(end - self.max_draft_tokens) // a * a, end // a * a], axis=1)
            always = np.concatenate([self._keep[slots], last], axis=1)
            rows, kept = kept_boundaries(start, end, always, self.interval)
        return [state.plan_chunk(start, end, rows, kept) for state in self.classes]

    def _out_of_pages(self, needed: int, decodes: list[Decode], chunks: list[Chunk]) -> OutOfPages:
        per_class = [0] * len(self.classes)
        for i, d in enumerate(decodes):
            per_class[i] += len(d.starts)
        for i, p in enumerate(chunks):
            per_class[i] += int(p.is_new.sum())
        per_group = {
            self.layout.groups[g].name: count
            for state, count in zip(self.classes, per_class, strict=True)
            for g in state.spec.groups.tolist()
        }
        worst = max(per_group, key=lambda name: per_group[name])
        return OutOfPages(needed, self.pool.num_free, self.index.num_evictable, worst, per_group)

    def commit(self, plan: StepPlan, input_ids: Any, accepted: Any = None) -> None:
        """Make a planned step real: its rows become context, whole segments become findable.

        Args:
            plan: the newest plan; nothing else was called since.
            input_ids: [total] ints, the tokens whose rows the step computed, in the plan's order.
            accepted: [n] ints, how many of each request's new tokens stay; all by default. At most
                max_draft_tokens of a request may be rejected.

        Raises:
            ValueError: the plan is not the newest, or an argument has the wrong size. Nothing changed.
        """
        ids = as_token_ids("input_ids", input_ids)
        slots, start = plan.slots, plan._start
        if plan._version != self._version:
            raise ValueError("plan: expected the newest plan, got one made before another change")
        if len(ids) != len(plan.positions):
            raise ValueError(
                f"input_ids: expected {len(plan.positions)} tokens as planned, got {len(ids)}"
            )
        taken = plan.num_new_tokens
        if accepted is not None:
            taken = np.asarray(accepted, dtype=np.int64)
            low = np.maximum(1, plan.num_new_tokens - self.max_draft_tokens)
            if (
                taken.shape != slots.shape
                or (taken < low).any()
                or (taken > plan.num_new_tokens).any()
            ):
                raise ValueError(
                    f"accepted: expected between {low.tolist()} and {plan.num_new_tokens.tolist()}, "
                    f"got {taken.tolist()}"
                )
        end = start + taken
        self._changed()
        self.pool.take(plan._num_pages)
        gone: list[Int32] = []
        tails: list[Int32] = []
        kept_rows = kept = slots[:0]
        if plan._chunks:
            some = plan._chunk_rows
            kept_rows, kept = self._kept(slots[some], start[some], end[some])
            tails, gone = self._commit_chunks(plan, slots[some], end[some], kept_rows, kept)
        if plan._decodes:
            some = plan._decode_rows
            where, begin = (slots, start) if len(some) == len(slots) else (slots[some], start[some])
            self._next_slots[where] = plan._decode_slots + 1
            for decode, state in zip(plan._decodes, self.classes, strict=True):
                if len(decode.starts):
                    self._delta(*state.commit_decode(decode, where, begin))
        self.num_computed[slots] = end
        if self.max_draft_tokens:
            floor = np.maximum(self._rollback_floor[slots], end - self.max_draft_tokens)
            self._rollback_floor[slots] = floor
        if self.enable_caching:
            self._cache(plan, ids, end)
            chunk_slots = slots[plan._chunk_rows]
            for i, row in enumerate(kept_rows.tolist()):
                pages = np.concatenate([t[i].ravel() for t in tails])
                self._add_point(int(chunk_slots[row]), int(kept[i]), pages)
        for pages in gone:
            self.pool.unuse(pages)
        for chunk, state in zip(plan._chunks, self.classes, strict=False):
            if state.spec.is_window:  # blocks that no ring and no resume point took
                assert chunk.pages is not None
                fresh = chunk.pages[chunk.is_new].ravel()
                self.pool.put(fresh[(self.pool.users[fresh] == 0) & (self.pool.holds[fresh] == 0)])

    def _commit_chunks(
        self, plan: StepPlan, slots: Int64, end: Int64, kept_rows: Int64, kept: Int64
    ) -> tuple[list[Int32], list[Int32]]:
        """Tables of the chunk requests; returns the tails of kept boundaries and pages that left rings."""
        tails, gone = [], []
        for chunk, state in zip(plan._chunks, self.classes, strict=True):
            if state.spec.is_window:
                tails.append(state.tails(chunk, slots, kept_rows, kept))
                where, columns, pages, left = state.commit_window(chunk, slots, end)
                gone.append(left)
            else:
                where, columns, pages = state.commit_dense(chunk, slots, end)
            self._delta(where, columns, pages)
            state.reopen(slots, end)
        return tails, gone

    def _cache(self, plan: StepPlan, ids: Int32, end: Int64) -> None:
        """Feed new tokens to the key chains and cache the segments that became whole."""
        slots, start, a = plan.slots, plan._start, self.alignment
        rows = plan._decode_rows
        if len(rows):
            whole = len(rows) == len(slots)
            where, at = (slots, start) if whole else (slots[rows], start[rows])
            tokens = ids if whole else ids[plan.cu_seqlens_q[rows]]
            new = at >= self._prompt_len[where]
            if not new.all():
                where, at, tokens = where[new], at[new], tokens[new]
            self._open_tokens[where, at % a] = tokens
        for row in plan._chunk_rows.tolist():
            slot, first = int(slots[row]), int(plan.cu_seqlens_q[row])
            skip = max(0, int(self._prompt_len[slot] - start[row]))
            tokens = ids[first + skip : first + int(end[row] - start[row])]
            self._feed(slot, int(start[row]) + skip, tokens)
        closing = (end - self._cached[slots] >= a).nonzero()[0]
        if not len(plan._chunk_rows):
            self._close_decodes(slots[closing], end[closing])
        elif len(closing):
            for row in closing.tolist():
                self._close(int(slots[row]), int(end[row]) // a * a)
            one = closing[plan.num_new_tokens[closing] == 1]
            self._keep_decodes(slots[one], end[one])

    def _close_decodes(self, slots: Int64, end: Int64) -> None:
        """Cache the segment that each of `slots` completed with one token; `end` are boundaries."""
        if not len(slots):
            return
        segments = end // self.alignment - 1
        pages = self._segment_pages(slots, segments)
        tokens = self._open_tokens[slots].tobytes()
        size = 4 * self.alignment
        for i, slot in enumerate(slots.tolist()):
            segment, prompt = int(segments[i]), self._prompts[slot]
            assert prompt is not None
            if segment < prompt.num_segments:
                key = prompt.keys[segment * KEY_BYTES : (segment + 1) * KEY_BYTES]
            else:
                key = next_key(self._last_keys[slot], tokens[i * size : (i + 1) * size])
                self._last_keys[slot] = key
            run, known = self.index.append(self._runs[slot], key, pages[i])
            self._runs[slot] = run
            if known:
                self._adopt(slot, segment, pages[i : i + 1])
        self._cached[slots] = end
        self._keep_decodes(slots, end)

    def _keep_decodes(self, slots: Int64, end: Int64) -> None:
        """Resume points that retention wants at `end` [n], boundaries reached with one token."""
        if not self.interval and (end > self._prompt_len[slots]).all():
            return
        rows, kept = self._kept(slots, end - 1, end)
        for row, boundary in zip(rows.tolist(), kept.tolist(), strict=True):
            slot = int(slots[row])
            self._add_point(slot, boundary, self._ring_tail(slot, boundary))

    def _segment_pages(self, slots: Int64, segments: Int64) -> Int32:
        """Dense pages of one segment of each of `slots`: [n, pages_per_segment]."""
        parts = []
        for state in self.classes:
            c = state.spec
            if not c.is_window:
                if c.per_segment == 1:
                    parts.append(state.table[slots, :, segments])
                else:
                    blocks = (segments * c.per_segment)[:, None] + np.arange(c.per_segment)
                    parts.append(state.read(slots, blocks).reshape(len(slots), -1))
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts, axis=1) if parts else np.empty((len(slots), 0), np.int32)

    def _adopt(self, slot: int, first: int, pages: Int32) -> None:
        """Segments from `first` on were cached by someone else: keep one copy, theirs."""
        self.pool.put(pages.ravel())
        theirs = self.index.pages_between(self._runs[slot], first, first + len(pages))
        self._fill_dense(slot, first, theirs)

    def _feed(self, slot: int, start: int, tokens: Int32) -> None:
        """Append tokens past the prompt to the open segment; segments before the last are cached here."""
        a = self.alignment
        while len(tokens):
            at = start % a
            part, tokens = tokens[: a - at], tokens[a - at :]
            self._open_tokens[slot, at : at + len(part)] = part
            start += len(part)
            if start % a == 0 and len(tokens):
                self._close(slot, start)

    def _close(self, slot: int, to: int) -> None:
        """Cache the segments of `slot` up to token `to`, a boundary."""
        first, last = int(self._cached[slot]) // self.alignment, to // self.alignment
        prompt = self._prompts[slot]
        assert prompt is not None
        keys = prompt.keys[first * KEY_BYTES : last * KEY_BYTES]
        if last > prompt.num_segments:
            key = next_key(self._last_keys[slot], self._open_tokens[slot].tobytes())
            self._last_keys[slot] = key
            keys += key
        segments = np.arange(first, last)
        pages = self._segment_pages(np.full(last - first, slot), segments)
        self._runs[slot], known = self.index.insert(self._runs[slot], keys, pages)
        if known:
            self._adopt(slot, first, pages[:known])
        self._cached[slot] = to

    def _ring_tail(self, slot: int, boundary: int) -> Int32:
        """Pages of the tail of `boundary` from the rings of `slot`: [pages_per_point]."""
        tails, slots = [], np.array([slot])
        for state in self.classes:
            c = state.spec
            if c.is_window:
                blocks = boundary // c.block_size - np.arange(c.tail, 0, -1)
                tails.append(state.read(slots, blocks[None, :]).ravel())
        return np.concatenate(tails)

    def _add_point(self, slot: int, boundary: int, pages: Int32) -> None:
        if self.index.add_point(self._runs[slot], boundary // self.alignment, pages):
            self.counters["resume_points_kept"] += 1

    def rollback(self, slot: int, num_tokens: int) -> None:
        """Forget the last computed tokens of a request.

        Args:
            slot: from `admit`.
            num_tokens: how many, at least 1.

        Raises:
            ValueError: the slot is unknown, or the tokens are cached already, or more than
                max_draft_tokens would be taken back from the furthest position reached.
        """
        slot = int(slot)
        if not (0 <= slot < self.max_requests and self.active[slot]):
            raise ValueError(f"slot: expected the slot of an admitted request, got {slot}")
        old = int(self.num_computed[slot])
        low = max(int(self._rollback_floor[slot]), int(self._cached[slot]))
        if not self.max_draft_tokens:
            low = old
        new = old - int(num_tokens)
        if num_tokens < 1 or new < low:
            raise ValueError(
                f"num_tokens: expected 1..{old - low} (computed {old}, last boundary "
                f"{self._cached[slot]}, max_draft_tokens {self.max_draft_tokens}), got {num_tokens}"
            )
        self._changed()
        slots = np.array([slot])
        for state in self.classes:
            size = state.spec.block_size
            blocks = np.arange(-(-new // size), -(-old // size))
            if len(blocks):
                pages = state.read(slots, blocks[None, :]).ravel()
                if state.spec.is_window:
                    self.pool.unuse(pages)
                else:
                    self.pool.put(pages)
                state.write(np.repeat(slots, len(blocks)), blocks, np.zeros(1, np.int32))
            state.reopen(slots, np.array([new]))
        self.num_computed[slot] = new

    def release(self, request_id: Hashable) -> None:
        """End a request: finished, aborted or preempted. What is cached of it stays findable.

        The last boundary it reached becomes a resume point, so that the next turn of a chat, or the same
        request after preemption, resumes there.

        Raises:
            ValueError: the id is unknown.
        """
        slot = self.slot_of(request_id)
        self._changed()
        self._checked = None
        computed, cached = int(self.num_computed[slot]), int(self._cached[slot])
        if self.hybrid and cached and self.enable_caching:
            self._add_point(slot, cached, self._ring_tail(slot, cached))
        for state in self.classes:
            c = state.spec
            if c.is_window:
                self.pool.unuse(state.table[slot].ravel())
                state.table[slot] = 0
            else:
                own = state.table[slot, :, cached // c.block_size : -(-computed // c.block_size)]
                self.pool.put(own.ravel())
                state.table[slot, :, : -(-computed // c.block_size)] = 0
        self.index.unlock(self._runs[slot])
        self._runs[slot], self._prompts[slot] = self.index.root, None
        self.active[slot] = False
        self.num_computed[slot] = self._cached[slot] = 0
        del self._slots[request_id]
        self._free_slots.append(slot)

    # Device copies.

    def take_deltas(self) -> tuple[Int64, Int32]:
        """Table entries that changed since the last call, for a copy of `tables` on a device.

        Returns:
            (flat indices into `tables` [m] int64, values [m] int32), later changes of an entry last.

        Raises:
            ValueError: the cache was made without track_deltas.
        """
        if not self._track_deltas:
            raise ValueError(
                "track_deltas: expected True at construction to take deltas, got False"
            )
        deltas, self._deltas = self._deltas, []
        if not deltas:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        return np.concatenate([d[0] for d in deltas]), np.concatenate([d[1] for d in deltas])

    def _delta(self, slots: Int64, columns: Int64, pages: Int32) -> None:
        if self._track_deltas and pages.size:
            base = slots * self.layout.num_columns
            flat = columns + (base[:, None] if columns.ndim == 2 else base)
            self._deltas.append((flat.ravel(), pages.ravel().astype(np.int32)))

    def _changed(self) -> None:
        self._version += 1
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
