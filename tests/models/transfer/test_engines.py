"""Hand-off between two engines: logits behind it are those of a run without a cache, for every family."""

import threading

import pytest

from quire.kvcore.page_layout import LayoutMismatch
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.loading.random_weights import random_model
from quire.models.transfer.memory import DictStore
from tests.models.engine.test_engine import DEVICE, Recorder, prompt
from tests.models.engine.test_tiering import end, leave
from tests.support.models.few import few

FAMILIES = ("gemma3-tiny", "gemma4-tiny", "gemma4-e-tiny", "gemma4-moe-tiny", "gpt-oss-tiny", "llama-tiny", "deepseek-v4-tiny")  # fmt: skip


@pytest.fixture
def store():
    store = DictStore(timeout=20)
    yield store
    store.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_token_is_computed_from_the_resume_point(name, store):
    """The prefill engine's pool is another size, so pages have other ids; free pages are NaN."""
    model = random_model(few(name), device=DEVICE)
    prefill, decode = Recorder(model), Recorder(model, num_pages=300)
    tokens = prompt(150)
    prefill.add(tokens, max_tokens=1)
    prefill.run()
    decode.add(prompt(60, seed=3), max_tokens=2)
    decode.run()
    sent = prefill.engine.export_prefix(tokens, store)
    usable = 149 // decode.engine.kv.alignment * decode.engine.kv.alignment
    assert sent.num_tokens == usable > 0
    came = decode.engine.import_prefix(tokens, store)
    assert came.num_tokens == usable and came.num_segments + came.num_points > 0
    decode.engine.kv.check_invariants()
    request = decode.add(tokens, max_tokens=6)
    decode.run()
    assert decode.check(request).num_cached_tokens == usable
    alone = Recorder(model, enable_caching=False)
    cold = alone.add(tokens, max_tokens=6)
    alone.run()
    assert decode.outputs[request].token_ids == alone.outputs[cold].token_ids
    assert decode.engine.import_prefix(tokens, store).num_bytes == {}


def test_e4m3_pages_go_as_they_are(store):
    model = random_model(few("gemma3-tiny"), device=DEVICE)
    outputs = []
    for config in (
        EngineConfig(kv_cache_dtype="fp8"),
        EngineConfig(kv_cache_dtype="fp8", num_pages=90),
    ):
        engine = Engine(model, config)
        found = engine.import_prefix(prompt(100), store).num_tokens
        engine.add_request(prompt(100), SamplingParams(4, ignore_eos=True))
        while engine.has_work:
            outputs += engine.step().finished
        assert engine.export_prefix(prompt(100), store).num_tokens == 96
        assert found == 96 * (len(outputs) - 1)
    other = Engine(model, EngineConfig())
    with pytest.raises(LayoutMismatch) as error:
        other.import_prefix(prompt(100), store)
    assert "kv_cache_dtype" in error.value.names and "kv_cache_dtype fp8" in str(error.value)


def test_what_came_goes_to_host_memory_and_back(store):
    """A receiver with tiers keeps it as what it computed itself."""
    model = random_model(few("gemma4-tiny"), device=DEVICE)
    ends = [Recorder(model, num_pages=200, host_cache_gib=0.01) for _ in range(2)]
    tokens = prompt(100)
    ends[0].add(tokens, max_tokens=1)
    ends[0].run()
    ends[0].engine.export_prefix(tokens, store)
    assert ends[1].engine.import_prefix(tokens, store).num_tokens == 96
    leave(ends[1].engine, "device")
    assert ends[1].engine.kv.match(tokens).num_tokens == 0
    request = ends[1].add(tokens, max_tokens=3)
    ends[1].run()
    assert ends[1].check(request).num_cached_tokens == 96
    assert ends[1].engine.kv.stats()["tier_loaded_pages/host"] > 0
    for one in ends:
        end(one.engine)


def test_steps_go_on_while_a_prefix_comes(store):
    """The one thread steps, another imports; a receiver that waits holds nobody up."""
    model = random_model(few("gemma3-tiny"), device=DEVICE)
    prefill, decode = Recorder(model), Recorder(model)
    tokens = prompt(120)
    prefill.add(tokens, max_tokens=1)
    prefill.run()
    came = []
    importer = threading.Thread(
        target=lambda: came.append(decode.engine.import_prefix(tokens, store, wait=60))
    )
    importer.start()
    others = [decode.add(prompt(40, seed=n), max_tokens=12) for n in range(3)]
    decode.run()
    prefill.engine.export_prefix(tokens, store)
    others += [decode.add(prompt(50, seed=n), max_tokens=12) for n in range(4, 7)]
    while importer.is_alive() or decode.engine.has_work:
        decode.run(max_steps=1)
    importer.join()
    request = decode.add(tokens)
    decode.run()
    for one in (*others, request):
        decode.check(one)
    assert came[0].num_tokens == decode.outputs[request].num_cached_tokens > 0


def test_weights_and_settings_are_compared(store):
    """Of another model, of other weights of the same, and of other block sizes."""
    config = few("gemma3-tiny")
    sender = Engine(random_model(config, device=DEVICE), EngineConfig(num_pages=100))
    sender.add_request(prompt(70), SamplingParams(1))
    while sender.has_work:
        sender.step()
    sender.export_prefix(prompt(70), store)
    same, other = random_model(config, device=DEVICE), random_model(config, device=DEVICE, seed=1)
    llama = random_model(few("llama-tiny"), device=DEVICE)
    for model, settings, names in (
        (other, {}, {"weights"}),
        (same, {"base_block_size": 32}, {"groups", "page_bytes"}),
        (llama, {}, {"model", "weights", "groups", "page_bytes"}),
    ):
        engine = Engine(model, EngineConfig(num_pages=100, **settings))
        with pytest.raises(LayoutMismatch, match="expected that of the sender") as error:
            engine.import_prefix(prompt(70), store)
        assert names == set(error.value.names) & {"weights", "groups", "page_bytes", "model"}
    assert (
        Engine(same, EngineConfig(num_pages=80)).import_prefix(prompt(70), store).num_tokens == 64
    )
    with pytest.raises(ValueError, match="kv: expected a cache with enable_caching"):
        Engine(same, EngineConfig(enable_caching=False)).export_prefix(prompt(70), store)
    with pytest.raises(ValueError, match="prompt_token_ids: "):
        sender.export_prefix([], store)
