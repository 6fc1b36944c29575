"""Shorter hits, lost pages, and what is counted."""

import pytest

from quire.kvcore import OutOfPages
from tests.kvcore.engine import Engine, groups

HYBRID = ((32, None), (16, 64))
PROMPT = list(range(300))


def engine(*specs, **options) -> Engine:
    base = {"num_pages": 400, "max_requests": 4, "max_model_len": 600}
    return Engine(groups(*specs or HYBRID), **(base | options))


def test_why_a_short_hit_is_not_longer():
    e = engine((8, None))
    assert e.kv.match(PROMPT, max_tokens=0).limited_by == "not-cached"
    e.run("a", PROMPT[:41])
    assert (
        e.kv.match(PROMPT, max_tokens=0).explain() == "0 of 300 tokens: no longer hit was asked for"
    )
    assert e.kv.match(PROMPT, max_tokens=40).limited_by == "diverged"  # it ends there by itself
    assert e.kv.match([1, 2], max_tokens=0).limited_by == "prompt-too-short"
    assert engine((8, None), enable_caching=False).kv.match(PROMPT).limited_by == "caching-disabled"


def test_a_request_that_comes_back_is_counted_once():
    e = engine((8, None), num_pages=14)
    e.run("warm", PROMPT[:41])
    slot = e.kv.admit("a", e.kv.match(PROMPT[:60]))
    e.kv.commit(e.kv.plan([slot], [20]), PROMPT[40:60])
    before = e.kv.stats()
    assert (before["requests"], before["hits"], before["hit_tokens"]) == (2, 1, 40)
    other = e.kv.admit("b", e.kv.match([9] * 50))
    assert isinstance(e.kv.plan([other], [50]), OutOfPages)
    e.kv.release("a")  # preempted
    e.kv.commit(e.kv.plan([other], [50]), [9] * 50)
    e.kv.release("b")
    before = e.kv.stats()
    match = e.kv.match(PROMPT[:60])
    e.kv.admit("a", match, resumed=True)
    after = e.kv.stats()
    changed = {k: after[k] - before[k] for k in after if after[k] != before[k] and "page" not in k}
    assert changed == {
        "resumed_requests": 1, "resumed_prompt_tokens": 60, "resumed_hit_tokens": match.num_tokens
    }  # fmt: skip
    assert match.num_tokens > 0


# Admissions.

DENSE = ((8, None),)


def last_page(e: Engine) -> list[int]:
    """The newest window page of the resume point at 288."""
    return [int(next(e.kv.index.runs()).points[9].pages[-1])]


SINCE = {  # groups, a request and its steps, what happens between `match` and `admit`, the hit then
    "evicted": (DENSE, [], [], lambda e: e.kv.evict(10**6), 0),
    "evicted in part": (DENSE, [], [], lambda e: e.kv.evict(2), 280),
    "without its resume point": (HYBRID, [], [], lambda e: e.kv.evict_pages(last_page(e)), 256),
    "without pages": (DENSE, [], [], lambda e: e.kv.evict_pages(range(1, 400)), 0),
    "cleared": (HYBRID, [], [], lambda e: e.kv.clear(), 0),
    "longer": (DENSE, [*range(350)], [], lambda e: e.step({"b": 54}), 344),
    "longer by a segment": (DENSE, [*range(350)], [24], lambda e: e.step({"b": 8}), 328),
    "one run again": (HYBRID, [*range(100)], [], lambda e: e.release("b"), 96),
}


@pytest.mark.parametrize("change", SINCE)
def test_a_hit_is_looked_up_again_where_the_cache_changed_since(change):
    specs, running, steps, happens, hit = SINCE[change]
    e = engine(*specs, retention="dense")
    e.run("a", PROMPT)
    if running:
        e.admit("b", running)
        for count in steps:
            e.step({"b": count})
    wanted = [*(running or PROMPT), 1]
    match = e.kv.match(wanted)
    happens(e)
    assert match.num_tokens != hit or change == "one run again"
    slot = e.kv.admit("new", match)
    assert e.kv.num_computed[slot] == hit == e.kv.match(wanted).num_tokens
    e.kv.check_invariants()


def test_admissions_are_counted_by_reason():
    e = engine((8, None), (4, 10), max_model_len=400)
    prompt = list(range(41))
    e.run("cold", prompt)  # leaves a resume point at 40
    e.run("again", prompt)
    e.run("other", [9] * 41)
    e.run("short", [1, 2])
    e.run("branch", [*prompt[:20], 99])  # dense blocks to 16, no resume point there
    stats = e.kv.stats()
    found = {k: v for k, v in stats.items() if k.startswith(("limited_by/", "misses/")) and v}
    assert found == {
        "limited_by/not-cached": 2, "misses/not-cached": 2,
        "limited_by/prompt-end": 1,
        "limited_by/prompt-too-short": 1, "misses/prompt-too-short": 1,
        "limited_by/resume-point": 1, "misses/resume-point": 1,
    }  # fmt: skip
    assert stats["requests"] == 5 and stats["hits"] == 1 and stats["hit_tokens"] == 40
    assert stats["prompt_tokens"] == 41 * 3 + 2 + 21
    assert stats["tokens_without_resume_point"] == 16
    assert stats["group_tokens/g0"] == 40 + 16 and stats["group_tokens/g1"] == 40
    assert stats["resume_points_used"] == 1
    misses = sum(v for k, v in stats.items() if k.startswith("misses/"))
    assert misses + stats["hits"] == stats["requests"]


def test_evictions_are_counted_by_reason():
    dense = engine((8, None), num_pages=12)
    dense.run("a", [1] * 41)
    dense.run("b", [2] * 80)
    stats = dense.kv.stats()
    assert stats["evicted_segments/policy"] == stats["evicted_segments"] == 4
    assert stats["evicted_segments/useless"] == 0
    hybrid = engine((8, None), (4, 6), num_pages=20)
    hybrid.run("a", [1] * 41)
    hybrid.run("b", [2] * 80)
    stats = hybrid.kv.stats()
    assert stats["evicted_resume_points"] == 1
    assert stats["evicted_segments/useless"] == stats["evicted_segments"] > 0
    hybrid.kv.clear()
    assert hybrid.kv.stats()["evicted_segments"] == stats["evicted_segments"], "not an eviction"
