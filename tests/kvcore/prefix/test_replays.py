"""Requests that compute cached tokens again, because their dense blocks are there and no resume point is near."""

from __future__ import annotations

import pytest

from quire.kvcore import GroupSpec, StepPlan
from tests.kvcore.engine import Engine, groups

GROUPS = ((16, None), (4, 9), (8, 9))  # alignment 16; two window groups of 8 rows before the query


def tokens(n: int, seed: int = 0) -> list[int]:
    return [(i * 7 + seed) % 97 for i in range(n)]


def without_points(replay_tokens: int | None, num_tokens: int = 200, **options) -> Engine:
    """An engine that has the dense blocks of a prompt, and none of its resume points."""
    e = Engine(
        groups(*GROUPS), num_pages=400, max_requests=4, max_model_len=512, replay_tokens=replay_tokens, **options
    )  # fmt: skip
    e.run("old", tokens(num_tokens), chunk=64)
    index = e.kv.index
    for run in list(index.runs()):
        for point in list(run.points.values()):
            index.drop_point(point)
    assert e.kv.match(tokens(num_tokens)).dense_tokens == 192
    return e


def test_a_replay_is_offered_where_it_saves_tokens():
    match = without_points(32).kv.match(tokens(200))
    assert (match.num_tokens, match.replay_from, match.replay_to) == (0, 160, 192)
    assert match.num_saved_tokens == 160
    assert match.explain() == (
        "0 of 200 tokens: dense blocks reach 192, but no resume point does; replayed from 160"
    )
    assert without_points(33).kv.match(tokens(200)).replay_from == 144, "a whole segment more"
    assert without_points(192).kv.match(tokens(200)).replay_from is None, "nothing would be saved"
    assert without_points(None).kv.match(tokens(200)).replay_from is None


def test_a_nearer_resume_point_is_taken_instead():
    e = without_points(32)
    e.run("again", tokens(200)[:190])  # leaves points at 176 and before
    assert e.kv.match(tokens(200)).num_tokens == 176
    assert e.kv.match(tokens(200)).replay_from is None


@pytest.mark.parametrize("chunk", [1, 5, 16, 40, 64])
def test_a_replay_writes_no_dense_page_and_makes_the_boundary_resumable(chunk):
    e = without_points(32)
    in_use = e.kv.num_pages - e.kv.num_free_pages
    e.admit("new", tokens(200))
    slot = e.slots["new"]
    assert e.computed("new") == 160 and e.kv._chains.cached[slot] == 192
    dense = e.kv.table(0)[slot].copy()
    while e.computed("new") < 192:
        plan = e.step({"new": min(chunk, 192 - e.computed("new"))})
        assert isinstance(plan, StepPlan)
        assert (plan.slot_mapping[0] == -1).all() and len(plan.replay_rows) == len(plan.positions)
        assert (e.kv.table(0)[slot] == dense).all()
        e.check()
    assert e.kv.match(tokens(200)).num_tokens == 192, "the boundary is a resume point now"
    e.finish_prompt("new")
    e.decode("new", [1, 2, 3])
    e.release("new")
    e.check()
    assert e.kv.num_pages - e.kv.num_free_pages > in_use
    assert e.kv.stats()["replays"] == 1 and e.kv.stats()["replayed_tokens"] == 32


def test_a_state_rules_replays_out():
    specs = groups((16, None), GroupSpec("state", "state", 16, 4096))
    with pytest.raises(ValueError, match="replay_tokens: expected None with a state group"):
        Engine(specs, num_pages=40, max_requests=2, max_model_len=64, replay_tokens=8)
    with pytest.raises(ValueError, match="replay_tokens: expected an int >= 1, got 0"):
        Engine(groups(*GROUPS), num_pages=40, max_requests=2, max_model_len=64, replay_tokens=0)
