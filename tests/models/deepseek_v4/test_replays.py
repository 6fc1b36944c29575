"""Replays of DeepSeek-V4: compressed entries are cached and no resume point is, so tokens are computed again. Compared
with runs without a cache."""

from dataclasses import replace

import pytest

from quire.models.config.named import get_config
from quire.models.deepseek_v4.config import CSA, HCA, MOE, SLIDING
from quire.models.loading.random_weights import random_model
from tests.models.deepseek_v4.test_engine import DEVICE, DRAFTERS, V4Recorder, prompt

WINDOW, ALIGNMENT = 16, 16  # of the tiny model


@pytest.fixture(scope="module")
def model():
    """Two layers of each kind, of which CSA and HCA alternate."""
    return random_model(get_config("deepseek-v4-tiny"), device=DEVICE)


class Forgetful(V4Recorder):
    """Loses all resume points after each step; rows before a replay are zeros, as in a new pool."""

    def _poison(self, pages):
        super()._poison(pages)
        self.engine.pool.data[0] = 0
        index = self.engine.kv.index
        for run in list(index.runs()):
            for point in list(run.points.values()):
                index.drop_point(point)


def start_of(model, end):
    return (end - model.config.replay_tokens) // ALIGNMENT * ALIGNMENT


@pytest.mark.parametrize("budget", [13, 48, 500])
def test_logits_after_a_replay_equal_a_cold_run(model, budget):
    """Chunks end inside of replays, at their ends and after them; three prompts part from the first one
    at different boundaries, one of them where an entry of HCA begins that none of 16 tokens does."""
    run = Forgetful(model, replay=True, max_num_batched_tokens=budget)
    first = run.add(prompt(330), max_tokens=3)
    run.run()
    run.check(first)
    ends = [320, 304, 240, 224]
    ids = [run.add(prompt(330)[: end + 5] + prompt(30, seed=end), max_tokens=6) for end in ends]
    run.run()
    for request_id, end in zip(ids, ends, strict=True):
        assert run.check(request_id).num_cached_tokens == start_of(model, end) > 0
    assert run.engine.kv.stats()["replays"] == len(ends)


def test_released_ratios():
    """Entries of 4 and 128 tokens, a window of 128: a replay of 5 * 127 tokens starts in the third block of 256."""
    config = replace(
        get_config("deepseek-v4-tiny"), layer_types=(SLIDING, CSA, HCA, CSA, HCA), num_mtp_layers=0,
        mlp_layer_types=(MOE,) * 5, hca_ratio=128, sliding_window=128,
    )  # fmt: skip
    model = random_model(config, device=DEVICE)
    run = Forgetful(model, replay=True, max_num_batched_tokens=500)
    run.add(prompt(1300), max_tokens=1)
    run.run()
    again = run.add(prompt(1290) + prompt(5, seed=1))
    run.run()
    assert run.check(again).num_cached_tokens == (1280 - 635) // 256 * 256 == 512


def test_a_replay_leaves_a_resume_point(model):
    run = Forgetful(model, replay=True)
    run.add(prompt(230), max_tokens=1)
    run.run()
    kept = V4Recorder._poison
    run._poison = lambda pages: kept(run, pages)
    for expected in (start_of(model, 224), 224):
        again = run.add(prompt(230))
        run.run()
        assert run.check(again).num_cached_tokens == expected


REQUESTS = [(prompt(330)[: 240 + 9 * i], 24) for i in range(5)]


@pytest.fixture(scope="module")
def plain(model):
    """Tokens by request, without a cache."""
    run = V4Recorder(model, enable_caching=False)
    ids = [run.add(*request) for request in REQUESTS]
    run.run()
    return {request_id: run.outputs[request_id].token_ids for request_id in ids}


@pytest.mark.parametrize("drafter", [*DRAFTERS])
def test_drafts_and_preemptions(model, plain, drafter):
    """A pool too small for the five requests: some are preempted, and replay what they had computed."""
    drafter = DRAFTERS[drafter](model)
    run = Forgetful(model, replay=True, drafter=drafter, num_pages=60)
    drafter.outputs = plain
    for request_id, (text, max_tokens) in zip(plain, REQUESTS, strict=True):
        assert run.add(text, max_tokens) == request_id
    run.run()
    for request_id, tokens in plain.items():
        assert run.check(request_id).token_ids == tokens
    stats = run.engine.kv.stats()
    assert stats["replays"] > stats["resumed_requests"] > 2
    assert run.engine.totals.num_accepted > 0


def test_tokens_that_restore_the_windows():
    flash = get_config("deepseek-v4-flash")
    assert replace(flash, num_mtp_layers=0).replay_tokens == 43 * 127
    assert flash.replay_tokens == 43 * 127 + 128
