"""Calls on one request: shorter hits, what is discarded, pages that must go, resets, and what is counted."""

from __future__ import annotations

import pytest

from quire.kvcore import EventLog, OutOfPages
from tests.support.kvcore.engine import Engine, groups

HYBRID = ((32, None), (16, 64))
PROMPT = list(range(300))


def engine(*specs, **options) -> Engine:
    base = {"num_pages": 400, "max_requests": 4, "max_model_len": 600}
    return Engine(groups(*specs or HYBRID), **(base | options))


def points(e: Engine) -> int:
    return e.kv.stats()["resume_points"]


# Hits no longer than asked for.


@pytest.mark.parametrize(("most", "hit"), [(0, 0), (31, 0), (32, 32), (100, 96), (10**6, 288)])
def test_a_hit_is_no_longer_than_asked_for(most, hit):
    e = engine(retention="dense")
    e.run("a", PROMPT)
    match = e.kv.match(PROMPT, max_tokens=most)
    assert (match.num_tokens, match.dense_tokens) == (hit, 288)
    assert match.limited_by == ("prompt-end" if hit == 288 else "max-tokens")
    e.start("b", PROMPT, match)  # which keeps to it
    assert e.computed("b") == hit
    e.finish_prompt("b")  # rows that are cached are computed again, and adopted
    e.check()
    e.release("b")
    assert e.kv.match(PROMPT).num_tokens == 288
    assert e.kv.pin(match, now=0, ttl=9) == hit


def test_why_a_short_hit_is_not_longer():
    e = engine((8, None))
    assert e.kv.match(PROMPT, max_tokens=0).limited_by == "not-cached"
    e.run("a", PROMPT[:41])
    assert (
        e.kv.match(PROMPT, max_tokens=0).explain() == "0 of 300 tokens: no longer hit was asked for"
    )
    assert e.kv.match(PROMPT, max_tokens=40).limited_by == "diverged"  # it ends there by itself
    assert e.kv.match([1, 2], max_tokens=0).limited_by == "prompt-too-short"


def test_a_replay_stays_within_what_was_asked_for():
    e = engine((4, None), (4, 9), replay_tokens=8, retention="latest")
    e.run("a", PROMPT[:100])
    match = e.kv.match(PROMPT[:90], max_tokens=50)
    assert (match.replay_from, match.replay_to) == (40, 48)
    assert e.kv.match(PROMPT[:90], max_tokens=9).num_saved_tokens == 0


@pytest.mark.parametrize("bad", [-1, 1.0, True, "1"])
def test_a_wrong_longest_hit_is_named(bad):
    with pytest.raises(ValueError, match="max_tokens: expected an int >= 0, got"):
        engine().kv.match(PROMPT, max_tokens=bad)


# Discarding.


def test_what_is_discarded_leaves_no_more_than_its_commits():
    e = engine(retention="latest")
    e.admit("a", PROMPT)
    e.step({"a": 200})  # segments up to 192 are cached; no boundary of these is kept
    e.kv.pin_request("a", now=0, ttl=9)
    assert points(e) == 0
    e.kv.release("a", discard=True)
    assert points(e) == 0 and e.kv.stats()["pins"] == 0
    assert (e.kv.match(PROMPT).num_tokens, e.kv.match(PROMPT).dense_tokens) == (0, 192)
    e.kv.check_invariants()


# Certain pages.


def test_pages_that_must_go_take_what_needs_them():
    e = engine((8, None))
    e.run("a", PROMPT[:80])
    e.run("b", PROMPT[:40] + [7] * 40)
    run, _ = e.kv.index.find(e.kv.match(PROMPT[:80]).prompt.keys, 10)
    middle = int(run.pages[2, 0])  # segment 7 of the first prompt
    assert e.kv.evict_pages([middle, middle]).tolist() == []
    assert e.kv.match(PROMPT[:81]).num_tokens == 56
    assert e.kv.match(PROMPT[:40] + [7] * 41).num_tokens == 80
    e.check()
    first = int(e.kv.index.find(e.kv.match(PROMPT[:80]).prompt.keys, 1)[0].pages[0, 0])
    e.kv.evict_pages([first])
    assert e.kv.stats()["cached_segments"] == 0
    e.check()


def test_pages_of_running_requests_stay_and_are_named():
    e = engine(events=EventLog())
    e.run("a", PROMPT)
    e.kv.pin(e.kv.match(PROMPT), now=0, ttl=9)
    e.admit("b", PROMPT)
    needed = e.kv.evict_pages(range(1, e.kv.num_pages)).tolist()
    assert len(needed) == e.kv.num_pages - 1 - e.kv.num_free_pages == 288 // 32 + 4
    assert e.kv.num_evictable_pages == 0 and e.kv.stats()["pins"] == 0
    e.check()
    e.finish_prompt("b")
    e.release("b")
    assert e.kv.evict_pages(range(1, e.kv.num_pages)).tolist() == []
    assert e.kv.num_free_pages == e.kv.num_pages - 1


def test_a_resume_point_goes_with_its_page_and_leaves_the_segments():
    e = engine(retention="latest")
    e.run("a", PROMPT)
    (run,) = e.kv.index.runs()
    page = int(run.points[9].pages[-1])
    assert e.kv.evict_pages([page]).tolist() == []
    assert (e.kv.match(PROMPT).num_tokens, e.kv.match(PROMPT).dense_tokens) == (0, 288)


@pytest.mark.parametrize("bad", [[0], [400], [-1], [1.5], [[1]], None, "1"])
def test_wrong_pages_are_named(bad):
    with pytest.raises(ValueError, match="pages: expected"):
        engine().kv.evict_pages(bad)


# Resets.


def test_a_reset_waits_for_requests_or_ends_them():
    e = engine(events=EventLog())
    e.run("a", PROMPT)
    match = e.kv.match(PROMPT)
    e.kv.pin(match, now=0, ttl=9)
    e.admit("b", PROMPT)
    e.admit(("c", 1), [5] * 50)
    with pytest.raises(ValueError, match=r"end_requests: expected True .*'b', \('c', 1\)"):
        e.kv.reset()
    assert e.kv.match(PROMPT).num_tokens == 288
    plan = e.kv.plan([e.slots["b"]], [12])
    assert e.kv.reset(end_requests=True) == ["b", ("c", 1)]
    assert e.kv.num_free_pages == 399 and e.kv.num_free_slots == 4
    assert e.kv.match(PROMPT).dense_tokens == 0
    with pytest.raises(ValueError, match="plan: expected the newest plan"):
        e.kv.commit(plan, PROMPT[288:])
    e.kv.check_invariants()
    slot = e.kv.admit("d", match)
    assert e.kv.num_computed[slot] == 0
    e.kv.release("d")
    assert e.kv.reset() == []


# What is counted.


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


# Rollbacks.


def test_a_short_replay_leaves_a_whole_resume_point():
    e = engine((4, None), (4, 9), replay_tokens=8, retention="latest", max_draft_tokens=1)
    e.run("a", PROMPT[:100])
    match = e.kv.match(PROMPT[:90], max_tokens=50)
    e.start("b", PROMPT[:90], match)
    e.step({"b": 40})  # past the end of the replay, in one chunk
    e.check()
    (point,) = [p for run in e.kv.index.runs() for d, p in run.points.items() if d == 12]
    assert (point.pages > 0).all()
    assert e.run("c", [*PROMPT[:50], 1]).num_tokens == 48


# Dry runs.


def test_a_dry_run_evicts_nothing_and_leaves_the_plan_good():
    e = engine((8, None), (8, 20), num_pages=20, debug=False)
    e.run("old", [5] * 60)
    slot = e.kv.admit("a", e.kv.match(PROMPT[:90]))
    plan = e.kv.plan([slot], [10])
    before = e.kv.stats()
    asked = e.kv.needed([slot], [80])
    assert e.kv.stats() == before
    assert asked.per_group["g0"] == 10 and asked.fits
    assert asked.needed == sum(asked.per_group.values()) > asked.free
    assert not e.kv.needed([slot], [290]).fits
    e.kv.commit(plan, PROMPT[:10])
    free = e.kv.num_free_pages
    assert e.kv.needed([slot], [1]).needed == 0
    e.kv.commit(e.kv.plan([slot], [80]), PROMPT[10:90])
    assert e.kv.stats()["evicted_segments"] > 0 and e.kv.num_free_pages < free
    e.kv.check_invariants()


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
