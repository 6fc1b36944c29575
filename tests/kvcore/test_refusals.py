"""Wrong arguments are named with what was expected and what came, and leave no trace."""

import math
import re

import numpy as np
import pytest

from quire.kvcore import LRU, EventLog, GroupSpec, KVCache, linear_table, paged_rows
from quire.kvcore.policies.base import Ranked
from tests.kvcore.engine import Engine, groups
from tests.kvcore.expected import digest

NAN, INF = math.nan, math.inf
OPTIONS = {"num_pages": 60, "max_requests": 2, "max_model_len": 100, "max_draft_tokens": 3}
SPEC = {"name": "g", "kind": "window", "block_size": 4, "page_bytes": 1, "sliding_window": 9}
NO_INTS = [True, 1.0, NAN, "1", None, -(10**30), 10**30]
STATE = GroupSpec("state", "state", 4, 4096)


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
    ],
)  # fmt: skip
def test_other_constructors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


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
        before = digest(kv)
        with pytest.raises(ValueError, match=message):
            getattr(kv, name)(*args, **options)
        assert digest(kv) == before, (args, options)
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
    before = digest(kv)
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
        assert digest(kv) == before, message
    kv.commit(plan, [1] * 4)
    kv.admit("b", match)
    with pytest.raises(ValueError, match="all max_requests = 2 slots are taken"):
        kv.admit("c", match)
    with pytest.raises(ValueError, match="read-only"):
        kv.num_computed[:] = 1
    kv.check_invariants()


@pytest.mark.parametrize("window", [100, 101, 2**31, 2**62])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_window_past_the_longest_sequence_is_all_of_it(window, drafts):
    """Its tables and tails are as long as those of a window of max_model_len, and it hits the same."""
    options = OPTIONS | {"max_draft_tokens": drafts, "num_pages": 200}
    e, same = (Engine(groups((4, None), (4, w)), **options) for w in (window, 100))
    assert e.kv.layout.num_columns == same.kv.layout.num_columns
    for i, n in enumerate((30, 97, 60, 97)):
        hits = [x.run(i, list(range(n)), [5] * (99 - n), chunk=16).num_tokens for x in (e, same)]
        assert hits[0] == hits[1]
        e.check()
    assert hits[0] > 0


def test_numbers_at_the_edge_are_taken():
    kv = cache(num_pages=np.int32(60), max_model_len=np.int64(100), retention=np.int64(8))
    assert kv.num_pages == 60 and kv.interval == 8 and kv.evict(2**62) == 0
    kv = running()
    match = kv.match([1] * 30)
    assert kv.pin(match, now=0.0, ttl=5.0) == 8
    assert kv.expire_pins(np.float64(4.9)) == 0 and kv.expire_pins(5) == 1
    assert kv.pin(match, now=0, ttl=INF) == 8 and kv.expire_pins(1e300) == 0


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
    e = Engine(groups(*specs), policy=policy, num_pages=50, max_requests=3, max_model_len=300)
    e.run("old", [1] * 50, chunk=8)
    if case == "an-evicted-entry":
        gone = []
        policy.answer = lambda p: gone.append(LRU.pop(p)) or gone[-1]
        e.kv.evict(e.kv.num_evictable_pages)
        e.run("new", [2] * 50, chunk=8)
        policy.answer = lambda p: gone[0]
    elif case == "a-used-entry":
        e.admit("a", [1] * 60)
        used = e.kv._chains.runs[e.slots["a"]]
        policy.answer = lambda p: used
    else:
        policy.answer = lambda p: None if case == "nothing" else "x"
    e.run("other", [3] * 40, chunk=8)
    with pytest.raises(RuntimeError, match="policy: expected pop to return an entry that was"):
        e.kv.evict(e.kv.num_evictable_pages)
    e.check()
    policy.answer = LRU.pop
    e.kv.evict(e.kv.num_evictable_pages)
    e.check()


@pytest.mark.parametrize("rank", [NAN, None, "1", (1, 2)])
def test_a_rank_that_is_no_number_is_raised_by_an_eviction(rank):
    class Bad(Ranked):
        def rank(self, entry):
            return rank

    e = Engine(groups((4, None)), policy=Bad(), **OPTIONS)
    e.run("a", [1] * 30)
    with pytest.raises(ValueError, match="rank: Bad: expected a number, got "):
        e.kv.evict(3)
    e.check()


def test_a_policy_without_rank_is_refused_and_one_with_its_own_init_works():
    class Nothing(Ranked):
        pass

    class Own(Ranked):
        def __init__(self, weight, *, least=0):
            self.weight = weight

        def rank(self, entry):
            return self.weight * np.int64(entry.last_used)

    with pytest.raises(TypeError, match=r"policy: Nothing must define rank\(entry\)"):
        Nothing()
    e = Engine(groups((4, None)), policy=Own(2, least=1), **OPTIONS)
    e.run("a", [1] * 30)
    e.kv.evict(3)
    e.check()
