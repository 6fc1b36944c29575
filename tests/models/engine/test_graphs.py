"""Decode through captured graphs, which a CPU stands in for (`tests.support.models.captured`): tokens and log-probabilities of eager decode."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from quire.models.deepseek_v4.drafters import MTPDrafter
from quire.models.deepseek_v4.model import DeepseekV4
from quire.models.engine import graphs
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.engine.sampler import Sampled
from quire.models.loading.random_weights import random_model
from tests.models.engine.test_engine import prompt
from tests.support.models.captured import KERNELS, Captures, Waits, captured_engine
from tests.support.models.drafters import Oracle
from tests.support.models.few import few

SAMPLING = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 5}
LENGTHS = (40, 3, 17, 9, 31, 5, 22, 12, 64)
SMALL = {"max_num_batched_tokens": 64, "num_pages": 900}


def serve(engine, lengths, *, disturbed=False, again=3):
    """Outputs by id of requests of these prompt lengths, of which every third is sampled, and ``again`` more with the first one's prompt,
    once it has ended. disturbed: the last request loses its pages every sixth step, and one is ended early."""
    for n, length in enumerate(lengths):
        sampling = {} if n % 3 else SAMPLING
        params = SamplingParams(4 + 3 * n, ignore_eos=True, logprobs=2, **sampling)
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
        for name in ("token_ids", "finish_reason", "num_cached_tokens"):
            assert getattr(one, name) == getattr(other, name), key
        pairs = zip(one.logprobs, other.logprobs, strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-3, key


def eager(model, lengths, *, disturbed=False, again=3, **settings):
    plain = {"decode_graphs": False, "async_scheduling": False}
    engine = Engine(model, EngineConfig(**SMALL | settings | plain))
    return serve(engine, lengths, disturbed=disturbed, again=again)


def build(name):
    return random_model(few(name))


# max_num_seqs, requests, and how they are served.
CASES = {
    "gemma4-tiny": (7, LENGTHS, {"disturbed": True}, {}),
    "gemma4-e-tiny": (7, LENGTHS, {"disturbed": True}, {}),
    # Embeddings by layer and hashed experts read ids that the device alone knows.
    "gemma4-e-tiny ahead": (3, LENGTHS[1:4], {"again": 1}, {"async_scheduling": True}),
    "deepseek-v4-tiny ahead": (3, LENGTHS[1:4], {"again": 1}, {"async_scheduling": True}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_replays_decode_as_eager_steps_do(name):
    """Batches of many sizes, padded and not; an abort, preemptions, prefix hits; and each size is captured once."""
    most, lengths, way, settings = CASES[name]
    model, settings = build(name.split()[0]), settings | {"max_num_seqs": most}
    captures = Captures()
    engine = captured_engine(model, EngineConfig(decode_graphs=True, **SMALL | settings), captures)
    got = serve(engine, lengths, **way)
    assert_equal(got, eager(model, lengths, **way, **settings))
    assert got["again 0"].num_cached_tokens > 0 or lengths != LENGTHS
    sizes = [n for n in (1, 2, 4) if n < most] + [most]
    assert engine.runner.graphs.shapes == [(n, 1) for n in sizes]
    assert len(captures.graphs) == len(sizes) and captures.num_replays > 8
    # Padding writes nothing, not even to the null page (which DeepSeek-V4 uses).
    if not isinstance(model, DeepseekV4):
        assert not any(tensor[0].any() for tensor in engine.pool.tensors)


@pytest.mark.slow
def test_drafts_through_graphs():
    """Steps with any number of drafts, fewer than there is room for included: all that only decode are replayed."""
    model, lengths, captures = build("gemma4-tiny"), LENGTHS[:7], Captures()
    expected = eager(model, lengths, max_num_seqs=7)
    drafter = Oracle({i: output.token_ids for i, output in expected.items()}, 2)
    config = EngineConfig(decode_graphs=True, max_num_seqs=7, **SMALL)
    engine = captured_engine(model, config, captures, drafter=drafter)
    assert {shape.rows for shape in engine.runner.graphs.shapes} == {1, 3}
    forward, steps = engine._forward, []

    def noting(step):
        before = captures.num_replays
        forward(step)
        decodes = len(step.rows) == len(step.input_ids)
        steps.append((step.has_drafts, decodes, captures.num_replays > before))

    engine._forward = noting
    assert_equal(serve(engine, lengths), expected)
    assert 0 < engine.totals.num_accepted < engine.totals.num_drafts
    assert all(decodes == replayed for _, decodes, replayed in steps)
    assert sum(has_drafts and replayed for has_drafts, _, replayed in steps) > 5


@pytest.mark.parametrize("failing", [[(4, 1)], [(1, 1)], [(1, 1), (2, 1), (4, 1)]])
def test_a_size_that_cannot_be_captured(failing, monkeypatch):
    """One warning at start; its steps use a larger graph, or none; nothing else fails."""
    model, lengths, captures, sizes = build("llama-tiny"), LENGTHS[:5], Captures(), iter([4, 2, 1])

    def capture(work):
        if (next(sizes), 1) in failing:
            raise torch.OutOfMemoryError("no memory left")
        return captures(work)

    monkeypatch.setattr(graphs, "default_capture", lambda device: capture)
    names = ", ".join(f"{n} x {rows}" for n, rows in reversed(failing))
    message = rf"^decode graphs: {names} \(sequences x rows\) cannot be captured, and run without: OutOfMemoryError: no memory left$"
    with pytest.warns(RuntimeWarning, match=message) as warned:
        engine = Engine(model, EngineConfig(decode_graphs=True, max_num_seqs=4, **SMALL))
    assert len(warned) == 1
    assert_equal(serve(engine, lengths), eager(model, lengths, max_num_seqs=4))
    assert (captures.num_replays > 0) == (len(failing) < 3)


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("name", ["gemma3-tiny", "deepseek-v4-tiny"])
def test_an_engine_that_is_dropped_frees_its_pool(name, on):
    """At once, without a collection of cycles."""
    config = EngineConfig(num_pages=90, max_num_seqs=2, max_num_batched_tokens=64, decode_graphs=on)
    engine = Engine(build(name), config)
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


@pytest.mark.parametrize(
    ("name", "is_async", "num_drafts"),
    [("gemma4-tiny", False, 0), ("gemma4-tiny", True, 0), ("deepseek-v4-tiny", False, 2)],
)
def test_a_decode_step_waits_for_its_tokens_only(name, is_async, num_drafts, monkeypatch):
    """One tensor goes to the host: sampled ids, drafts and log-probabilities; a step ahead, those of the step before."""
    config = few(name)
    model = random_model(replace(config, num_mtp_layers=2) if num_drafts else config)
    settings = EngineConfig(
        max_num_seqs=4, decode_graphs=True, async_scheduling=is_async, **SMALL,
        rejection_sample_method="standard" if num_drafts else "strict",
    )  # fmt: skip
    captures, calls, waits = Captures(), [], Waits(monkeypatch)

    def noting(work):
        replay = waits.unseen(captures(work))
        return lambda: (calls.append("replay"), replay())

    drafter = MTPDrafter(model, num_drafts) if num_drafts else None
    engine = captured_engine(model, settings, noting, drafter=drafter)
    sampling = SAMPLING | {"logprobs": 3, "min_p": 0.01, "top_k": 50}
    for n in range(3):
        engine.add_request(prompt(11 + n, seed=n), SamplingParams(40, ignore_eos=True, **sampling))
    # What computes on a CPU is not what does on a device: each kernel is one operation.
    for module, kernel in KERNELS:
        monkeypatch.setattr(module, kernel, waits.unseen(getattr(module, kernel)))
    engine.step(), engine.step()  # prompts; a replay
    wait = Sampled.wait
    monkeypatch.setattr(Sampled, "wait", lambda copy: calls.append(copy) or wait(copy))
    for _ in range(7):  # past the end of a block
        waits.found.clear(), calls.clear()
        before = engine._in_flight.sampled if is_async else None
        with waits:
            told = engine.step()
        assert told.num_generated >= 3 and told.num_drafts == 3 * num_drafts
        assert waits.found == ["tolist"] and len(calls) == 2 and calls[0] == "replay"
        assert before in (None, calls[1])
