"""A worker that gets plans as arrays makes the same tensors as the allocator's process."""

import pickle
import random
from unittest import mock

import numpy as np
import pytest
import torch

from quire.kvcore import GroupSpec, KVCache, OutOfPages, WorkerTables, step_arrays
from quire.kvcore.device import BatchBuilder, known_ids

GROUPS = [
    GroupSpec("full", "dense", 16, 4096),
    GroupSpec("local", "window", 8, 4096, sliding_window=40),
]
SHAPE = {"max_requests": 6, "max_model_len": 300, "max_draft_tokens": 2}


class Both:
    """The cache, whose deltas two readers take."""

    def __init__(self, kv: KVCache) -> None:
        self.layout, self.tables, self.max_draft_tokens = kv.layout, kv.tables, kv.max_draft_tokens
        self.deltas = []

    def take_deltas(self):
        taken, self.deltas = self.deltas, []
        indices = np.concatenate([np.empty(0, np.int64), *taken])
        return indices, self.tables.reshape(-1)[indices]


def test_a_worker_builds_the_same_batch():
    rng = random.Random(1)
    kv = KVCache(GROUPS, num_pages=60, track_deltas=True, replay_tokens=39, **SHAPE)
    here, worker = Both(kv), WorkerTables(GROUPS, **SHAPE)
    builders = BatchBuilder(here, "cpu"), BatchBuilder(worker, "cpu")
    running, steps, replays = {}, 0, 0
    for step in range(250):
        if kv.num_free_slots and rng.random() < 0.5:
            text = rng.randint(0, 2)
            prompt = [text] * rng.randint(20, 120) + [step] * 9
            running[step] = kv.admit(step, kv.match(prompt)), prompt
        if running and rng.random() < 0.3:
            rid = rng.choice(list(running))
            del running[rid]
            kv.release(rid)
        if not running:
            continue
        left = {slot: prompt[int(kv.num_computed[slot]) :][:40] or [7] for slot, prompt in running.values()}  # fmt: skip
        left = dict(sorted(left.items(), key=lambda item: len(item[1])))
        plan = kv.plan(list(left), [len(ids) for ids in left.values()])
        if isinstance(plan, OutOfPages):
            kv.reset(end_requests=True)
            running.clear()
            continue
        ids = np.array([i for part in left.values() for i in part], dtype=np.int32)
        arrays = pickle.loads(pickle.dumps(step_arrays(kv, plan)))
        here.deltas.append(arrays.table_indices)
        worker.update(arrays)
        rows = (plan.cu_seqlens_q[1:] - 1).tolist()
        failing = mock.patch.object(builders[0]._staging, "send", side_effect=MemoryError)
        with failing, pytest.raises(MemoryError):  # a step that fails takes the deltas, too
            builders[0].build(plan, ids, rows)
        one = builders[0].build(plan, ids.tolist(), rows)
        other = builders[1].build(arrays, ids, arrays.cu_seqlens_q[1:].astype(np.int64) - 1)
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.positions, other.positions)
        for name, value in vars(one.attn).items():
            same = getattr(other.attn, name)
            if isinstance(value, tuple):
                assert all(map(torch.equal, value, same)), name
            else:
                assert torch.equal(value, same) if torch.is_tensor(value) else value == same, name
        # Triton compiles widths apart that are no multiples.
        assert one.attn.block_tables[0].shape[1] == -(-int(plan.seq_lens.max()) // 256) * 16
        for row, slot in enumerate(left):
            pages = one.attn.block_tables[0][row, : -(-int(kv.num_computed[slot]) // 16)]
            assert pages.tolist() == kv.table(0)[slot, : len(pages)].tolist()
        for slot in plan.slots[plan.cu_seqlens_q.searchsorted(plan.replay_rows, "right") - 1]:
            # Rows before a replay are in page 0: those of stale pages might be NaN.
            first, width = kv.layout.columns(1)
            copy = builders[0].tables[slot, first : first + width]
            assert copy.tolist() == kv.table(1)[slot].tolist()
        kv.commit(plan, ids)
        steps, replays = steps + 1, replays + bool(len(plan.replay_rows))
    assert steps > 100 and replays > 3


def test_ids_that_the_device_sampled_replace_their_placeholders():
    ids, sampled = torch.tensor([5, -1, -3]), torch.tensor([7, 8, 9])
    assert known_ids(ids, sampled).tolist() == [5, 7, 9]
    assert known_ids(ids[:1], sampled[:0]).tolist() == [5]


@pytest.mark.parametrize(
    ("ids", "rows", "message"),
    [
        ([1] * 39, [39], r"input_ids: expected 40 tokens as planned, got \[39\]"),
        ([[1] * 40], [39], r"input_ids: expected 40 tokens as planned, got \[1, 40\]"),
        ([1.0] * 40, [39], "input_ids: expected ints, got float64"),
        (None, [39], "input_ids: expected ints, got "),
        ([1] * 39 + [-3], [39], "input_ids: expected ids >= -2, got -3"),
        ([1] * 40, [40], r"logits_rows: expected rows in \[0, 40\), got \[40\]"),
        ([1] * 40, None, "logits_rows: expected ints, got "),
    ],
)
def test_wrong_ids_and_rows_are_named(ids, rows, message):
    kv = KVCache(GROUPS, num_pages=400, track_deltas=True, **SHAPE)
    builder = BatchBuilder(kv, "cpu", max_placeholders=2)
    plan = kv.plan([kv.admit("a", kv.match([1] * 40))], [40])
    with pytest.raises(ValueError, match=message):
        builder.build(plan, ids, rows)
    assert builder.build(plan, [1] * 38 + [-1, -2], [39]).input_ids.tolist()[-2:] == [0, 0]
