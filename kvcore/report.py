"""What a look-up found and why, what a cache can reuse, and the recount of all pages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from .prefix.index import Run
from .prefix.keys import Prompt
from .spec import Int32, Int64
from .tables.state import SNAPSHOT

if TYPE_CHECKING:
    from .cache import KVCache

Reason = Literal[
    "caching-disabled", "prompt-too-short", "prompt-end", "not-cached", "diverged", "resume-point"
]

_EXPLANATIONS: dict[Reason, str] = {
    "caching-disabled": "caching is disabled",
    "prompt-too-short": "the prompt has no whole segment before its last token",
    "prompt-end": "every segment before the last token was found",
    "not-cached": "nothing of this prompt is cached",
    "diverged": "the cached chain ends, or differs from the prompt, there",
    "resume-point": "dense blocks reach {dense}, but no resume point does",
}


@dataclass(frozen=True)
class Match:
    """Result of a look-up.

    Attributes:
        num_tokens: tokens that need not be computed, a multiple of the alignment.
        dense_tokens: tokens whose dense blocks are cached.
        limited_by: why the hit is not longer (see `explain`).
        per_group: tokens that each group could serve.
        prompt: the hashed prompt, to look up again.
        replay_from, replay_to: where no resume point is near, the tokens from `replay_from` on may be computed once more
            to restore the windows at `replay_to`, all of whose dense blocks are cached; None where that saves nothing.
    """

    num_tokens: int
    dense_tokens: int
    limited_by: Reason
    per_group: dict[str, int]
    prompt: Prompt
    replay_from: int | None = None
    replay_to: int | None = None

    @property
    def num_saved_tokens(self) -> int:
        """Tokens that an admitted request does not compute."""
        return self.num_tokens if self.replay_from is None else self.replay_from

    def explain(self) -> str:
        """One sentence: hit length and what limited it."""
        why = _EXPLANATIONS[self.limited_by].format(dense=self.dense_tokens)
        text = f"{self.num_tokens} of {self.prompt.num_tokens} tokens: {why}"
        if self.replay_from is not None:
            text += f"; replayed from {self.replay_from}"
        return text


def limited_by(enabled: bool, usable: int, dense: int, hit: int) -> Reason:
    """Why a hit of `hit` segments is not longer; all in segments (see `KVCache._match`)."""
    if not enabled:
        return "caching-disabled"
    if usable == 0:
        return "prompt-too-short"
    if hit == usable:
        return "prompt-end"
    if dense > hit:
        return "resume-point"
    return "diverged" if dense else "not-cached"


def describe(cache: KVCache) -> str:
    """What `cache` can reuse: alignment, smallest prefix, retention, cost of a resume point."""
    layout, a = cache.layout, cache.alignment
    mib = layout.page_bytes / 2**20
    retention = f"every {cache.interval} tokens" if cache.interval else "none besides"
    lines = [
        f"{cache.num_pages} pages of {mib:.3g} MiB ({cache.num_pages * mib / 1024:.3g} GiB a layer slot), "
        f"{cache.max_requests} requests of up to {cache.max_model_len} tokens",
        f"hits are multiples of {a} tokens; smallest cacheable prefix {a} tokens "
        f"(a prompt of at least {a + 1}), keys: SHA-256, one per {a} tokens",
    ]
    if not cache.enable_caching:
        lines.append("prefix caching is off")
    elif cache.hybrid:
        lines.append(
            f"resume points: both replay boundaries of a prompt, junctions, the end of a request; "
            f"retention {cache.retention!r}: {retention}; "
            f"{layout.pages_per_point} pages each ({layout.pages_per_point * mib:.3g} MiB)"
        )
        if cache.index.span > 1:
            lines.append(
                f"resume points at most {min(cache.index.span * a, cache.max_model_len)} tokens apart also hold what the "
                f"boundaries between them need"
            )
    for g in layout.groups:
        pages = f", {g.pages_per_block} pages a block" if g.pages_per_block > 1 else ""
        ahead = f", keys cover {g.lookahead} tokens ahead" if g.lookahead else ""
        if g.kind == "dense":
            lines.append(f"  {g.name}: dense, {g.block_size} tokens a block{pages}{ahead}")
        elif g.kind == "state":
            lines.append(f"  {g.name}: state, snapshots at multiples of {g.block_size}{pages}")
        else:
            lines.append(
                f"  {g.name}: window {g.sliding_window}, {g.block_size} tokens a block{pages}, "
                f"{g.tail_blocks} blocks to resume{ahead}"
            )
    return "\n".join(lines)


def check_invariants(cache: KVCache) -> None:
    """Recount pages, holders and locks of `cache` from scratch.

    Raises:
        AssertionError: any count or owner is wrong.
    """
    pool, index, a = cache.pool, cache.index, cache.alignment
    cache._tables.check_batch(cache.num_computed)
    owners: list[Int32 | Int64] = [pool.free_pages()]
    users: list[Int32 | Int64] = []
    holds: list[Int32 | Int64] = []
    locks: Counter[int] = Counter()
    pins: Counter[int] = Counter()
    segments = locked = points = pinned = 0
    for entry in index.pins:
        pinned_run = entry if isinstance(entry, Run) else entry.run
        assert pinned_run is not None and pinned_run.parent is not None, "a pin of what is gone"
        assert pinned_run.depth == entry.depth
        for node in index.path(pinned_run):
            pins[id(node)] += 1
    for slot in np.flatnonzero(cache.sequences.active).tolist():
        computed, cached = int(cache.num_computed[slot]), int(cache._chains.cached[slot])
        replaying = computed < int(cache._chains.replay_to[slot])
        assert (cached <= computed or replaying) and cached % a == 0
        lowest = min(computed, cache.lowest_rollback(slot))
        run = cache._chains.runs[slot]
        assert run.depth * a == cached, "a request's prefix ends at the end of its run"
        for node in index.path(run):
            locks[id(node)] += 1
        path_pages = np.concatenate([index.root.look(), *(r.look() for r in index.path(run))])
        for block in cache._tables.windows:
            c = block.spec
            users.append(block.table[slot].ravel())
            low = max(
                int(cache._chains.replay_from[slot]), lowest - (c.spec.sliding_window or 1) + 1
            )
            low = max(0, low) // c.block_size
            visible = np.arange(low, -(-computed // c.block_size))
            live = block.table[slot][:, visible % c.width]
            assert (live != 0).all(), "a block inside the window has no page"
        snapshot_at = int(cache._tables.snapshot_at[slot])
        assert snapshot_at <= computed and snapshot_at % a == 0, "a snapshot of what was taken back"
        for state in cache._tables.states:
            users.append(state.table[slot].ravel())
            assert not snapshot_at or state.table[slot, :, SNAPSHOT].all(), "a snapshot on no page"
        for block in cache._tables.dense:
            c = block.spec
            row = block.table[slot, :, : -(-max(cached, computed) // c.block_size)]
            assert (row != 0).all(), "a computed dense block has no page"
            whole = cached // c.block_size
            owners.append(row[:, whole:].ravel())
            part = path_pages[:, c.segment_offset :][:, : c.num_tables * c.per_segment]
            part = part.reshape(-1, c.num_tables, c.per_segment).transpose(1, 0, 2)
            assert (part.reshape(c.num_tables, -1) == row[:, :whole]).all()
    for run in index.runs():
        segments += run.length
        locked += run.length if run.locks else 0
        assert run.locks == locks[id(run)], "locks count the running requests below"
        assert run.pins == pins[id(run)], "pins count the pinned entries below"
        pinned += run.length if run.pins else 0
        assert run.length > 0 and run.parent is not None and run.start == run.parent.depth
        assert run.parent.children[run.segment_key(0)] is run
        assert len(run.keys) == 32 * run.length
        assert run.locks or run.source is None, "the source of a run has left"
        owners.append(run.look().ravel())
        assert run.depths == sorted(run.points) and all(
            run.start < d <= run.depth for d in run.depths
        )
        for point in run.points.values():
            points += 1
            assert point.run is run
            holds.append(point.pages)
    used, held = _count(users, pool.num_pages), _count(holds, pool.num_pages)
    used[0] = held[0] = 0  # empty entries
    owned = _count(owners, pool.num_pages) + ((used > 0) | (held > 0))
    assert owned[0] == 0, "the null page has an owner"
    assert (owned[1:] > 0).all(), f"{np.count_nonzero(owned[1:] == 0)} pages leaked"
    assert (owned[1:] == 1).all(), "a page has two owners"
    assert segments == index.num_segments and locked == index.num_locked_segments
    assert points == index.num_points and pinned == index.num_pinned_segments
    if cache._announcer is not None:
        known = len(cache._announcer.tokens) + cache._announcer.copies.total()
        assert known == segments, "tokens of what is not cached"
    assert np.count_nonzero((held > 0) & (used == 0)) == pool.num_held_only
    assert (used[1:] == pool.users[1:]).all() and (held[1:] == pool.holds[1:]).all()


def _count(pages: list[Int32 | Int64], num_pages: int) -> Int64:
    """[num_pages] how often each page occurs."""
    counts: Int64 = np.bincount(
        np.concatenate([np.empty(0, dtype=np.int32), *pages]), minlength=num_pages
    )
    return counts
