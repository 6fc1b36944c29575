"""The engine on the device, end to end, against full forward passes without a cache."""

import dataclasses

import pytest
import torch

from quire.bench.prefill_decode.__main__ import main
from quire.models.config.named import get_config
from quire.models.deepseek_v4.config import DeepseekV4Config
from quire.models.engine import graphs
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import build_model
from tests.gpu.conftest import DRY_RUN, needs_memory, without_waiting
from tests.models.engine.test_engine import Recorder, build, prompt
from tests.support.helpers import DEVICE

pytestmark = pytest.mark.gpu

LENGTHS = (1, 17, 49) if DRY_RUN else (1, 15, 16, 17, 47, 48, 49, 140, 31)
NAMES = ("gemma4-tiny",) if DRY_RUN else ("gemma3-tiny", "gemma4-tiny", "gemma4-small")
V4_NAMES = ("deepseek-v4-tiny",) if DRY_RUN else ("deepseek-v4-tiny", "deepseek-v4-small")
FAMILIES = ("gemma4-e-tiny", "gemma4-moe-tiny", "llama-tiny", "gpt-oss-tiny")


@pytest.mark.parametrize("name", NAMES if DRY_RUN else NAMES + FAMILIES)
def test_ragged_requests_and_a_prefix_hit_equal_each_alone(name):
    """fp32, every page that nobody owns is NaN, every sampled logit compared."""
    run, base = Recorder(build(name)), prompt(100)
    ids = [run.add(prompt(n, seed=n), max_tokens=3 + n % 20) for n in LENGTHS]
    ids.append(run.add(base, max_tokens=4))
    run.run()
    assert any(report.num_decodes and report.num_prefills for report in run.reports)
    hit = run.add(base + prompt(20, seed=9), max_tokens=4)
    run.run()
    for request_id in ids:
        run.check(request_id)
    assert run.check(hit).num_cached_tokens > 0


def error_over_budget(model, length):
    """The largest error of the logits of a prompt and a few tokens, over twice that of a full pass.

    Args:
        length: tokens of the prompt, which is computed in chunks.
    """
    # Replayed graphs do not call the hook.
    settings = EngineConfig(
        num_pages=400, max_num_seqs=2, max_model_len=2000, decode_graphs=False,
        async_scheduling=False, max_num_batched_tokens=max(2, length // 3),
    )  # fmt: skip
    engine, found = Engine(model, settings), []
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, model.config.vocab_size, (length,), generator=generator).tolist()
    engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    hook = model.register_forward_hook(lambda module, args, output: found.append(output))
    while engine.has_work:
        finished = engine.step().finished
    hook.remove()
    [output] = finished
    assert output.error is None
    # Chunks that do not end the prompt have no logits.
    got = torch.cat(found).float()
    sequence = torch.tensor([*output.prompt_token_ids, *output.token_ids][:-1], device=model.device)
    rows = torch.arange(length - 1, len(sequence), device=model.device)
    plain = model.full_forward(sequence, logits_rows=rows).float()
    wide = build_model(model.config, device=model.device, dtype=torch.float32)
    for target, source in zip(wide.parameters(), model.parameters(), strict=True):
        target.copy_(source)
    exact = wide.full_forward(sequence, logits_rows=rows)
    rounding = torch.finfo(model.dtype).eps / 2 * exact.abs().max()
    budget = 2 * ((plain - exact).abs().max() + rounding)
    errors = (got - exact).abs().amax(1)
    # Another expert or entry in a few tokens of DeepSeek-V4 is no mistake.
    several = isinstance(model.config, DeepseekV4Config)
    return ((errors.median() if several else errors.max()) / budget).item()


@pytest.mark.parametrize("name", NAMES + V4_NAMES)
def test_bf16_logits_are_within_the_budget(name):
    model = random_model(get_config(name), device=DEVICE, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert error_over_budget(model, 40 if DRY_RUN else 700) <= 1


def outputs(engine, count):
    """Tokens of ``count`` requests; every third is sampled, with a penalty and logprobs."""
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


@pytest.mark.parametrize("name", ["gemma4-tiny", *FAMILIES, "deepseek-v4-tiny"])
def test_decode_through_graphs_equals_eager_decode(name, cuda):
    """fp32 tokens of captured batches of several sizes; tables change between replays."""
    model = build(name)
    eager, replayed = (engine_of(model, decode_graphs=on) for on in (False, True))
    for _ in range(2):
        assert outputs(replayed, 9) == outputs(eager, 9)
    assert [shape.num_seqs for shape in replayed.runner.graphs.shapes] == [1, 2, 4, 6]


@pytest.mark.parametrize("name", ["gemma4-tiny", "gemma4-moe-tiny"])
def test_a_replay_does_what_the_captured_work_does(name, cuda, monkeypatch):
    """bf16, where eager steps of other batch sizes would round otherwise."""
    model = random_model(get_config(name), device=DEVICE, dtype=torch.bfloat16)
    replayed = engine_of(model, decode_graphs=True)
    monkeypatch.setattr(graphs, "default_capture", lambda device: lambda work: work)
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
    """Up to their copy to the host nothing synchronises."""
    engine = Engine(build("gemma4-tiny"), EngineConfig(num_pages=900, max_num_seqs=4))
    forward, seen = engine._forward, []

    def watched(step):
        if step.plan.num_new_tokens.max() > 1:
            return forward(step)
        with without_waiting():
            result = forward(step)
        seen.append(len(step.requests))
        return result

    monkeypatch.setattr(engine, "_forward", watched)
    engine.add_request(prompt(20), SamplingParams(20, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert len(seen) == 19


# `bench.prefill_decode` gives exit status 1 where it cannot prove the output right, token by token.
JOBS = {
    "v4": "--model deepseek-v4-small --dtype float32",
    "v4-bf16": "--model deepseek-v4-tiny --dtype bfloat16",
    "v4-fp8": "--model deepseek-v4-small --dtype float32 --kv-cache-dtype fp8",
    "v4-mtp": "--model deepseek-v4-tiny --dtype float32 --speculate mtp --draft-tokens 2",
    "v4-ngram": "--model deepseek-v4-tiny --dtype float32 --speculate ngram --draft-tokens 3",
    "fp8": "--model gemma4-small --dtype float32 --kv-cache-dtype fp8",
    "fp8-per-tensor": "--model gemma4-small --dtype float32 --kv-cache-dtype fp8_per_tensor",
    "fp8-bf16": "--model gemma4-small --dtype bfloat16 --kv-cache-dtype fp8",
    "ngram": "--model gemma4-small --dtype float32 --speculate ngram --draft-tokens 3",
    "few-pages": "--model gemma4-tiny --dtype float32 --max-num-seqs 4 --num-pages 90",
}
# In a dry run one: tests/bench/test_prefill_decode.py has the others.
JOB_NAMES = ["v4-bf16"] if DRY_RUN else list(JOBS)


@pytest.mark.parametrize("name", JOB_NAMES)
def test_jobs_are_right(name, capsys):
    size = "--limit 1 --scale 0.02 --check 1 --no-baseline" if DRY_RUN else "--limit 4 --scale 0.5"
    # By default an engine takes most of the free memory, of which other processes need some.
    status = main(f"--num-pages 2000 {JOBS[name]} {size} --device {DEVICE}".split())
    assert status == 0, capsys.readouterr().err


@pytest.mark.skipif(DRY_RUN, reason="16 GB of weights")
def test_real_widths():
    """Four layers of Flash, of each kind, with fewer experts."""
    needs_memory(20)
    config = get_config("deepseek-v4-flash")
    layers = {name: getattr(config, name)[:4] for name in ("layer_types", "mlp_layer_types")}
    config = dataclasses.replace(config, **layers, num_experts=8, num_mtp_layers=0)
    with torch.inference_mode():
        model = random_model(config, device=DEVICE, dtype=torch.bfloat16)
        assert error_over_budget(model, 700) <= 1
