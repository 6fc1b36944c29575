"""Tiers behind an engine: outputs are those without them, whatever is loaded, stored, or fails."""

import random
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.kvcore.invariants import check_index
from quire.kvcore.tier import disk as disk_module
from quire.models.config.named import get_config
from quire.models.engine import tier_calls, tiering
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.layout import layout
from quire.models.engine.request import SamplingParams
from quire.models.engine.speculative import NGramDrafter
from quire.models.layers.attention import PagedAttend
from quire.models.llm import DRAFTERS
from quire.models.loading.random_weights import random_model
from quire.models.tiers import ways
from tests.models.engine.test_engine import DEVICE, Recorder, prompt
from tests.models.engine.test_engine_many import alone, run_all, workload
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
        self.filled = [(2, self.tensors[0].shape[1])] * 2


def tiered(model):
    """The same toy with a pool whose pages can be copied."""
    make_cache = model.make_cache
    model.make_cache = lambda **more: replace(
        make_cache(**more), page_bytes=PAGE_BYTES, allocate=TieredPool
    )
    return model


def tiers_of(where, folder):
    """Settings."""
    found = {}
    if "host" in where:
        found["host_cache_gib"] = (40 if "disk" in where else 300) * GIB_OF_A_PAGE
    if "disk" in where:
        found |= {"disk_cache": folder / "cache", "disk_cache_gib": 300 * GIB_OF_A_PAGE}
    return found


def recount(engine):
    """Every page is accounted for, of the pool and of each tier; after a step or at the end."""
    engine.kv.check_invariants()
    for tier in engine.tiers.tiers.tiers:
        check_index(tier.index, [], [], [], Counter())


def end(engine):
    """All that ran has ended, and all pages are free once nothing is cached."""
    engine.tiers.settle()
    recount(engine)
    assert not engine.tiers.tiers.jobs and not engine.tiers.copier.has_jobs
    assert engine.kv.stats()["pages_in_use"] == 0 and not engine.tiers.is_loading
    engine.kv.clear()
    assert engine.kv.num_free_pages == engine.kv.num_pages - 1
    for tier in engine.tiers.tiers.tiers:
        assert tier.index.pool.num_free == tier.index.pool.num_pages - 1
    engine.close()


class Faults:
    """Calls fail now and then, before or after a part of what they do."""

    def __init__(self, monkeypatch, rng, share):
        self.count, self.rng, self.share = Counter(), rng, share
        for owner, name in ((ways.PageWays, "copy"), (disk_module.DiskStore, "read"), (disk_module.DiskStore, "write")):  # fmt: skip
            monkeypatch.setattr(owner, name, self.flaky(name, getattr(owner, name)))

    def flaky(self, name, work):
        def call(this, *args):
            if self.rng.random() > self.share:
                return work(this, *args)
            self.count[name] += 1
            if name == "copy":
                direction, pages, buffer, rows, *tensor = args
                half = len(pages) // 2
                work(this, direction, pages[:half], buffer, rows[:half], *tensor)
                raise torch.OutOfMemoryError("copy")
            if self.rng.random() < 0.5:
                raise ValueError(name)
            failed = Future()
            failed.set_exception(OSError(name))
            return failed

        return call


class Hints:
    """Hints on prefixes, and on requests that are not finished; what became of them."""

    def __init__(self):
        self.rng, self.outcomes = random.Random(5), Counter()

    def give(self, engine, prompts):
        rng = self.rng
        if rng.random() < 0.5:
            return
        intent = rng.choice(["retain", "prefetch", "demote", "release"])
        of = rng.choice(prompts)[: rng.choice([16, 40, None])]
        if (running := sorted(engine.unfinished)) and rng.random() < 0.3:
            of = rng.choice(running)
        options = {"priority": rng.choice([0, 1]), "ttl": rng.choice([1e-3, 10.0])}
        options |= {"max_bytes": rng.choice([None, 4 * PAGE_BYTES])}
        answer = engine.hint(of, intent, **options)
        assert answer.reason
        self.outcomes[intent, answer.outcome] += 1


@pytest.mark.parametrize(
    "where, share, is_async, num_drafts",
    [
        ("host", 0.25, False, 3),
        ("disk", 0.25, False, 0),
        ("host and disk", 0.25, True, 0),
    ],
)
def test_outputs_are_those_without_tiers(where, share, is_async, num_drafts, tmp_path, monkeypatch):
    """Requests come back and are aborted, drafts are rejected, the pool is too small for all, calls fail, and callers give hints."""
    rng, hints = random.Random(11), Hints()
    model = tiered(ToyModel())
    faults = Faults(monkeypatch, rng, share)
    config = EngineConfig(
        max_num_seqs=6,
        max_num_batched_tokens=64,
        num_pages=30,
        async_scheduling=is_async,
        **tiers_of(where, tmp_path),
    )
    drafter = NGramDrafter(num_drafts, min_ngram=1) if num_drafts else None
    engine = Engine(model, config, drafter=drafter)
    work = list(workload(rng, 40, VOCAB, engine.max_model_len))
    work += [([*tokens, 5, 6], replace(params, max_tokens=3), None) for tokens, params, _ in work]

    def distrust(step):
        hints.give(engine, [tokens for tokens, _, _ in work])
        engine.pool.poison(engine.kv.pool.free_pages())
        if step % 8 == 0:
            recount(engine)

    outputs = run_all(engine, work, rng, distrust, in_flight=9)
    for (tokens, params, _), output in zip(work, outputs, strict=True):
        expected = alone(model, tokens, params)[: engine.max_model_len - len(tokens)]
        if output.finish_reason == "abort":
            expected = expected[: len(output.token_ids)]
        assert output.token_ids == expected
    stats = engine.kv.stats()
    loads = {name: count for name, count in stats.items() if name.startswith("tier_loaded_pages")}
    stores = {name: count for name, count in stats.items() if name.startswith("tier_stored_pages")}
    assert min(stores.values()) > 10 and sum(loads.values()) > 3, stats
    assert share == 0 or sum(faults.count.values()) > 10
    assert len(hints.outcomes) >= 6, hints.outcomes
    totals = engine.totals
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


def leave(engine, *places):
    """What these hold goes to the places behind them, and is there no more."""
    stores = engine.tiers.tiers._stores
    watermark, stores._watermark = stores._watermark, engine.kv.num_pages
    for _ in range(8):  # through host memory, as what leaves a pool that is short
        engine.tiers._store(1 << 30)
        engine.tiers.settle()
    stores._watermark = watermark
    engine.tiers.store_everything()
    if "device" in places:
        engine.kv.evict(engine.kv.num_evictable_pages)
    for tier in engine.tiers.tiers.tiers:
        if tier.name in places:
            tier.index.evict(tier.index.num_evictable)


@pytest.mark.parametrize("name", FAMILIES)
def test_pages_come_back_as_they_left(name, tmp_path):
    """Around host memory and disk, to other pages; logits behind them are those of a run without a cache."""
    model = random_model(few(name), device=DEVICE)
    run = Recorder(
        model,
        num_pages=200,
        host_cache_gib=0.01,
        disk_cache=tmp_path / "cache",
        disk_cache_gib=0.01,
    )
    tokens = prompt(130)
    run.add(tokens, max_tokens=2)
    run.run()
    depth, points, before, ids = cached(run.engine, tokens)
    assert depth > 0
    for way in (["device"], ["device", "host"]):
        leave(run.engine, *way)
        assert cached(run.engine, tokens)[0] == 0
        run.add(prompt(60, seed=9), max_tokens=1)  # others get the pages that these had
        run.run()
        again = run.add([*tokens, *prompt(20, seed=len(way))], max_tokens=2)
        run.run()
        assert (
            run.check(again).num_cached_tokens
            >= 128 // run.engine.kv.alignment * run.engine.kv.alignment
        )
        *there, after, loaded = cached(run.engine, tokens)
        assert there == [depth, points] and not np.array_equal(loaded, ids)
        assert all(a.equal(b) for a, b in zip(after, before, strict=True))
    stats = run.engine.kv.stats()
    assert stats["tier_loaded_pages/host"] and stats["tier_loaded_pages/disk"]
    end(run.engine)


def toy_engine(monkeypatch=None, model=None, **settings):
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_pages": 40} | settings
    settings = {"host_cache_gib": 300 * GIB_OF_A_PAGE} | settings
    return Engine(tiered(model or ToyModel()), EngineConfig(**settings))


def finish(engine, *wanted):
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
    """Copies to the device that end when `let` says so; no step runs ahead of them."""

    def __init__(self, engine, monkeypatch):
        self.held, begin = [], engine.tiers.copier.streams.begin

        def held(direction, copy):
            done = begin(direction, copy)
            if direction == "to_device":
                done = SimpleNamespace(
                    done=lambda d=done: self.ended, result=self.let, seconds=1e-3
                )
                self.held.append(done)
            return done

        self.ended = False
        monkeypatch.setattr(engine.tiers.copier.streams, "begin", held)
        monkeypatch.setattr(engine.tiers.copier, "can_run_ahead", lambda job: False)

    def let(self):
        self.ended = True


def behind(engine, tokens):
    """Has a prompt in the tiers and not on the device."""
    engine.add_request(tokens, PARAMS)
    finish(engine)
    leave(engine, "device")


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
    outputs = finish(engine)  # with nobody else to run, copies are waited for
    assert later.ended
    assert outputs[slow].num_cached_tokens == outputs[same].num_cached_tokens == 96
    assert outputs[slow].token_ids == alone(engine.model, LONG, PARAMS)
    assert outputs[same].token_ids == alone(engine.model, [*LONG, 7, 8], PARAMS)
    (share,) = outputs[slow].loads  # 6 segments of 16 tokens, and the last of the window's blocks
    assert (share.place, share.num_tokens, share.num_bytes) == (
        "host",
        96,
        share.num_pages * PAGE_BYTES,
    )
    assert share.num_pages == engine.kv.stats()["tier_loaded_pages/host"] > 6 and share.seconds > 0
    assert outputs[same].loads == (share,) and first[0].loads == ()
    assert outputs[slow].explain() == (
        f"96 of 100 tokens, 96 from host ({share.num_bytes / 2**20:.3g} MiB, 2 ms): "
        "every segment before the last token was found"
    )
    assert first[0].explain() == "0 of 20 tokens: nothing of this prompt is cached"
    end(engine)


def test_an_aborted_request_needs_no_load(monkeypatch):
    """Its pages come nevertheless, as their copies have begun; nobody waits for them."""
    engine = toy_engine()
    behind(engine, LONG)
    later = Later(engine, monkeypatch)
    aborted, quick = engine.add_request(LONG, PARAMS), engine.add_request(SHORT, PARAMS)
    engine.step()
    assert engine.abort(aborted).finish_reason == "abort"
    assert not engine.tiers.is_loading
    outputs = finish(engine)
    assert list(outputs) == [quick] and engine.tiers.tiers.jobs
    later.let()
    end(engine)


@BOTH
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_load_that_fails_is_computed(runs_ahead, is_async, monkeypatch):
    """What cannot be loaded is dropped, and so is not tried for ever; a step that ran ahead of it is dropped."""
    engine = toy_engine(async_scheduling=is_async)
    behind(engine, LONG)
    if not runs_ahead:
        monkeypatch.setattr(engine.tiers.copier, "can_run_ahead", lambda job: False)
    other = engine.add_request(SHORT, PARAMS)
    engine.step()
    calls = []

    def fail(this, direction, *args):
        calls.append(direction)
        raise torch.OutOfMemoryError("copy")

    with monkeypatch.context() as patch:
        patch.setattr(ways.PageWays, "copy", fail)
        request_id = engine.add_request(LONG, PARAMS)
        outputs = finish(engine)
    output = outputs[request_id]
    assert output.token_ids == alone(engine.model, LONG, PARAMS) and output.num_cached_tokens == 0
    assert outputs[other].token_ids == alone(engine.model, SHORT, PARAMS)
    assert output.num_preemptions == 0 and outputs[other].num_preemptions == int(runs_ahead)
    assert all(share.num_tokens == share.num_bytes == 0 for share in output.loads)
    assert "to_device" in calls
    assert 1 <= engine.kv.stats()["tier_load_failures/host"] <= tiering.MOST_LOADS
    assert runs_ahead or engine.kv.stats()["tier_loaded_pages/host"] == 0
    assert engine.kv.match([*LONG, 1]).num_tokens == 96  # computed
    end(engine)


@BOTH
def test_after_a_late_failure_the_shorter_resume_point_is_used(is_async, monkeypatch):
    """What the device had before stays, and nobody finds what did not come."""
    engine = toy_engine(async_scheduling=is_async)
    behind(engine, LONG)
    engine.add_request(LONG[:40], PARAMS)
    finish(engine)  # 32 tokens come again, the rest of LONG is on the host alone
    assert engine.kv.match([*LONG, 1]).num_tokens == 32
    copy = ways.PageWays.copy

    def late(this, direction, *args):
        copy(this, direction, *args)
        if direction == "to_device":
            raise torch.OutOfMemoryError("copy")

    request_id = engine.add_request(LONG, PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(ways.PageWays, "copy", late)
        while not engine.kv.stats()["tier_load_failures/host"]:
            engine.step()
            recount(engine)
    assert engine.tiers.tiers.match(LONG).num_tokens == 32
    output = finish(engine)[request_id]
    assert output.num_cached_tokens == 32 and output.loads == ()
    assert output.token_ids == alone(engine.model, LONG, PARAMS)
    end(engine)


def test_who_runs_ahead(monkeypatch):
    """Who is alone; or whose prefill takes as long as the copies, for which the others would wait."""
    for num_others, rate, runs_ahead in ((0, 1.0, True), (1, 1.0, False), (1, 1e12, True)):
        engine = toy_engine()
        behind(engine, LONG)
        engine.tiers.tiers.tiers[0].rate.value = rate
        engine.tiers.tiers._planner.prefill.value = 1e-5
        for _ in range(num_others):
            engine.add_request(SHORT, SamplingParams(20, ignore_eos=True))
            engine.step()
        started, start = [], engine.tiers.copier.start
        monkeypatch.setattr(
            engine.tiers.copier,
            "start",
            lambda job, ahead=False, start=start, started=started: (
                started.append((job.kind, ahead)),
                start(job, ahead=ahead),
            ),
        )
        engine.tiers.tiers._planner.prefill.value = 1.0
        request_id = engine.add_request(LONG, PARAMS)
        if rate == 1.0:  # a load is chosen all the same
            engine.tiers.tiers._planner.prefill.value = 1e-6
            monkeypatch.setattr(engine.tiers.tiers, "prefill_seconds", lambda num_tokens: 4.0)
        output = finish(engine)[request_id]
        assert output.token_ids == alone(engine.model, LONG, PARAMS)
        assert ("load", runs_ahead) in started and output.num_cached_tokens == 96
        end(engine)


@pytest.mark.parametrize("name", ["gemma3-tiny", "gemma4-tiny", "gemma4-e-tiny"])
def test_layers_wait_for_their_own_pages(name, monkeypatch):
    """A step begins before they have come, and each layer reads what a run without a cache computes."""
    model = random_model(get_config(name), device=DEVICE)
    run = Recorder(model, num_pages=200, host_cache_gib=0.01)
    tokens = prompt(130)
    run.add(tokens, max_tokens=2)
    run.run()
    leave(run.engine, "device")
    free = torch.from_numpy(run.engine.kv.pool.free_pages())
    for tensor in run.engine.pool.tensors:
        tensor[free] = 255
    done, copy, attend = [], ways.PageWays.copy, PagedAttend._attend

    def copied(this, direction, pages, buffer, rows, tensor=None):
        if tensor is not None:  # the pages of one tensor of the pool after the other
            done.append(("copied", sum(kind == "copied" for kind, _ in done)))
        return copy(this, direction, pages, buffer, rows, tensor)

    def attended(this, layer, *args):
        done.append(("attended", this._pool.layers[layer].tensor))
        return attend(this, layer, *args)

    monkeypatch.setattr(ways.PageWays, "copy", copied)
    monkeypatch.setattr(PagedAttend, "_attend", attended)
    again = run.add([*tokens, *prompt(20, seed=1)], max_tokens=2)
    run.run()
    assert run.check(again).num_cached_tokens >= 112
    num_tensors = len(run.engine.pool.tensors)
    copies = [x for x in done if x[0] == "copied"]
    assert sorted(copies) == [("copied", i) for i in range(num_tensors)] and num_tensors > 1
    for tensor in range(num_tensors):
        assert done.index(("copied", tensor)) < done.index(("attended", tensor))
    first = done.index(("attended", 0))
    assert sum(kind == "copied" for kind, _ in done[:first]) == 1  # of layer 0 alone
    end(run.engine)


def test_of_a_damaged_page_the_shorter_resume_point_is_loaded(tmp_path):
    """On the disk bytes rot: what comes before them is of use."""
    settings = {"host_cache_gib": None, "retention": 32}
    settings |= {"disk_cache": tmp_path / "cache", "disk_cache_gib": 300 * GIB_OF_A_PAGE}
    engine = toy_engine(**settings)
    behind(engine, LONG)
    index = engine.tiers.tiers.tiers[0].index
    keys = engine.kv.match(LONG).prompt.keys
    run, depth = index.find(keys, 6)
    assert depth == 6
    page = int(index.pages_between(run, 4, 5).ravel()[0])
    with open(tmp_path / "cache" / "pages", "r+b") as file:
        stride = engine.tiers._disk._pages.file.stride
        file.seek((page - 1) * stride)
        file.write(bytes([255] * 8))
    request_id = engine.add_request(LONG, PARAMS)
    output = finish(engine)[request_id]
    assert output.num_cached_tokens == 64
    assert output.token_ids == alone(engine.model, LONG, PARAMS)
    assert [share.num_tokens for share in output.loads] == [64, 0]  # then the point at its end
    assert engine.kv.stats()["tier_load_failures/disk"] == 1
    end(engine)


@BOTH
def test_what_may_be_nan_is_nowhere_found(is_async, monkeypatch):
    """Not in a tier either, nor does it come with a load or a store that runs."""
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
    assert engine.tiers.tiers.match(LONG).num_tokens == 0
    outputs = finish(engine)
    assert outputs[waiting].num_cached_tokens == 0
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


def test_settings(tmp_path):
    for settings, message in [
        ({"host_cache_gib": 0}, "host_cache_gib: expected a number > 0, got 0"),
        ({"host_cache_gib": "1"}, "host_cache_gib: expected a number > 0, got '1'"),
        ({"host_cache_gib": float("nan")}, "host_cache_gib: expected a number > 0, got nan"),
        ({"disk_cache": 3}, "disk_cache: expected a path, a store or None, got 3"),
        ({"disk_cache_gib": None}, "disk_cache_gib: expected a number > 0, got None"),
        ({"host_cache_gib": 1, "enable_caching": False}, "enable_caching: expected True with host"),
    ]:
        with pytest.raises(ValueError, match=f"^{message}"):
            EngineConfig(**settings)
    with pytest.raises(ValueError, match=r"host_cache_gib=1000000.*: MemoryError|fit the memory"):
        toy_engine(host_cache_gib=1e6)
    for more in (
        {"host_cache_gib": 1e-12},
        {"disk_cache": tmp_path / "tiny", "disk_cache_gib": 1e-9},
    ):
        with pytest.raises(ValueError, match=rf"^{[*more][-1]}: expected at least .*\(one page of"):
            toy_engine(**more)
    kept = {"disk_cache": tmp_path / "cache", "disk_cache_gib": 2**-10}
    engine = toy_engine(**kept)
    assert "\nbehind    150 KiB of host memory, 1 MiB of disk\n" in engine.memory.describe()
    with pytest.raises(OSError, match="expected a store that nobody uses"):
        toy_engine(**kept)
    engine.close()
    toy_engine(**kept).close()
    with pytest.raises(
        ValueError, match=r"^layout: expected that of .*hash_seed.*\(another folder starts anew"
    ):
        toy_engine(**kept, hash_seed=b"another")
    plain = Engine(ToyModel(), EngineConfig(num_pages=40))
    plain.close()
    assert plain.tiers is None and "behind" not in plain.memory.describe()


def test_hints_on_a_request(monkeypatch):
    """Of its tokens so far, with its salt; while it runs it does not leave."""
    now = [1000.0]
    monkeypatch.setattr(tier_calls.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(tiering.time, "monotonic", lambda: now[0])
    engine = toy_engine(max_num_batched_tokens=128)
    params = SamplingParams(40, ignore_eos=True)
    request_id = engine.add_request(LONG, params, salt=b"x")
    for _ in range(30):
        engine.step()
    assert engine.hint(request_id, "demote").outcome == "deferred"
    kept = engine.hint(request_id, "retain", until=1010.0)
    assert kept.outcome == "accepted" and kept.num_tokens == 96  # its last resume point yet
    assert engine.hint(LONG, "retain", ttl=5).outcome == "refused"  # of another salt
    output = finish(engine)[request_id]
    assert output.token_ids == alone(engine.model, LONG, params)
    for time, pins in ((1009.0, True), (1011.0, False)):
        now[0] = time
        engine.add_request(SHORT, PARAMS)
        finish(engine)
        assert (engine.kv.stats()["pins"] > 0) == pins
    end(engine)


def test_a_tenant_keeps_to_its_budget():
    """Of an engine; another tenant has its own."""
    engine = toy_engine(max_hint_gib=10 * GIB_OF_A_PAGE)
    prompts = [[user, *LONG] for user in (1, 2)]
    for tokens in prompts:
        for salt in (b"x", b"y"):
            engine.add_request(tokens, PARAMS, salt=salt)
            finish(engine)
    for salt in (b"x", b"y"):
        first, second = (engine.hint(p, "retain", salt=salt, ttl=100) for p in prompts)
        assert first.outcome == "accepted" and first.num_bytes <= 10 * PAGE_BYTES
        assert second.outcome in ("clipped", "refused")
        assert first.num_bytes + second.num_bytes <= 10 * PAGE_BYTES
    end(engine)


def test_a_folder_goes_with_its_weights():
    """Of the same shape, in the same engine; and with rows that only other scales make."""
    memory = SimpleNamespace(groups=())
    kept = [
        layout(random_model(few("gemma3-tiny"), seed=seed), memory, EngineConfig(**more))
        for seed, more in ((0, {}), (0, {}), (1, {}), (0, {"kv_cache_dtype": "fp8"}))
    ]
    assert kept[0] == kept[1]
    different = [{name for name in kept[0] if kept[0][name] != other[name]} for other in kept[2:]]
    assert different == [{"weights"}, {"kv_cache_dtype"}]


def test_a_process_that_starts_anew_finds_what_was_cached(tmp_path):
    """Also what was only on the device, at the end; and what was in host memory."""
    settings = {"disk_cache": tmp_path / "cache", "disk_cache_gib": 300 * GIB_OF_A_PAGE}
    for num_cached in (0, 96):
        engine = toy_engine(**settings)
        request_id = engine.add_request(LONG, PARAMS)
        output = finish(engine)[request_id]
        assert output.num_cached_tokens == num_cached
        assert output.token_ids == alone(engine.model, LONG, PARAMS)
        engine.close()


def test_steps_of_drafts_are_no_prefill():
    """Or what a prefill takes, and so what is loaded, would go by the pace of decode steps."""
    engine = toy_engine()
    measured = []
    engine.tiers.tiers.computed = lambda num_tokens, seconds: measured.append(num_tokens)
    for num_tokens, num_decodes, num_drafts in ((100, 4, 0), (8, 8, 0), (8, 0, 6), (8, 2, 3), (100, 2, 9), (0, 0, 0)):  # fmt: skip
        engine.tiers.observe(
            SimpleNamespace(
                num_tokens=num_tokens, num_decodes=num_decodes, num_drafts=num_drafts, total=1.0
            )
        )
    assert measured == [96, 80]
    end(engine)


def test_hints():
    """Brought before anybody asks, left first, kept for a time; and nothing of it without tiers."""
    engine = toy_engine(num_pages=30)
    behind(engine, LONG)
    answer = engine.hint(LONG, "prefetch")
    assert (answer.outcome, answer.num_tokens) == ("accepted", 96) and engine.tiers.copier.has_jobs
    assert engine.hint(LONG, "prefetch").job is answer.job or not engine.tiers.copier.has_jobs
    first = engine.add_request(SHORT, PARAMS)
    finish(engine)
    assert engine.kv.match([*LONG, 3]).num_tokens == 96  # nobody had to ask for it
    assert engine.hint(LONG, "demote").outcome == "accepted"
    engine.add_request([3] * 280, PARAMS)
    finish(engine)
    assert engine.kv.match([*SHORT, 3]).num_tokens == 16 > engine.kv.match([*LONG, 3]).num_tokens
    kept = engine.hint(LONG, "retain", ttl=1000)
    assert kept.outcome == "accepted" and "host" in kept.reason
    assert engine.hint(LONG, "release").outcome == "accepted"
    again = engine.add_request(LONG, PARAMS)
    output = finish(engine)[again]
    assert output.num_cached_tokens == 96 and output.token_ids == alone(engine.model, LONG, PARAMS)
    assert first != again
    with pytest.raises(ValueError, match=r"^now, ttl: expected seconds to retain"):
        engine.hint(LONG, "retain")
    with pytest.raises(ValueError, match=r"^prompt_token_ids: expected ints"):
        engine.hint([-1], "prefetch")
    with pytest.raises(ValueError, match=r"^request_id: expected an unfinished request, got"):
        engine.hint(first, "prefetch")
    with pytest.raises(ValueError, match=r"^ttl, until: expected one of them, got 1 and 2"):
        engine.hint(LONG, "retain", ttl=1, until=2)
    end(engine)
    with pytest.raises(ValueError, match=r"^hint: expected an engine with host_cache_gib"):
        Engine(ToyModel(), EngineConfig(num_pages=40)).hint(LONG, "prefetch")


@pytest.mark.parametrize(
    "name, num_users, drafter",
    [
        ("gemma3-tiny", 4, None),
        ("deepseek-v4-tiny", 4, "mtp"),
    ],
)
def test_conversations_in_a_pool_that_is_too_small(name, num_users, drafter, tmp_path, monkeypatch):
    """Turn after turn, each prompt with the answer before: the same tokens as with room for all and without drafts, whatever fails."""
    config = few(name)
    if drafter == "mtp":
        config = replace(config, num_mtp_layers=1)
    model = random_model(config, device=DEVICE)

    def converse(num_pages, make_drafter=None, **settings):
        config = EngineConfig(
            max_num_seqs=2, max_num_batched_tokens=48, num_pages=num_pages, **settings
        )
        engine = Engine(model, config, drafter=make_drafter and make_drafter(model, 2))
        prompts = {user: prompt(70 + 9 * user, seed=user) for user in range(num_users)}
        for turn in range(3):
            ids = {engine.add_request(p, PARAMS): user for user, p in prompts.items()}
            for request_id, output in finish_any(engine).items():
                user = ids[request_id]
                prompts[user] = [
                    *output.prompt_token_ids,
                    *output.token_ids,
                    *prompt(11, seed=turn),
                ]
        return engine, prompts

    def finish_any(engine):
        outputs = {}
        while engine.has_work:
            outputs |= {o.request_id: o for o in engine.step().finished}
            engine.kv.check_invariants()
        return outputs

    _, expected = converse(400, enable_caching=False)
    faults = Faults(monkeypatch, random.Random(3), 0.1)
    make_drafter = DRAFTERS.get(drafter)
    plain = Engine(
        model,
        EngineConfig(max_num_seqs=2, max_model_len=150, num_pages=400),
        drafter=make_drafter and make_drafter(model, 2),
    )
    needed = 1 + 2 * -(-plain.memory.request_bytes(150) // plain.memory.page_bytes)
    for is_async in (False, True) if drafter is None else (False,):
        folder = tmp_path / str(is_async)
        engine, prompts = converse(
            needed, make_drafter, max_model_len=150, async_scheduling=is_async, host_cache_gib=0.001,
            disk_cache=folder, disk_cache_gib=0.01,
        )  # fmt: skip
        assert prompts == expected
        space = engine.tiers.space()
        assert space["host"][0] and all(h <= taken <= 1.05 * h for h, taken in space.values()), (
            space
        )
        stats = engine.kv.stats()
        assert stats["tier_stored_pages/host"] and stats["tier_loaded_pages/host"]
        assert drafter is None or engine.totals.num_drafts > 3
        end(engine)
    assert faults.count
