"""Wrong arguments are named with what was expected and what came, and leave no trace."""

import math
import re

import numpy as np
import pytest

from quire.kvcore import (
    LRU,
    EventLog,
    GroupSpec,
    KVCache,
    LayerShape,
    WorkerTables,
    cache_groups,
    linear_table,
    paged_rows,
    step_arrays,
)
from quire.kvcore.policies.base import Ranked
from quire.kvcore.tier import Tiers
from tests.kvcore.engine import Runner, groups
from tests.kvcore.expected import contents

NAN, INF = math.nan, math.inf
OPTIONS = {"num_pages": 60, "max_requests": 2, "max_model_len": 100, "max_draft_tokens": 3}
SPEC = {"name": "g", "kind": "window", "block_size": 4, "page_bytes": 1, "sliding_window": 9}
NO_INTS = [True, 1.0, NAN, "1", None, -(10**30), 10**30]
STATE = GroupSpec("state", "state", 4, 4096)
LISTS = {"reads": "pages", "adopt": False, "append_only": True}
NOT_LISTS = (
    {"reads": "step"}, {"adopt": True}, {"track_deltas": True}, {"events": EventLog()}, {"max_draft_tokens": 2},
    {"replay_tokens": 9},
)  # fmt: skip
TIER = {"num_pages": 10, "bytes_per_second": 1e9, "prefill_tokens_per_second": 1.0}


def cache(*specs, **options) -> KVCache:
    return KVCache(groups(*specs or ((4, None), (4, 10))), **(OPTIONS | options))


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("num_pages", [*NO_INTS, 0, 1, 2**31]), ("max_requests", [*NO_INTS, 0, 2**31]), ("max_model_len", [*NO_INTS, 0, 2**31]),
        ("max_draft_tokens", [*NO_INTS, -1, 101]), ("replay_tokens", [1.0, 10**30, 0]), ("max_pinned_pages", [1.0, 10**30, -1]),
        ("hash_seed", ["x", 1, None]), ("enable_caching", [1, None, "no"]), ("track_deltas", [0, None]), ("adopt", [None, 0]),
        ("debug", [1]), ("reads", ["tokens", None]), ("retention", [True, 1.5, NAN, 0, -4, 3, "x", {}]),
        ("policy", ["lru", LRU]), ("events", [True]), ("groups", [[], ["g"], groups((4, None)) * 2]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_arguments_of_a_cache(name, bad):
    for value in bad:
        with pytest.raises(ValueError, match=f"{name}: expected"):
            KVCache(**{"groups": groups((4, None), (4, 10))} | OPTIONS | {name: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GroupSpec(**SPEC | {"lookahead": -1}), "lookahead: expected an int >= 0, got -1"),
        (lambda: GroupSpec("s", "state", 16, 1, sliding_window=9), "sliding_window: expected None for a state group, got 9"),
        (lambda: cache((65521, None), (65519, None), (65497, None)), "block_size: expected a least common multiple <= 2147483647"),
        (lambda: cache((16, None), GroupSpec("x", "window", 16, 8192, 64)), r"groups: expected one page size.*'g0': 4096, 'x': 8192"),
        (lambda: cache((4, None), STATE, replay_tokens=8), "replay_tokens: expected None with a state group"),
        (lambda: cache(GroupSpec("d", "dense", 4, 4096, lookahead=5)), "lookahead: expected at most one segment of 4"),
        (lambda: EventLog(0), "capacity: expected"), (lambda: EventLog(max_bytes=0), "max_bytes: expected"),
        (lambda: EventLog().take(0), "most: expected"), (lambda: EventLog(identities=1), "identities: expected True or False, got 1"),
        *((lambda spec=spec: cache(spec, **OPTIONS | {"max_draft_tokens": 0} | LISTS), "groups: expected dense and window groups.*name='s'")
          for spec in (GroupSpec("s", "state", 8, 1), GroupSpec("s", "dense", 8, 1, lookahead=1))),
        *((lambda bad=bad: cache(**{"max_draft_tokens": 0} | LISTS | bad), "append_only: expected False but with reads='pages'")
          for bad in NOT_LISTS),
        (lambda: cache_groups([]), "layers: expected at least one LayerShape, got none"),
        (lambda: cache_groups([4096]), "layers: expected LayerShapes, got 4096"),
        (lambda: cache_groups([LayerShape(64)], base_block_size=0), "base_block_size: expected an int >= 1, got 0"),
        *((lambda field=field: LayerShape(**{"token_bytes": 64} | {field: -1}), f"{field}: expected an int")
          for field in ("token_bytes", "sliding_window", "scale_bytes")),
        *((lambda name=name: WorkerTables(groups((4, None)), **{"max_requests": 1, "max_model_len": 9} | {name: -1}), f"{name}: expected an int")
          for name in ("max_requests", "max_model_len", "max_draft_tokens")),
        (lambda: Tiers(object(), **TIER), "kv: expected a KVCache, got <"),
        (lambda: Tiers(cache(enable_caching=False), **TIER), "kv: expected a cache with enable_caching"),
        (lambda: Tiers(cache(policy=FourMethods()), **TIER), r"kv: expected a policy with coming\(n\), got <"),
        *((lambda bad=bad: Tiers(cache(), **TIER | bad), message) for bad, message in (
            ({"prefill_tokens_per_second": 0}, "prefill_tokens_per_second: expected a finite numb"),
            ({"bytes_per_second": NAN}, "bytes_per_second: expected a finite number > 0"),
            ({"num_pages": 1}, "num_pages: expected an int >= 2, got 1"),
            ({"page_bytes": 0}, "page_bytes: expected an int >= 1, got 0"),
            ({"watermark": -1}, "watermark: expected an int >= 0, got -1"),
            ({"policy": LRU}, r"policy: expected an eviction policy, such as LRU\(\), got <class"),
        )),
    ],
)  # fmt: skip
def test_other_constructors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class FourMethods:
    """A policy of the four methods alone."""

    def __init__(self):
        lru = LRU()
        self.add, self.discard, self.pop, self.asked = lru.add, lru.discard, lru.pop, lru.asked


@pytest.mark.parametrize(
    "name", ["kind", "block_size", "page_bytes", "sliding_window", "lookahead"]
)
def test_fields_of_a_group(name):
    for value in [*NO_INTS, -1]:
        if (name, value) != ("sliding_window", None):
            with pytest.raises(ValueError, match=f"{name}: expected"):
                GroupSpec(**(SPEC | {name: value}))
    with pytest.raises(NotImplementedError, match="lookahead: supported are dense and window"):
        GroupSpec("s", "state", 4, 64, lookahead=1)


def test_a_constructor_that_fails_takes_no_policy_and_no_log():
    policy, log = LRU(), EventLog()
    for bad in ({"retention": "x"}, {"hash_seed": "x"}, {"replay_tokens": 0}, {"num_pages": 1}):
        with pytest.raises(ValueError, match="expected"):
            cache(**{"policy": policy, "events": log} | bad)
    cache(policy=policy, events=log)
    with pytest.raises(ValueError, match="policy: expected one that no cache was made with, got <"):
        cache(policy=policy)
    with pytest.raises(ValueError, match="events: expected one that no cache was made with, got <"):
        cache(events=log)


def running() -> KVCache:
    """A cache with a prefix of 8 cached tokens, a request "a" of 9 in slot 0, and slot 1 free."""
    kv = cache()
    kv.commit(kv.plan([kv.admit("a", kv.match([1] * 9))], [9]), [1] * 9)
    return kv


PAGES = (0, 60, -1, 1.5, [1], None, "1")
SLOTS = ([0.0], [NAN], [True], ["0"], [None], [-1], [2], [2**62], [2**64 - 1], [10**30], [[0]], [[0], [0, 1]], [], [0, 0], [1])  # fmt: skip
COUNTS = ([0], [-1], [-(2**63)], [2**63 - 1], [2**64 - 1], [10**30], [1.0], [True], [1, 1])
CALLS = [  # name, arguments, keywords, and the start of the error
    *(("match", ([1] * 9,), {"max_tokens": bad}, "max_tokens: expected") for bad in (-1, 1.0, True, "1")),
    *(("match", ([1] * 9,), {"salt": bad}, "salt: expected bytes") for bad in ("text", 1, bytearray(b"x"))),
    ("match", ([],), {}, "token_ids: expected at least one token"),
    ("match", ([1, -5],), {}, r"token_ids: expected ids in \[0, 2\*\*31\), got -5"),
    ("match", ([2**31],), {}, "token_ids: .*got 2147483648"),
    ("match", (np.array([1, -5], np.int32),), {}, r"token_ids: expected ids in \[0, 2\*\*31\), got -5"),
    ("match", ([0.5],), {}, "token_ids: expected a 1-D sequence of ints, got float64"),
    ("match", ([[1, 2]],), {}, "token_ids: expected a 1-D"),
    ("match", ("hello",), {}, r"token_ids: expected a 1-D sequence of ints, got str \[\]"),
    ("match", ([1] * 101,), {}, "token_ids: expected at most max_model_len = 100 tokens, got 101"),
    ("match", ([1] * 9,), {"extra_keys": 5}, r"extra_keys: expected \(start, stop, key\) each, got 5"),
    ("match", ([1] * 9,), {"extra_keys": [(1, 2)]}, r"extra_keys: expected \(start, stop, key\) each"),
    ("match", ([1] * 9,), {"extra_keys": [(-1, 2, b"")]}, "extra_keys: start: expected an int >= 0, got -1"),
    ("match", ([1] * 9,), {"extra_keys": [(9, None, b"")]}, "extra_keys: start: expected an int <= 8, got 9"),
    ("match", ([1] * 9,), {"extra_keys": [(5, 5, b"")]}, "extra_keys: stop: expected an int >= 6, got 5"),
    ("match", ([1] * 9,), {"extra_keys": [(5, 10, b"")]}, "extra_keys: stop: expected an int <= 9, got 10"),
    ("match", ([1] * 9,), {"extra_keys": [(5, 9, b"a"), (5, None, b"a")]}, "extra_keys: expected each key once at one start, got several b'a' at 5"),
    ("match", ([1] * 9,), {"extra_keys": [(5, 6, "cat")]}, "extra_keys: key: expected bytes, got str"),
    ("match", (), {"keys": b"k", "num_tokens": 9}, "keys: expected 32 bytes a segment"),
    ("match", (), {"keys": b"k" * 96, "num_tokens": 9}, "keys: expected at most 2 for 9"),
    ("match", ([1],), {"keys": b"", "num_tokens": 9}, "keys: expected None beside"),
    ("match", (), {"keys": b""}, "num_tokens: expected an int"),
    ("admit", ("b", [1]), {}, r"match: expected what `match` returned, got \[1\]"),
    ("release", ("b",), {}, "request_id: expected an admitted request, got 'b'"),
    *((name, ([1], *more), options, r"request_id: expected a hashable id, got \[1\]")
      for name, more, options in (("release", (), {}), ("slot_of", (), {}))),
    *((name, (slots, [1]), {}, "slots.*: ") for name in ("plan", "cut") for slots in SLOTS),
    *((name, ([0], counts), {}, "num_new_tokens.*: ") for name in ("plan", "cut") for counts in COUNTS
      if (name, counts) != ("cut", [2**63 - 1])),
    ("plan", ([0], [92]), {}, "num_new_tokens: slot 0 would reach 101 tokens"),
    *(("commit", (other, [1]), {}, "plan: expected a StepPlan") for other in (None, 1, "plan")),
    *(("rollback", (0, bad), {}, "num_tokens: expected") for bad in [*NO_INTS, 0]),
    ("rollback", (0, 2), {}, r"num_tokens: expected 1\.\.1 .*got 2; to go back further, release the"),  # 8 are cached
    *(("rollback", (bad, 1), {}, "slot: expected") for bad in [*NO_INTS, -1, 2, 1]),
    *((name, (slot, *more), {}, "slot: expected") for name, more in (("room", ()), ("reserve", (1,))) for slot in (-1, 1, 2)),
    *(("evict", (bad,), {}, "num_pages: expected") for bad in [*NO_INTS, -1]),
    *(("evict_pages", ([bad] if bad is not None else bad,), {}, "pages: expected") for bad in PAGES),
    *(("table", (bad,), {}, "group: expected") for bad in (-1, 9, None, 0.0, "0", 10**30)),
    *(("expire_pins", (bad,), {}, f"now: expected a finite number of seconds, got {re.escape(repr(bad))}")
      for bad in (NAN, INF, -INF, "1", None, True, 10**400, np.float32("nan"), [1.0])),
    ("unpin", (None,), {}, "match: expected"),
    ("reset", (), {}, "end_requests: expected True .*'a'"),
    ("announce", (), {}, "events: expected an EventLog at construction"),
    ("take_deltas", (), {}, "track_deltas: expected True at construction"),
]  # fmt: skip


@pytest.mark.parametrize("name", list(dict.fromkeys(call[0] for call in CALLS)))
def test_calls(name):
    kv = running()
    for _, args, options, message in (call for call in CALLS if call[0] == name):
        before = contents(kv)
        with pytest.raises(ValueError, match=message):
            getattr(kv, name)(*args, **options)
        assert contents(kv) == before, (args, options)
    kv.check_invariants()


def test_calls_that_need_something_first():
    kv = running()
    match, other = kv.match([1] * 9), cache((8, None), (4, 10)).match([1] * 9)
    plan = kv.plan([0], [4])
    ids = (
        [1] * 3,
        [1.0] * 4,
        [-1] * 4,
        [2**31] * 4,
        [[1] * 4],
        [True] * 4,
        ["1"] * 4,
        [10**30] * 4,
    )
    taken = ([0], [5], [-1], [2**63 - 1], [2**64 - 1], [1.0], [NAN], [True], [], [4, 4], 4, ["4"])
    calls = [
        (lambda: kv.admit("a", match), "request_id: expected a new id, got 'a'"),
        (lambda: kv.admit([1], match), r"request_id: expected a hashable id, got \[1\]"),
        (lambda: kv.pin(match, now=NAN, ttl=1.0), "now: expected"),
        *((lambda bad=bad: kv.pin(match, now=0.0, ttl=bad), "ttl: expected") for bad in (NAN, -INF, 0, -1.0, "1", None, True, 10**400)),
        (lambda: linear_table(kv, 9, [0]), "group: expected"),
        (lambda: linear_table(kv, 0, [1]), "slots: expected slots of admitted requests"),
        (lambda: linear_table(kv, 0, [0.5]), "slots: expected ints, got float64"),
        (lambda: linear_table(kv, 0, ["a"]), "slots: expected ints, got str"),
        (lambda: linear_table(0, kv, [0]), "cache: expected a KVCache, got 0"),
        (lambda: kv.commit(plan, [1] * 4, [0]), r"accepted: expected between \[1\] and \[4\], as max_draft_tokens=3 may be rejected, got \[0\]"),
        (lambda: paged_rows(cache((4, None), STATE), 1, []), "group: expected a dense or window group, got state group"),
        *((lambda x=x: kv.commit(plan, x), "input_ids: expected") for x in ids),
        *((lambda x=x: kv.commit(plan, [1] * 4, x), "accepted: expected") for x in taken),
        *((lambda call=call: call(other), r"a prompt of this cache's segments \(alignment 4, lookahead 0\)")
          for call in (lambda m: kv.match(m.prompt), lambda m: kv.admit("b", m), lambda m: kv.pin(m, now=0.0, ttl=1.0))),
        *((lambda call=call: call(cache(hash_seed=b"b").match([1] * 9)), "a prompt of this cache's hash_seed")
          for call in (lambda m: kv.match(m.prompt), lambda m: kv.admit("b", m), lambda m: kv.unpin(m))),
        (lambda: kv.match(match.prompt, salt=b"b"), "salt: expected that of the prompt"),
        (lambda: kv.match(match.prompt, extra_keys=[(0, 1, b"b")]), "extra_keys: expected those of the prompt"),
    ]  # fmt: skip
    before = contents(kv)
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
        assert contents(kv) == before, message
    kv.commit(plan, [1] * 4)
    kv.admit("b", match)
    with pytest.raises(ValueError, match="all max_requests = 2 slots are taken"):
        kv.admit("c", match)
    with pytest.raises(ValueError, match="read-only"):
        kv.num_computed[:] = 1
    kv.check_invariants()


def test_numbers_at_the_edge_are_taken():
    kv = cache(num_pages=np.int32(60), max_model_len=np.int64(100), retention=np.int64(8))
    assert kv.num_pages == 60 and kv.interval == 8 and kv.evict(2**62) == 0
    assert linear_table(kv, 0, []).shape == (0, 0)
    for window in (100, 2**31, 2**62):  # past the longest sequence it is all of it
        layout = cache((4, None), (4, window)).layout
        assert layout.num_columns == cache((4, None), (4, 101)).layout.num_columns
    kv = running()
    match = kv.match([1] * 30)
    assert kv.pin(match, now=0.0, ttl=5.0) == 8
    assert kv.expire_pins(np.float64(4.9)) == 0 and kv.expire_pins(5) == 1
    assert kv.pin(match, now=0, ttl=INF) == 8 and kv.expire_pins(1e300) == 0


# Steps in flight.


def in_flight() -> tuple[KVCache, int, int]:
    """A cache whose request 0 has a step of 9 tokens in flight, while request 1 has not started."""
    kv = KVCache(groups((4, None), (4, 9)), num_pages=20, max_requests=3, max_model_len=100, max_draft_tokens=2)  # fmt: skip
    a, b = (kv.admit(i, kv.match([i] * 9)) for i in range(2))
    kv.reserve(a, 9)
    kv.arrays([a], [0], [9])
    return kv, a, b


HELD = "expected a request that no step holds"
RESERVE, ADVANCE = lambda kv, a, b: kv.reserve(b, 9), lambda kv, a, b: kv.advance(a, 9)
REFUSED = {  # calls before, the call, the start of the error
    "release": (lambda kv, a, b: kv.release(0), f"request_id: {HELD}"),
    "reset": (lambda kv, a, b: kv.reset(end_requests=True), f"end_requests: {HELD}"),
    "rollback": (lambda kv, a, b: kv.rollback(a, 1), f"slots: {HELD}"),
    "plan": (lambda kv, a, b: kv.plan([b, a], [1, 1]), f"slots: {HELD}"),
    "reserve": (lambda kv, a, b: kv.reserve(a, 10), f"slots: {HELD}"),
    "reserve of several": (lambda kv, a, b: kv.reserve([b, a], [1, 10]), f"slots: {HELD}"),
    "plan beside what is reserved": (RESERVE, lambda kv, a, b: kv.plan([b], [1]), "slots: expected a request without reserved"),
    "arrays of nothing reserved": (lambda kv, a, b: kv.arrays(b, 0, 9), "ends: expected tokens whose pages are reserved, got 9 of slot 1"),
    "arrays past it": (RESERVE, lambda kv, a, b: kv.arrays(b, 0, 13), "ends: expected tokens whose pages are reserved, got 13"),
    "arrays far before it": (RESERVE, lambda kv, a, b: kv.arrays(b, 0, 6), r"ends: expected at least \[7\], got \[6\]"),
    "arrays from elsewhere": (RESERVE, lambda kv, a, b: kv.arrays(b, 1, 9), r"starts: expected num_computed \[0\], got \[1\]"),
    "no tokens": (lambda kv, a, b: kv.arrays(b, 0, 0), r"ends: expected at least \[1\]"),
    "advance of nothing reserved": (lambda kv, a, b: kv.advance(b, 9), "ends: expected tokens whose pages are reserved"),
    "too many rejected": (lambda kv, a, b: kv.advance(a, 6), r"ends: expected at least \[7\], got \[6\]"),
    "more than reserved": (lambda kv, a, b: kv.advance(a, 13), "ends: expected tokens whose pages are reserved, got 13"),
    "oldest query of rings": (lambda kv, a, b: kv.advance(a, 9, 3), "oldest_query, keep_tails: expected None and True"),
    "publish before advance": (lambda kv, a, b: kv.publish(a, 9, [1] * 9), r"upto: expected 0..0 of slot 0"),
    "rollback of unpublished": (ADVANCE, lambda kv, a, b: kv.rollback(a, 1), "slots: expected a request whose tokens are published, got slot 0, of which 0"),
    "plan of unpublished": (ADVANCE, lambda kv, a, b: kv.plan([a], [1]), "slots: expected a request whose tokens are published"),
    "publish past it": (ADVANCE, lambda kv, a, b: kv.publish(a, 10, [1] * 10), r"upto: expected 0..9 of slot 0"),
    "publish back": (ADVANCE, lambda kv, a, b: kv.publish(a, 9, [0] * 9), lambda kv, a, b: kv.publish(a, 8), r"upto: expected 9..9 of slot 0"),
    "too few tokens": (ADVANCE, lambda kv, a, b: kv.publish(a, 9, [1] * 8), r"tokens: expected 9, \[9\] of each request, got 8"),
    "keys of tokens": (ADVANCE, lambda kv, a, b: kv.publish(a, 9, keys=b"k" * 64), "keys: expected None, as slot 0 was admitted with tokens"),
    "too many tokens": (lambda kv, a, b: kv.reserve(b, 101), "ends: slot 1 would reach 101 tokens"),
    "one of several too long": (lambda kv, a, b: kv.reserve([b], [101]), "ends: slot 1 would reach 101 tokens"),
    "unknown slot": (lambda kv, a, b: kv.reserve(2, 1), "slot: expected the slot of an admitted request"),
    "no int": (lambda kv, a, b: kv.reserve(b, 1.0), "ends: expected an int"),
    "twice": (lambda kv, a, b: kv.reserve([b, b], [1, 1]), "slots: expected distinct slots"),
    "uneven": (lambda kv, a, b: kv.reserve([b], [1, 1]), "slots, ends: expected two vectors of one length"),
    "plan of a slot that was left": (lambda kv, a, b: (kv.plan([b], [1]), kv.release(1)), lambda kv, a, b: kv.plan([b], [1]), "slots: expected slots of admitted requests"),
    "pages of rings": (lambda kv, a, b: kv.pages_of(a), "pages_of: expected a cache with append_only=True"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_would_harm_a_step_in_flight(name):
    *before, call, message = REFUSED[name]
    kv, a, b = in_flight()
    for action in before:
        action(kv, a, b)
    before = contents(kv)
    with pytest.raises(ValueError, match=message):
        call(kv, a, b)
    assert contents(kv) == before
    kv.check_invariants()


def test_calls_of_a_cache_without_tables():
    kv = KVCache(groups((4, None), (4, 5)), num_pages=60, max_requests=4, max_model_len=100, **LISTS)  # fmt: skip
    for i in range(2):
        kv.reserve(kv.admit(i, kv.match([i] * 20)), 20)
    for call, message in (
        (lambda: kv.plan([0], [20]), "plan: expected a cache with tables"),
        (lambda: kv.arrays([0], [0], [20]), "arrays: expected a cache with tables"),
        (lambda: kv.rollback(0, 1), "rollback: expected a cache with tables"),
        (lambda: kv.table(0), "table: expected a cache with tables"),
        (lambda: kv.tables, "tables: expected a cache with tables"),
        (lambda: kv.publish(0, 25, [1] * 25), r"upto: expected 0\.\.20 of slot 0"),
        (lambda: kv.reserve(0, 101), "ends: slot 0 would reach 101 tokens"),
        (lambda: kv.advance([0, 3], [8, 8]), "slot"),
        (lambda: kv.advance([0, 1], [8, 99]), "ends: expected 0..20 of slot 1, as many as have pages, got 99"),
        (lambda: kv.advance([0, 1], [8, -1]), "ends: expected 0..20 of slot 1"),
        (lambda: kv.advance([0, 1], [8]), "slots, ends"),
        (lambda: kv.advance([0, 1], [8, 8], [8]), "slots, oldest_query"),
    ):  # fmt: skip
        before = contents(kv)
        with pytest.raises(ValueError, match=message):
            call()
        assert contents(kv) == before, message


def test_calls_of_workers_and_tiers():
    kv = cache()
    tiers = Tiers(kv, **TIER)
    slot = kv.admit("a", kv.match([1] * 40))
    tracked = cache(track_deltas=True)
    tracked.commit(tracked.plan([tracked.admit("a", tracked.match([1] * 40))], [40]), [1] * 40)
    step = step_arrays(tracked, tracked.plan([0], [1]))
    worker = WorkerTables(groups((4, None)), max_requests=1, max_model_len=4)
    stored = cache(policy=LRU())
    tier = Tiers(stored, **TIER, watermark=60)
    stored.commit(stored.plan([stored.admit("a", stored.match([1] * 9))], [9]), [1] * 9)
    stored.release("a")
    [ended] = tier.stores(4096)
    tier.done(ended)
    assert tier.stores(1 << 20)
    for call, message in (
        (lambda: Tiers(kv, **TIER), "kv: expected a cache without tiers"),
        (lambda: tier.done(ended), "job: expected one that is open"),
        (lambda: tier.cancel(ended), "job: expected one that is open"),
        (lambda: stored.reset(), "reset: expected no open jobs of tiers, got 1: end them"),
        (lambda: tiers.stores(-1), "max_bytes: expected an int >= 0, got -1"),
        (lambda: tiers.load(kv.match([1])), r"match: expected what `Tiers\.match` returned, got"),
        (lambda: worker.update(step), "step: expected indices below 1, "),
        (lambda: step_arrays(kv, kv.plan([slot], [1])), "track_deltas: expected True at construction"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    assert worker.take_deltas()[0].size == 0 and not worker.tables.any()


# Code that a cache calls.


class Stubborn(LRU):
    """Return from `pop` what `answer` says."""

    answer = None

    def pop(self):
        return self.answer(self)


@pytest.mark.parametrize("specs", [((8, None),), ((8, None), (4, 10))], ids=["dense", "hybrid"])
@pytest.mark.parametrize("case", ["nothing", "an-evicted-entry", "a-used-entry", "anything"])
def test_a_policy_that_chooses_what_it_may_not_is_named(specs, case):
    policy = Stubborn()
    e = Runner(*specs, policy=policy, num_pages=50)
    e.run("old", [1] * 50, chunk=8)
    if case == "an-evicted-entry":
        gone = []
        policy.answer = lambda p: gone.append(LRU.pop(p)) or gone[-1]
        e.kv.evict(e.kv.num_evictable_pages)
        e.run("new", [2] * 50, chunk=8)
        policy.answer = lambda p: gone[0]
    elif case == "a-used-entry":
        e.admit("a", [1] * 60)
        used = e.kv._chains.runs[e.kv.slot_of("a")]
        policy.answer = lambda p: used
    else:
        policy.answer = lambda p: None if case == "nothing" else "x"
    e.run("other", [3] * 40, chunk=8)
    with pytest.raises(RuntimeError, match="policy: expected pop to return an entry that was"):
        e.kv.evict(e.kv.num_evictable_pages)
    policy.answer = LRU.pop
    e.kv.evict(e.kv.num_evictable_pages)
    e.kv.check_invariants()


def test_ranks_and_classes_of_ranked_policies():
    class Bad(Ranked):
        def __init__(self, value, *, least=0):
            self.value = value

        def rank(self, entry):
            return self.value

    for value in (NAN, None, "1", (1, 2)):
        e = Runner((4, None), policy=Bad(value))
        e.run("a", [1] * 30)
        with pytest.raises(ValueError, match="rank: Bad: expected a number, got "):
            e.kv.evict(3)
        e.kv.check_invariants()
    e = Runner((4, None), policy=Bad(np.int64(2), least=1))
    e.run("a", [1] * 30)
    assert e.kv.evict(3) >= 3
    with pytest.raises(TypeError, match=r"policy: Nothing must define rank\(entry\)"):
        type("Nothing", (Ranked,), {})()
