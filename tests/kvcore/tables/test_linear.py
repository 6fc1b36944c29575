"""`KVCache(append_only=True)`: tables that only grow."""

from hashlib import sha256

import pytest

from quire.kvcore import EventLog, GroupSpec, KVCache, OutOfPages
from tests.kvcore.engine import groups

HYBRID = ((8, None), (8, 20), (8, 33))
LONGEST = 160
MODES = {"reads": "pages", "adopt": False, "append_only": True}


def keys_of(tokens: list[int], alignment: int) -> bytes:
    keys, key = b"", b""
    for end in range(alignment, len(tokens) + 1, alignment):
        key = sha256(key + repr(tokens[end - alignment : end]).encode()).digest()
        keys += key
    return keys


def full(num_pages=20, **options) -> KVCache:
    options = (
        MODES | {"max_requests": 12, "max_model_len": LONGEST, "num_pages": num_pages} | options
    )
    return KVCache(groups(*HYBRID), **options)


def admitted(cache: KVCache, name: str, keys: bytes, num_tokens: int, end: int) -> int:
    slot = cache.admit(name, cache.match(keys=keys, num_tokens=num_tokens))
    assert not isinstance(cache.reserve(slot, end), OutOfPages)
    return slot


def test_several_requests_get_all_that_they_ask_for_or_nothing():
    cache = full(40)
    a, b = admitted(cache, "a", b"", 10, 1), admitted(cache, "b", b"", 10, 1)
    assert [[len(x) for x in given] for given in cache.reserve([a, b], [8, 20])] == [
        [0, 0, 0],
        [2, 2, 2],
    ]
    free = cache.num_free_pages
    assert isinstance(cache.reserve([a, b], [80, 150]), OutOfPages)
    assert cache.num_free_pages == free and cache.pages_of(a)[0] == cache.pages_of(a)[0][:1]
    assert not len(cache.advance([a, b], [8, 20], [8, 20]))
    cache.check_invariants()


def test_without_caching_windows_keep_nothing_for_others():
    cache = full(100, enable_caching=False)
    keys = keys_of(list(range(80)), 8)
    for _ in range(2):  # both in one slot
        a = admitted(cache, "a", b"", 80, 80)
        cache.publish(a, 80, keys=keys)
        match = cache.match(keys=keys, num_tokens=80)
        assert (match.num_tokens, match.dense_tokens) == (0, 0)
        cache.advance(a, 80)
        assert [pages.count(0) for pages in cache.pages_of(a)] == [0, 7, 6]
        assert cache.room(a) == 80
        cache.check_invariants()
        cache.release("a")


def test_groups_and_modes_that_need_tables_are_refused():
    for spec in (GroupSpec("s", "state", 8, 1), GroupSpec("s", "dense", 8, 1, lookahead=1)):
        with pytest.raises(ValueError, match=r"groups: expected dense and window groups.*name='s'"):
            KVCache([spec], num_pages=9, max_requests=1, max_model_len=LONGEST, **MODES)
    for options in (
        {"reads": "step"}, {"adopt": True}, {"track_deltas": True}, {"events": EventLog()}, {"max_draft_tokens": 2},
        {"replay_tokens": 9},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="append_only: expected False but with reads='pages'"):
            full(**options)


def test_calls_that_need_tables_are_refused_by_name():
    cache = full(60)
    a = cache.admit("a", cache.match([1] * 20))
    cache.reserve(a, 20)
    calls = {
        "plan": lambda: cache.plan([a], [20]),
        "arrays": lambda: cache.arrays([a], [0], [20]),
        "rollback": lambda: cache.rollback(a, 1),
        "table": lambda: cache.table(0),
        "tables": lambda: cache.tables,
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name}: expected a cache with tables"):
            call()
    with pytest.raises(ValueError, match=r"upto: expected 0\.\.24 of slot 0"):
        cache.publish(a, 25, [1] * 25)
    with pytest.raises(ValueError, match="ends: slot 0 would reach 161 tokens"):
        cache.reserve(a, LONGEST + 1)
    cache.check_invariants()


@pytest.mark.parametrize(
    ("slots", "ends", "oldest", "message"),
    [
        ([0, 3], [8, 8], None, "slot"),
        ([0, 1], [8, 99], None, "ends: expected 0..20 of slot 1, as many as have pages, got 99"),
        ([0, 1], [8, -1], None, "ends: expected 0..20 of slot 1"),
        ([0, 1], [8], None, "slots, ends"),
        ([0, 1], [8, 8], [8], "slots, oldest_query"),
    ],
)
def test_an_advance_that_is_refused_changes_no_request(slots, ends, oldest, message):
    cache = KVCache(
        [GroupSpec("d", "dense", 4, 1), GroupSpec("w", "window", 4, 1, 5)],
        num_pages=60, max_requests=4, max_model_len=100, **MODES,
    )  # fmt: skip
    for i in range(2):
        assert cache.admit(i, cache.match([i] * 20)) == i
        cache.reserve(i, 20)
    with pytest.raises(ValueError, match=message):
        cache.advance(slots, ends, oldest)
    assert not cache.num_computed.any()
    assert all(page for slot in range(2) for table in cache.pages_of(slot) for page in table)
    cache.check_invariants()
