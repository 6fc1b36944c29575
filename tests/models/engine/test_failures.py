"""A step that fails, for want of memory or a mistake in a model, is done again by the next call, as if nothing had happened."""

import random

import pytest
import torch

from quire.kvcore.device import HostCopy
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.engine.speculative import NGramDrafter
from quire.models.loading.random_weights import random_model
from tests.models.engine.test_engine_many import alone, counting, workload
from tests.support.models.few import few
from tests.support.models.toy import VOCAB, ToyModel


def fails_at_times(rng, work, *, after=False):
    """``work``, which in a third of its calls raises instead of being done, or after it was."""

    def flaky(*args, **more):
        if rng.random() > 0.3:
            return work(*args, **more)
        if after:
            work(*args, **more)
        raise torch.OutOfMemoryError("CUDA out of memory")

    return flaky


def run(engine):
    """Outputs by request id, and how many steps failed."""
    outputs, failed = {}, 0
    while engine.has_work:
        try:
            report = engine.step()
        except torch.OutOfMemoryError:
            failed += 1
        else:
            outputs |= {output.request_id: output for output in report.finished}
        engine.kv.check_invariants()
    assert engine.kv.stats()["pages_in_use"] == 0
    return outputs, failed


GUESS = NGramDrafter(3, min_ngram=1)


@pytest.mark.parametrize(
    ("where", "drafter", "is_async"),
    [
        ("tensors", GUESS, False),
        ("written", None, False),
        ("sample", GUESS, False),
        ("evict", GUESS, False),
        ("tensors", None, True),
        ("written", None, True),
        ("wait", None, True),
    ],
)
def test_outputs_are_those_of_steps_that_do_not_fail(where, drafter, is_async, monkeypatch):
    """A step ahead, the requests of both steps wait again."""
    model, rng, budget = ToyModel(), random.Random(7), 10 if is_async else 30
    # Requests that are not in the step that fails, and a pool that is too small for all.
    config = EngineConfig(
        max_num_seqs=8, max_num_batched_tokens=24, num_pages=34, async_scheduling=is_async
    )
    engine = Engine(model, config, drafter=drafter)
    owner, name = {
        "tensors": (engine.runner.builder._staging, "send"),
        "written": (model, "forward"),
        "sample": (engine, "_sampler"),
        "wait": (HostCopy, "wait"),
        "evict": (engine.kv.index, "_evict_one"),
    }[where]
    flaky = fails_at_times(rng, getattr(owner, name), after=where == "written")
    monkeypatch.setattr(owner, name, flaky)
    work = [(tokens, params) for tokens, params, _ in workload(rng, budget, VOCAB, 150)]
    ids, ahead = [engine.add_request(*one) for one in work], counting(engine)
    outputs, failed = run(engine)
    assert failed > budget // 3
    assert ahead[True] > 5 if is_async else engine.totals.num_preempted > budget // 20
    preempted = sum(output.num_preemptions for output in outputs.values())
    assert preempted > engine.totals.num_preempted  # and those of steps that failed
    for request_id, (tokens, params) in zip(ids, work, strict=True):
        assert outputs[request_id].token_ids == alone(ToyModel(), tokens, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4-e-tiny", "deepseek-v4-tiny"])
def test_a_model_that_had_written_its_state_starts_from_what_is_cached(name):
    """DeepSeek-V4 keeps rings and open windows beside the pages: a step may not find what it left of itself."""
    model, lengths = random_model(few(name)), (5, 100, 150, 33)
    runs = []
    for seed in (None, 3):
        config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=48, num_pages=300)
        engine, rng = Engine(model, config), random.Random(1)
        if seed is not None:
            engine._sampler = fails_at_times(random.Random(seed), engine._sampler)
        params = SamplingParams(12, ignore_eos=True, logprobs=0)
        ids = [
            engine.add_request([rng.randrange(3, 259) for _ in range(n)], params) for n in lengths
        ]
        outputs, failed = run(engine)
        assert (failed > 3) == (seed is not None)
        runs.append([outputs[i] for i in ids])
    for whole, disturbed in zip(*runs, strict=True):
        assert whole.token_ids == disturbed.token_ids
        for a, b in zip(whole.logprobs, disturbed.logprobs, strict=True):
            assert abs(a.logprob - b.logprob) < 1e-3
