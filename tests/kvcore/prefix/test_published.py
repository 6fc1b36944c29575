"""Cases that the authors of public prefix-caching work published, restated for resume points."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kvcore import KVCache, StepPlan
from tests.kvcore.engine import Engine, Text, groups


def cached_window_blocks(e: Engine, prompt: list[int], group: int) -> dict[int, list[int]]:
    """Window blocks that the resume points of `prompt` hold, by boundary in tokens."""
    rows, size = e.device.memory, e.specs[group].block_size
    identity = Text(prompt, b"").rows(e.device.tags[group], 0)
    block_of = {int(identity[b * size]): b for b in range(len(prompt) // size)}
    found = {}
    for run in e.kv.index.runs():
        for depth, point in run.points.items():
            c = e.kv.layout.classes[group]
            assert c.tables.tolist() == [group]
            pages = point.pages[c.tail_offset : c.tail_offset + c.tail]
            found[depth * e.kv.alignment] = [block_of[int(rows[p, 0])] for p in pages if p]
    return found


@pytest.mark.parametrize(
    ("window_block", "window", "length", "expected"),
    [
        (8, 8, 64, {32: [3], 64: [7]}),
        (16, 32, 112, {32: [0, 1], 64: [2, 3], 96: [4, 5]}),
    ],
    ids=["one-block-a-segment", "last-block-past-the-boundary"],
)
def test_only_blocks_that_can_serve_a_hit_are_cached(window_block, window, length, expected):
    """vLLM PR 42258: the blocks of a window group that no aligned hit can use stay out."""
    e = Engine(
        groups((32, None), (window_block, window)),
        num_pages=100, max_requests=2, max_model_len=256, retention="dense",
    )  # fmt: skip
    prompt = np.random.default_rng(0).integers(0, 1000, length).tolist()
    e.run("a", prompt, chunk=length)
    assert cached_window_blocks(e, prompt, 1) == expected
    for boundary in expected:
        assert e.kv.match([*prompt[:boundary], 1001]).num_tokens == boundary


def test_a_long_prefill_does_not_flood_the_cache():
    """vLLM PR 43447: 14 requests of 1M tokens, one after another, in a pool for 14.5 of them.

    Published there: over 95 % of the tokens hit when prompt fractions of 10..100 % are replayed.
    """
    length, chunk, pages_per_request = 1 << 20, 8192, 4096 + 6
    kv = KVCache(
        groups((256, None), (64, 128), (64, 128)),
        num_pages=int(14.5 * pages_per_request), max_requests=1, max_model_len=length,
        retention=32768,
    )  # fmt: skip
    prompts = [np.arange(length, dtype=np.int32) + i for i in range(14)]
    for i, prompt in enumerate(prompts):
        slot = kv.admit(i, kv.match(prompt))
        for start in range(0, length, chunk):
            plan = kv.plan([slot], [chunk])
            assert isinstance(plan, StepPlan)
            kv.commit(plan, prompt[start : start + chunk])
        kv.release(i)
    fractions = [length * p // 100 for p in range(10, 101, 10)]
    shares = [kv.match(prompt[:n]).num_tokens / n for prompt in prompts for n in fractions]
    assert np.mean(shares) > 0.95
    assert kv.stats()["evicted_segments"] == 0
    kv.check_invariants()


def test_free_pages_are_reused_before_cached_ones_last_freed_first():
    """vLLM PR 43447: uncached pages go first (LIFO), cached ones last."""
    e = Engine(groups((32, None), (16, 64)), num_pages=60, max_requests=4, max_model_len=512)
    prompt = list(range(256))
    e.run("a", prompt)
    kept, free = e.kv.num_evictable_pages, e.kv.num_free_pages
    used = []
    for rid in ("b", "c"):  # too short to cache anything
        e.admit(rid, [7] * 20)
        plan = e.step({rid: 20})
        used.append(
            sorted(
                {
                    slot // g.block_size
                    for g, row in zip(e.kv.layout.groups, plan.slot_mapping.tolist(), strict=True)
                    for slot in row
                }
            )
        )
        e.release(rid)
    assert len(used[0]) == 1 + 2 and used[0] == used[1], "pages freed last are used first"
    assert (e.kv.num_evictable_pages, e.kv.num_free_pages) == (kept, free)
    assert e.kv.match(prompt).num_tokens == 224, "nothing cached went"
