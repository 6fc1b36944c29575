"""What a worker in another process gets: it reads the same tables, from a tenth of the bytes."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest

from quire.kvcore import GroupSpec, KVCache, OutOfPages, WorkerTables, step_arrays
from tests.support.kvcore.engine import groups

GROUPS = [
    *groups((16, None), (8, 40)),
    GroupSpec("s", "state", 16, 4096),
    GroupSpec("wide", "dense", 8, 4096),
]
SHAPE = {"max_requests": 6, "max_model_len": 300, "max_draft_tokens": 2}


def test_a_worker_reads_what_the_cache_reads():
    """Random traffic: every entry that a step's queries may read is the same in the worker's tables."""
    rng = random.Random(0)
    kv = KVCache(GROUPS, num_pages=400, track_deltas=True, **SHAPE)
    worker = WorkerTables(GROUPS, **SHAPE)
    running, compared = {}, 0
    for step in range(300):
        if len(running) < 6 and rng.random() < 0.4:
            tokens = [0] * rng.randint(1, 150)
            running[step] = kv.admit(step, kv.match(tokens))
        if running and rng.random() < 0.15:
            rid = rng.choice(list(running))
            del running[rid]
            kv.release(rid)
        slots = [s for s in running.values() if kv.num_computed[s] < 260]
        if not slots:
            continue
        counts = [rng.choice((1, 1, 3, 30)) for _ in slots]
        plan = kv.plan(slots, counts)
        if isinstance(plan, OutOfPages):
            kv.reset(end_requests=True)
            running.clear()
            continue
        arrays = pickle.loads(pickle.dumps(step_arrays(kv, plan)))
        worker.update(arrays)
        for name in arrays._fields[:-2]:
            assert (getattr(arrays, name) == getattr(plan, name)).all(), name
        for t, spec in enumerate(kv.layout.groups):
            mine, theirs = worker.table(t), kv.table(t)
            for slot in slots:
                n = int(kv.num_computed[slot])
                first = max(0, n - (spec.sliding_window or n + 1) + 1)
                blocks = np.arange(first // spec.block_size, -(-n // spec.block_size))
                columns = blocks % theirs.shape[1]
                if spec.kind == "state":  # before the first step there is no live page
                    columns = np.arange(theirs[slot, 0] > 0)
                assert (mine[slot, columns] == theirs[slot, columns]).all(), (t, slot)
                compared += len(columns)
        kv.commit(plan, [0] * sum(counts))
    assert compared > 5000


def test_the_arrays_are_small():
    kv = KVCache(
        GROUPS[:2], num_pages=20_000, track_deltas=True, max_requests=256, max_model_len=1000
    )
    slots = [kv.admit(i, kv.match([i] * 100)) for i in range(256)]
    kv.commit(kv.plan(slots, [100] * 256), np.repeat(np.arange(256), 100))
    for _ in range(20):
        plan = kv.plan(slots, [1] * 256)
        arrays = step_arrays(kv, plan)
        kv.commit(plan, [1] * 256)
    size = sum(a.nbytes for a in arrays)
    assert size < len(pickle.dumps(arrays)) < size + 1500
    assert len(pickle.dumps(arrays)) < len(pickle.dumps(plan))


def test_a_worker_with_other_tables_is_told():
    kv = KVCache(GROUPS, num_pages=400, track_deltas=True, **SHAPE)
    other = WorkerTables(GROUPS[:1], max_requests=1, max_model_len=16)
    slot = kv.admit("a", kv.match([1] * 40))
    kv.commit(kv.plan([slot], [40]), [1] * 40)
    arrays = step_arrays(kv, kv.plan([slot], [1]))
    with pytest.raises(ValueError, match="step: expected indices below 1, "):
        other.update(arrays)
    assert other.take_deltas()[0].size == 0 and not other.tables.any()


def test_a_cache_without_deltas_has_nothing_to_send():
    kv = KVCache(GROUPS, num_pages=400, **SHAPE)
    slot = kv.admit("a", kv.match([1]))
    with pytest.raises(ValueError, match="track_deltas: expected True at construction"):
        step_arrays(kv, kv.plan([slot], [1]))


@pytest.mark.parametrize("name", ["max_requests", "max_model_len", "max_draft_tokens"])
def test_wrong_arguments_are_named(name):
    with pytest.raises(ValueError, match=f"{name}: expected an int"):
        WorkerTables(GROUPS, **(SHAPE | {name: -1}))
