"""Hits: between resume points, in published cases, and by computing cached tokens again."""

import numpy as np
import pytest

from quire.kvcore import GroupSpec, KVCache, StepPlan
from quire.kvcore.prefix.replays import replay_range
from tests.kvcore.engine import Engine, groups

REPLAYS = ((16, None), (4, 9), (8, 9))  # alignment 16; two window groups of 8 rows before the query


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
    """All boundaries are resumable with a thirty-second of the resume points."""
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


# Replays.


def tokens(n: int, seed: int = 0) -> list[int]:
    return [(i * 7 + seed) % 97 for i in range(n)]


def without_points(replay_tokens: int | None, num_tokens: int = 200, **options) -> Engine:
    """An engine that has the dense blocks of a prompt, and none of its resume points."""
    e = Engine(
        groups(*REPLAYS), num_pages=400, max_requests=4, max_model_len=512, replay_tokens=replay_tokens, **options
    )  # fmt: skip
    e.run("old", tokens(num_tokens), chunk=64)
    index = e.kv.index
    for run in list(index.runs()):
        for point in list(run.points.values()):
            index.drop_point(point)
    assert e.kv.match(tokens(num_tokens)).dense_tokens == 192
    return e


def test_a_replay_is_offered_where_it_saves_tokens():
    assert replay_range(dense=5, hit=0, replay_tokens=9, alignment=1) is None
    match = without_points(32).kv.match(tokens(200))
    assert (match.num_tokens, match.replay_from, match.replay_to) == (0, 160, 192)
    assert match.num_saved_tokens == 160
    assert match.explain() == (
        "0 of 200 tokens: dense blocks reach 192, but no resume point does; replayed from 160"
    )
    assert without_points(33).kv.match(tokens(200)).replay_from == 144, "a whole segment more"
    assert without_points(192).kv.match(tokens(200)).replay_from is None, "nothing would be saved"
    assert without_points(None).kv.match(tokens(200)).replay_from is None
    e = without_points(32)
    e.run("again", tokens(200)[:190])  # leaves points at 176 and before
    assert e.kv.match(tokens(200)).num_tokens == 176
    assert e.kv.match(tokens(200)).replay_from is None


@pytest.mark.parametrize(
    ("specs", "options"),
    [
        (((16, None), (16, 64)), {"retention": "dense"}),  # kept: multiples of 64
        (((16, None), (16, 128)), {"retention": 16}),
        (((16, 64), (32, 100)), {"retention": "latest"}),
        (((16, None), (16, 64), GroupSpec("state", "state", 16, 4096)), {"retention": "latest"}),
    ],
)
def test_prompts_share_what_a_running_request_has_computed(specs, options):
    """vLLM 0.33 hits each block of a request that is in the middle of its prompt; so do we, at the end of a
    chunk, though retention keeps no resume point there."""
    e = Engine(groups(*specs), num_pages=400, max_requests=3, max_model_len=512, **options)
    prompt = [*range(300)]
    e.admit("a", prompt)
    for done in (32, 96, 160):
        e.step({"a": done - e.computed("a")})
        assert e.kv.match([*range(done + 9), 999]).num_tokens == done
        if done == 96:
            e.admit("b", [*range(done + 9), 999])
        e.check()
    e.finish_prompt("b")
    e.finish_prompt("a")
    e.check()
    assert e.kv.match(prompt[:99]).num_tokens == 96, "used by b, so it stays"
    stats = e.kv.stats()
    assert stats["resume_points_kept"] == stats["resume_points"] < 8
