"""The examples that are drawn in docstrings: built, run, and compared with what the drawings say."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kvcore import LRU, GroupSpec, KVCache
from quire.kvcore import plan as plans
from quire.kvcore.policies import retention
from quire.kvcore.prefix import replays
from quire.kvcore.prefix.keys import Prompt, next_key, root_key
from quire.kvcore.tables import calendar, decode

DENSE, WINDOW = GroupSpec("dense", "dense", 32, 4096), GroupSpec("window", "window", 16, 4096, 33)
TOKENS = np.arange(1000, dtype=np.int32)


def cache(*groups: GroupSpec, **settings) -> KVCache:
    return KVCache(groups, num_pages=200, max_requests=3, max_model_len=512, **settings)


def start(kv: KVCache, name: str, tokens: np.ndarray) -> int:
    """Admit a request and compute its prompt."""
    slot = kv.admit(name, kv.match(tokens))
    first = int(kv.num_computed[slot])
    kv.commit(kv.plan([slot], [len(tokens) - first]), tokens[first:])
    return slot


def keep_points(kv: KVCache, *depths: int) -> None:
    """Drop all resume points but those at these segments."""
    for run in list(kv.index.runs()):
        for depth in list(run.depths):
            if depth not in depths:
                kv.index.drop_point(run.points[depth])


def points(kv: KVCache) -> set[int]:
    """Boundaries of all resume points, tokens."""
    return {depth * kv.alignment for run in kv.index.runs() for depth in run.depths}


def test_segments():
    tokens = TOKENS[:11]
    for ahead, covered in ((0, ((0, 4), (4, 8))), (1, ((0, 5), (5, 9)))):
        prompt = Prompt(tokens, 4, ahead, b"", b"")
        key, keys = root_key(b"", b""), b""
        for low, high in covered:
            key = next_key(key, tokens[low:high].tobytes())
            keys += key
        assert prompt.keys == keys and prompt.tail.tolist() == tokens[covered[1][1] :].tolist()


def test_junction():
    kv = cache(DENSE, WINDOW, retention="latest")
    start(kv, "1", TOKENS[:200])
    assert points(kv) == {192}
    second = np.concatenate([TOKENS[:130], TOKENS[500:570]])
    match = kv.match(second)
    assert (match.num_tokens, match.dense_tokens) == (0, 128)
    start(kv, "2", second)
    assert 128 in points(kv)
    assert kv.match(np.concatenate([TOKENS[:130], TOKENS[700:750]])).num_tokens == 128
    assert "prompt 3   |===================|" in (retention.__doc__ or "")


def test_survivors_only_pages():
    kv = cache(DENSE, WINDOW, retention=64)
    slot = kv.admit("a", kv.match(TOKENS[:161]))
    plan = kv.plan([slot], [160])
    written = (plan.slot_mapping[1].reshape(10, 16) >= 0).all(axis=1)
    assert written.nonzero()[0].tolist() == [2, 3, 6, 7, 8, 9]
    assert (plan.slot_mapping[1] >= 0).sum() == 6 * 16
    kv.commit(plan, TOKENS[:160])
    assert points(kv) == {64, 128, 160} and kv.pool.num_held_only == 4


def test_ring_table():
    kv = cache(DENSE, WINDOW)
    slot = start(kv, "a", TOKENS[:32])
    page_of = {}
    for position in range(32, 100):
        plan = kv.plan([slot], [1])
        page_of[position // 16] = int(plan.slot_mapping[1, 0]) // 16
        kv.commit(plan, TOKENS[position : position + 1])
    ring, spec = kv.table(1)[slot].tolist(), kv.layout.classes[1]
    assert (spec.live, spec.per_segment, spec.lag, spec.width) == (2, 2, 0, len(ring))
    assert [ring[column] for column in (0, 1, 2, 3)] == [page_of[b] for b in (4, 5, 6, 3)]
    run = kv._chains.runs[slot]
    assert kv._tables.tail(slot, 96).tolist() == [page_of[4], page_of[5]] and run.depth == 3


@pytest.mark.parametrize("settled", [99, 0], ids=["due-now", "calendar"])
def test_decode_calendar(settled, monkeypatch):
    monkeypatch.setattr(decode, "SETTLED", settled)
    kinds = {"dense": (4, None), "window": (2, 5), "state": (8, None)}
    kv = cache(*(GroupSpec(name, name, size, 4096, w) for name, (size, w) in kinds.items()))
    prompts = TOKENS[:5], TOKENS[100:106]
    slots = [kv.admit(i, kv.match(prompt)) for i, prompt in enumerate(prompts)]
    kv.commit(kv.plan(slots, [5, 6]), np.concatenate(prompts))
    drawn = {name: [] for name in kinds}
    slices = []
    for _ in range(8):
        plan = kv.plan(slots, [1, 1])
        batch = plan.changes.batch
        due = kv._tables.decodes._due(batch, True)
        assert (batch.calendar is None) == (settled == 99)
        found = [(list(kinds)[o // 2], "ab"[o % 2]) for o in due.outputs.tolist()]
        for name in kinds:
            drawn[name].append("".join(who for kind, who in found if kind == name) or ".")
        slices.append(" ".join(who for _, who in found))
        kinds_due = [kind for kind, _ in found]
        assert kinds_due == sorted(kinds_due, key=list(kinds).index), "dense, windows, snapshots"
        assert due.num_dense == due.num_always_new == kinds_due.count("dense")
        assert due.num_blocks == len(kinds_due) - kinds_due.count("state")
        kv.commit(plan, [7, 7])
    text = calendar.__doc__ or ""
    for name, (size, _) in kinds.items():
        at = 7 if name == "state" else 0
        row = f"{name:6} (p % {size} = {at})  {'    '.join(drawn[name])}\n"
        assert row in text
    assert f"[{' | '.join(slices)}]" in text


def test_tables_change_in_the_commit():
    kv = cache(GroupSpec("dense", "dense", 16, 4096))
    slot = start(kv, "a", TOKENS[:31])
    text = plans.__doc__ or ""
    for token in (31, 32, 33):
        plan = kv.plan([slot], [1])
        table = [page for page in kv.table(0)[slot].tolist() if page]
        where = int(plan.slot_mapping[0, 0])
        page, row = divmod(where, 16)
        place = f"{where} = {page} * 16" + (f" + {row}" if row else "")
        keys = f"0 .. {token - 1}"
        assert f"    {token:<14}{int(plan.seq_lens[0]):<11}{table!s:<12}{keys:<16}{place}\n" in text
        kv.commit(plan, [7])
        assert page in kv.table(0)[slot]


def test_releasing_window():
    """A long segment, drawn from block 14 on: the blocks that leave the table as another starts."""
    groups = GroupSpec("dense", "dense", 256, 4096), WINDOW
    kv = KVCache(groups, num_pages=90, max_requests=1, max_model_len=600, retention=256)
    slot, spec = start(kv, "a", TOKENS[:1]), kv.layout.classes[1]
    assert (spec.live, spec.tail, spec.per_segment, spec.lag, spec.width) == (2, 2, 16, 0, 18)
    at, left = {}, {}
    for position in range(1, 33 * 16):
        plan = kv.plan([slot], [1])
        kv.commit(plan, [7])
        block, ring = position // 16, kv.table(1)[slot]
        at[block] = int(plan.slot_mapping[1, 0]) // 16
        if position % 16 == 0:
            known = {b for gone in left.values() for b in gone}
            here = {b for b in at if ring[b % 18] == at[b] and b > block - 18}
            left[block] = set(range(1, block)) - here - known
    text = decode.__doc__ or ""
    assert "starts    14   15   16   17   18   19   20        31   32\n" in text
    assert "let go        11   12   13   .    .    16   17   ..   28   29 15 14\n" in text
    drawn = {14: {11}, 15: {12}, 16: {13}, 17: set(), 18: set(), 19: {16}, 20: {17}, 31: {28}}
    for block, gone in (drawn | {32: {29, 15, 14}}).items():
        assert left[block] == gone, block


def test_drafts():
    kv = cache(GroupSpec("dense", "dense", 4, 4096), max_draft_tokens=2)
    slot = start(kv, "a", TOKENS[:6])
    pages = kv.table(0)[slot]
    plan = kv.plan([slot], [3])
    kv.commit(plan, TOKENS[6:9], [1])
    shift = 4 * (int(pages[1]) - 1), 4 * (int(kv.pool.peek(1)[0]) - 3)
    assert (plan.slot_mapping[0] - [shift[0], shift[0], shift[1]]).tolist() == [6, 7, 12]
    assert plan.changes.drafts.after.tolist() == [2] and int(kv.num_computed[slot]) == 7
    assert pages[2] == 0
    plan = kv.plan([slot], [3])
    assert (plan.slot_mapping[0] - [shift[0], shift[1], shift[1]]).tolist() == [7, 12, 13]
    assert plan.changes.drafts.after.tolist() == [1]
    kv.commit(plan, TOKENS[7:10], [3])
    assert int(kv.num_computed[slot]) == 10 and 4 * (int(pages[2]) - 3) == shift[1]


def test_runs():
    kv = cache(DENSE)
    second = np.concatenate([TOKENS[:64], TOKENS[500:532]])
    for name, tokens in (("1", TOKENS[:128]), ("2", second)):
        start(kv, name, tokens)
    runs = list(kv.index.runs())
    assert sorted((r.start, r.depth) for r in runs) == [(0, 2), (2, 3), (2, 4)]
    assert [r.parent.depth for r in runs if r.start] == [2, 2]


def test_resume_point_and_what_two_hold_between_them():
    groups = GroupSpec("d", "dense", 64, 4096), GroupSpec("w", "window", 64, 4096, 129)
    kv = cache(*groups)
    start(kv, "short", TOKENS[:193])
    start(kv, "a", TOKENS[:320])
    keep_points(kv, 3)
    prompt = TOKENS[:400]
    match = kv.match(prompt)
    assert (match.num_tokens, match.dense_tokens, match.limited_by) == (192, 320, "resume-point")
    kv.release("a")  # which leaves a point at its end
    assert points(kv) == {192, 320} and kv.index.span == 2
    shorter = np.concatenate([TOKENS[:256], TOKENS[600:610]])
    assert kv.match(shorter).num_tokens == 256
    kv.admit("b", kv.match(shorter))
    [between] = [p for run in kv.index.runs() for p in run.points.values() if p.depth == 4]
    [before] = [p for run in kv.index.runs() for p in run.points.values() if p.depth == 3]
    [after] = [p for run in kv.index.runs() for p in run.points.values() if p.depth == 5]
    assert between.pages.tolist() == [before.pages[1], after.pages[0]]


def test_order_of_eviction():
    kv = cache(DENSE, WINDOW, policy=LRU())
    for n in (65, 161, 224):
        start(kv, str(n), TOKENS[:n])
    for n in (65, 161, 224):
        kv.release(str(n))
    keep_points(kv, 2, 5)
    assert points(kv) == {64, 160} and kv.stats()["cached_segments"] == 7
    kv.admit("b", kv.match(TOKENS[:70]))  # uses the point at 2, and locks what is before it
    assert kv.evict(2) == 2
    assert points(kv) == {64, 160} and kv.stats()["cached_segments"] == 5
    assert kv.evict(1) >= 1 and points(kv) == {64}
    assert kv.evict(3) == 3 and kv.stats()["cached_segments"] == 2
    assert kv.evict(99) == 0 and kv.stats()["cached_segments"] == 2


def test_replay():
    assert replays.replay_range(160, 32, 48, 32) == (96, 160)
    assert replays.replay_range(160, 96, 48, 32) is None, "nothing saved over the hit"
    kv = cache(DENSE, GroupSpec("window", "window", 16, 4096, 17), replay_tokens=48)
    start(kv, "a", TOKENS[:165])
    keep_points(kv)
    start(kv, "short", TOKENS[:33])
    assert points(kv) == {32}
    prompt = np.concatenate([TOKENS[:165], TOKENS[300:335]])
    match = kv.match(prompt)
    assert (match.num_tokens, match.dense_tokens) == (32, 160)
    assert (match.replay_from, match.replay_to, match.num_saved_tokens) == (96, 160, 96)
    slot = kv.admit("b", match)
    plan = kv.plan([slot], [80])
    assert plan.positions[[0, -1]].tolist() == [96, 175]
    assert (plan.slot_mapping[0, :64] == -1).all() and (plan.slot_mapping[0, 64:] >= 0).all()
    assert plan.replay_rows.tolist() == [*range(64)] and (plan.replay_slots[0] >= 0).all()
    kv.commit(plan, prompt[96:176])
    assert points(kv) == {32, 160}
