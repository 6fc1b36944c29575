"""Decode through captured graphs, which a CPU stands in for (`tests.support.models.captured`): tokens and log-probabilities of eager decode."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kvcore.device import HostCopy, batch
from quire.models.config.model import FULL, SLIDING
from quire.models.config.named import get_config
from quire.models.deepseek_v4.drafters import MTPDrafter
from quire.models.deepseek_v4.model import DeepseekV4
from quire.models.engine import graphs
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.loading.random_weights import random_model
from tests.models.engine.test_engine import prompt
from tests.support.models.captured import (
    KERNELS,
    LAUNCHES,
    ON_HOST,
    Captures,
    captured_engine,
    forbidden,
)
from tests.support.models.drafters import Oracle
from tests.support.models.few import few

NAMES = ("gemma3-tiny", "gemma4-tiny", "gemma4-e-tiny", "gemma4-moe-tiny", "llama-tiny", "gpt-oss-tiny", "deepseek-v4-tiny")  # fmt: skip
SAMPLING = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 5}


def serve(engine, lengths, *, disturbed=False, again=3):
    """Outputs by id of requests of these prompt lengths, of which every third is sampled, and ``again`` more with the first one's prompt,
    once it has ended. disturbed: the last request loses its pages every sixth step, and one is ended early."""
    for n, length in enumerate(lengths):
        params = SamplingParams(
            4 + 3 * n, ignore_eos=True, logprobs=2, **({} if n % 3 else SAMPLING)
        )
        engine.add_request(prompt(length, seed=length), params, request_id=str(n))
    done, step = {}, 0
    while engine.has_work:
        done |= {o.request_id: o for o in engine.step().finished}
        step += 1
        if disturbed and step % 6 == 0 and engine.scheduler.running:
            engine.scheduler._requeue(engine.scheduler.running[-1:])
        if disturbed and step == 9:
            done["4"] = engine.abort("4")
        if "0" in done and again:
            again -= 1
            params = SamplingParams(6, ignore_eos=True, logprobs=2)
            engine.add_request(prompt(lengths[0], seed=lengths[0]), params, request_id=f"again {again}")  # fmt: skip
    return done


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for key, one in got.items():
        other = expected[key]
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason), key
        pairs = zip(one.logprobs, other.logprobs, strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-3, key
        assert one.num_cached_tokens == other.num_cached_tokens, key


def both(model, lengths, *, captures=None, disturbed=False, again=3, **settings):
    """(eager outputs, captured outputs, captures, engine of these)."""
    settings = {"max_num_batched_tokens": 64, "num_pages": 900} | settings
    more = {"disturbed": disturbed, "again": again}
    plain = {"decode_graphs": False, "impl": "torch", "async_scheduling": False}
    eager = serve(Engine(model, EngineConfig(**settings | plain)), lengths, **more)
    captures = captures or Captures()
    engine = captured_engine(model, EngineConfig(decode_graphs=True, **settings), captures)
    return eager, serve(engine, lengths, **more), captures, engine


def build(name):
    return random_model(few(name))


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return build(request.param)


LENGTHS = (40, 3, 17, 9, 31, 5, 22, 12, 64)


@pytest.mark.parametrize("model", ["gemma4-tiny", "gemma4-e-tiny"], indirect=True)
@pytest.mark.slow
def test_replays_decode_as_eager_steps_do(model):
    """Batches of many sizes, padded and not; an abort, preemptions, prefix hits; and each size is captured once."""
    eager, got, captures, engine = both(model, LENGTHS, max_num_seqs=7, disturbed=True)
    assert_equal(got, eager)
    assert got["4"].finish_reason == "abort" and got["again 0"].num_cached_tokens > 0
    assert (
        engine.runner.graphs.shapes == [(1, 1), (2, 1), (4, 1), (7, 1)]
        and len(captures.graphs) == 4
    )
    assert captures.num_replays > 20
    # Padding writes nothing, not even to the null page (which DeepSeek-V4 uses).
    if not isinstance(model, DeepseekV4):
        assert not any(tensor[0].any() for tensor in engine.pool.tensors)


@pytest.mark.parametrize("model", ["gemma4-e-tiny", "deepseek-v4-tiny"], indirect=True)
def test_replays_a_step_ahead(model):
    """Embeddings by layer and hashed experts read ids that the device alone knows."""
    more = {"max_num_seqs": 3, "async_scheduling": True, "again": 1}
    eager, got, captures, _ = both(model, LENGTHS[1:4], **more)
    assert_equal(got, eager)
    assert captures.num_replays > 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4-tiny"])
def test_drafts_through_graphs(name, monkeypatch):
    """Steps with any number of drafts, fewer than there is room for included: all that decode are replayed, up to the longest sequence."""
    model, lengths = build(name), LENGTHS[:7]
    settings = {"max_num_batched_tokens": 64, "num_pages": 900, "max_num_seqs": 7}
    eager = serve(Engine(model, EngineConfig(decode_graphs=False, **settings)), lengths)
    config, captures = EngineConfig(decode_graphs=True, **settings), Captures()
    drafter = Oracle({i: output.token_ids for i, output in eager.items()}, 2)
    engine = captured_engine(model, config, captures, drafter=drafter)
    rows = {shape.rows for shape in engine.runner.graphs.shapes}
    assert rows == {1, 3} and len(captures.graphs) == 2 * 4
    build_batch, built = batch.BatchBuilder.build, []

    def building(self, plan, *arguments):
        computed, slots = engine.kv.num_computed, plan.slots.tolist()
        by_slot = {r.slot: r for r in engine.scheduler.running}
        built.append(sum(computed[slot] < by_slot[slot].prompt_len - 1 for slot in slots))
        return build_batch(self, plan, *arguments)

    monkeypatch.setattr(batch.BatchBuilder, "build", building)
    steps, forward = [], engine._forward
    monkeypatch.setattr(engine, "_forward", lambda step: steps.append(step) or forward(step))
    assert_equal(serve(engine, lengths), eager)
    assert 0 < engine.totals.num_accepted < engine.totals.num_drafts
    assert len([step for step in steps if step.has_drafts]) > 5
    assert captures.num_replays + len(built) == len(steps)
    assert min(built) > 0, "only steps with prompts are not replayed"


@pytest.mark.parametrize("failing", [[(4, 1)], [(1, 1)], [(1, 1), (2, 1), (4, 1)]])
def test_a_size_that_cannot_be_captured(failing):
    """One warning at start; its steps use a larger graph, or none; nothing else fails."""
    model, lengths = build("llama-tiny"), LENGTHS[:5]
    settings = {"num_pages": 900, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    eager = serve(Engine(model, EngineConfig(decode_graphs=False, **settings)), lengths)
    captures, sizes = Captures(), iter([4, 2, 1])

    def capture(work):
        if (next(sizes), 1) in failing:
            raise torch.OutOfMemoryError("no memory left")
        return captures(work)

    names = ", ".join(f"{n} x {rows}" for n, rows in reversed(failing))
    with pytest.MonkeyPatch.context() as patch, pytest.warns(RuntimeWarning) as warned:
        patch.setattr(graphs, "default_capture", lambda device: capture)
        engine = Engine(model, EngineConfig(decode_graphs=True, **settings))
    [warning] = warned
    assert str(warning.message) == (
        f"decode graphs: {names} (sequences x rows) cannot be captured, and run without: OutOfMemoryError: no memory left"
    )
    assert_equal(serve(engine, lengths), eager)
    assert (captures.num_replays > 0) == (len(failing) < 3)


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("name", ["gemma3-tiny", "deepseek-v4-tiny"])
def test_an_engine_that_is_dropped_frees_its_pool(name, on):
    """At once, without a collection of cycles."""
    engine = Engine(
        build(name),
        EngineConfig(num_pages=90, max_num_seqs=2, max_num_batched_tokens=64, decode_graphs=on),
    )
    engine.add_request(prompt(9), SamplingParams(4))
    while engine.has_work:
        engine.step()
    pool = weakref.ref(engine.pool)
    gc.collect()
    gc.disable()
    try:
        del engine
        assert pool() is None
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (replace(get_config("gemma4-tiny"), layer_types=(SLIDING, FULL)), "auto"),
        (replace(get_config("gemma4-tiny"), layer_types=(FULL, SLIDING)), "fp8"),
    ],
    ids=["gemma4", "gemma4-fp8"],
)
def test_launches_of_triton(config, dtype):
    """Work of wrappers before and between their launches is captured too, workspaces included."""
    captures = Captures(LAUNCHES)
    settings = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 4,
        "max_model_len": 32,
        "impl": "triton",
    }
    eager, got, captures, _ = both(
        random_model(config), (4,), captures=captures, again=0, kv_cache_dtype=dtype, **settings
    )
    assert_equal(got, eager)
    assert captures.num_replays == 3


class Step(TorchDispatchMode):
    """Record operations of a step that wait for the device, outside of replays."""

    def __init__(self):
        super().__init__()
        self.found, self.replaying = [], False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.see(forbidden(op, args, kwargs))
        return op(*args, **kwargs)

    def see(self, name):
        if name is not None and not self.replaying:
            self.found.append(name)

    def unseen(self, work):
        def call(*args, **kwargs):
            self.replaying = True
            try:
                return work(*args, **kwargs)
            finally:
                self.replaying = False

        return call

    def watch_host(self, monkeypatch):
        """See copies from and to the host too. Arrays go through `quire.kvcore.device.Staging`."""

        def seen(name, original):
            def call(*args, **kwargs):
                self.see(name)
                return original(*args, **kwargs)

            return call

        for owner, names in ((torch.Tensor, ON_HOST), (torch, ("tensor", "as_tensor"))):
            for name in names:
                monkeypatch.setattr(owner, name, seen(name, getattr(owner, name)))


@pytest.mark.parametrize(
    ("name", "is_async", "num_drafts"),
    [
        ("gemma4-tiny", False, 0),
        ("gemma4-tiny", True, 0),
        ("deepseek-v4-tiny", False, 0),
        ("deepseek-v4-tiny", False, 2),
    ],
)
def test_a_decode_step_waits_for_its_tokens_only(name, is_async, num_drafts, monkeypatch):
    """One tensor goes to the host: sampled ids, drafts and log-probabilities; a step ahead, those of the step before."""
    step, capture, calls = Step(), Captures(), []

    def noting(work):
        replay = step.unseen(capture(work))
        return lambda: (calls.append("replay"), replay())

    config = few(name)
    model = random_model(replace(config, num_mtp_layers=2) if num_drafts else config)
    settings = EngineConfig(
        num_pages=900, max_num_seqs=4, max_num_batched_tokens=64, decode_graphs=True,
        async_scheduling=is_async, rejection_sample_method="standard" if num_drafts else "strict",
    )  # fmt: skip
    drafter = MTPDrafter(model, num_drafts) if num_drafts else None
    engine = captured_engine(model, settings, noting, drafter=drafter)
    sampling = SAMPLING | {"logprobs": 3, "min_p": 0.01, "top_k": 50}
    for n in range(3):
        engine.add_request(prompt(11 + n, seed=n), SamplingParams(40, ignore_eos=True, **sampling))
    # What computes on a CPU is not what does on a device: each kernel is one operation.
    for module, names in KERNELS.items():
        for kernel in names:
            monkeypatch.setattr(module, kernel, step.unseen(getattr(module, kernel)))
    engine.step(), engine.step()  # prompts; a replay
    wait = HostCopy.wait
    monkeypatch.setattr(HostCopy, "wait", lambda copy: calls.append(copy) or wait(copy))
    step.watch_host(monkeypatch)
    for _ in range(7):  # past the end of a block
        step.found.clear(), calls.clear()
        before = engine._in_flight.sampled._copy if is_async else None
        with step:
            told = engine.step()
        assert told.num_generated >= 3 and told.num_drafts == 3 * num_drafts
        assert step.found == ["tolist"] and len(calls) == 2 and calls[0] == "replay"
        assert before in (None, calls[1])
