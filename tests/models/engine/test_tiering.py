"""Host memory behind an engine: outputs are those without it, whatever is loaded, stored, or fails."""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.kvcore.invariants import check_index
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.host_tier import PageCopier
from quire.models.engine.request import SamplingParams
from quire.models.engine.speculative import NGramDrafter
from quire.models.loading.random_weights import random_model
from tests.models.engine.test_engine import DEVICE, Recorder, prompt
from tests.models.engine.test_engine_many import (
    alone,
    assert_equal_each_alone,
    run_all,
    workload,
)
from tests.models.engine.test_isolation import BAD, KINDS, SpoiledModel
from tests.support.models.few import few
from tests.support.models.toy import VOCAB, ToyModel, ToyPool

BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
PAGE_BYTES = 512  # 16 rows of token and position, of two groups
GIB_OF_A_PAGE = PAGE_BYTES / 2**30


class TieredPool(ToyPool):
    """tensors: the same memory as bytes."""

    def __init__(self, num_pages):
        super().__init__(num_pages)
        self.tensors = [
            torch.from_numpy(p.view(np.uint8).reshape(num_pages, -1)) for p in self.pages
        ]


def tiered(model):
    """The same toy with page tensors that can be copied."""
    make_cache = model.make_cache
    model.make_cache = lambda **more: replace(
        make_cache(**more), page_bytes=PAGE_BYTES, allocate=TieredPool
    )
    return model


def recount(engine):
    """Every page is accounted for, of the pool and of the host; after a step or at the end."""
    engine.kv.check_invariants()
    check_index(engine.tiers.tiers.index, [], [], [], Counter())


def end(engine):
    """All that ran has ended, and all pages are free once nothing is cached."""
    engine.tiers.settle()
    recount(engine)
    assert not engine.tiers.tiers.jobs and not engine.tiers.copier.has_jobs
    assert engine.kv.stats()["pages_in_use"] == 0 and not engine.tiers.is_loading
    engine.kv.clear()
    assert engine.kv.num_free_pages == engine.kv.num_pages - 1
    host = engine.tiers.tiers.index.pool
    assert host.num_free == host.num_pages - 1
    engine.close()


@pytest.mark.parametrize(("host_pages", "is_async", "num_drafts"), [(300, False, 3), (60, True, 0)])
def test_outputs_are_those_without_tiers(host_pages, is_async, num_drafts, monkeypatch):
    """Requests come back and are aborted, drafts are rejected, the pool is too small for all, and a quarter of the copies fail."""
    rng, model, failed = random.Random(11), tiered(ToyModel()), []
    whole = PageCopier._copy

    def copy(this, direction, pages, rows):
        if rng.random() > 0.25:
            return whole(this, direction, pages, rows)
        failed.append(direction)
        half = len(pages) // 2
        whole(this, direction, pages[:half], rows[:half])
        raise torch.OutOfMemoryError("copy")

    monkeypatch.setattr(PageCopier, "_copy", copy)
    config = EngineConfig(
        max_num_seqs=6,
        max_num_batched_tokens=64,
        num_pages=30,
        async_scheduling=is_async,
        host_cache_gib=host_pages * GIB_OF_A_PAGE,
    )
    drafter = NGramDrafter(num_drafts, min_ngram=1) if num_drafts else None
    engine = Engine(model, config, drafter=drafter)
    work = list(workload(rng, 40, VOCAB, engine.max_model_len))
    work += [([*tokens, 5, 6], replace(params, max_tokens=3), None) for tokens, params, _ in work]

    def distrust(step):
        engine.pool.poison(engine.kv.pool.free_pages())
        if step % 8 == 0:
            recount(engine)

    outputs = run_all(engine, work, rng, distrust, in_flight=9)
    assert_equal_each_alone(model, work, outputs, engine.max_model_len)
    stats, totals = engine.kv.stats(), engine.totals
    assert min(count for name, count in stats.items() if name.startswith("tier_stored_pages")) > 10
    assert sum(count for name, count in stats.items() if name.startswith("tier_loaded_pages")) > 3
    assert len(failed) > 10
    assert num_drafts == 0 or 20 < totals.num_accepted < totals.num_drafts - 20, totals
    monkeypatch.undo()
    end(engine)


FAMILIES = ("gemma3-tiny", "gemma4-tiny", "gpt-oss-tiny", "llama-tiny", "deepseek-v4-tiny")


def cached(engine, tokens):
    """Bytes of all pages that are cached of a prompt, and the boundaries of its resume points."""
    index, keys = engine.kv.index, engine.kv.match(tokens).prompt.keys
    run, depth = index.find(keys, len(keys) // 32)
    pages, points, node = [index.pages_between(run, 0, depth).ravel()], {}, run
    while node is not None:
        points |= {d: p for d, p in node.points.items() if d <= depth}
        node = node.parent
    pages += [points[d].pages for d in sorted(points)]
    ids = np.concatenate(pages)
    rows = [tensor[ids[ids > 0]].clone() for tensor in engine.pool.tensors]
    return depth, sorted(points), rows, ids


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
    """Around host memory, to other pages; logits behind them are those of a run without a cache."""
    model = random_model(few(name), device=DEVICE)
    run = Recorder(model, num_pages=200, host_cache_gib=0.01)
    tokens = prompt(130)
    run.add(tokens, max_tokens=2)
    run.run()
    depth, points, before, ids = cached(run.engine, tokens)
    assert depth > 0
    for turn in range(2):
        leave(run.engine)
        assert cached(run.engine, tokens)[0] == 0
        run.add(prompt(60, seed=9), max_tokens=1)  # others get the pages that these had
        run.run()
        again = run.add([*tokens, *prompt(20, seed=turn)], max_tokens=2)
        run.run()
        assert (
            run.check(again).num_cached_tokens
            >= 128 // run.engine.kv.alignment * run.engine.kv.alignment
        )
        *there, after, loaded = cached(run.engine, tokens)
        assert there == [depth, points] and not np.array_equal(loaded, ids)
        assert all(a.equal(b) for a, b in zip(after, before, strict=True))
    stats = run.engine.kv.stats()
    assert stats["tier_loaded_pages/host"]
    end(run.engine)


def toy_engine(model=None, **settings):
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_pages": 40} | settings
    settings = {"host_cache_gib": 300 * GIB_OF_A_PAGE} | settings
    return Engine(tiered(model or ToyModel()), EngineConfig(**settings))


def finish(engine):
    """Outputs by id."""
    outputs = {}
    while engine.has_work:
        report = engine.step()
        outputs |= {o.request_id: o for o in report.finished}
        recount(engine)
    assert engine.step() is None
    return outputs


PARAMS = SamplingParams(4, ignore_eos=True)
LONG, SHORT = [5 + n % 9 for n in range(100)], [9] * 20


class Later:
    """Loads that end when `let` says so."""

    def __init__(self, engine, monkeypatch):
        copier, start = engine.tiers.copier, engine.tiers.copier.start

        def held(job):
            start(job)
            if job.kind == "load":
                ended = SimpleNamespace(query=lambda: self.ended, synchronize=self.let)
                copier._running[-1].event = ended

        self.ended = False
        monkeypatch.setattr(copier, "start", held)

    def let(self):
        self.ended = True


def behind(engine, tokens):
    """Has a prompt in the host and not on the device."""
    engine.add_request(tokens, PARAMS)
    finish(engine)
    leave(engine)


@BOTH
def test_others_run_while_a_request_waits(is_async, monkeypatch):
    engine = toy_engine(async_scheduling=is_async)
    behind(engine, LONG)
    later = Later(engine, monkeypatch)
    slow = engine.add_request(LONG, PARAMS)
    same = engine.add_request([*LONG, 7, 8], PARAMS)  # waits for the same pages
    quick = engine.add_request(SHORT, PARAMS)
    first = []
    while not first:
        first += engine.step().finished
        recount(engine)
    assert (
        [o.request_id for o in first] == [quick]
        and len(engine.tiers.tiers.jobs) == 1
        and not later.ended
    )
    outputs = finish(engine)  # with no other request to run, the engine waits for copies
    assert later.ended
    assert outputs[slow].num_cached_tokens == outputs[same].num_cached_tokens == 96
    assert outputs[slow].token_ids == alone(engine.model, LONG, PARAMS)
    assert outputs[same].token_ids == alone(engine.model, [*LONG, 7, 8], PARAMS)
    assert outputs[slow].num_loaded_tokens == outputs[same].num_loaded_tokens == 96
    assert engine.kv.stats()["tier_loaded_pages/host"] > 6  # segments, and blocks of the window
    assert outputs[slow].explain() == (
        "96 of 100 tokens, 96 loaded from host memory: "
        "every segment before the last token was found"
    )
    assert first[0].explain() == "0 of 20 tokens: nothing of this prompt is cached"
    end(engine)


@BOTH
def test_a_wait_for_copies_is_no_idle_time_of_a_step(is_async, monkeypatch):
    engine = toy_engine(async_scheduling=is_async)
    behind(engine, LONG)
    later = Later(engine, monkeypatch)
    engine.add_request(LONG, PARAMS)
    engine.add_request(SHORT, PARAMS)
    while not engine.step().finished:
        assert not later.ended
    first = engine.step()
    assert later.ended and first.idle == 0
    finish(engine)
    end(engine)


def test_an_aborted_request_needs_no_load(monkeypatch):
    """Copies that have begun end; no request waits for them."""
    engine = toy_engine()
    behind(engine, LONG)
    later = Later(engine, monkeypatch)
    aborted = engine.add_request(LONG, PARAMS)
    engine.step()
    assert engine.abort(aborted).finish_reason == "abort" and not engine.tiers.is_loading
    later.let()
    end(engine)


@BOTH
def test_a_load_that_fails_is_computed(is_async, monkeypatch):
    """Pages that cannot be loaded leave the host, and their request goes on."""
    engine = toy_engine(async_scheduling=is_async)
    behind(engine, LONG)
    other = engine.add_request(SHORT, PARAMS)
    engine.step()
    calls = []

    def fail(this, direction, *args):
        calls.append(direction)
        raise torch.OutOfMemoryError("copy")

    with monkeypatch.context() as patch:
        patch.setattr(PageCopier, "_copy", fail)
        request_id = engine.add_request(LONG, PARAMS)
        outputs = finish(engine)
    output = outputs[request_id]
    assert output.token_ids == alone(engine.model, LONG, PARAMS) and output.num_cached_tokens == 0
    assert outputs[other].token_ids == alone(engine.model, SHORT, PARAMS)
    assert output.num_loaded_tokens == output.num_preemptions == 0
    assert "to_device" in calls
    assert engine.kv.stats()["tier_load_failures/host"] == 1
    assert engine.kv.stats()["tier_loaded_pages/host"] == 0
    assert engine.kv.match([*LONG, 1]).num_tokens == 96  # computed
    end(engine)


def test_why_a_hit_is_not_longer(monkeypatch):
    """A load that would take longer than the prefill, or found no room; a chain without a point."""
    engine = toy_engine(num_pages=30)
    behind(engine, LONG)
    tiers, rate = engine.tiers.tiers, engine.tiers.tiers.bytes_per_second
    for patch, why in (
        ({"bytes_per_second": 1e-6}, "loading more would take longer than computing it"),
        ({"load": lambda match: None}, "the pool had no room to load more"),
    ):
        with monkeypatch.context() as context:
            for name, value in patch.items():
                context.setattr(tiers, name, value)
            request_id = engine.add_request([*LONG, 1], PARAMS)
            output = finish(engine)[request_id]
        assert output.explain() == f"0 of 101 tokens: {why}"
        assert tiers.bytes_per_second == rate
        leave(engine)
    request_id = engine.add_request([*LONG[:70], 1, 1], PARAMS)
    output = finish(engine)[request_id]
    assert (output.num_cached_tokens, output.limited_by, output.dense_tokens) == (0, "resume-point", 64)  # fmt: skip
    end(engine)


@BOTH
def test_what_may_be_nan_is_nowhere_found(is_async, monkeypatch):
    """Not in the host either, nor does it come with a load or a store that runs."""
    model = SpoiledModel(KINDS["nan"])
    engine = toy_engine(model=model, async_scheduling=is_async)
    behind(engine, LONG)
    later = Later(engine, monkeypatch)
    waiting = engine.add_request(LONG, PARAMS)
    bad = engine.add_request([11, BAD, 12] * 7, PARAMS)
    outputs = {}
    while bad not in outputs:
        outputs |= {o.request_id: o for o in engine.step().finished}
        recount(engine)
    assert outputs[bad].finish_reason == "nan" and not later.ended
    assert engine.tiers.tiers.match(LONG).num_saved_tokens == 0
    outputs = finish(engine)
    assert outputs[waiting].num_cached_tokens == outputs[waiting].num_loaded_tokens == 0
    assert outputs[waiting].token_ids == alone(model, LONG, PARAMS)
    end(engine)


def test_pages_that_copies_hold_are_waited_for(monkeypatch):
    """Before anybody is preempted, or fails as it does not fit alone."""
    engine = toy_engine(num_pages=16)
    behind(engine, LONG)
    later = Later(engine, monkeypatch)
    first = engine.add_request(SHORT, SamplingParams(60, ignore_eos=True))
    engine.step()
    engine.add_request(LONG, PARAMS)
    outputs = finish(engine)
    assert outputs[first].num_preemptions == 0 and outputs[first].finish_reason == "length"
    assert later.ended
    end(engine)


@pytest.mark.parametrize("where", ["device", "host"])
def test_salts_separate_tenants(where):
    engine = toy_engine()
    engine.add_request(LONG, PARAMS, salt=b"one")
    finish(engine)
    if where == "host":
        leave(engine)
    hits = {}
    for salt in (b"two", b"", b"one"):  # the owner last: nothing is back on the device before
        name = engine.add_request(LONG, PARAMS, salt=salt)
        output = finish(engine)[name]
        hits[salt] = output.num_cached_tokens, output.num_loaded_tokens, output.dense_tokens
    cached, loaded, _ = hits.pop(b"one")
    assert cached >= 64 and (loaded > 0) == (where == "host")
    assert set(hits.values()) == {(0, 0, 0)}
    end(engine)


def test_settings():
    with pytest.raises(ValueError, match="fit the memory"):
        toy_engine(host_cache_gib=1e6)
    with pytest.raises(ValueError, match=r"^host_cache_gib: expected at least .*\(one page of"):
        toy_engine(host_cache_gib=1e-9)
    assert "\nbehind    150 KiB of host memory\n" in toy_engine().memory.describe()
    plain = Engine(ToyModel(), EngineConfig(num_pages=40))
    plain.close()
    assert plain.tiers is None and "behind" not in plain.memory.describe()


def test_close_waits_for_copies_and_ends_the_steps(monkeypatch):
    engine = toy_engine()
    behind(engine, LONG)
    later = Later(engine, monkeypatch)
    engine.add_request(LONG, PARAMS)
    engine.tiers.advance(engine.scheduler.waiting, 4, None)
    engine.close()
    assert later.ended and not engine.tiers.copier.has_jobs and not engine.tiers.tiers.jobs
    engine.close()
    with pytest.raises(RuntimeError, match=r"^step: expected an engine that is open"):
        engine.step()
    with pytest.raises(RuntimeError, match=r"^add_request: expected an engine that is open"):
        engine.add_request(LONG, PARAMS)
