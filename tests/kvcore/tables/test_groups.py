"""State groups, blocks of several pages, and drafters whose keys look ahead."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kvcore import GroupSpec, KVCache
from tests.kvcore.engine import Engine, groups

STATE = GroupSpec("state", "state", 32, 4096)
DENSE = GroupSpec("dense", "dense", 32, 4096)
MAMBA = (DENSE, STATE)
V4 = (  # compressed entries, two window groups, compressor state: the shape of a DeepSeek-V4 model
    GroupSpec("compressed", "dense", 256, 4096),
    GroupSpec("window.0", "window", 64, 4096, 128),
    GroupSpec("window.1", "window", 64, 4096, 128),
    GroupSpec("compressor", "state", 128, 4096),
)
DRAFT = GroupSpec("draft", "window", 16, 4096, 64, lookahead=1)


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, n).tolist()


def engine(specs, **options) -> Engine:
    base = {"num_pages": 2000, "max_requests": 8, "max_model_len": 4096}
    return Engine(groups(*specs), **(base | options))


MIXES = {
    "gemma": ((32, None), (16, 64), (16, 64)),
    "wide": ((256, None), (64, 128), (64, 128)),  # segments longer than the window
    "mamba": MAMBA,
    "v4": V4,
}


@pytest.mark.parametrize("specs", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("chunk", [7, 1000])
def test_a_prompt_is_hit_by_a_resend_a_longer_one_and_the_next_turn(specs, chunk):
    e = engine(specs)
    a = e.kv.alignment
    prompt, answer = tokens(3 * a), tokens(2 * a + 5, 1)
    assert e.run("a", prompt, answer, chunk).num_tokens == 0
    e.check()
    match = e.run("resend", prompt, chunk=chunk)
    assert (match.num_tokens, match.limited_by) == (2 * a, "prompt-end")
    assert e.run("sibling", [*prompt, 1], chunk=chunk).num_tokens == 3 * a
    assert e.run("next turn", [*prompt, *answer, 1, 2]).num_tokens == 5 * a
    e.check()


def test_cut_ends_chunks_where_a_point_is_due():
    e = engine(MAMBA, retention=64)
    e.admit("a", tokens(200))
    slot = e.slots["a"]
    counts = []
    while e.computed("a") < 200:
        (n,) = e.kv.cut([slot], [min(150, 200 - e.computed("a"))]).tolist()
        counts.append(n)
        e.step({"a": n})
    assert counts == [64, 64, 64, 8]
    plain = engine((DENSE,))
    plain.admit("a", tokens(200))
    assert plain.kv.cut([plain.slots["a"]], [150]).tolist() == [150]


def test_copies_name_what_to_move_and_when():
    e = engine(MAMBA)
    prompt = tokens(64)
    e.admit("a", prompt)
    plan = e.kv.plan([e.slots["a"]], [32])
    assert plan.copies[:, 0].tolist() == [0], "a new state starts from the null page"
    live = plan.copies[:, 1]
    assert plan.state_pages[1:, 0].tolist() == live.tolist()
    after = e.kv.commit(plan, prompt[:32])
    assert after[:, 0].tolist() == live.tolist() and not set(after[:, 1]) & set(live.tolist())
    plan = e.kv.plan([e.slots["a"]], [5])
    assert len(plan.copies) == 0
    assert len(e.kv.commit(plan, prompt[32:37])) == 0, "37 is no boundary"
    e.kv.check_invariants()


@pytest.mark.parametrize("others", [(), ((16, 64),), ((16, 64), (8, 40))], ids=["2", "3", "4"])
def test_a_drafter_costs_no_hits(others):
    """vLLM PR 44082: hits went to 0 with a drafter in one of three groups."""
    plain = engine((DENSE, (16, 64), *others))
    drafted = engine((DENSE, DRAFT, *others))
    prompt, answer = tokens(320), tokens(100, 1)
    for e in (plain, drafted):
        e.run("a", prompt, answer)
        e.check()
    for query in (prompt, [*prompt, answer[0]], [*prompt, *answer, 7], prompt[:200]):
        assert plain.kv.match(query).num_tokens == drafted.kv.match(query).num_tokens


def test_multi_token_drafters():
    spec = GroupSpec("draft", "window", 16, 4096, 64, lookahead=3)
    e = engine((DENSE, spec))
    prompt = tokens(99)
    e.run("a", prompt)
    assert e.kv.match([*prompt[:98], 1001, 1]).dense_tokens == 64, (
        "98 is within the lookahead of 96"
    )
    assert e.kv.match([*prompt, 1]).dense_tokens == 96
    assert e.kv.match(prompt[:98]).dense_tokens == 64, "96 cannot be verified without token 98"
    with pytest.raises(ValueError, match="lookahead: expected at most one segment of 32"):
        KVCache(
            groups(DENSE, GroupSpec("d", "dense", 32, 4096, lookahead=33)),
            num_pages=9, max_requests=1, max_model_len=99,
        )  # fmt: skip
