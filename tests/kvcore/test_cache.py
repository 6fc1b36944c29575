"""Retention, reasons of hits, pins, and what is counted, case by case."""

import numpy as np
import pytest

from quire.kvcore import GroupSpec, OutOfPages, StepPlan
from tests.kvcore.engine import Runner

DENSE = ((8, None),)
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
    kv = Runner(*specs, max_model_len=4096).kv
    assert kv.interval == interval
    layout = kv.layout
    if interval > kv.alignment:
        share = layout.pages_per_point / (layout.pages_per_segment * interval / kv.alignment)
        assert 1 / 8 <= share < 1 / 4


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
    for specs, counts in (((32, None), STATE), [64, 64, 64, 8]), (((32, None),), [150, 50]):
        e = Runner(*specs, retention=64)
        e.admit("a", range(200))
        for count in counts:
            assert e.kv.cut([0], [min(150, 200 - e.computed("a"))]).tolist() == [count]
            e.step("a", count)


def test_prompts_share_what_a_running_request_has_computed():
    """At the end of a chunk, though retention keeps no resume point there."""
    e = Runner((16, None), (16, 64), STATE, retention="latest")
    e.admit("a", PROMPT)
    for done in (32, 96, 160):
        e.step("a", done - e.computed("a"))
        assert e.kv.match([*range(done + 9), 999]).num_tokens == done
        if done == 96:
            e.admit("b", [*range(done + 9), 999])
    e.finish_prompt("b")
    e.finish_prompt("a")
    assert e.kv.match(PROMPT[:99]).num_tokens == 96, "used by b, so it stays"
    stats = e.kv.stats()
    assert stats["resume_points_kept"] == stats["resume_points"] < 8


# Reasons.


@pytest.mark.parametrize(
    ("specs", "tokens", "options", "reason", "said"),
    [
        (DENSE, PROMPT, {"max_tokens": 0}, "max-tokens", "0 of 300 tokens: no longer hit was"),
        (DENSE, PROMPT, {"max_tokens": 40}, "diverged", "40 of 300 tokens: behind them"),
        (DENSE, [9] * 9, {"max_tokens": 0}, "not-cached", "0 of 9 tokens: nothing of this"),
        (DENSE, [1, 2], {"max_tokens": 0}, "prompt-too-short", "0 of 2 tokens: the prompt has no"),
        (DENSE, PROMPT[:41], {}, "prompt-end", "40 of 41 tokens: every segment before the last"),
        (GEMMA, PROMPT[:39], {}, "resume-point", "0 of 39 tokens: dense blocks reach 32, but"),
    ],
    ids=lambda x: x if isinstance(x, str) and " " not in x else "",
)
def test_why_a_hit_is_not_longer(specs, tokens, options, reason, said):
    e = Runner(*specs)
    e.run("a", PROMPT[: 41 if specs is DENSE else 300], chunk=300)
    match = e.kv.match(tokens, **options)
    assert match.limited_by == reason and match.explain().startswith(said)
    off = Runner(*specs, enable_caching=False).kv.match(PROMPT)
    assert off.limited_by == "caching-disabled"


def test_a_replay_is_offered_where_it_saves_tokens():
    """Of a prompt with its dense blocks up to 192, and without resume points."""
    for replay_tokens, start in ((32, 160), (33, 144), (192, None), (None, None)):
        e = Runner((16, None), (4, 9), (8, 9), replay_tokens=replay_tokens)
        e.run("old", PROMPT[:200])
        for run in list(e.kv.index.runs()):
            for point in list(run.points.values()):
                e.kv.index.drop_point(point)
        match = e.kv.match(PROMPT[:200])
        assert (match.dense_tokens, match.num_tokens, match.replay_from) == (192, 0, start)
        assert match.num_saved_tokens == (start or 0) and match.replay_to == (start and 192)
        end = f"; replayed from {start}" if start else "no resume point does"
        assert match.explain().endswith(end)
        if start:
            e.run("again", PROMPT[:200])
            stats = e.kv.stats()
            assert (stats["replays"], stats["replayed_tokens"]) == (1, 192 - start)


# Pins; `shadow` checks that what is pinned stays.


def pin(e: Runner, tokens, now: float = 0.0, ttl: float = 1e9) -> int:
    return e.kv.pin(e.kv.match(tokens), now=now, ttl=ttl)


def test_a_pin_that_is_renewed_ends_when_its_newest_time_has_passed():
    e = Runner(*GEMMA)
    e.run("a", PROMPT)
    assert pin(e, PROMPT, now=100.0, ttl=10.0) == pin(e, PROMPT, now=109.0, ttl=10.0) == 288
    assert e.kv.stats()["pins"] == 1
    assert e.kv.expire_pins(now=110.0) == 0 and e.kv.expire_pins(now=119.0) == 1
    assert not e.kv.unpin(e.kv.match(PROMPT)) and e.kv.stats()["pinned_pages"] == 0


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
    assert alive[0] == [True] * 3 and alive[-1][:2] == [False] * 2
    assert isinstance(plan, OutOfPages) and e.kv.stats()["demoted_pins"] == 3


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


# Counters.


def test_admissions_are_counted_by_reason_and_those_of_preempted_requests_apart():
    e = Runner((8, None), (4, 10))
    e.run("cold", PROMPT[:41])  # leaves a resume point at 40
    e.run("again", PROMPT[:41])
    e.run("other", [999] * 41)
    e.run("short", [1, 2])
    e.run("branch", [*PROMPT[:20], 999])  # dense blocks to 16, no resume point there
    before = e.kv.stats()
    found = {k: v for k, v in before.items() if k.startswith(("limited_by/", "misses/")) and v}
    assert found == {
        "limited_by/not-cached": 2, "misses/not-cached": 2,
        "limited_by/prompt-end": 1,
        "limited_by/prompt-too-short": 1, "misses/prompt-too-short": 1,
        "limited_by/resume-point": 1, "misses/resume-point": 1,
    }  # fmt: skip
    assert before["requests"] == 5 and before["hits"] == 1 and before["hit_tokens"] == 40
    assert before["prompt_tokens"] == 41 * 3 + 2 + 21
    assert before["tokens_without_resume_point"] == 16
    assert before["group_tokens/g0"] == 40 + 16 and before["group_tokens/g1"] == 40
    assert before["resume_points_used"] == 1
    e.kv.admit("cold", e.kv.match(PROMPT[:60]), resumed=True)
    after = e.kv.stats()
    changed = {k: after[k] - before[k] for k in after if after[k] != before[k] and "page" not in k}
    assert changed == {
        "resumed_requests": 1, "resumed_prompt_tokens": 60, "resumed_hit_tokens": 40,
        "resume_points_used": 1,
    }  # fmt: skip


def test_evictions_are_counted_by_reason():
    dense = Runner(*DENSE, num_pages=12)
    hybrid = Runner((8, None), (4, 6), num_pages=20)
    for e, points, by_policy in ((dense, 0, 4), (hybrid, 1, 0)):
        e.run("a", [1] * 41)
        e.run("b", [2] * 80)
        stats = e.kv.stats()
        assert stats["evicted_segments/policy"] == by_policy
        assert stats["evicted_segments/useless"] == stats["evicted_segments"] - by_policy
        assert stats["evicted_resume_points"] == points and stats["evicted_segments"] > 0
        e.kv.clear()
        assert e.kv.stats()["evicted_segments"] == stats["evicted_segments"], "not an eviction"


def test_no_more_dense_segments_are_evicted_than_pages_are_needed():
    e = Runner((4, None), (8, None), num_pages=40)
    prompt = [1] * 81
    e.run("a", prompt[:80])
    for num_pages, freed, left in (4, 6, 64), (3, 3, 56), (1, 3, 48):  # a segment has three pages
        assert e.kv.evict(num_pages) == freed
        assert e.kv.match(prompt).num_tokens == left
