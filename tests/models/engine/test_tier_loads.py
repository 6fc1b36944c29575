"""Loads of an engine for clients that go away, or that wait for those of others."""

import time
from concurrent.futures import Future

from quire.kvcore import OutOfPages
from quire.models.engine import tiering
from quire.models.tiers import copier as copier_module
from tests.models.engine.test_engine_many import alone
from tests.models.engine.test_tiering import (
    GIB_OF_A_PAGE,
    LONG,
    PAGE_BYTES,
    PARAMS,
    SHORT,
    Later,
    behind,
    end,
    finish,
    leave,
    toy_engine,
)


def disk_engine(folder, monkeypatch=None, **settings):
    """Over a disk alone, from which everything is worth a load.

    Args:
        monkeypatch: where pages go through so few staging rows that most of a load waits for its turn.
    """
    if monkeypatch is not None:
        monkeypatch.setattr(copier_module, "STAGING_BYTES", 4 * PAGE_BYTES)
    settings = {"host_cache_gib": None, "disk_cache": folder / "cache"} | settings
    engine = toy_engine(**{"disk_cache_gib": 300 * GIB_OF_A_PAGE} | settings)
    eager(engine)
    return engine


def eager(engine):
    """Everything is worth a load, whatever the clock says of this machine."""
    engine.tiers.observe = lambda report: None
    engine.tiers.tiers._planner.prefill.value = 1e-5


class HeldReads:
    """Reads of the disk are made when `let` says so, and at once from then on."""

    def __init__(self, engine):
        self.held, self._disk = [], engine.tiers.copier._disk
        self._read = self._disk.read
        self._disk.read = self._hold

    def _hold(self, pages, buffers):
        self.held.append((pages, [*buffers], Future()))
        return self.held[-1][-1]

    def let(self):
        self._disk.read = self._read
        for pages, buffers, future in self.held:
            self._read(pages, buffers).result()
            future.set_result(None)


def test_who_goes_away_leaves_what_was_to_be_loaded(tmp_path, monkeypatch):
    """What nobody waits for is not read, and stays where it is; what was read is good."""
    engine = disk_engine(tmp_path, monkeypatch)
    behind(engine, LONG)
    reads, quick = HeldReads(engine), engine.add_request(SHORT, PARAMS)
    waiting = engine.add_request([*LONG, 1], PARAMS)
    engine.step()
    engine.abort(waiting)
    assert list(finish(engine)) == [quick]  # which needs nothing of the disk
    reads.let()
    engine.tiers.settle()
    stats = engine.kv.stats()
    assert len(reads.held) == stats["tier_loaded_pages/disk"] == 4  # of 8
    assert stats["tier_load_failures/disk"] == 0
    assert 0 < stats["tier_loaded_segments/disk"] <= 4
    assert engine.tiers.tiers.match([*LONG, 1]).num_tokens == 96
    again = engine.add_request([*LONG, 1], PARAMS)
    output = finish(engine)[again]
    assert output.num_cached_tokens == 96
    assert output.token_ids == alone(engine.model, [*LONG, 1], PARAMS)
    end(engine)


def test_a_prefetch_outlives_who_waited_first(tmp_path, monkeypatch):
    """A hint on what is being loaded for a request says that it comes; so it does if that request goes."""
    engine = disk_engine(tmp_path, monkeypatch)
    behind(engine, LONG)
    reads, waiting = HeldReads(engine), engine.add_request([*LONG, 1], PARAMS)
    engine.scheduler._advance_tiers()
    assert engine.hint([*LONG, 1], "prefetch").reason == "it is being loaded"
    engine.abort(waiting)
    engine.scheduler._advance_tiers()
    reads.let()
    engine.tiers.settle()
    assert engine.kv.match([*LONG, 1]).num_tokens == 96
    end(engine)


def test_who_waited_for_a_shorter_load_loads_the_rest(tmp_path, monkeypatch):
    """Of a prefix that two requests share, one has more behind it."""
    engine = disk_engine(tmp_path)
    system, whole = LONG[:40], [*LONG[:40], *[3 + n % 7 for n in range(60)]]
    for tokens in (system, whole):
        behind(engine, tokens)
    later = Later(engine, monkeypatch)
    first = engine.add_request([*system, 1], PARAMS)
    second = engine.add_request([*whole, 2], PARAMS)
    third = engine.add_request([*system, 2], PARAMS)
    engine.scheduler._advance_tiers()
    assert len(engine.tiers.tiers.jobs) == 1
    later.let()
    outputs = finish(engine)
    assert outputs[second].num_cached_tokens == 96
    assert [outputs[r].num_cached_tokens for r in (first, third)] == [32, 32]
    assert [len(outputs[r].loads) for r in (first, second, third)] == [1, 2, 1]
    assert outputs[second].token_ids == alone(engine.model, [*whole, 2], PARAMS)
    end(engine)


def test_a_disk_that_was_slow_is_used_again(tmp_path, monkeypatch):
    """Some time later; until then the prompt is computed, and the output says why."""
    engine = disk_engine(tmp_path)
    now = tiering.time.monotonic()
    monkeypatch.setattr(tiering.time, "monotonic", lambda: now)
    behind(engine, LONG)
    engine.tiers.tiers.tiers[0].rate.value = 1e-6
    for passed, cached, why in ((1.0, 0, "slower"), (3e4, 96, "prompt-end")):
        now += passed
        request_id = engine.add_request([*LONG, 1], PARAMS)
        output = finish(engine)[request_id]
        assert (output.num_cached_tokens, output.limited_by) == (cached, why)
        if not cached:
            said = "0 of 101 tokens: loading more would take longer than computing it"
            assert output.explain() == said
        engine.kv.evict(engine.kv.num_evictable_pages)
    end(engine)


def test_where_the_pool_has_no_room_the_output_says_so(tmp_path, monkeypatch):
    """And not that nothing is cached; nor, where a chain is behind the pool, that there is none."""
    engine = disk_engine(tmp_path, num_pages=30)
    behind(engine, LONG)
    load = engine.tiers.tiers.load
    monkeypatch.setattr(
        engine.tiers.tiers, "load", lambda match: OutOfPages(9, 1, 1, "a", {"a": 9})
    )
    request_id = engine.add_request([*LONG, 1], PARAMS)
    output = finish(engine)[request_id]
    assert output.explain() == "0 of 101 tokens: the pool had no room to load more"
    monkeypatch.setattr(engine.tiers.tiers, "load", load)
    leave(engine, "device")
    request_id = engine.add_request([*LONG[:70], 1, 1], PARAMS)
    output = finish(engine)[request_id]
    assert (output.num_cached_tokens, output.limited_by, output.dense_tokens) == (0, "resume-point", 64)  # fmt: skip
    end(engine)


def test_a_prefetch_goes_on_in_steps_without_requests(tmp_path, monkeypatch):
    engine = disk_engine(tmp_path, monkeypatch)
    behind(engine, LONG)
    answer = engine.hint([*LONG, 1], "prefetch")
    assert answer.job.num_pages > 4  # that are read at once
    for _ in range(1000):
        assert engine.step() is None
        if not engine.tiers.copier.has_jobs:
            break
        time.sleep(0.001)
    assert engine.kv.match([*LONG, 1]).num_tokens == answer.num_tokens == 96
    end(engine)


def test_a_disk_that_does_not_answer_holds_up_no_store_of_the_device(tmp_path, monkeypatch):
    """What may run at once is counted for each tier."""
    engine = disk_engine(tmp_path, num_pages=60, host_cache_gib=60 * GIB_OF_A_PAGE)
    tiers, disk = engine.tiers.tiers, engine.tiers.copier._disk
    monkeypatch.setattr(tiering, "STORE_BYTES", 8 * tiers.page_bytes)
    write, held = disk.write, []

    def hold(pages, buffers):
        held.append((pages, [*buffers], Future()))
        return held[-1][-1]

    monkeypatch.setattr(disk, "write", hold)
    budgets, stores = [], tiers.stores

    def spied(max_bytes, **options):
        budgets.append(max_bytes)
        return stores(max_bytes, **options)

    monkeypatch.setattr(tiers, "stores", spied)
    for user in range(12):
        engine.add_request([3 + user, *LONG[1:]], PARAMS)
        finish(engine)
    assert held and sum(job.num_bytes for job in tiers.jobs) >= 8 * tiers.page_bytes
    assert budgets[-1] == {"host": 8 * tiers.page_bytes, "disk": 0}
    for pages, buffers, future in held:
        write(pages, buffers).result()
        future.set_result(None)
    monkeypatch.setattr(disk, "write", write)
    end(engine)
