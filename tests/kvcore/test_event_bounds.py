"""The memory of events is bounded, and an announcement of any size can be read."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kvcore import AllBlocksCleared, BlockStored, EventLog
from tests.kvcore.test_events import Reader, same_hits
from tests.support.kvcore.engine import Engine, groups


def engine(log: EventLog, specs=((4, None), (4, 9)), **options) -> Engine:
    base = {"num_pages": 400, "max_requests": 4, "max_model_len": 4096}
    return Engine(groups(*specs), events=log, **(base | options))


def test_bytes_are_bounded_too():
    log = EventLog(max_bytes=60_000)
    e = engine(log)
    reader = Reader(e.kv.layout.groups)
    for i in range(6):
        e.run(i, list(range(1000 * i, 1000 * i + 160)), chunk=160)
        assert log.num_bytes <= 60_000
    assert log.num_dropped > 0 and 0 < len(log) < log.next_number
    reader.read(log)
    assert reader.lost and log.num_bytes == 0 and len(log) == 0


def test_an_event_larger_than_all_room_is_dropped():
    log = EventLog(max_bytes=5000)
    engine(log).run("a", list(range(400)), chunk=400)
    assert log.num_bytes <= 5000 and log.num_dropped > 0
    assert log.take()[0] == log.next_number or log.num_dropped < log.next_number


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_an_announcement_larger_than_the_log_is_read_in_parts(most):
    log = EventLog(capacity=12)
    e = engine(log, retention="dense")
    prompts = [list(range(1000 * i, 1000 * i + 80)) for i in range(3)]
    for i, prompt in enumerate(prompts):
        e.run(i, prompt)
    reader = Reader(e.kv.layout.groups)
    reader.next_number = log.next_number - len(log)
    e.kv.announce()
    assert len(log) > 12
    e.run(
        "later", [*prompts[0], 1, 2, 3, 4, 5]
    )  # told after the announcement, made before it is read
    points = e.kv.stats()["resume_points"]
    e.kv.evict(1)  # a point that was announced, and dense blocks behind it
    assert e.kv.stats()["resume_points"] < points
    number, events = log.take(most)
    assert number == reader.next_number and isinstance(events[0], AllBlocksCleared)
    while events:
        assert len(events) <= most and number == reader.next_number
        for event in events:
            reader.apply(event)
        reader.next_number += len(events)
        number, events = log.take(most)
    assert number == log.next_number
    same_hits(e, reader, [[*p, 7] for p in prompts] + [[*prompts[0], 1, 2, 3, 4, 5, 6]])


def test_an_announcement_that_later_events_push_out_leaves_a_gap():
    log = EventLog(capacity=2)
    e = engine(log)
    e.run("a", list(range(40)))
    log.take()
    e.kv.announce()
    first = log.take(1)[0]
    e.run("b", list(range(100, 180)), chunk=8)
    number, events = log.take()
    assert number > first + 1 and len(events) == 2


def test_tokens_of_answers_take_room_for_the_newest_only():
    log = EventLog()
    e = engine(log, ((4, None),), max_draft_tokens=3)
    for rid in ("a", "b"):
        e.admit(rid, [1, 2, 3])
        e.finish_prompt(rid)
    size = e.kv._event_writer._answers.size
    rng = np.random.default_rng(0)
    for _ in range(60):
        e.decode("a", rng.integers(0, 50, 3).tolist())
        e.tokens["b"] += rng.integers(0, 50, 4).tolist()
        e.step({"b": 4}, {"b": int(rng.integers(1, 5))})
        assert e.kv._event_writer._answers.size <= 2 * size
    e.tokens["a"] += rng.integers(0, 50, 500).tolist()
    e.step({"a": 500})
    e.decode("b", [1, 2, 3, 4, 5, 6])
    e.decode("a", [1, 2, 3, 4, 5, 6])
    assert e.kv._event_writer._answers.size <= 2 * size
    said = {rid: e.tokens[rid][: e.computed(rid)] for rid in ("a", "b")}
    for rid, done in said.items():
        e.release(rid)
        e.run((rid, "again"), [*done, 9])
    told = [r for r in log.take()[1] if isinstance(r, BlockStored)]
    tokens = {h: r.token_ids[4 * i : 4 * i + 4] for r in told for i, h in enumerate(r.block_hashes)}
    for done in said.values():
        keys = e.kv.match([*done, 9]).prompt.keys
        for i in range(len(done) // 4):
            assert list(tokens[keys[32 * i : 32 * i + 32]]) == done[4 * i : 4 * i + 4]
