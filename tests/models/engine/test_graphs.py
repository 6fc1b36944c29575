"""Decode through captured graphs, for which a CPU stands in (`tests.support.models.captured`).

Tokens and log-probabilities are those of eager decode. Kernels are compiled at the start, all of
them, and few.
"""

import collections
import gc
import json
import os
import weakref
from dataclasses import replace
from pathlib import Path

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
from tests.support.forked import printed
from tests.support.models.captured import Captures, Waits, captured_engine, capturing
from tests.support.models.drafters import Oracle
from tests.support.models.few import few
from tests.support.models.toy import finish

SAMPLING = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 5}
LENGTHS = (40, 3, 17, 9, 31, 5, 22, 12, 64)
SMALL = {"max_num_batched_tokens": 64, "num_pages": 900}


def serve(engine, lengths):
    """Outputs by id of requests of these prompt lengths, of which every third is sampled.

    Once the first has ended, more come with its prompt. Of all `LENGTHS`, the last request loses
    its pages every sixth step, and one is ended early.
    """
    again, is_disturbed = len(lengths) // 3, lengths == LENGTHS

    def add(length, count, request_id, **sampling):
        params = SamplingParams(count, ignore_eos=True, logprobs=2, **sampling)
        engine.add_request(prompt(length, seed=length), params, request_id=request_id)

    for n, length in enumerate(lengths):
        add(length, 4 + 3 * n, str(n), **({} if n % 3 else SAMPLING))
    done, step = {}, 0
    while engine.has_work:
        done |= {o.request_id: o for o in engine.step().finished}
        step += 1
        if is_disturbed and step % 6 == 0 and engine.scheduler.running:
            engine.scheduler._requeue(engine.scheduler.running[-1:])
        if is_disturbed and step == 9:
            done["4"] = engine.abort("4")
        if "0" in done and again:
            again -= 1
            add(lengths[0], 6, f"again {again}")
    return done


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for key, one in got.items():
        other = expected[key]
        for name in ("token_ids", "finish_reason", "num_cached_tokens"):
            assert getattr(one, name) == getattr(other, name), key
        pairs = zip(one.logprobs, other.logprobs, strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-3, key


def eager(model, lengths, most):
    plain = {"decode_graphs": False, "async_scheduling": False}
    return serve(Engine(model, EngineConfig(max_num_seqs=most, **SMALL, **plain)), lengths)


def build(name):
    return random_model(few(name))


@pytest.mark.parametrize(
    ("name", "ahead"),
    # Embeddings by layer and hashed experts read ids that the device alone knows.
    [("gemma4-tiny", 0), ("gemma4-e-tiny", 0), ("gemma4-e-tiny", 1), ("deepseek-v4-tiny", 1)],
)
@pytest.mark.slow
def test_replays_decode_as_eager_steps_do(name, ahead):
    """Batches of many sizes, padded and not; an abort, preemptions, prefix hits.

    Each size is captured once.
    """
    model, captures = build(name), Captures()
    most, lengths = (3, LENGTHS[1:4]) if ahead else (7, LENGTHS)
    settings = SMALL | {"async_scheduling": bool(ahead), "max_num_seqs": most}
    engine = captured_engine(model, EngineConfig(decode_graphs=True, **settings), captures)
    got = serve(engine, lengths)
    assert_equal(got, eager(model, lengths, most))
    assert got["again 0"].num_cached_tokens > 0 or lengths != LENGTHS
    sizes = [n for n in (1, 2, 4) if n < most] + [most]
    assert engine.runner.graphs.shapes == [(n, 1) for n in sizes]
    assert len(captures.graphs) == len(sizes) and captures.num_replays > 8
    # Padding writes nothing, not even to the null page (which DeepSeek-V4 uses).
    if not isinstance(model, DeepseekV4):
        assert not any(tensor[0].any() for tensor in engine.pool.tensors)


@pytest.mark.slow
def test_drafts_through_graphs():
    """All steps that only decode are replayed, also those with fewer drafts than there is room."""
    model, lengths, captures = build("gemma4-tiny"), LENGTHS[:7], Captures()
    expected = eager(model, lengths, 7)
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
    message = rf"^decode graphs: {names} \(sequences x rows\) cannot be captured, and run without: "
    message += "OutOfMemoryError: no memory left$"
    with pytest.warns(RuntimeWarning, match=message) as warned:
        engine = Engine(model, EngineConfig(decode_graphs=True, max_num_seqs=4, **SMALL))
    assert len(warned) == 1
    assert_equal(serve(engine, lengths), eager(model, lengths, 4))
    assert (captures.num_replays > 0) == (len(failing) < 3)


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("name", ["gemma3-tiny", "deepseek-v4-tiny"])
def test_an_engine_that_is_dropped_frees_its_pool(name, on):
    """At once, without a collection of cycles."""
    engine = Engine(build(name), EngineConfig(max_num_seqs=2, decode_graphs=on, **SMALL))
    engine.add_request(prompt(9), SamplingParams(4))
    finish(engine)
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
    """One tensor goes to the host: sampled ids, drafts and log-probabilities.

    A step ahead, it is that of the step before.
    """
    config = few(name)
    model = random_model(replace(config, num_mtp_layers=2) if num_drafts else config)
    settings = EngineConfig(
        max_num_seqs=4, decode_graphs=True, async_scheduling=is_async, **SMALL,
        rejection_sample_method="standard" if num_drafts else "strict",
    )  # fmt: skip
    captures, calls, waits = Captures(), [], Waits()

    def noting(work):
        replay = captures(work)
        return lambda: (calls.append("replay"), waits.kernel("replay", replay))

    drafter = MTPDrafter(model, num_drafts) if num_drafts else None
    engine = captured_engine(model, settings, noting, drafter=drafter)
    sampling = SAMPLING | {"logprobs": 3, "min_p": 0.01, "top_k": 50}
    for n in range(3):
        engine.add_request(prompt(11 + n, seed=n), SamplingParams(40, ignore_eos=True, **sampling))
    engine.step(), engine.step()  # prompts; a replay
    wait = Sampled.wait
    monkeypatch.setattr(Sampled, "wait", lambda copy: calls.append(copy) or wait(copy))
    for _ in range(7):  # past the end of a block
        waits.found.clear(), calls.clear()
        before = engine._in_flight.sampled if is_async else None
        with capturing(waits):
            told = engine.step()
        assert told.num_generated >= 3 and told.num_drafts == 3 * num_drafts
        assert waits.found == ["tolist"] and len(calls) == 2 and calls[0] == "replay"
        assert before in (None, calls[1])


ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "experts"),
    [("gemma4-tiny", []), ("gpt-oss-tiny", []), ("deepseek-v4-tiny", []), ("deepseek-v4-tiny", ["fp4"])],
)  # fmt: skip
def test_nothing_is_compiled_after_the_start(name, experts):
    """Requests of all lengths, batches of all sizes, prompts beside decodes, and drafts."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    code = "import json, sys; from tests.support.models.variants import session; print(json.dumps(session(sys.argv[1], 60, *sys.argv[2:])))"
    found = json.loads(printed(code, name, *experts, cwd=ROOT, env=environment))
    assert not found["later"], found["later"]
    counts = collections.Counter(found["start"])
    assert counts.pop("sample_kernel") == 2
    assert 4 <= counts.total() <= 33, counts
