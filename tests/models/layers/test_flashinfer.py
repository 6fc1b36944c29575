"""Attention through FlashInfer, here its stand-in: what each step attends to is what quire's own kernels do, and every logit of an engine is that of a
run without a cache. On a GPU: `tests.gpu.test_gpu_flashinfer`."""

import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.bench.prefill_decode.verify import e4m3_values
from quire.kvcore import KVCache
from quire.kvcore.device import BatchBuilder
from quire.models.config.named import get_config
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.speculative import NGramDrafter
from quire.models.layers import flashinfer as planner
from quire.models.layers.attention import PagedAttend
from quire.models.layers.flashinfer import FlashInfer, FlashInferAttend
from quire.models.layers.kv_cache import PageTensors, cache_groups
from quire.models.loading.random_weights import random_model
from tests.models.engine.test_engine import Recorder, prompt
from tests.support import flashinfer_stand_in
from tests.support.models.few import few


@pytest.fixture
def flashinfer(monkeypatch):
    return flashinfer_stand_in.install(monkeypatch)


@pytest.fixture
def seen(monkeypatch):
    """How often groups were planned over pages, and over copies."""
    counts = Counter()

    def counted(name, call):
        def counting(self, *arguments):
            counts[name] += 1
            return call(self, *arguments)

        monkeypatch.setattr(FlashInferAttend, name, counting)

    counted("_plan_pages", FlashInferAttend._plan_pages)
    counted("_plan_copies", FlashInferAttend._plan_copies)
    return counts


def sized(name, *, head_dim=64, **changes):
    """A tiny configuration with heads of a size that FlashInfer has."""
    config = few(name)
    sliding = config.sliding and replace(config.sliding, head_dim=head_dim)
    return replace(config, full=replace(config.full, head_dim=head_dim), sliding=sliding, **changes)


# New tokens of each request in a step, 0 = it takes no part; windows are of 16 tokens.
STEPS = {
    "prompts": [(1, 15, 16, 17, 33)],
    "chunks": [(7, 40), (7, 40), (16, 3), (1, 50)],
    "decodes": [(15, 16, 31, 100), *[(1, 1, 1, 1)] * 20],
    "mixed": [(30, 1, 0, 0), (1, 1, 20, 0), (1, 1, 20, 5), (1, 1, 1, 33), (1, 3, 0, 4)],
}


def steps_through_both(config, steps, device, dtype):
    """Attention of every layer of some steps, over the same rows: yields (FlashInfer's output, quire's, whose pages are its own)."""
    groups, placement = cache_groups(config, dtype)
    kv = KVCache(groups, num_pages=200, max_requests=8, max_model_len=256, track_deltas=True)
    builder = BatchBuilder(kv, device)
    pools = [
        PageTensors(config, groups, placement, num_pages=200, dtype=dtype, device=device)
        for _ in range(2)
    ]
    for pool in pools:
        for tensor in pool.tensors:
            tensor.view(dtype).fill_(float("nan"))
    model = SimpleNamespace(config=config, dtype=dtype, device=device)
    wrappers = FlashInfer(model, groups, "auto")
    generator = torch.Generator().manual_seed(0)
    lengths = [sum(counts) for counts in zip(*steps, strict=True)]
    tokens = [np.random.default_rng(n).integers(9, 99, n).astype(np.int32) for n in lengths]
    slots = [kv.admit(i, kv.match(ids)) for i, ids in enumerate(tokens)]
    done = [0] * len(slots)
    for counts in steps:
        order = sorted((i for i, n in enumerate(counts) if n), key=lambda i: counts[i] > 1)
        ids = np.concatenate([tokens[i][done[i] : done[i] + counts[i]] for i in order])
        plan = kv.plan([slots[i] for i in order], [counts[i] for i in order])
        attn = builder.build(plan, ids, np.arange(len(order))).attn
        theirs = FlashInferAttend(config, attn, pools[0], wrappers)
        ours = PagedAttend(config, attn, pools[1])
        for layer in range(config.num_layers):
            shape = config.attention(layer)
            heads = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads
            rows = [torch.randn(len(ids), n, shape.head_dim, generator=generator) for n in heads]
            q, k, v = (x.to(device, dtype) for x in rows)
            yield theirs(layer, q, k, v), ours(layer, q, k, v)
        kv.commit(plan, ids)
        done = [n + count for n, count in zip(done, counts, strict=True)]


@pytest.mark.parametrize("name", ["gemma3-tiny", "gemma4-tiny", "llama-tiny"])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_a_step_attends_to_what_the_kernels_do(name, steps, flashinfer):
    for theirs, ours in steps_through_both(sized(name), steps, "cpu", torch.float32):
        torch.testing.assert_close(theirs, ours)


@pytest.fixture(scope="module", params=["gemma3-tiny", "gemma4-tiny"])
def model(request):
    return random_model(sized(request.param), device="cpu")


@pytest.fixture(scope="module")
def gemma():
    return random_model(sized("gemma3-tiny"), device="cpu")


LENGTHS = (1, 15, 16, 17, 48, 49, 110, 31)


def test_ragged_requests_equal_each_alone(model, flashinfer, seen):
    """Prompts cut into steps of 48, of which windows of 16 keep the last rows only, beside decodes; then the same with hits."""
    run = Recorder(model, impl="flashinfer")
    ids = [run.add(prompt(n, seed=n), max_tokens=3 + n % 20) for n in LENGTHS]
    run.run()
    for request_id in ids:
        run.check(request_id)
    assert any(r.num_decodes and r.num_prefills for r in run.reports)  # mixed steps happened
    assert seen["_plan_copies"] > 0 < seen["_plan_pages"]
    again = [run.add(prompt(n, seed=n) + prompt(9), max_tokens=3) for n in LENGTHS]
    run.run()
    assert sum(run.check(request_id).num_cached_tokens for request_id in again) > 0


def test_each_group_is_planned_once_a_step(flashinfer, seen):
    """And all of its layers run with that plan."""
    config = sized("gemma3-tiny", layer_types=get_config("gemma3-tiny").layer_types)
    model = random_model(config, device="cpu")
    engine = Engine(model, EngineConfig(impl="flashinfer", num_pages=300))
    assert engine.runner.graphs is None
    for n in (5, 40):
        engine.add_request(prompt(n))
    num_groups = engine.runner.builder.num_groups
    windows = sum(group.kind == "window" for group in engine.kv.layout.groups)
    assert 0 < windows < num_groups < model.config.num_layers
    engine.step()
    assert seen == {"_plan_copies": windows, "_plan_pages": num_groups - windows}
    seen.clear()
    engine.step()
    assert seen == {"_plan_pages": num_groups}


def test_drafts(gemma, flashinfer):
    """Rows of drafts are in pages, those that are taken back too."""
    run = Recorder(gemma, impl="flashinfer", drafter=NGramDrafter(3, min_ngram=1))
    ids = [run.add(prompt(7, seed=n) * 6, max_tokens=16) for n in range(2)]
    ids.append(run.add(prompt(30), max_tokens=16, sampling={"temperature": 1.0, "seed": 1}))
    ids.append(run.add(prompt(110, seed=5), max_tokens=4))
    run.run()
    for request_id in ids:
        run.check(request_id)
    totals = run.engine.totals
    assert totals.num_drafts > totals.num_accepted > 0


def test_graphs_are_refused(gemma, flashinfer):
    config = EngineConfig(impl="flashinfer", num_pages=300, decode_graphs=True)
    with pytest.raises(NotImplementedError, match=r"decode_graphs: .*, got impl='flashinfer'"):
        Engine(gemma, config)


@pytest.mark.parametrize("name", ["gemma3-tiny", "llama-tiny"])
def test_pages_of_e4m3_with_a_scale_for_each_layer(name, flashinfer, seen):
    """Logits are off by as much as rounding of keys and values explains: that of all of them, once for those of the engine and once for those of
    the pass (`bench.prefill_decode.verify`)."""
    model = random_model(sized(name), device="cpu")
    scale = 0.25
    model.kv_scales = [(scale, scale)] * model.config.num_layers
    run = Recorder(model, impl="flashinfer", kv_cache_dtype="fp8_per_tensor")
    ids = [run.add(prompt(n, seed=n), max_tokens=12) for n in (60, 9)]
    run.run()
    assert (seen["_plan_copies"] > 0) == (name == "gemma3-tiny")
    for request_id in ids:
        output = run.outputs[request_id]
        tokens = torch.tensor(output.prompt_token_ids + output.token_ids)[:-1]
        first = len(output.prompt_token_ids) - 1
        exact = model.full_forward(tokens)[first:]
        stored = model.full_forward(tokens, stored=lambda rows: e4m3_values(rows / scale) * scale)
        cache_err = (stored[first:] - exact).abs().max()
        assert cache_err > 1e-3
        assert (torch.stack(run.logits[request_id]) - exact).abs().max() <= 2 * cache_err


def gemma4_e():
    config = get_config("gemma4-e-tiny")
    return replace(
        config, full=replace(config.full, head_dim=64), sliding=replace(config.sliding, head_dim=64)
    )


REFUSED = {
    "head_dim": (lambda: few("gemma3-tiny"), {}, r"layer 0 \(sliding_attention\) has a head_dim of 32, supported are \[64, 128, 256\]"),
    "sinks": (lambda: sized("gpt-oss-tiny"), {}, r"layer 0 \(sliding_attention\) has attention sinks"),
    "shared": (gemma4_e, {}, r"layer 6 \(.*\) reads the keys and values of layer"),
    "window": (lambda: replace(sized("gemma3-tiny"), sliding=replace(sized("gemma3-tiny").sliding, sliding_window=1)), {}, r"layer 0 \(sliding_attention\) has a window of 1"),
    "v4": (lambda: few("deepseek-v4-tiny"), {}, r"layer 0 is sliding_attention, over latents"),
    "scales": (lambda: sized("gemma3-tiny"), {"kv_cache_dtype": "fp8"}, "FlashInfer takes no scales of rows"),
    "replay": (lambda: sized("gemma3-tiny"), {"replay": True}, "replay=True"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_at_the_start(name, flashinfer):
    config, settings, message = REFUSED[name]
    model = random_model(config(), device="cpu")
    with pytest.raises(NotImplementedError, match=message):
        Engine(model, EngineConfig(impl="flashinfer", num_pages=300, **settings))


def test_devices_and_dtypes(gemma, monkeypatch):
    config = EngineConfig(impl="flashinfer", num_pages=300)
    with pytest.raises(NotImplementedError, match=r"tensors on 'cpu', supported is \['cuda'\]"):
        Engine(gemma, config)
    monkeypatch.setattr(planner, "DEVICES", ["cpu"])
    with pytest.raises(NotImplementedError, match=r"a model in torch.float32, supported are"):
        Engine(gemma, config)
    monkeypatch.setattr(planner, "DTYPES", [torch.float32])
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as if not installed
    with pytest.raises(NotImplementedError, match=r"flashinfer-python is installed .*quire\[gpu\]"):
        Engine(gemma, config)


def test_under_rocm_it_says_so(flashinfer, monkeypatch):
    """Even where a package of that name is there."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(NotImplementedError, match=r"^impl: 'flashinfer' .*ROCm 7.0, .*NVIDIA GPUs"):
        planner.import_flashinfer()
