"""An engine whose attention goes through FlashInfer, here its stand-in: every logit is that of a run without a cache, as with our kernels."""

import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.bench.prefill_decode.verify import e4m3_values
from quire.models.config.named import get_config
from quire.models.engine import graphs
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.speculative import NGramDrafter
from quire.models.engine.warm_up import warm_up
from quire.models.flashinfer import planner
from quire.models.flashinfer.planner import FixedStep, StepPlanner
from quire.models.flashinfer.rows import GroupKeys, Sequences
from quire.models.layers import attention
from quire.models.layers.kv_cache import E4M3
from quire.models.loading.random_weights import random_model
from tests.models.engine.test_engine import Recorder, prompt
from tests.support import flashinfer_stand_in
from tests.support.models.captured import Captures, captured_engine
from tests.support.models.few import few


@pytest.fixture
def flashinfer(monkeypatch):
    return flashinfer_stand_in.install(monkeypatch)


def counted(counts, name, call):
    def counting(self, *args):
        counts[name] += 1
        return call(self, *args)

    return counting


@pytest.fixture
def seen(monkeypatch):
    """How often each thing happened: keys gathered, read from pages, plans for graphs."""
    counts = Counter()
    for owner, name in ((GroupKeys, "gather"), (GroupKeys, "paged"), (FixedStep, "plan")):
        monkeypatch.setattr(owner, name, counted(counts, name, getattr(owner, name)))
    return counts


@pytest.fixture
def written_first(monkeypatch):
    """Checks of every step that no row is written to a place that is still read from pages; counts the rows that windows see."""
    step, counts = StepPlanner.step, Counter()

    def checked(self, plan):
        prepared = step(self, plan)
        for g, group in enumerate(prepared.groups):
            last = prepared.num_decodes if group.gathered else len(plan.slots)
            if not last:
                continue
            keys = GroupKeys(self.kv, plan, g, Sequences(plan, 0, last))
            size = keys.spec.block_size
            _, _, positions, pages = keys.kept()
            read = pages * size + positions % size
            counts[keys.spec.kind] += len(read)
            assert not np.isin(plan.slot_mapping[g], read).any()
            assert (read >= size).all(), "the null page is read by nobody"
        return prepared

    monkeypatch.setattr(StepPlanner, "step", checked)
    return counts


def of_64(name, **changes):
    """A tiny configuration with heads of a size that FlashInfer has."""
    config = few(name)
    sliding = config.sliding and replace(config.sliding, head_dim=64)
    return replace(config, full=replace(config.full, head_dim=64), sliding=sliding, **changes)


@pytest.fixture(scope="module", params=["gemma3-tiny", "gemma4-tiny"])
def model(request):
    return random_model(of_64(request.param), device="cpu")


@pytest.fixture(scope="module")
def gemma():
    return random_model(of_64("gemma3-tiny"), device="cpu")


LENGTHS = (1, 15, 16, 17, 48, 49, 110, 31)


def test_ragged_requests_equal_each_alone(model, flashinfer, seen, written_first):
    """Prompts cut into steps of 48, of which windows of 16 keep the last rows only, beside decodes; then the same with hits."""
    run = Recorder(model, impl="flashinfer")
    ids = [run.add(prompt(n, seed=n), max_tokens=3 + n % 20) for n in LENGTHS]
    run.run()
    for request_id in ids:
        run.check(request_id)
    assert any(r.num_decodes and r.num_prefills for r in run.reports)  # mixed steps happened
    assert seen["gather"] > 0 < seen["paged"]
    again = [run.add(prompt(n, seed=n) + prompt(9), max_tokens=3) for n in LENGTHS]
    run.run()
    assert sum(run.check(request_id).num_cached_tokens for request_id in again) > 0
    assert min(written_first["dense"], written_first["window"]) > 1000


def test_each_group_is_planned_once_a_step(flashinfer):
    """And all of its layers run with that plan."""
    config = of_64("gemma3-tiny", layer_types=get_config("gemma3-tiny").layer_types)
    model = random_model(config, device="cpu")
    engine = Engine(model, EngineConfig(impl="flashinfer", num_pages=300, decode_graphs=False))
    for n in (5, 40):
        engine.add_request(prompt(n))
    engine.step()
    planner = engine._builder.planner
    assert [wrapper.plans for wrapper in planner._prefills] == [1] * engine._builder.num_groups
    engine.step()
    assert [wrapper.plans for wrapper in planner._decodes] == [1] * engine._builder.num_groups
    assert [wrapper.plans for wrapper in planner._prefills] == [1] * engine._builder.num_groups
    assert engine._builder.num_groups < model.config.num_layers


def test_drafts(gemma, flashinfer, written_first):
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
    assert written_first["window"] > 100


def served(model, make=Engine, **settings):
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=48, num_pages=600, **settings)
    engine = make(model, config)
    ids = [engine.add_request(prompt(n, seed=n)) for n in (1, 15, 16, 17, 49)]
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output.token_ids for output in engine.step().finished}
    return [outputs[i] for i in ids]


def test_decode_through_graphs(gemma, flashinfer, seen):
    """Captured (`tests.support.models.captured`) and replayed after other plans, which write to the buffers of the wrappers' runs; batches of 1 to
    4 are padded to the sizes of graphs."""
    kernels = {attention: ("write_kv",), flashinfer_stand_in.Wrapper: ("compute",)}
    captures = Captures(kernels)
    graphed = served(
        gemma,
        lambda *arguments: captured_engine(*arguments, captures),
        impl="flashinfer",
        decode_graphs=True,
    )
    num_graphs = len(graphs.batch_sizes(4))
    assert len(captures.graphs) == num_graphs and captures.num_replays > 10
    assert seen["plan"] == num_graphs + captures.num_replays
    assert graphed == served(gemma, impl="torch", decode_graphs=False)


def test_steps_of_padding(gemma, flashinfer):
    """What an engine on a GPU compiles at its start: kernels for pages, and for copies of keys, which are not quantized. Nothing is written."""
    config = EngineConfig(
        impl="flashinfer",
        num_pages=300,
        max_num_seqs=3,
        max_num_batched_tokens=40,
        kv_cache_dtype="fp8_per_tensor",
    )
    engine = Engine(gemma, config)
    planned, plan = set(), planner.plan_prefill
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(planner, "plan_prefill", lambda *a: (planned.add(a[1]), plan(*a)))
        warm_up(engine._run, engine._builder, config, engine.max_model_len, torch.device("cpu"))
    kernels = {(shape.sliding_window, shape.kv_dtype) for shape in planned}
    assert kernels == {(None, E4M3), (16, E4M3), (16, torch.float32)}
    assert all(wrapper.plans for wrapper in engine._builder.planner._decodes)
    assert all(not tensor.any() for tensor in engine.pool.tensors)


def test_drafts_run_without_graphs(gemma, flashinfer):
    with pytest.warns(RuntimeWarning, match=r"4 x 4, .* cannot be captured, .*one row") as warned:
        engine = Engine(
            gemma,
            EngineConfig(impl="flashinfer", decode_graphs=True, max_num_seqs=4, num_pages=300),
            drafter=NGramDrafter(3),
        )
    assert len(warned) == 1
    assert {shape.rows for shape in engine._graphs.shapes} == {1}


def test_memory_of_graphs_is_measured_with_plans(gemma, flashinfer, seen, monkeypatch):
    monkeypatch.setattr(graphs, "MEASURED_ON", ("cpu",))
    free = iter(range(10**9, 0, -(10**6)))
    monkeypatch.setattr(graphs, "free_memory", lambda device: next(free))
    config = EngineConfig(
        impl="flashinfer", memory_fraction=0.01, max_num_seqs=4, decode_graphs=True
    )
    engine = Engine(gemma, config)
    assert engine.memory.graph_bytes == 10**6 * len(graphs.batch_sizes(4))


@pytest.mark.parametrize("name", ["gemma3-tiny", "llama-tiny"])
def test_pages_of_e4m3_with_a_scale_for_each_layer(name, flashinfer, seen):
    """Logits are off by as much as rounding of keys and values explains: that of all of them, once for those of the engine and once for those of
    the pass (`bench.prefill_decode.verify`)."""
    model = random_model(of_64(name), device="cpu")
    scale = 0.25
    model.kv_scales = [(scale, scale)] * model.config.num_layers
    run = Recorder(model, impl="flashinfer", kv_cache_dtype="fp8_per_tensor")
    ids = [run.add(prompt(n, seed=n), max_tokens=12) for n in (60, 9)]
    run.run()
    assert (seen["gather"] > 0) == (name == "gemma3-tiny")
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
    "sinks": (lambda: of_64("gpt-oss-tiny"), {}, r"layer 0 \(sliding_attention\) has attention sinks"),
    "shared": (gemma4_e, {}, r"layer 6 \(.*\) reads the keys and values of layer"),
    "window": (lambda: replace(of_64("gemma3-tiny"), sliding=replace(of_64("gemma3-tiny").sliding, sliding_window=1)), {}, r"layer 0 \(sliding_attention\) has a window of 1"),
    "v4": (lambda: few("deepseek-v4-tiny"), {}, r"layer 0 is sliding_attention, over latents"),
    "scales": (lambda: of_64("gemma3-tiny"), {"kv_cache_dtype": "fp8"}, "FlashInfer takes no scales of rows"),
    "replay": (lambda: of_64("gemma3-tiny"), {"replay": True}, "replay=True"),
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
    monkeypatch.setattr("quire.models.flashinfer.support.DEVICES", ("cpu",))
    with pytest.raises(NotImplementedError, match=r"a model in torch.float32, supported are"):
        Engine(gemma, config)
    monkeypatch.setattr("quire.models.flashinfer.support.DTYPES", (torch.float32,))
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as if not installed
    with pytest.raises(NotImplementedError, match=r"flashinfer-python is installed .*quire\[gpu\]"):
        Engine(gemma, config)
