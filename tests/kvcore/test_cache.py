"""Retention, hits and their reasons, replays, pins, and what is counted, case by case."""

import numpy as np
import pytest

from quire.kvcore import GroupSpec, OutOfPages, StepPlan
from quire.kvcore.prefix.replays import replay_range
from tests.kvcore.engine import Runner

DENSE = ((8, None),)
HYBRID = ((32, None), (16, 64))
GEMMA = ((32, None), (16, 64), (16, 64))  # alignment 32, tail 4 blocks
V4 = ((256, None), (64, 128), (64, 128))  # alignment 256, wider than the window
STATE = GroupSpec("state", "state", 32, 4096)
PROMPT = list(range(300))


def prompt(seed: int, n: int = 200) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, n).tolist()


# Retention.


@pytest.mark.parametrize(
    ("specs", "interval"),
    [
        ((*V4, (256, 5)), 8192),
        (((32, None), *[(16, 1024)] * 5), 65536),
        (((64, None), (64, 128)), 1024),
        (((16, None), (16, 2)), 128),
        ((*[(16, None)] * 16, (16, 17)), 16),
        (((16, None), (32, None)), 0),
        (((16, 64),), 0),
    ],
)
def test_auto_retention_spends_up_to_a_quarter_of_the_dense_pages_on_resume_points(specs, interval):
    kv = Runner(*specs, max_model_len=4096, retention="auto").kv
    assert kv.interval == Runner(*specs, max_model_len=4096).kv.interval == interval
    layout = kv.layout
    if interval > kv.alignment:
        share = layout.pages_per_point / (layout.pages_per_segment * interval / kv.alignment)
        assert 1 / 8 <= share < 1 / 4
    elif interval:
        assert 8 * layout.pages_per_point < 2 * layout.pages_per_segment


@pytest.mark.parametrize(("retention", "interval"), [("dense", 1024), (32, 1024), (96, 960)])
def test_intervals_within_a_tail_keep_no_more_points_than_the_longest_of_them(retention, interval):
    """All boundaries are resumable with a thirty-second of the resume points."""
    e = Runner((32, None), (16, 1024), num_pages=1000, max_model_len=8192, retention=retention)
    assert e.kv.interval == interval
    tokens = np.arange(5000)
    e.run("a", tokens.tolist(), chunk=5000)
    assert e.kv.stats()["resume_points"] <= 5000 // interval + 3  # and at the prompt's end
    for shared in range(100, 4900, 311):
        hit = e.kv.match(np.where(tokens < shared, tokens, tokens + 9000)).num_tokens
        assert hit == shared // 32 * 32


def test_cut_ends_chunks_where_a_point_is_due():
    e = Runner((32, None), STATE, retention=64)
    e.admit("a", range(200))
    counts = []
    while (left := 200 - e.computed("a")) > 0:
        counts += e.kv.cut([0], [min(150, left)]).tolist()
        e.step("a", counts[-1])
    assert counts == [64, 64, 64, 8]
    plain = Runner((32, None))
    plain.admit("a", range(200))
    assert plain.kv.cut([0], [150]).tolist() == [150]


def test_describe_tells_what_can_hit():
    text = Runner(*GEMMA, retention=64).kv.describe()
    for part in ("pages of 0.00391 MiB", "multiples of 32", "at least 33", "every 64 tokens", "8 pages each", "window 64"):  # fmt: skip
        assert part in text
    assert "ahead" not in text
    short = GroupSpec("state", "state", 16, 4096)
    assert "snapshots at multiples of 32" in Runner((32, None), short).kv.describe()


# Hits.


def test_why_a_short_hit_is_not_longer():
    e = Runner(*DENSE)
    assert e.kv.match(PROMPT, max_tokens=0).limited_by == "not-cached"
    e.run("a", PROMPT[:41])
    said = e.kv.match(PROMPT, max_tokens=0).explain()
    assert said == "0 of 300 tokens: no longer hit was asked for"
    assert e.kv.match(PROMPT, max_tokens=40).limited_by == "diverged"  # it ends there by itself
    assert e.kv.match([1, 2], max_tokens=0).limited_by == "prompt-too-short"
    assert Runner(*DENSE, enable_caching=False).kv.match(PROMPT).limited_by == "caching-disabled"


def test_prompts_share_what_a_running_request_has_computed():
    """At the end of a chunk, though retention keeps no resume point there."""
    e = Runner((16, None), (16, 64), STATE, retention="latest")
    e.admit("a", PROMPT)
    for done in (32, 96, 160):
        e.step("a", done - e.computed("a"))
        assert e.kv.match([*range(done + 9), 999]).num_tokens == done
        if done == 96:
            e.admit("b", [*range(done + 9), 999])
        e.kv.check_invariants()
    e.finish_prompt("b")
    e.finish_prompt("a")
    assert e.kv.match(PROMPT[:99]).num_tokens == 96, "used by b, so it stays"
    stats = e.kv.stats()
    assert stats["resume_points_kept"] == stats["resume_points"] < 8


def last_page(kv) -> list[int]:
    """The newest window page of the resume point at 288."""
    return [int(next(kv.index.runs()).points[9].pages[-1])]


SINCE = {  # groups, a request and its steps, what happens between `match` and `admit`, the hit then
    "evicted": (DENSE, [], [], lambda e: e.kv.evict(10**6), 0),
    "evicted in part": (DENSE, [], [], lambda e: e.kv.evict(2), 280),
    "without its resume point": (HYBRID, [], [], lambda e: e.kv.evict_pages(last_page(e.kv)), 256),
    "without pages": (DENSE, [], [], lambda e: e.kv.evict_pages(range(1, 400)), 0),
    "cleared": (HYBRID, [], [], lambda e: e.kv.clear(), 0),
    "longer": (DENSE, [*range(350)], [], lambda e: e.step("b", 54), 344),
    "longer by a segment": (DENSE, [*range(350)], [24], lambda e: e.step("b", 8), 328),
    "one run again": (HYBRID, [*range(100)], [], lambda e: e.kv.release("b"), 96),
}


@pytest.mark.parametrize("change", SINCE)
def test_a_hit_is_looked_up_again_where_the_cache_changed_since(change):
    specs, running, steps, happens, hit = SINCE[change]
    e = Runner(*specs, retention="dense")
    e.run("a", PROMPT)
    if running:
        e.admit("b", running)
        for count in steps:
            e.step("b", count)
    wanted = [*(running or PROMPT), 1]
    match = e.kv.match(wanted)
    happens(e)
    assert match.num_tokens != hit or change == "one run again"
    slot = e.kv.admit("new", match)
    assert e.kv.num_computed[slot] == hit == e.kv.match(wanted).num_tokens
    e.kv.check_invariants()


def test_a_replay_is_offered_where_it_saves_tokens():
    """Of a prompt with its dense blocks up to 192, and without resume points."""
    assert replay_range(dense=5, hit=0, replay_tokens=9, alignment=1) is None
    for replay_tokens, start in ((32, 160), (33, 144), (192, None), (None, None)):
        e = Runner((16, None), (4, 9), (8, 9), replay_tokens=replay_tokens)
        e.run("old", PROMPT[:200])
        for run in list(e.kv.index.runs()):
            for point in list(run.points.values()):
                e.kv.index.drop_point(point)
        match = e.kv.match(PROMPT[:200])
        assert (match.dense_tokens, match.num_tokens, match.replay_from) == (192, 0, start)
        assert match.num_saved_tokens == (start or 0) and match.replay_to == (start and 192)
        said = "0 of 200 tokens: dense blocks reach 192, but no resume point does"
        assert match.explain() == said + (f"; replayed from {start}" if start else "")
        if start == 160:
            slot = e.kv.admit("again", e.kv.match(PROMPT[:190]))
            begin = int(e.kv.num_computed[slot])
            # The replay ends at 176, in a step that completes no segment.
            e.kv.commit(e.kv.plan([slot], [190 - begin]), PROMPT[begin:190])
            stats = e.kv.stats()
            assert (stats["replays"], stats["replayed_tokens"]) == (1, 32)
            match = e.kv.match(PROMPT[:200])
            assert (match.num_tokens, match.replay_from) == (176, None)


# Pins.


def pin(e: Runner, tokens, now: float = 0.0, ttl: float = 1e9) -> int:
    return e.kv.pin(e.kv.match(tokens), now=now, ttl=ttl)


@pytest.mark.parametrize("specs", [GEMMA, ((16, 64),)], ids=["gemma", "window"])
def test_a_pinned_prefix_outlives_what_evicts_the_rest_until_it_ends(specs):
    e = Runner(*specs, num_pages=80 if len(specs) > 1 else 40)
    kept, lost = prompt(0), prompt(1)
    e.run("kept", kept)
    e.run("lost", lost)
    assert pin(e, kept, now=100.0, ttl=10.0) == 192
    for first in (10, 20):
        for seed in range(first, first + 10):
            e.run(seed, prompt(seed))
        e.kv.check_invariants()
        assert e.kv.match(kept).num_tokens == 192 and e.kv.match(lost).num_tokens == 0
        e.run("user", [*kept[:193], 1, 2, 3])  # hit and released, it is still pinned
    assert e.kv.stats()["demoted_pins"] == 0 and e.kv.expire_pins(now=109.9) == 0
    pin(e, kept, now=109.0, ttl=10.0)
    assert e.kv.stats()["pins"] == 1, "the same prefix, renewed"
    assert e.kv.expire_pins(now=110.0) == 0 and e.kv.expire_pins(now=119.0) == 1
    pin(e, kept)
    assert e.kv.unpin(e.kv.match(kept)) and not e.kv.unpin(e.kv.match(kept))
    assert e.kv.stats()["pinned_pages"] == 0


def test_pins_give_way_oldest_first_before_an_admission_is_refused():
    e = Runner(*GEMMA, num_pages=120, max_model_len=4096)
    for i in range(3):
        e.run(i, prompt(i))
        pin(e, prompt(i), now=float(i))
    e.admit("big", prompt(9, 4000))
    alive = []
    while isinstance(plan := e.step("big", 64), StepPlan):
        alive.append([e.kv.match(prompt(i)).num_tokens > 0 for i in range(3)])
        assert alive[-1] == sorted(alive[-1]), "the oldest pin goes first"
        e.kv.check_invariants()
    assert alive[0] == [True] * 3 and alive[-1][:2] == [False] * 2
    assert isinstance(plan, OutOfPages) and plan.needed > plan.free + plan.evictable
    assert e.kv.stats()["demoted_pins"] == 3


def test_the_budget_demotes_the_oldest_pins():
    e = Runner(*GEMMA, num_pages=500, max_pinned_pages=40)
    for i in range(4):  # 6 segments and 8 window pages each: two fit
        e.run(i, prompt(i))
        assert pin(e, prompt(i), now=float(i)) == 192
        assert e.kv.stats()["pinned_pages"] == 14 * min(2, i + 1)
    for pages, pinned in ((13, 0), (14, 192)):
        small = Runner(*GEMMA, max_pinned_pages=pages)
        small.run("a", prompt(0))
        assert pin(small, prompt(0)) == pinned
        assert small.kv.stats()["pins"] == (pinned > 0)
        small.kv.check_invariants()


# Counters.


def test_a_request_that_comes_back_is_counted_once():
    e = Runner(*DENSE, num_pages=14)
    e.run("warm", PROMPT[:41])
    e.admit("a", PROMPT[:60])
    e.step("a")
    before = e.kv.stats()
    assert (before["requests"], before["hits"], before["hit_tokens"]) == (2, 1, 40)
    e.admit("b", [999] * 50)
    assert isinstance(e.step("b"), OutOfPages)
    e.kv.release("a")  # preempted
    e.step("b")
    e.kv.release("b")
    before = e.kv.stats()
    match = e.kv.match(PROMPT[:60])
    e.kv.admit("a", match, resumed=True)
    after = e.kv.stats()
    changed = {k: after[k] - before[k] for k in after if after[k] != before[k] and "page" not in k}
    assert match.num_tokens > 0
    assert changed == {
        "resumed_requests": 1, "resumed_prompt_tokens": 60, "resumed_hit_tokens": match.num_tokens
    }  # fmt: skip


def test_admissions_are_counted_by_reason():
    e = Runner((8, None), (4, 10))
    e.run("cold", PROMPT[:41])  # leaves a resume point at 40
    e.run("again", PROMPT[:41])
    e.run("other", [999] * 41)
    e.run("short", [1, 2])
    e.run("branch", [*PROMPT[:20], 999])  # dense blocks to 16, no resume point there
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


def test_evictions_are_counted_by_reason():
    dense = Runner(*DENSE, num_pages=12)
    dense.run("a", [1] * 41)
    dense.run("b", [2] * 80)
    stats = dense.kv.stats()
    assert stats["evicted_segments/policy"] == stats["evicted_segments"] == 4
    assert stats["evicted_segments/useless"] == 0
    hybrid = Runner((8, None), (4, 6), num_pages=20)
    hybrid.run("a", [1] * 41)
    hybrid.run("b", [2] * 80)
    stats = hybrid.kv.stats()
    assert stats["evicted_resume_points"] == 1
    assert stats["evicted_segments/useless"] == stats["evicted_segments"] > 0
    hybrid.kv.clear()
    assert hybrid.kv.stats()["evicted_segments"] == stats["evicted_segments"], "not an eviction"
