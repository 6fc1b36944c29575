"""The engine on the device, end to end, against full forward passes without a cache."""

import pytest
import torch

from quire.models.config.named import get_config
from quire.models.engine import graphs
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.loading.random_weights import random_model
from tests.gpu.conftest import DRY_RUN, without_waiting
from tests.gpu.logits import error_over_budget
from tests.models.engine.test_engine import Recorder, build, prompt
from tests.support.helpers import DEVICE

pytestmark = pytest.mark.gpu

LENGTHS = (1, 17, 49) if DRY_RUN else (1, 15, 16, 17, 47, 48, 49, 140, 31)
NAMES = ("gemma4-tiny",) if DRY_RUN else ("gemma3-tiny", "gemma4-tiny", "gemma4-small")
FAMILIES = ("gemma4-e-tiny", "gemma4-moe-tiny", "llama-tiny", "gpt-oss-tiny")


@pytest.mark.parametrize("name", NAMES if DRY_RUN else NAMES + FAMILIES)
def test_ragged_requests_equal_each_alone(name):
    """fp32, every page that nobody owns is NaN, every sampled logit compared."""
    run = Recorder(build(name))
    ids = [run.add(prompt(n, seed=n), max_tokens=3 + n % 20) for n in LENGTHS]
    run.run()
    for request_id in ids:
        run.check(request_id)
    assert any(report.num_decodes and report.num_prefills for report in run.reports)


@pytest.mark.parametrize("name", NAMES if DRY_RUN else NAMES + FAMILIES)
def test_a_prefix_hit_equals_a_cold_run(name):
    run = Recorder(build(name))
    base = prompt(100)
    run.add(base, max_tokens=4)
    run.run()
    request_id = run.add(base + prompt(20, seed=9), max_tokens=4)
    run.run()
    assert run.check(request_id).num_cached_tokens > 0


@pytest.mark.parametrize("name", NAMES)
def test_bf16_logits_are_within_the_budget(name):
    model = random_model(get_config(name), device=DEVICE, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert error_over_budget(model, 40 if DRY_RUN else 700) <= 1


def outputs(engine, count):
    """Tokens of ``count`` requests; every third is sampled, with a penalty and log-probabilities."""
    sampling = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.1, "logprobs": 2}
    for n in range(count):
        extra = {} if n % 3 else sampling | {"seed": n}
        params = SamplingParams(6 + n, ignore_eos=True, **extra)
        engine.add_request(prompt(5 + 7 * n, seed=n), params, request_id=str(n))
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.token_ids for o in engine.step().finished}
    return done


def engine_of(model, **settings):
    config = EngineConfig(num_pages=900, max_num_seqs=6, max_num_batched_tokens=64, **settings)
    return Engine(model, config)


@pytest.mark.parametrize("name", ["gemma4-tiny", "gemma4-e-tiny", "gemma4-moe-tiny", "gpt-oss-tiny", "deepseek-v4-tiny"])  # fmt: skip
def test_decode_through_graphs_equals_eager_decode(name, cuda):
    """fp32 tokens of captured batches of several sizes; pages come and go, so tables change between replays."""
    model = build(name)
    eager, replayed = (engine_of(model, decode_graphs=on) for on in (False, True))
    for _ in range(2):
        assert outputs(replayed, 9) == outputs(eager, 9)
    assert [shape.num_seqs for shape in replayed.runner.graphs.shapes] == [1, 2, 4, 6]


@pytest.mark.parametrize("name", ["gemma4-tiny", "gemma4-moe-tiny"])
def test_a_replay_does_what_the_captured_work_does(name, cuda, monkeypatch):
    """bf16, where eager steps of other batch sizes would round otherwise: the same work called again gives the same tokens."""
    model = random_model(get_config(name), device=DEVICE, dtype=torch.bfloat16)
    replayed = engine_of(model, decode_graphs=True)
    monkeypatch.setattr(graphs, "default_capture", lambda device: graphs.call_again)
    called = engine_of(model, decode_graphs=True)
    for _ in range(2):
        assert outputs(replayed, 9) == outputs(called, 9)


@pytest.mark.parametrize("name", ["gemma4-e-tiny", "deepseek-v4-tiny"])
@pytest.mark.parametrize("through_graphs", [False, True])
def test_steps_launched_ahead_give_the_same_tokens(name, through_graphs, cuda):
    """The ids go from sampler to input on the device."""
    model = build(name)
    one_by_one, ahead = (
        engine_of(model, decode_graphs=through_graphs, async_scheduling=on) for on in (False, True)
    )
    for _ in range(2):
        assert outputs(ahead, 9) == outputs(one_by_one, 9)
    if through_graphs:  # eager steps of tiny models are launches, and the device waits for these
        assert ahead.totals.idle < one_by_one.totals.idle


def test_a_decode_step_waits_for_the_device_only_for_its_tokens(cuda, monkeypatch):
    """Up to their copy to the host nothing synchronises: tables, integers, the replay and the sampling are queued."""
    engine = Engine(build("gemma4-tiny"), EngineConfig(num_pages=900, max_num_seqs=4))
    forward, seen = engine._forward, []

    def watched(step):
        if step.plan.num_new_tokens.max() > 1:
            return forward(step)
        with without_waiting():
            return forward(step)
            seen.append(len(step.requests))

    monkeypatch.setattr(engine, "_forward", watched)
    engine.add_request(prompt(20), SamplingParams(20, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert len(seen) == 19
