"""Counters say what hit, what did not, and why."""

from __future__ import annotations

from tests.support.kvcore.engine import Engine, groups


def engine(*specs, **options) -> Engine:
    base = {"num_pages": 400, "max_requests": 4, "max_model_len": 400}
    return Engine(groups(*specs), **(base | options))


def test_admissions_are_counted_by_reason():
    e = engine((8, None), (4, 10))
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
