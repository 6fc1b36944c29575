"""The memory plan: what it says fits, fits."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.kernels import sample_tokens
from quire.kernels.common import checks, launching
from quire.kvcore import GroupSpec, KVCache
from quire.kvcore.device import Staging
from quire.models.config.named import get_config
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.memory import (
    LOGITS_COPIES,
    PROMPT_LOGITS_COPIES,
    ModelCache,
    pages_of_request,
    plan_memory,
)
from quire.models.engine.request import SamplingParams
from quire.models.engine.sampler import Sampler, draw_columns
from quire.models.loading.random_weights import random_model
from tests.models.engine.test_engine import build, prompt

DENSE = GroupSpec("d", "dense", 16, 100)


GROUPS = {
    "dense": [DENSE],
    "hybrid": [DENSE, GroupSpec("w", "window", 32, 100, sliding_window=70)],
    "windows": [
        GroupSpec("d", "dense", 32, 100),
        *(GroupSpec(f"w{n}", "window", 16, 100, sliding_window=n) for n in (16, 300)),
    ],
}


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("name", GROUPS)
def test_a_request_never_needs_more_pages_than_its_bound(name, drafts):
    """Token by token in a pool of that size; pages in use come near the bound."""
    groups, n = GROUPS[name], 700
    bound = pages_of_request(groups, n, drafts)
    kv = KVCache(
        groups, num_pages=1 + bound, max_requests=1, max_model_len=n, max_draft_tokens=drafts
    )
    tokens = np.arange(n)
    slot = kv.admit("r", kv.match(tokens[:1]))
    most = 0
    for token in tokens:
        plan = kv.plan([slot], [1])
        assert hasattr(plan, "slots"), f"{plan} at {token}"
        kv.commit(plan, [token])
        most = max(most, kv.stats()["pages_in_use"])
    # What a ring keeps for drafts and for a boundary shows only now and then.
    assert bound - 3 * len(groups) <= most <= bound


@pytest.mark.parametrize(("num_pages", "n"), [(61, 100), (200, 333)])
def test_as_many_requests_fit_as_the_plan_says(num_pages, n):
    settings = {"max_num_seqs": 50, "max_num_batched_tokens": 512}
    engine = Engine(build("gemma3-tiny"), EngineConfig(num_pages=num_pages, **settings))
    count = engine.memory.num_fitting(n)
    assert 1 < count < 50
    for seed in range(count):
        engine.add_request(prompt(n - 6, seed), SamplingParams(6, ignore_eos=True))
    while engine.has_work:
        report = engine.step()
        assert report.num_preempted == 0
        if report.num_prefills == 0 and not report.finished:
            assert report.num_decodes == count, "they all hold their pages at once"


def model_on(device, **config):
    """The attributes of a model that a memory plan reads."""
    config = {"max_position_embeddings": 50, "vocab_size": 100, "activation_size": 0} | config
    return SimpleNamespace(
        config=SimpleNamespace(**config), device=torch.device(device), dtype=torch.bfloat16
    )


def test_pool_from_free_memory(monkeypatch):
    cache = ModelCache(GROUPS["hybrid"], 1000, lambda n: None)
    monkeypatch.setattr("quire.models.engine.memory.free_memory", lambda device: 5_000_000)
    cpu, gpu = model_on("cpu", vocab_size=1), model_on("cuda", vocab_size=1)  # 27,392 of logits
    half = plan_memory(cpu, cache, EngineConfig(memory_fraction=0.5))
    assert half.num_pages == 2486 and half.max_num_seqs == 64
    monkeypatch.setattr("quire.models.engine.memory.MAX_PROMPT_LOGITS", 50_999)
    # Activations 400,000, logits of 30 sampled rows 660,000 and of 101 rows of prompts 606,000.
    busy = model_on("cuda", activation_size=100, vocab_size=500)
    config = EngineConfig(max_num_batched_tokens=2000, max_num_seqs=15)
    plan = plan_memory(busy, cache, config, max_draft_tokens=1)
    assert plan.num_pages == 3000 and "of 4.768 MiB free" in plan.describe()
    few = replace(config, max_num_batched_tokens=100)  # 20,000, 660,000 and 600,000
    assert plan_memory(busy, cache, few, max_draft_tokens=1).num_pages == 3348
    assert plan_memory(gpu, cache, EngineConfig()).num_pages == 4475
    assert plan_memory(cpu, cache, EngineConfig()).num_pages == 256 * 2**20 // 1000
    besides = replace(cache, fixed_bytes=20_000)  # rings, which are no pages
    assert plan_memory(gpu, besides, EngineConfig()).num_pages == 4455
    with pytest.raises(
        ValueError,
        match=r"num_pages: expected at least 3 \(2\.93 KiB\) for one request of 2 tokens, got 0",
    ):
        plan_memory(model_on("cuda", vocab_size=10_000), cache, EngineConfig())


class NoAttention:
    """Replace `PagedAttend`: its kernels need next to no memory."""

    rows, impl = None, "triton"

    def __call__(self, layer, q, k=None, v=None, *, sinks=None):
        return torch.empty_like(q)

    def finish(self):
        pass


def peak_bytes(work):
    """The most bytes that tensors of ``work`` hold at once on the CPU.

    Without oneDNN, which packs a copy of the weights where there is AVX-512: a GPU makes none.
    """
    with (
        torch.backends.mkldnn.flags(enabled=False),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile,
    ):
        work()
    events = profile.profiler.kineto_results.events()
    return max(np.cumsum([e.nbytes() for e in events if e.name() == "[memory]"]))


@pytest.mark.parametrize(
    "name", ["gemma4-tiny", "gemma4-e-tiny", "gemma4-moe-tiny", "gpt-oss-tiny", "llama-tiny"]
)
def test_a_step_holds_what_its_model_says(name, monkeypatch):
    """Elements of two bytes and Triton's kernels; the estimate is at most a quarter above."""
    # The memory is all that counts.
    monkeypatch.setattr(launching, "launch", lambda *_, **named: None)
    monkeypatch.setattr(checks, "is_readable", lambda tensor: False)
    config, n = get_config(name), 256
    if name == "gemma4-e-tiny":  # with 8 channels a layer, ids and positions weigh more
        config = replace(config, per_layer_input_size=32)
    model = random_model(config, dtype=torch.bfloat16)
    ids, rows = torch.arange(n), torch.arange(1)
    peak = peak_bytes(lambda: model.run(ids, ids, NoAttention(), rows))
    assert 0.8 < peak / (n * 2 * config.activation_size) <= 1


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("filters", [{}, {"top_k": 50, "top_p": 0.9, "min_p": 0.1}])
def test_sampling_holds_what_the_plan_says(filters, keeps):
    """keeps: also the probabilities, as rejection sampling needs them."""
    rows, vocab_size = 8, 20_000
    params = [SamplingParams(temperature=1.0, **filters)] * rows
    [given] = draw_columns(params, [np.random.rand(rows)], Staging("cpu"))

    def work():
        logits = torch.randn(rows, vocab_size)
        sample_tokens(logits, **given, probs=torch.empty_like(logits) if keeps else None)

    share = peak_bytes(work) / (rows * vocab_size * 4 * LOGITS_COPIES)
    assert (0.85 if filters else 0.5) < share <= 1


def test_scores_of_prompts_hold_what_the_plan_says():
    """Logits with a soft cap, and their log-probabilities, of a step that scores a prompt."""
    config = replace(get_config("gemma4-tiny"), vocab_size=20_000)
    assert config.final_logit_softcapping is not None
    model = random_model(config, dtype=torch.bfloat16)
    rows, sampler = 50, Sampler(20_000, "cpu", torch.zeros(0, dtype=torch.int64))
    request = SimpleNamespace(
        params=SamplingParams(prompt_logprobs=5),
        prompt_token_ids=np.zeros(rows + 1, dtype=np.int32),
    )
    hidden = torch.randn(rows, 64, dtype=torch.bfloat16)
    table, cap = model.embed_tokens, config.final_logit_softcapping

    def work():
        logits = table.logits(hidden, softcap=cap)
        sampler.score_prompts(logits, [(request, range(rows))])

    peak = peak_bytes(work)
    assert peak / (rows * 20_000 * 4 * PROMPT_LOGITS_COPIES) == pytest.approx(1, rel=1e-3)
