"""A worker in another process gets the tables that a step reads, and nothing else."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest

from quire.kvcore import GroupSpec, KVCache, OutOfPages, WorkerTables, step_arrays
from tests.kvcore.engine import groups

GROUPS = [*groups((16, None), (8, 40)), GroupSpec("s", "state", 16, 4096)]
SHAPE = {"max_requests": 6, "max_model_len": 300, "max_draft_tokens": 2}


def test_a_worker_reads_what_the_cache_reads():
    rng = random.Random(0)
    kv = KVCache(GROUPS, num_pages=300, track_deltas=True, **SHAPE)
    worker = WorkerTables(GROUPS, **SHAPE)
    running, compared = {}, 0
    for step in range(200):
        if len(running) < 6 and rng.random() < 0.4:
            running[step] = kv.admit(step, kv.match([0] * rng.randint(1, 150)))
        if running and rng.random() < 0.15:
            rid = rng.choice(list(running))
            del running[rid]
            kv.release(rid)
        slots = [s for s in running.values() if kv.num_computed[s] < 260]
        counts = [rng.choice((1, 1, 3, 30)) for _ in slots]
        plan = kv.plan(slots, counts) if slots else None
        if plan is None:
            continue
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
                columns = np.arange(first // spec.block_size, -(-n // spec.block_size))
                columns = columns % theirs.shape[1]
                if spec.kind == "state":  # no live page before the first step
                    columns = np.arange(theirs[slot, 0] > 0)
                assert (mine[slot, columns] == theirs[slot, columns]).all(), (t, slot)
                compared += len(columns)
        kv.commit(plan, [0] * sum(counts))
    assert compared > 2000


def test_wrong_tables_and_arguments_are_named():
    kv = KVCache(GROUPS, num_pages=400, track_deltas=True, **SHAPE)
    slot = kv.admit("a", kv.match([1] * 40))
    kv.commit(kv.plan([slot], [40]), [1] * 40)
    other = WorkerTables(GROUPS[:1], max_requests=1, max_model_len=16)
    with pytest.raises(ValueError, match="step: expected indices below 1, "):
        other.update(step_arrays(kv, kv.plan([slot], [1])))
    assert other.take_deltas()[0].size == 0 and not other.tables.any()
    plain = KVCache(GROUPS, num_pages=400, **SHAPE)
    slot = plain.admit("a", plain.match([1]))
    with pytest.raises(ValueError, match="track_deltas: expected True at construction"):
        step_arrays(plain, plain.plan([slot], [1]))
    for name in SHAPE:
        with pytest.raises(ValueError, match=f"{name}: expected an int"):
            WorkerTables(GROUPS, **(SHAPE | {name: -1}))
