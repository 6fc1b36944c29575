"""Loads of an engine for clients that go away, or that wait for those of others."""

from quire.kvcore import OutOfPages
from quire.models.engine import tiering
from tests.models.engine.test_engine_many import alone
from tests.models.engine.test_tiering import (
    LONG,
    PARAMS,
    Later,
    behind,
    end,
    finish,
    leave,
    toy_engine,
)


def eager(**settings):
    """An engine to which everything is worth a load, whatever the clock says of this machine."""
    engine = toy_engine(**settings)
    engine.tiers.observe = lambda report: None
    engine.tiers.tiers._planner.prefill.value = 1e-5
    return engine


def test_who_waited_for_a_shorter_load_loads_the_rest(monkeypatch):
    """Of a prefix that two requests share, one has more behind it."""
    engine = eager()
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


def test_a_link_that_was_slow_is_used_again(monkeypatch):
    """Some time later; until then the prompt is computed, and the output says why."""
    engine = eager()
    now = tiering.time.monotonic()
    monkeypatch.setattr(tiering.time, "monotonic", lambda: now)
    behind(engine, LONG)
    engine.tiers.tiers.host.rate.value = 1e-6
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


def test_where_the_pool_has_no_room_the_output_says_so(monkeypatch):
    """And not that nothing is cached; nor, where a chain is behind the pool, that there is none."""
    engine = eager(num_pages=30)
    behind(engine, LONG)
    load = engine.tiers.tiers.load
    monkeypatch.setattr(
        engine.tiers.tiers, "load", lambda match: OutOfPages(9, 1, 1, "a", {"a": 9})
    )
    request_id = engine.add_request([*LONG, 1], PARAMS)
    output = finish(engine)[request_id]
    assert output.explain() == "0 of 101 tokens: the pool had no room to load more"
    monkeypatch.setattr(engine.tiers.tiers, "load", load)
    leave(engine)
    request_id = engine.add_request([*LONG[:70], 1, 1], PARAMS)
    output = finish(engine)[request_id]
    assert (output.num_cached_tokens, output.limited_by, output.dense_tokens) == (0, "resume-point", 64)  # fmt: skip
    end(engine)
