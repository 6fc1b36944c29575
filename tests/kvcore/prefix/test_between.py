"""Hits between two resume points: all boundaries whose rows are held anyway can be resumed at."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kvcore import GroupSpec, KVCache, StepPlan
from tests.kvcore.engine import Engine, Text, groups

MIXES = {
    "one-window": ((8, None), (4, 17)),
    "short-tail": ((8, None), (4, 5)),
    "two-windows": ((4, None), (4, 9), (2, 14)),
    "window-of-one": ((4, None), (8, 20), (4, 1)),
    "no-dense": ((4, 13),),
    "drafter": ((4, None), GroupSpec("draft", "window", 4, 4096, 14, lookahead=1)),
}


def engine(mix: str, **options) -> Engine:
    base = {"num_pages": 400, "max_requests": 4, "max_model_len": 400, "retention": "latest"}
    return Engine(groups(*MIXES[mix]), **(base | options))


def held(e: Engine, prompt: list[int]) -> int:
    """Longest boundary of `prompt` whose visible window rows all lie in cached pages."""
    match = e.kv.match(prompt)
    a, pages = e.kv.alignment, np.flatnonzero(e.kv.pool.holds)
    most = min(match.dense_tokens, (len(prompt) - 1) // a * a)
    found = set(e.device.memory[pages].ravel().tolist())
    text = Text(prompt, b"")
    for boundary in range(most, 0, -a):
        for spec, tag in zip(e.specs, e.device.tags, strict=True):
            if spec.kind == "window":
                low = max(0, boundary - spec.sliding_window + 1)
                needed = text.rows(tag, spec.lookahead)[low:boundary]
                if not found.issuperset(needed.tolist()):
                    break
        else:
            return boundary
    return 0


@pytest.mark.parametrize(("chunk", "retention"), [(5, "latest"), (64, 2)])
@pytest.mark.parametrize("mix", MIXES)
def test_a_hit_is_as_long_as_the_held_rows_allow(mix, chunk, retention):
    a = engine(mix).kv.alignment
    for length in (a + 1, 45):
        prompt = list(range(100, 100 + length))
        for shared in range(chunk % 3, length + 1, 3):
            e = engine(mix, retention=2 * a if retention == 2 else retention)
            e.run("first", prompt, [1, 2, 3], chunk)
            second = [*prompt[:shared], *range(500, 500 + 2 * a + 1)]
            expected = held(e, second)
            kept = e.kv.stats()["resume_points"]
            assert e.run("second", second, chunk=chunk).num_tokens >= expected  # reads are checked
            assert e.kv.stats()["resume_points"] >= kept
            e.check()
            # A resend, and a third that parts elsewhere, see what the second left.
            third = [*second[: shared + a], *range(900, 905)]
            expected = held(e, third)
            assert e.run("third", third, chunk=chunk).num_tokens >= expected
            e.check()


@pytest.mark.parametrize("windows", [1, 5])
@pytest.mark.parametrize(("length", "shared", "hit"), [(600, 500, 480), (1024, 1000, 992), (900, 40, 32), (600, 31, 0)])  # fmt: skip
def test_chats_shorter_than_the_window_share_what_they_have_in_common(windows, length, shared, hit):
    """vLLM 0.33 keeps all blocks inside the window: 480 of 600 tokens where 500 are shared."""
    specs = groups((32, None), *[(16, 1024)] * windows)
    kv = KVCache(specs, num_pages=5000, max_requests=2, max_model_len=4096)
    first = np.arange(length)
    second = np.where(first < shared, first, first + 5000)
    run(kv, "a", first)
    assert kv.match(second).num_tokens == hit
    free = kv.num_free_pages
    kv.admit("b", kv.match(second))
    assert kv.num_free_pages == free, "no page is taken for the hit"
    kv.check_invariants()


def run(kv: KVCache, rid: object, prompt: np.ndarray) -> int:
    match = kv.match(prompt)
    slot, hit = kv.admit(rid, match), match.num_tokens
    plan = kv.plan([slot], [len(prompt) - hit])
    assert isinstance(plan, StepPlan)
    kv.commit(plan, prompt[hit:])
    kv.release(rid)
    return hit


@pytest.mark.parametrize("retention", ["dense", 32, 96])
def test_intervals_within_a_tail_keep_no_more_points_than_the_longest_of_them(retention):
    """All boundaries are resumable, and an eviction has a thirty-second of the entries to look at."""
    specs = groups((32, None), (16, 1024))
    kv = KVCache(specs, num_pages=5000, max_requests=2, max_model_len=8192, retention=retention)
    assert kv.interval == (1024 if retention != 96 else 960)
    prompt = np.arange(5000)
    run(kv, "a", prompt)
    kv.check_invariants()
    assert kv.stats()["resume_points"] <= 5000 // kv.interval + 3  # and at the prompt's end
    for shared in range(100, 4900, 311):
        hit = kv.match(np.where(prompt < shared, prompt, prompt + 9000)).num_tokens
        assert hit == shared // 32 * 32
