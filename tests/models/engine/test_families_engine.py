"""Every family through the engine: prefix hits, preemption and drafts, each logit against a run without a cache."""

import pytest

from quire.models.config.named import get_config
from quire.models.engine.speculative import NGramDrafter
from quire.models.loading.random_weights import random_model
from tests.models.engine.test_engine import DEVICE, Recorder, prompt

NAMES = ("gemma4-e-tiny", "gemma4-moe-tiny", "llama-tiny", "gpt-oss-tiny")


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return random_model(get_config(request.param), device=DEVICE)


def test_ragged_requests_equal_each_alone(model):
    """Chunked prompts beside decodes; without a retained boundary, windows keep only what a chunk's end needs."""
    run = Recorder(model)
    lengths = (1, 16, 17, 49, 140, 31)
    ids = [run.add(prompt(n, seed=n), max_tokens=3 + n % 7) for n in lengths]
    run.run()
    for request_id in ids:
        run.check(request_id)
    assert run.engine.kv.stats()["pages_in_use"] == 0
    assert any(r.num_decodes and r.num_prefills for r in run.reports)  # mixed steps happened


def test_prefix_hit_equals_cold_run(model):
    base = prompt(100)
    run = Recorder(model)
    cold = run.add(base)
    run.run()
    longer = run.add(base + prompt(30, seed=1))
    run.run()
    next_turn = run.add(base + list(run.check(cold).token_ids) + prompt(5, seed=2))
    run.run()
    whole = 100 // run.engine.kv.alignment * run.engine.kv.alignment
    assert run.check(cold).num_cached_tokens == 0
    assert run.check(longer).num_cached_tokens == whole > 0
    assert run.check(next_turn).num_cached_tokens >= whole


@pytest.mark.parametrize("model", ["gemma4-e-tiny"], indirect=True)
def test_preempted_and_resumed_equals_undisturbed(model):
    lengths = (40, 50, 30)

    def outputs(num_pages):
        run = Recorder(model, num_pages=num_pages)
        ids = [run.add(prompt(n, seed=n), max_tokens=20) for n in lengths]
        peak = 0
        while run.engine.has_work:
            run.run(max_steps=1)
            peak = max(peak, run.engine.kv.stats()["pages_in_use"])
        return [run.check(i) for i in ids], peak

    undisturbed, peak = outputs(2000)
    disturbed, _ = outputs(1 + peak // 2)
    assert sum(o.num_preemptions for o in undisturbed) == 0
    assert sum(o.num_preemptions for o in disturbed) > 0
    assert [o.token_ids for o in disturbed] == [o.token_ids for o in undisturbed]


@pytest.mark.parametrize("model", ["gemma4-moe-tiny"], indirect=True)
def test_drafts_change_nothing(model):
    """Verified drafts are several wanted rows of a sequence, among prompts that want their last row or none."""

    def outputs(drafter):
        run = Recorder(model, drafter=drafter)
        ids = [run.add(prompt(7, seed=n) * 6, max_tokens=16) for n in range(2)]
        ids.append(run.add(prompt(110, seed=5), max_tokens=4))
        run.run()
        return run, [run.check(i).token_ids for i in ids]

    run, drafted = outputs(NGramDrafter(3, min_ngram=1))
    assert run.engine.totals.num_drafts > 0
    assert drafted == outputs(None)[1]
