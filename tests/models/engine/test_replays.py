"""Hits and replays.

Logits behind a hit are to the bit those of a cold run whose chunks fall on the same rows. Replays:
what a prefix has in pages of whole prompts is cached and no resume point is, so tokens are computed
again; compared with runs without a cache.
"""

from dataclasses import replace

import pytest
import torch

from quire.models.config.named import get_config
from quire.models.loading.random_weights import random_model
from tests.models.deepseek_v4.test_engine import DRAFTERS, V4Recorder
from tests.models.engine.test_engine import DEVICE, Recorder, prompt
from tests.support.models.few import few

FP32, E4M3 = "auto", "fp8"
CASES = [
    *((name, FP32) for name in ("gemma3-tiny", "gemma4-small", "deepseek-v4-tiny")),
    # What a hit reads is quantized, as is what the cold run reads.
    *((name, E4M3) for name in ("gemma4-e-tiny", "llama-tiny", "gpt-oss-tiny", "deepseek-v4-small")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kv_cache_dtype"), CASES)
def test_hits_and_resumed_requests_are_bit_equal_to_cold_ones(name, kv_cache_dtype):
    model, record = random_model(few(name), device=DEVICE), Recorder
    if "deepseek" in name:
        record = V4Recorder
    alignment = record(model).engine.kv.alignment
    tokens = prompt(3 * alignment + 9, 4)

    def run(**settings):
        chunks = {"max_num_batched_tokens": alignment, "max_num_seqs": 1, "retention": "dense"}
        return record(model, kv_cache_dtype=kv_cache_dtype, **chunks, **settings)

    cold, warm, disturbed = run(enable_caching=False), run(), run()
    logits = []
    for recorder, hits in ((cold, [0]), (warm, [0, 3 * alignment])):
        ids = [recorder.add(tokens, 6) for _ in hits]
        recorder.run()
        assert [recorder.outputs[i].num_cached_tokens for i in ids] == hits
        logits += [torch.stack(recorder.logits[i]) for i in ids]
    preempted = disturbed.add(tokens, 6)
    disturbed.run(max_steps=3)
    disturbed.engine.scheduler._requeue(list(disturbed.engine.scheduler.running))
    disturbed.run()
    assert disturbed.reports[3].q_lens.tolist() == [9], "from the boundary before it"
    logits.append(torch.stack(disturbed.logits[preempted]))
    assert all(torch.equal(other, logits[0]) for other in logits[1:])


# Tokens that restore all windows of 16: 15 a layer with keys of its own, and the drafter's in DeepSeek-V4.
REPLAYED = {"gemma3-tiny": 75, "gemma4-tiny": 60, "gemma4-e-tiny": 60, "gpt-oss-tiny": 30, "deepseek-v4-tiny": 7 * 15 + 1}  # fmt: skip


def forgetful(model, **settings):
    """A recorder that loses all resume points after each step; rows before a replay are zeros, as in a new pool."""
    base = V4Recorder if "deepseek" in model.config.name else Recorder

    class Forgetful(base):
        forgets = True

        def _poison(self, pages):
            super()._poison(pages)
            for tensor in self.engine.pool.tensors:
                tensor[0] = 0
            index = self.engine.kv.index
            for run in list(index.runs()) if self.forgets else ():
                for point in list(run.points.values()):
                    index.drop_point(point)

    return Forgetful(model, replay=True, **settings)


@pytest.fixture(scope="module", params=REPLAYED)
def model(request):
    """With a CPU's random weights on each device: how many requests are preempted depends on how many
    tokens n-grams guess."""
    drawn = random_model(get_config(request.param))
    model = random_model(get_config(request.param), device=DEVICE)
    for target, source in zip(model.parameters(), drawn.parameters(), strict=True):
        target.copy_(source)
    return model


def start_of(run, end):
    alignment = run.engine.kv.alignment
    return (end - REPLAYED[run.engine.model.config.name]) // alignment * alignment


@pytest.mark.parametrize(
    ("model", "budget"),
    [("gemma4-e-tiny", 17), ("gemma4-e-tiny", 500), ("gemma3-tiny", 17),
     *(("deepseek-v4-tiny", budget) for budget in (13, 48, 500))],
    indirect=["model"],
)  # fmt: skip
def test_logits_after_a_replay_equal_a_cold_run(model, budget):
    """Chunks end inside of replays, at their ends and after them; three prompts part from the first one
    at different boundaries, one of them where an entry of HCA begins that none of 16 tokens does."""
    run = forgetful(model, max_num_batched_tokens=budget)
    first = run.add(prompt(330), max_tokens=3)
    run.run()
    run.check(first)
    ends = [320, 304, 240, 224]
    ids = [run.add(prompt(330)[: end + 5] + prompt(30, seed=end), max_tokens=6) for end in ends]
    run.run()
    for request_id, end in zip(ids, ends, strict=True):
        assert run.check(request_id).num_cached_tokens == start_of(run, end) > 0
    assert run.engine.kv.stats()["replays"] == len(ends)


def test_a_replay_leaves_a_resume_point(model):
    run = forgetful(model)
    run.add(prompt(230), max_tokens=1)
    run.run()
    run.forgets = False
    for expected in (start_of(run, 224), 224):
        again = run.add(prompt(230))
        run.run()
        assert run.check(again).num_cached_tokens == expected
    assert run.engine.kv.stats()["replayed_tokens"] == 224 - start_of(run, 224)


def outputs(run):
    ids = [run.add(prompt(330)[: 240 + 9 * i], 24) for i in range(5)]
    run.run()
    return {request_id: run.check(request_id).token_ids for request_id in ids}


@pytest.fixture(scope="module")
def plain(model):
    return outputs(forgetful(model))


@pytest.mark.parametrize(
    ("model", "name", "num_pages"),
    [("gemma4-tiny", "n-gram", 34), *(("deepseek-v4-tiny", name, 60) for name in DRAFTERS)],
    indirect=["model"],
)
def test_drafts_and_preemptions(model, plain, name, num_pages):
    """A pool too small for the requests: some are preempted, and replay what they had computed."""
    drafter = DRAFTERS[name](model)
    drafter.outputs = plain
    run = forgetful(model, drafter=drafter, num_pages=num_pages)
    assert outputs(run) == plain
    stats = run.engine.kv.stats()
    assert stats["replays"] > stats["resumed_requests"] > 2
    assert run.engine.totals.num_accepted > 0


def test_tokens_that_restore_the_windows():
    flash = get_config("deepseek-v4-flash")
    assert replace(flash, num_mtp_layers=0).replay_tokens == 43 * 127
    assert flash.replay_tokens == 43 * 127 + 128
