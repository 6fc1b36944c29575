"""Events: a reader that sees nothing else answers the same hits as the cache."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quire.kvcore import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventLog,
    GroupSpec,
    tail_hashes,
)
from tests.support.kvcore.engine import Engine, groups

STATE = GroupSpec("state", "state", 4, 4096)
MIXES = [
    ((8, None),),
    ((8, None), (4, 10), (4, 10)),
    ((16, None), (4, 8)),
    ((4, None), (8, 20), (4, 1)),
    ((4, None), (4, 1)),
    ((4, 9),),
    (STATE,),
    ((4, None), (8, None), STATE, (2, 5)),
    (GroupSpec("wide", "dense", 8, 4096), (4, 6)),
    (GroupSpec("draft", "dense", 4, 4096, lookahead=3), (2, 6), STATE),
]


class Reader:
    """A router: it knows the groups, and learns the rest from events. Salts and tokens never reach it."""

    def __init__(self, specs: list[GroupSpec]) -> None:
        self.dense = [i for i, g in enumerate(specs) if g.kind == "dense"]
        self.others = [i for i, g in enumerate(specs) if g.kind != "dense"]
        self.alignment = math.lcm(*(g.block_size for g in specs))
        tails = [
            g.tail_blocks * g.block_size for g in specs if g.kind == "window" and g.tail_blocks
        ]
        self.span = min(tails, default=10**9) // self.alignment
        if any(g.kind == "state" for g in specs):
            self.span = 0
        self.parents: dict[bytes, bytes | None] = {}
        self.stored: list[set[bytes]] = [set() for _ in specs]
        self.next_number = 0
        self.lost = False

    def read(self, log: EventLog) -> None:
        first, events = log.take()
        self.lost |= first != self.next_number
        self.next_number = first + len(events)
        for event in events:
            self.apply(event)

    def apply(self, event) -> None:
        if isinstance(event, AllBlocksCleared):
            for stored in self.stored:
                stored.clear()
            return
        hashes = set(event.block_hashes)
        assert len(hashes) == len(event.block_hashes)
        for group in event.groups:
            if isinstance(event, BlockStored):
                if event.kind == "dense":
                    before = (event.parent, *event.block_hashes[:-1])
                    self.parents.update(zip(event.block_hashes, before, strict=True))
                assert not hashes & self.stored[group], "stored twice"
                self.stored[group] |= hashes
            else:
                assert hashes <= self.stored[group], "removed what was not stored"
                self.stored[group] -= hashes

    def hit(self, keys: list[bytes], num_tokens: int) -> int:
        depth = len(keys)
        if self.dense:
            while depth and not all(k in self.stored[g] for k in keys[:depth] for g in self.dense):
                depth -= 1
        depth = min(depth, (num_tokens - 1) // self.alignment)
        if self.others:
            points = set.intersection(*(self.stored[g] for g in self.others))
            held = points | self._between(points)
            while depth and keys[depth - 1] not in held:
                depth -= 1
        return depth * self.alignment

    def _between(self, points: set[bytes]) -> set[bytes]:
        """Boundaries between two resume points, or the start and one, of which the longer tail holds all in between."""
        held: set[bytes] = set()
        if self.dense:
            for key in points & self.parents.keys():  # the other hashes are of blocks of tails
                above, node = [], self.parents[key]
                while node is not None and node not in points and len(above) < self.span:
                    above.append(node)
                    node = self.parents[node]
                if len(above) < self.span:
                    held.update(above)
        return held


def engine(specs, log: EventLog | None = None, **options) -> Engine:
    base = {"num_pages": 400, "max_requests": 4, "max_model_len": 400}
    return Engine(groups(*specs), events=log, **(base | options))


def same_hits(e: Engine, reader: Reader, prompts, salts=(b"",)) -> None:
    for tokens in prompts:
        for salt in salts:
            match = e.kv.match(tokens, salt=salt)
            keys = match.prompt.keys
            split = [keys[i : i + 32] for i in range(0, len(keys), 32)]
            told = reader.hit(split, len(tokens))
            # Without dense groups nobody is told which keys are on the way to a boundary.
            assert told == match.num_tokens or (not reader.dense and told < match.num_tokens)


def test_the_records_of_a_request_name_exactly_its_blocks():
    log = EventLog(medium="HBM")
    specs = ((8, None), (4, 10), (4, 10), GroupSpec("state", "state", 4, 4096))
    e = engine(specs, log)
    prompt = list(range(100, 126))
    e.run("a", prompt, [7, 8], chunk=8)
    first, events = log.take()
    keys = e.kv.match([*prompt, 7, 8, 9]).prompt.keys
    key = [keys[i : i + 32] for i in range(0, len(keys), 32)]
    assert first == 0 and len(events) == log.next_number
    dense = [r for r in events if r.kind == "dense"]
    assert [r.block_hashes for r in dense] == [(k,) for k in key]
    assert [r.parent for r in dense] == [None, *key[:2]]
    assert [list(r.token_ids) for r in dense] == [prompt[i : i + 8] for i in (0, 8, 16)]
    assert {(r.groups, r.names, r.block_size, r.sliding_window) for r in dense} == {
        ((0,), ("g0",), 8, None)
    }
    # One resume point, at 24: three window blocks from 12 on, in both window groups, and one state block.
    window, state = [r for r in events if r.kind != "dense"]
    assert (window.kind, window.groups, window.names) == ("window", (1, 2), ("g1", "g2"))
    assert (window.start, window.block_size, window.sliding_window) == (12, 4, 10)
    assert list(window.token_ids) == prompt[12:24] and window.parent == key[0]
    assert window.block_hashes == tail_hashes(key[2], 3) and window.block_hashes[-1] == key[2]
    assert (state.kind, state.groups, state.start) == ("state", (3,), 20)
    assert list(state.token_ids) == prompt[20:24] and state.block_hashes == (key[2],)
    assert {r.medium for r in events} == {"HBM"}


def test_a_tail_at_the_start_names_only_blocks_that_exist():
    log = EventLog()
    e = engine(((4, None), (4, 30)), log)
    e.run("a", [1, 2, 3, 4, 5])
    (stored,) = [r for r in log.take()[1] if r.kind == "window"]
    assert stored.token_ids == (1, 2, 3, 4) and stored.start == 0 and stored.parent is None
    assert len(stored.block_hashes) == 1


def test_an_overflow_drops_the_oldest_and_shows_as_a_gap():
    log = EventLog(capacity=5)
    e = engine(((4, None),), log)
    reader = Reader(e.kv.layout.groups)
    e.run("a", list(range(20)), chunk=4)
    reader.read(log)
    assert not reader.lost and log.num_dropped == 0
    e.run("b", list(range(100, 140)), chunk=4)
    assert len(log) == 5 and log.num_dropped == 5 and log.next_number == 15
    number, events = log.take()
    assert number == 10 and len(events) == 5
    reader.read(log)
    assert reader.lost
    e.kv.clear()  # brings both to the same state
    assert log.take() == (15, [AllBlocksCleared()])


def test_clear_spares_what_running_requests_use():
    log = EventLog()
    e = engine(((8, None), (4, 10)), log)
    reader = Reader(e.kv.layout.groups)
    e.run("old", list(range(40)))
    e.admit("a", [*range(16), 99, 98])
    e.finish_prompt("a")
    in_use = e.kv.stats()["pages_in_use"]
    e.kv.clear()
    reader.read(log)
    e.check()
    assert e.kv.num_evictable_pages == 0 and e.kv.stats()["pages_in_use"] == in_use
    assert e.kv.match([*range(16), 99]).num_tokens == 0, "no resume point is left"
    assert e.kv.match([*range(16), 99]).dense_tokens == 16, "its dense blocks stay findable"
    same_hits(e, reader, [list(range(40)), [*range(16), 99]])
    e.release("a")
    reader.read(log)
    assert e.kv.match([*range(16), 99]).num_tokens == 16
    same_hits(e, reader, [[*range(16), 99]])


def test_without_a_log_no_tokens_are_kept():
    quiet = engine(((4, None),), debug=False)  # debug keeps them too
    loud = engine(((4, None),), EventLog(), debug=False)
    assert quiet.kv.match([1, 2, 3]).prompt.tokens is None
    assert loud.kv.match([1, 2, 3]).prompt.tokens.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="a prompt made by a cache with events"):
        loud.kv.match(quiet.kv.match([1, 2, 3]).prompt)


def ledger(events) -> dict:
    """What is stored after `events`: of each entry its blocks, parent and tokens."""
    stored: dict = {}
    for event in events:
        if isinstance(event, AllBlocksCleared):
            stored.clear()
            continue
        for i, key in enumerate(event.block_hashes):
            name = (event.kind, event.groups, key)
            if isinstance(event, BlockRemoved):
                del stored[name]
                continue
            size = event.block_size
            dense = event.kind == "dense"
            parent = event.block_hashes[i - 1] if dense and i else event.parent
            tokens = event.token_ids[i * size : (i + 1) * size]
            stored[name] = (event.start + i * size, tokens, parent, size, event.sliding_window)
    return stored


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_a_late_reader_is_told_everything(mix):
    log = EventLog()
    e = engine(mix, log, retention="dense", num_pages=80)
    rng, history, events = np.random.default_rng(0), [[1]], []
    for rid in range(25):
        base = history[rng.integers(len(history))]
        prompt = base[: rng.integers(len(base) + 1)] + rng.integers(0, 2, 50).tolist()
        e.run(rid, prompt[:100], [0, 1, 0])
        history.append(prompt[:100])
    e.admit("running", [*history[-1], 5, 6])
    e.finish_prompt("running")
    events = log.take()[1]
    e.kv.announce()
    late, again = Reader(e.kv.layout.groups), log.take()[1]
    for event in again:
        late.apply(event)
    same_hits(e, late, history)
    assert ledger(again) == ledger(events) != {}
    assert any(isinstance(event, BlockRemoved) for event in events)


def test_only_a_cache_with_events_announces():
    with pytest.raises(ValueError, match="events: expected an EventLog at construction"):
        engine(MIXES[0]).kv.announce()
