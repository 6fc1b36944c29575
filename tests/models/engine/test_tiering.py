"""Host memory behind an engine; `test_engine_many` has copies that end late, or fail."""

import pytest

from quire.models.engine import host_tier
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.host_tier import HostPages
from quire.models.engine.request import SamplingParams
from quire.models.loading.random_weights import random_model
from tests.models.engine.test_engine import DEVICE, Recorder, prompt
from tests.models.engine.test_engine_many import GIB_OF_A_PAGE, alone, end, later
from tests.support.models.few import few
from tests.support.models.toy import ToyModel

FAMILIES = ("gemma3-tiny", "gemma4-tiny", "gpt-oss-tiny", "llama-tiny", "deepseek-v4-tiny")
PARAMS = SamplingParams(4, ignore_eos=True)
LONG = [5 + n % 9 for n in range(100)]


def leave(engine):
    """Move all cached pages from the device to the host."""
    stores = engine.tiers.tiers._stores
    watermark, stores._watermark = stores._watermark, engine.kv.num_pages
    stores._seen.clear()
    for _ in range(8):
        for job in engine.tiers.tiers.stores(1 << 30):
            engine.tiers.copier.start(job)
        engine.tiers.settle()
    stores._watermark = watermark
    engine.kv.evict(engine.kv.num_evictable_pages)


@pytest.mark.parametrize("name", FAMILIES)
def test_pages_come_back_as_they_left(name):
    """Logits behind pages that were in host memory twice are those of a run without a cache."""
    run = Recorder(random_model(few(name), device=DEVICE), num_pages=200, host_cache_gib=0.01)
    tokens, alignment = prompt(130), run.engine.kv.alignment
    run.add(tokens, max_tokens=2)
    run.run()
    for turn in range(2):
        leave(run.engine)
        assert run.engine.kv.match(tokens).num_tokens == 0
        run.add(prompt(60, seed=9), max_tokens=1)
        run.run()
        again = run.add([*tokens, *prompt(20, seed=turn)], max_tokens=2)
        run.run()
        output = run.check(again)
        assert output.num_loaded_tokens == output.num_cached_tokens >= 128 // alignment * alignment
    end(run.engine)


def toy_engine(model=None, **settings):
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_pages": 40} | settings
    settings = {"host_cache_gib": 300 * GIB_OF_A_PAGE} | settings
    return Engine(model or ToyModel(), EngineConfig(**settings))


def finish(engine):
    """Outputs by id."""
    outputs = {}
    while engine.has_work:
        outputs |= {o.request_id: o for o in engine.step().finished}
    return outputs


def behind(ends=lambda: False, **settings):
    """(engine that has LONG in the host and not on the device, waits for its later copies)."""
    engine = toy_engine(**settings)
    engine.add_request(LONG, PARAMS)
    finish(engine)
    leave(engine)
    return engine, later(engine, ends)


@pytest.mark.parametrize("is_async", [False, True])
def test_others_run_while_a_request_waits(is_async):
    engine, waits = behind(async_scheduling=is_async)
    slow = engine.add_request(LONG, PARAMS)
    same = engine.add_request([*LONG, 7, 8], PARAMS)  # waits for the same pages
    quick = engine.add_request([9] * 20, PARAMS)
    first = []
    while not first:
        first += engine.step().finished
    assert [o.request_id for o in first] == [quick] and not waits
    assert len(engine.tiers.tiers.jobs) == 1
    assert first[0].explain() == "0 of 20 tokens: nothing of this prompt is cached"
    waited = engine.step()  # with no other request to run, the engine waits for copies
    assert waits and waited.idle == 0
    outputs = finish(engine)
    for request_id, tokens in ((slow, LONG), (same, [*LONG, 7, 8])):
        output = outputs[request_id]
        assert output.num_cached_tokens == output.num_loaded_tokens == 96
        assert output.token_ids == alone(engine.model, tokens, PARAMS)
    loaded = "96 of 100 tokens, 96 loaded from host memory: "
    loaded += "every segment before the last token was found"
    assert outputs[slow].explain() == loaded
    end(engine)


def test_an_aborted_request_needs_no_load():
    """Copies that have begun end; no request waits for them."""
    engine, _ = behind()
    aborted = engine.add_request(LONG, PARAMS)
    engine.step()
    assert engine.abort(aborted).finish_reason == "abort" and not engine.tiers.is_loading
    end(engine)


def test_pages_that_copies_hold_are_waited_for():
    """No request is preempted for them, and none fails."""
    engine, waits = behind(num_pages=16)
    first = engine.add_request([9] * 20, SamplingParams(60, ignore_eos=True))
    engine.step()
    engine.add_request(LONG, PARAMS)
    outputs = finish(engine)
    assert outputs[first].num_preemptions == 0 and outputs[first].finish_reason == "length"
    assert waits
    end(engine)


def test_why_a_hit_is_not_longer(monkeypatch):
    """A load that would take longer than the prefill, or found no room; a chain without a point."""
    engine, _ = behind(lambda: True, num_pages=30)
    for name, value, why in (
        ("bytes_per_second", 1e-6, "loading more would take longer than computing it"),
        ("load", lambda match: None, "the pool had no room to load more"),
    ):
        with monkeypatch.context() as context:
            context.setattr(engine.tiers.tiers, name, value)
            request_id = engine.add_request([*LONG, 1], PARAMS)
            output = finish(engine)[request_id]
        assert output.explain() == f"0 of 101 tokens: {why}"
        leave(engine)
    request_id = engine.add_request([*LONG[:70], 1, 1], PARAMS)
    output = finish(engine)[request_id]
    assert (output.num_cached_tokens, output.limited_by, output.dense_tokens) == (
        0,
        "resume-point",
        64,
    )
    end(engine)


def test_settings(monkeypatch):
    with pytest.raises(ValueError, match="fit the memory"):
        toy_engine(host_cache_gib=1e6)
    with pytest.raises(ValueError, match=r"^host_cache_gib: expected at least .*\(one page of"):
        toy_engine(host_cache_gib=1e-9)
    assert "\nbehind    150 KiB of host memory\n" in toy_engine().memory.describe()
    plain = toy_engine(host_cache_gib=None)
    plain.close()
    assert plain.tiers is None and "behind" not in plain.memory.describe()
    monkeypatch.setattr(host_tier, "free_memory", lambda device: 2**20)
    message = "expected host memory for 1025 pages of 1024 bytes, 0.0009775 GiB, "
    message += "and 0.0009766 GiB are free"
    with pytest.raises(MemoryError, match=message):
        HostPages(1025, 1024, "cpu")


def test_close_waits_for_copies_and_ends_the_steps():
    engine, waits = behind()
    engine.add_request(LONG, PARAMS)
    engine.tiers.advance(engine.scheduler.waiting, 4, None)
    for _ in range(2):
        engine.close()
    assert waits and not engine.tiers.copier.has_jobs and not engine.tiers.tiers.jobs
    for name, call in (("step", engine.step), ("add_request", lambda: engine.add_request(LONG))):
        with pytest.raises(RuntimeError, match=rf"^{name}: expected an engine that is open"):
            call()
