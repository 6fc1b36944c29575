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
from tests.support.models.toy import ToyModel, finish

FAMILIES = ("gemma3-tiny", "gemma4-tiny", "gpt-oss-tiny", "llama-tiny", "deepseek-v4-tiny")
PARAMS = SamplingParams(4, ignore_eos=True)
LONG = [5 + n % 9 for n in range(100)]


def leave(engine):
    """Move all cached pages from the device to the host."""
    stores = engine.host_tier.tiers._stores
    watermark, stores._watermark = stores._watermark, engine.kv.num_pages
    stores._seen.clear()
    for _ in range(8):
        for job in engine.host_tier.tiers.stores(1 << 30):
            engine.host_tier.copier.start(job)
        engine.host_tier.settle()
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


def toy_engine(**settings):
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_pages": 40} | settings
    settings = {"host_cache_gib": 300 * GIB_OF_A_PAGE} | settings
    return Engine(ToyModel(), EngineConfig(**settings))


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
    waiting = {"slow": LONG, "same": [*LONG, 7, 8]}  # for the same pages
    for name, tokens in waiting.items():
        engine.add_request(tokens, PARAMS, request_id=name)
    engine.add_request([9] * 20, PARAMS, request_id="quick")
    first = []
    while not first:
        first += engine.step().finished
    assert [o.request_id for o in first] == ["quick"] and not waits
    assert len(engine.host_tier.tiers.jobs) == 1
    assert first[0].explain() == "0 of 20 tokens: nothing of this prompt is cached"
    waited = engine.step()  # with no other request to run, the engine waits for copies
    assert waits and waited.idle == 0
    outputs = {o.request_id: o for o in finish(engine)}
    for name, tokens in waiting.items():
        assert outputs[name].num_cached_tokens == outputs[name].num_loaded_tokens == 96
        assert outputs[name].token_ids == alone(engine.model, tokens, PARAMS)
    loaded = "96 of 100 tokens, 96 loaded from host memory: "
    loaded += "every segment before the last token was found"
    assert outputs["slow"].explain() == loaded
    end(engine)


def test_pages_that_copies_hold_are_waited_for():
    """No request is preempted for them, and none fails."""
    engine, waits = behind(num_pages=16)
    engine.add_request([9] * 20, SamplingParams(60, ignore_eos=True), request_id="first")
    engine.step()
    engine.add_request(LONG, PARAMS)
    outputs = {o.request_id: o for o in finish(engine)}
    assert outputs["first"].num_preemptions == 0 and outputs["first"].finish_reason == "length"
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
            context.setattr(engine.host_tier.tiers, name, value)
            engine.add_request([*LONG, 1], PARAMS)
            [output] = finish(engine)
        assert output.explain() == f"0 of 101 tokens: {why}"
        leave(engine)
    engine.add_request([*LONG[:70], 1, 1], PARAMS)
    [output] = finish(engine)
    assert output.num_cached_tokens == 0
    assert (output.limited_by, output.dense_tokens) == ("resume-point", 64)
    end(engine)


def test_sizes_of_host_memory(monkeypatch):
    for gib, message in (
        (1e6, "fit the memory"),
        (1e-9, r"^host_cache_gib: expected at least .*\(one page of"),
    ):
        with pytest.raises(ValueError, match=message):
            toy_engine(host_cache_gib=gib)
    assert "\nbehind    150 KiB of host memory\n" in toy_engine().memory.describe()
    plain = toy_engine(host_cache_gib=None)
    plain.close()
    assert plain.host_tier is None and "behind" not in plain.memory.describe()
    monkeypatch.setattr(host_tier, "free_memory", lambda device: 2**20)
    message = "for 1025 pages of 1024 bytes, 0.0009775 GiB, and 0.0009766 GiB are free"
    with pytest.raises(MemoryError, match=message):
        HostPages(1025, 1024, "cpu")


def test_abort_and_close_end_what_waits_for_copies():
    engine, waits = behind()
    aborted = engine.add_request(LONG, PARAMS)
    engine.step()
    assert engine.abort(aborted).finish_reason == "abort" and not engine.host_tier.is_loading
    for _ in range(2):
        engine.close()
    assert waits and not engine.host_tier.copier.has_jobs and not engine.host_tier.tiers.jobs
    for name, call in (("step", engine.step), ("add_request", lambda: engine.add_request(LONG))):
        with pytest.raises(RuntimeError, match=rf"^{name}: expected an engine that is open"):
            call()
    end(engine)
