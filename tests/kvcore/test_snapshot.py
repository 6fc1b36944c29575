"""A restored cache hits what the saved one hit, in the same pages; a bad file leaves an empty, usable cache."""

from __future__ import annotations

import json
import os
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.kvcore import LRU, S3FIFO, CostAware, EventLog, GroupSpec, snapshot
from tests.kvcore.test_events import MIXES, Reader, ledger, same_hits
from tests.support.budgets import size
from tests.support.kvcore.engine import Engine, groups


def engine(specs, **options) -> Engine:
    base = {"num_pages": 300, "max_requests": 4, "max_model_len": 400, "hash_seed": b"my seed"}
    return Engine(groups(*specs), **(base | options))


def used(e: Engine, seed: int = 0) -> list[list[int]]:
    """Random traffic; returns what was computed."""
    rng = np.random.default_rng(seed)
    history: list[list[int]] = [[]]
    for i in range(14):
        base = history[rng.integers(len(history))]
        prompt = (
            base[: rng.integers(len(base) + 1)] + rng.integers(0, 2, rng.integers(1, 60)).tolist()
        )
        e.admit(i, prompt[:150], salt=b"s" if i % 3 == 0 else b"")
        e.finish_prompt(i, chunk=32)
        history.append(e.release(i))
    return history


def successor(e: Engine, specs, **options) -> Engine:
    """A new engine that kept the page contents of `e`."""
    after = engine(specs, **options)
    after.rows = [rows.copy() for rows in e.rows]
    return after


def hits(e: Engine, history) -> list[tuple[int, int, str]]:
    found = [e.kv.match([*t, 1], salt=s) for t in history for s in (b"", b"s")]
    return [(m.num_tokens, m.dense_tokens, m.limited_by) for m in found]


@pytest.mark.slow
@pytest.mark.long
@settings(max_examples=size(20, long=50), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    mix=st.sampled_from(MIXES), seed=st.integers(0, 99), pages=st.sampled_from([80, 300]),
    policy=st.sampled_from([LRU, CostAware, S3FIFO]), running=st.booleans(),
)  # fmt: skip
def test_a_restored_cache_hits_the_same_rows(mix, seed, pages, policy, running):
    before = engine(mix, num_pages=pages, policy=policy())
    history = used(before, seed)
    if running:  # what is cached of a running request is saved too
        before.admit("running", [*history[-1], 5, 6])
        before.finish_prompt("running")
    data = snapshot.dumps(before.kv)
    after = successor(before, mix, num_pages=pages, policy=policy())
    snapshot.loads(after.kv, data)
    after.check()
    assert hits(after, history) == hits(before, history)
    assert snapshot.page_ids(after.kv).tolist() == snapshot.page_ids(before.kv).tolist()
    assert after.kv.num_free_pages + after.kv.num_evictable_pages == pages - 1
    # The stand-in engine checks each row that these read.
    for i, tokens in enumerate(history):
        after.run(("again", i), [*tokens, 1], [3, 4], chunk=32)
    after.check()
    after.kv.clear()
    assert after.kv.num_free_pages == pages - 1


@pytest.mark.parametrize("mix", [((8, None),), ((8, None), (4, 10))], ids=["dense", "hybrid"])
def test_entries_are_evicted_in_the_same_order(mix):
    before = engine(mix, policy=LRU())  # which remembers nothing besides
    for i in range(5):
        before.run(i, [i] * 40)
    before.run("again", [1] * 41)
    after = successor(before, mix, policy=LRU())
    snapshot.loads(after.kv, snapshot.dumps(before.kv))
    prompts = [[i] * 41 for i in range(5)]
    while before.kv.num_evictable_pages:
        for e in (before, after):
            e.kv.evict(3)
        assert hits(after, prompts) == hits(before, prompts)


def test_a_file_round_trip(tmp_path):
    mix = ((8, None), (4, 10))
    before, path = engine(mix), tmp_path / "index"
    history = used(before)
    snapshot.save(before.kv, path)
    assert os.listdir(tmp_path) == ["index"], "no temporary file is left"
    after = successor(before, mix)
    snapshot.restore(after.kv, path)
    assert hits(after, history) == hits(before, history)
    assert b"my seed" not in path.read_bytes()
    again = snapshot.dumps(after.kv)
    third = successor(before, mix)
    snapshot.loads(third.kv, again)
    assert hits(third, history) == hits(before, history)


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    e, path = engine(((8, None),)), tmp_path / "index"
    used(e)
    snapshot.save(e.kv, path)
    old = path.read_bytes()
    e.run("more", [3] * 50)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        snapshot.save(e.kv, path)
    assert path.read_bytes() == old and os.listdir(tmp_path) == ["index"]


def test_text_is_no_snapshot():
    with pytest.raises(ValueError, match="snapshot: expected bytes, got str"):
        snapshot.loads(engine(((8, None),)).kv, "quire-kv" * 20)


def refused(mix, data: bytes, message: str, **options) -> None:
    """`data` is refused, and the cache is empty and works."""
    e = engine(mix, **options)
    with pytest.raises(ValueError, match=message):
        snapshot.loads(e.kv, data)
    assert e.kv.num_free_pages == e.kv.num_pages - 1 and e.kv.stats()["cached_segments"] == 0
    e.run("a", [1] * 50)
    assert e.run("b", [1] * 50).num_tokens == 48
    e.check()


MIX = ((8, None), (4, 10))


@pytest.fixture(scope="module")
def saved() -> bytes:
    e = engine(MIX)
    used(e)
    return snapshot.dumps(e.kv)


def test_every_damaged_byte_is_noticed(saved):
    rng = np.random.default_rng(0)
    for at in [*range(16), *rng.integers(16, len(saved), 60).tolist()]:
        data = bytearray(saved)
        data[at] ^= 1 << int(rng.integers(8))
        with pytest.raises(ValueError, match=r"snapshot: expected"):
            snapshot.loads(engine(MIX).kv, bytes(data))
    data = bytearray(saved)
    data[-100] ^= 1
    refused(
        MIX,
        bytes(data),
        "expected the SHA-256 of .*, got another: the file is damaged or truncated",
    )


def test_a_truncated_file_is_refused(saved):
    for n in (0, 1, 15, 47, 48, 100, len(saved) // 2, len(saved) - 1):
        refused(MIX, saved[:n], "snapshot: expected")
    refused(MIX, saved + b"\0", "damaged or truncated")


def test_another_version_is_refused(saved):
    refused(MIX, saved[:8] + b"\x02" + saved[9:], "expected version 1, got 2")


def test_another_file_is_refused():
    refused(MIX, b"PK\x03\x04" + b"\0" * 100, r"starts with b'quire-kv'.*got b'PK")


@pytest.mark.parametrize(
    ("mix", "options", "name"),
    [
        (((8, None), (4, 11)), {}, "groups"),
        (((4, None), (8, 10)), {}, "groups"),
        (((8, None),), {}, "groups"),
        (MIX, {"num_pages": 301}, "num_pages"),
        (MIX, {"hash_seed": b"other"}, "seed"),
    ],
)
def test_other_settings_are_refused(saved, mix, options, name):
    refused(mix, saved, f"snapshot: expected {name} .*, got", **options)


def forged(data: bytes, **changes) -> bytes:
    """A snapshot with a right checksum whose arrays were changed at [0, column]."""
    length = int.from_bytes(data[12:16], "little")
    header, at = json.loads(data[16 : 16 + length]), 16 + length
    out = bytearray(data[:-32])
    for name, (dtype, shape) in header["arrays"].items():
        size = np.dtype(dtype).itemsize * int(np.prod(shape))
        if name in changes:
            column, value = changes[name]
            array = np.frombuffer(bytes(out[at : at + size]), dtype).reshape(shape).copy()
            array[(0, column) if array.ndim == 2 else 0] = value
            out[at : at + size] = array.tobytes()
        at += size
    return bytes(out) + sha256(out).digest()


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        ("runs", 0, 0), ("runs", 0, -2), ("runs", 1, 0), ("runs", 1, 99),
        ("run_pages", 0, 0), ("run_pages", 0, 300), ("run_pages", 0, -1),
        ("points", 0, 999), ("points", 0, -1), ("points", 1, 0), ("points", 1, 99),
        ("point_pages", 2, 300), ("point_pages", 2, -5),
    ],
)  # fmt: skip
def test_contents_that_make_no_index_are_refused(saved, name, column, value):
    assert forged(saved) == saved
    field = name if name.endswith("_pages") else f".* of {name}"
    refused(MIX, forged(saved, **{name: (column, value)}), f"snapshot: {field}: expected .*, got")


def test_a_page_with_two_owners_is_refused(saved):
    e = engine(MIX)
    snapshot.loads(e.kv, saved)
    pages = [run.pages for run in e.kv.index.runs()]
    refused(MIX, forged(saved, run_pages=(0, int(pages[0][-1, 0]))), "distinct run_pages")
    refused(MIX, forged(saved, point_pages=(2, int(pages[0][0, 0]))), "that are run_pages")


def test_only_a_new_cache_is_restored_into(saved):
    e = engine(MIX)
    e.run("a", [1] * 20)
    with pytest.raises(ValueError, match="kv: expected a cache without requests"):
        snapshot.loads(e.kv, saved)
    e = engine(MIX, enable_caching=False)
    with pytest.raises(ValueError, match="enable_caching"):
        snapshot.loads(e.kv, saved)


def test_state_groups_with_several_pages():
    mix = ((8, None), GroupSpec("state", "state", 8, 4096, pages_per_block=3))
    before = engine(mix)
    before.run("a", list(range(30)), [1, 2, 3], chunk=8)
    after = successor(before, mix)
    snapshot.loads(after.kv, snapshot.dumps(before.kv))
    assert after.run("b", [*range(30), 1, 2, 3, 4]).num_tokens == 32
    after.check()


def test_a_policy_learns_of_entries_in_the_order_of_their_use():
    class Recording(LRU):
        def __init__(self):
            super().__init__()
            self.seen = []

        def add(self, entry):
            self.seen.append((entry.last_used, entry.num_uses))
            super().add(entry)

    before = engine(MIX)
    for i in range(5):
        before.run(i, [i] * 40)
    before.run("again", [1] * 41)
    policy = Recording()
    after = successor(before, MIX, policy=policy)
    snapshot.loads(after.kv, snapshot.dumps(before.kv))
    assert len(policy.seen) > 5 and policy.seen == sorted(policy.seen)
    assert [uses for _, uses in policy.seen].count(1) == 1


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_a_restore_is_announced(mix):
    logs = EventLog(), EventLog()
    before = engine(mix, events=logs[0], retention="dense")
    history = used(before)
    after = successor(before, mix, events=logs[1], retention="dense")
    snapshot.loads(after.kv, snapshot.dumps(before.kv))
    told = logs[1].take()[1]
    assert ledger(told) == ledger(logs[0].take()[1]) != {}
    after.run("again", [*history[-1], 1, 1, 1], [3, 4])  # tokens are known for what comes next
    reader = Reader(after.kv.layout.groups)
    for event in [*told, *logs[1].take()[1]]:
        reader.apply(event)
    same_hits(after, reader, [t for t in history if t])


def test_events_need_a_snapshot_with_tokens():
    before = engine(MIXES[1])
    history = used(before)
    after = engine(MIXES[1], events=EventLog())
    with pytest.raises(ValueError, match="expected one of a cache with events"):
        snapshot.loads(after.kv, snapshot.dumps(before.kv))
    assert after.kv.index.num_segments == 0
    after.run("usable", history[-1])
    # The other way round, tokens are of no use.
    before = engine(MIXES[1], events=EventLog())
    used(before)
    snapshot.loads(engine(MIXES[1]).kv, snapshot.dumps(before.kv))
