"""Events name salts and extra keys where the log says so: a reader with hashes of its own then answers as `match` does."""

from __future__ import annotations

import pytest

from quire.kvcore import AllBlocksCleared, EventLog, KVCache
from tests.support.kvcore.engine import groups

IMAGE = 8  # placeholder of an image

EXTRA = ((0, None, b"adapter"), (3, 10, b"cat"))


def run(kv: KVCache, rid, tokens, **keys) -> None:
    slot = kv.admit(rid, kv.match(tokens, **keys))
    at = int(kv.num_computed[slot])
    kv.commit(kv.plan([slot], [len(tokens) - at]), tokens[at:])
    kv.release(rid)


def stored(log: EventLog, kind="dense"):
    return [e for e in log.take()[1] if not isinstance(e, AllBlocksCleared) and e.kind == kind]


def cache(log: EventLog, *mix) -> KVCache:
    return KVCache(groups(*mix), num_pages=80, max_requests=2, max_model_len=200, events=log)


def test_the_extra_keys_of_a_block_are_those_over_its_tokens():
    log = EventLog(identities=True)
    kv = cache(log, (8, None), (4, 10))
    run(kv, "a", [1, 2, 3, *[IMAGE] * 7, *range(16)], salt=b"tenant", extra_keys=EXTRA)
    for event in log.take()[1]:
        assert (event.salt, event.request_id) == (b"tenant", "a")
        over = list(event.extra_keys)
        if event.kind == "dense":
            cats = {0: (3, 8, b"cat"), 8: (3, 10, b"cat")}
            expected = [
                ((0, at + 8, b"adapter"), *([cats[at]] if at in cats else []))
                for at in range(event.start, event.start + 8 * len(over), 8)
            ]
        else:
            assert event.start == 12
            expected = [((0, at, b"adapter"),) for at in (16, 20, 24)]
        assert over == expected


def test_of_a_tail_too_the_blocks_under_an_image_name_it():
    log = EventLog(identities=True)
    kv = cache(log, (8, None), (4, 10))
    run(kv, "a", [1, 2, 3, *[IMAGE] * 7, *range(7)], extra_keys=EXTRA[1:])
    (window,) = stored(log, "window")
    assert (window.start, window.extra_keys) == (4, (((3, 8, b"cat"),), ((3, 10, b"cat"),), ()))


def test_only_a_log_with_identities_names_them():
    log = EventLog()
    kv = cache(log, (4, None), (4, 6))
    run(kv, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], salt=b"tenant-secret", extra_keys=EXTRA)
    kv.announce()
    events = log.take()[1]
    assert len(events) > 2 and not any("secret" in repr(e) or "cat" in repr(e) for e in events)
    with pytest.raises(ValueError, match="identities: expected True or False, got 1"):
        EventLog(identities=1)


def test_a_slot_is_another_identity_when_it_is_used_again():
    log = EventLog(identities=True)
    kv = cache(log, (4, None))
    run(kv, "a", [1, 2, 3, 4, 5], salt=b"t", extra_keys=((0, None, b"x"),))
    run(kv, "b", [1, 2, 3, 4, 5])
    assert [(e.request_id, e.salt, e.extra_keys) for e in stored(log)] == [
        ("a", b"t", (((0, 4, b"x"),),)),
        ("b", b"", ()),
    ]
