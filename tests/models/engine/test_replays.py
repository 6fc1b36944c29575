"""Replays: full attention is cached and windows are not, so tokens are computed again. Compared with runs without a cache."""

import pytest

from quire.models.config.named import get_config
from quire.models.loading.random_weights import random_model
from tests.models.engine.test_engine import DEVICE, Recorder, prompt

# Sliding layers with keys and values of their own, of 16 tokens each.
NUM_WINDOWS = {"gemma3-tiny": 5, "gemma4-tiny": 4, "gemma4-e-tiny": 4, "gpt-oss-tiny": 2}
LENGTH = 230


@pytest.fixture(scope="module", params=NUM_WINDOWS)
def model(request):
    return random_model(get_config(request.param), device=DEVICE)


def without_points(model, **settings):
    """An engine that has full attention of a prompt cached, and none of its resume points."""
    run = Recorder(model, replay=True, **settings)
    for slot in run.engine.pool.tensors:
        slot[0] = (
            0  # the null page, never written: the first rows read it in place of tokens before them
        )
    run.add(prompt(LENGTH), max_tokens=1)
    run.run()
    index = run.engine.kv.index
    for cached in list(index.runs()):
        for point in list(cached.points.values()):
            index.drop_point(point)
    run.engine.kv.check_invariants()
    return run


def expected_start(run):
    alignment = run.engine.kv.alignment
    to = (LENGTH - 1) // alignment * alignment
    return (to - 15 * NUM_WINDOWS[run.engine.model.config.name]) // alignment * alignment, to


@pytest.mark.parametrize(
    ("model", "budget"),
    [("gemma4-e-tiny", 17), ("gemma4-e-tiny", 500), ("gemma3-tiny", 17)],
    indirect=["model"],
)
def test_logits_after_a_replay_equal_a_cold_run(model, budget):
    """Chunks end inside the replayed tokens, at their end, and at the end of the prompt."""
    run = without_points(model, max_num_batched_tokens=budget)
    again = run.add(prompt(LENGTH))
    longer = run.add(prompt(LENGTH) + prompt(40, seed=1))  # while the first decodes
    new = run.add(prompt(60, seed=2))
    run.run()
    start, to = expected_start(run)
    assert 0 < start < to
    assert run.check(again).num_cached_tokens == start
    run.check(longer)
    run.check(new)
    stats = run.engine.kv.stats()
    assert stats["replays"] >= 1 and stats["replayed_tokens"] >= to - start
    # The boundary is a resume point now: its windows were restored.
    next_turn = run.add(prompt(LENGTH) + prompt(5, seed=3))
    run.run()
    assert run.check(next_turn).num_cached_tokens == to


def test_drafts_after_a_replay(model):
    from quire.models.engine.speculative import NGramDrafter

    run = without_points(model, drafter=NGramDrafter(3, min_ngram=1))
    again = run.add(prompt(LENGTH), max_tokens=12)
    run.run()
    assert run.check(again).num_cached_tokens == expected_start(run)[0]
    assert run.engine.totals.num_drafts > 0
