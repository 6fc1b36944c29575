"""Steps built request by request: what is planned ahead, published late and freed meanwhile never mixes rows."""

from __future__ import annotations

import random
from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from quire.kvcore import (
    GroupSpec,
    KVCache,
    OutOfPages,
    Step,
    linear_table,
    paged_rows,
)
from tests.support.kvcore.engine import groups
from tests.support.kvcore.queued import Host

STATE = GroupSpec("state", "state", 4, 4096)
MIXES = [
    ((8, None),),
    ((8, None), (4, 10), (4, 10)),
    ((16, None), (4, 8)),
    ((4, None), (8, 20), (4, 1)),
    ((4, 9),),
    ((4, None), STATE),
    (STATE, (4, 9), (8, None)),
    (GroupSpec("wide", "dense", 8, 4096, pages_per_block=3), (4, 6)),
    ((2, 70), (32, None)),
    ((8, None), (4, 10), GroupSpec("draft", "window", 4, 4096, 10, lookahead=1)),
]


def host(seed: int, kind: type[Host] = Host, **options) -> Host:
    mix = MIXES[seed % len(MIXES)]
    base = {
        "num_pages": (60, 90, 200)[seed % 3], "max_requests": 5, "max_model_len": 160,
        "max_draft_tokens": (0, 3)[seed // 2 % 2], "debug": seed % 5 == 0, "track_deltas": True,
    }  # fmt: skip
    if not any(isinstance(g, GroupSpec) and g.kind == "state" for g in mix) and seed % 4 == 1:
        base["replay_tokens"] = 20
    return kind(seed, groups(*mix), **(base | options))


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_no_row_is_wrong_however_far_ahead_steps_are_planned(ahead):
    total = Counter()
    for seed in range(len(MIXES)):
        total += host(seed).go(45, ahead)
    assert total["wrong"] == 0 and total["rows"] > 10_000
    for name in ("hits", "added", "out of pages", "dropped", "preempted", "committed", "rejected"):
        assert total[name] > 2, name


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_engine_that_writes_before_it_reads_finds_every_row_in_pages(ahead):
    total = Counter()
    for seed in range(len(MIXES)):
        total += host(seed, writes_first=True, reads="pages").go(35, ahead)
    assert total["wrong"] == 0 and total["rows"] > 10_000
    for name in ("hits", "added", "out of pages", "preempted", "committed", "rejected"):
        assert total[name] > 2, name


class Unguarded(Host):
    """Tables of a step from its context and its slot mapping, whatever the cache says of them."""

    def during(self, step: Step, t: int) -> np.ndarray:
        plan, size = step.full_plan(), self.specs[t].block_size
        table = self.kv.table(*self.kv.layout.tables[t])
        linear = np.zeros((len(plan.slots), 200), dtype=np.int64)
        for i, slot in enumerate(plan.slots.tolist()):
            start, end = int(plan.seq_lens[i] - plan.num_new_tokens[i]), int(plan.seq_lens[i])
            first = max(0, -(-start // size) - table.shape[1])
            for block in range(first, -(-start // size)):
                linear[i, block] = table[slot, block % table.shape[1]]
            a = plan.cu_seqlens_q[i]
            for p, where in zip(range(start, end), plan.slot_mapping[t, a:].tolist(), strict=False):
                if where >= 0:
                    linear[i, p // size] = where // size
        return linear


def test_rows_that_do_not_outlive_a_step_are_in_pages_only_if_these_are_read():
    """The same traffic with and without."""
    for reads, fails in (("step", True), ("pages", False)):
        wrong = sum(
            host(seed, Unguarded, writes_first=True, reads=reads).go(30, 0)["wrong"]
            for seed in (1, 2, 3, 4)
        )
        assert (wrong > 500) == fails, wrong


def test_tables_of_a_step_are_refused_where_pages_do_not_hold_its_rows():
    for reads in ("step", "pages"):
        kv = small(num_pages=40, reads=reads)
        (a,) = admitted(kv, [1] * 40)
        plan = kv.plan([a], [40])
        assert linear_table(kv, 0, plan)[0].tolist() == (plan.slot_mapping[0, ::4] // 4).tolist()
        if reads == "pages":
            assert linear_table(kv, 1, plan)[0].all()
        else:
            with pytest.raises(
                ValueError, match="rows of group 'g1' all have pages, got one with 28"
            ):
                linear_table(kv, 1, plan)
        kv.commit(plan, [1] * 40)
        assert kv.num_free_pages == 39 - 10 - 3  # what the step alone needed is free again
        with pytest.raises(ValueError, match="slots: expected a plan that is not committed yet"):
            paged_rows(kv, 0, plan)
        plan = kv.plan([a], [1])  # one token a request: nothing is missing
        assert (linear_table(kv, 1, plan)[0, 8:] > 0).all()
    with pytest.raises(ValueError, match="reads: expected 'step' or 'pages', got 'tokens'"):
        small(reads="tokens")


def test_a_device_may_append_to_tables_of_its_own_where_nothing_is_adopted():
    """An engine that tells its workers only which blocks start; adoption rewrites entries, which it does not tell."""
    for adopt in (True, False):
        total = Counter()
        for seed in range(len(MIXES)):
            first = {"writes_first": True, "reads": "pages"} if seed % 2 else {}  # as vLLM does
            total += host(seed, keeps_tables=True, adopt=adopt, **first).go(60, seed % 3)
        assert (total["wrong"] > 100) == adopt, total
    assert total["hits"] > 3 and total["rows"] > 10_000


def test_pages_that_are_not_adopted_come_back():
    left = []
    for adopt in (True, False):
        kv = small(num_pages=60, adopt=adopt)
        a, b = admitted(kv, [1] * 20, [1] * 20)
        kv.commit(kv.plan([a, b], [20, 20]), [1] * 40)
        same = (kv.table(0)[a, :5] == kv.table(0)[b, :5]).all()
        assert same == adopt
        kv.check_invariants()
        left.append(kv.num_free_pages)
        kv.release(0)
        kv.check_invariants()
        assert kv.match([1] * 40).num_tokens == 20
        kv.release(1)
        kv.clear()
        kv.check_invariants()
        assert kv.num_free_pages == 59
    assert left[0] - left[1] == 5
    with pytest.raises(ValueError, match="adopt: expected True or False"):
        small(adopt=None)


def evictions(kv: KVCache) -> int:
    return kv.index.num_evicted_points + kv.index.num_evicted_segments


def twins(seed: int):
    specs = groups(*MIXES[seed % len(MIXES)])
    options = {"num_pages": 90, "max_requests": 4, "max_model_len": 160, "max_draft_tokens": 3}
    return [KVCache(specs, **options) for _ in range(2)]


@pytest.mark.parametrize("seed", range(len(MIXES)))
def test_a_step_gives_what_a_plan_of_the_whole_batch_gives(seed):
    """Two caches see the same requests; one plans batches, the other adds request by request, and drops some."""
    rng, (whole, single) = random.Random(seed), twins(seed)
    running, failed = {}, 0
    for turn in range(120):
        if len(running) < 4 and rng.random() < 0.5:
            prompt = [rng.randint(0, 1)] * 5 + rng.choices((0, 1), k=rng.choice((1, 10, 40)))
            slots = [kv.admit(turn, kv.match(prompt)) for kv in (whole, single)]
            assert slots[0] == slots[1]
            running[turn] = slots[0]
        some = [r for r in rng.sample(list(running), len(running)) if rng.random() < 0.8]
        some = [r for r in some if whole.num_computed[running[r]] < 150]
        if some:
            slots = [running[r] for r in some]
            counts = [rng.choice((1, 1, 1, rng.randint(1, 9))) for _ in some]
            if rng.random() < 0.3:
                counts = [counts[0]] * len(some)
            plan, step = whole.plan(slots, counts), single.begin()
            got = [step.add(slot, n) for slot, n in zip(slots, counts, strict=True)]
            if isinstance(plan, OutOfPages):
                failed += 1
                assert any(isinstance(p, OutOfPages) for p in got)
                step.cancel()
                victim = rng.choice(list(running))
                for kv in (whole, single):
                    kv.release(victim)
                    kv.clear()
                del running[victim]
            else:
                if rng.random() < 0.3:
                    for slot in slots:
                        step.drop(slot)
                    got = [step.add(slot, n) for slot, n in zip(slots, counts, strict=True)]
                mine = step.plan()
                for name in ("slots", "num_new_tokens", "cu_seqlens_q", "seq_lens", "positions"):
                    assert np.array_equal(getattr(plan, name), getattr(mine, name)), name
                assert ((plan.slot_mapping < 0) == (mine.slot_mapping < 0)).all()
                sizes = [[whole.layout.groups[g].block_size] for g, _ in whole.layout.tables]
                assert (plan.slot_mapping % sizes == mine.slot_mapping % sizes).all()
                assert plan.changes.num_new == mine.changes.num_new == len(set(step.pages.tolist()))
                ids = rng.choices((0, 1), k=sum(counts))
                early = rng.random() < 0.5
                after = step.advance() if early else None
                copies = whole.commit(plan, ids)
                assert copies.shape == (after if early else step.commit(ids)).shape
                if early:
                    assert not len(step.commit(ids))
                assert ((whole.tables > 0) == (single.tables > 0)).all()
                assert (whole.num_computed == single.num_computed).all()
                if evictions(whole) or evictions(single):
                    for kv in (whole, single):  # of how much at once is not the same
                        kv.clear()
                for name in ("resume_points", "cached_segments", "free_pages"):
                    assert whole.stats()[name] == single.stats()[name], name
        if running and rng.random() < 0.1:
            rid = rng.choice(list(running))
            for kv in (whole, single):
                kv.release(rid)
            del running[rid]
        assert whole.num_free_pages == single.num_free_pages
        single.check_invariants()


def small(**options) -> KVCache:
    return KVCache(
        groups((4, None), (4, 9)),
        **({"num_pages": 20, "max_requests": 3, "max_model_len": 100} | options),
    )


def admitted(kv: KVCache, *prompts: list[int]) -> list[int]:
    return [kv.admit(i, kv.match(p)) for i, p in enumerate(prompts)]


def test_each_part_says_what_is_its():
    kv = KVCache(
        groups((4, None), (4, 9), STATE),
        num_pages=40,
        max_requests=3,
        max_model_len=100,
        max_draft_tokens=3,
    )
    a, b = admitted(kv, [1] * 10, [2] * 30)
    step = kv.begin()
    first, second = step.add(a, 10, 3), step.add(b, 7)
    assert (first.num_new_tokens, first.lookahead, first.start) == (10, 3, 0)
    plan = step.plan()
    assert plan.cu_seqlens_q.tolist() == [0, 10, 17] and plan.seq_lens.tolist() == [10, 7]
    assert first.rows == slice(0, 10) and second.rows == slice(10, 17)
    assert first.positions.tolist() == [*range(10)] and second.positions.tolist() == [*range(7)]
    assert (
        np.concatenate([first.slot_mapping, second.slot_mapping], axis=1) == plan.slot_mapping
    ).all()
    blocks, mine = first.new_blocks(0)
    assert blocks.tolist() == [0, 1, 2, 3]  # the last one for tokens 12 of the lookahead
    where = np.concatenate([first.slot_mapping[0], first.lookahead_slots[0]])
    assert where.tolist() == [int(mine[p // 4]) * 4 + p % 4 for p in range(13)]
    assert first.state_pages[2] == plan.state_pages[2, 0] > 0
    assert first.copies.tolist() == [[0, plan.state_pages[2, 0]]]
    assert second.copies.tolist() == [[0, plan.state_pages[2, 1]]]
    step.commit([1] * 10 + [2] * 7)
    assert kv.num_computed[[a, b]].tolist() == [10, 7]
    kv.check_invariants()
    step = kv.begin()
    part = step.add(a, 1)
    assert part.new_blocks(0)[0].tolist() == [] and part.replays[0].tolist() == []
    step.cancel()
    assert kv.match([1] * 30).dense_tokens == 8


def test_a_lookahead_is_clipped_at_the_longest_sequence():
    kv = small(max_model_len=10, max_draft_tokens=3)
    (a,) = admitted(kv, [1] * 9)
    step = kv.begin()
    assert step.add(a, 9, 3).lookahead == 1
    step.plan()
    step.commit([1] * 9)
    assert kv.num_computed[a] == 9


def test_what_is_not_taken_of_a_step_comes_back():
    kv = small()
    a, b = admitted(kv, [1] * 20, [2] * 20)
    free = kv.num_free_pages
    step = kv.begin()
    assert step.add(a, 20).num_new_pages == 8
    step.add(b, 20)
    step.drop(a)
    assert kv.num_free_pages == free and kv.pool.num_reserved == 8
    step.plan()
    assert kv.num_free_pages == free - 8 and kv.pool.num_reserved == 0
    kv.check_invariants()
    step.cancel()
    assert kv.num_free_pages == free
    kv.check_invariants()
    step = kv.begin()
    step.add(a, 20)
    step.cancel()
    assert kv.num_free_pages == free and kv.pool.num_reserved == 0
    out = kv.begin().add(a, 20)
    assert not isinstance(out, OutOfPages)


def test_a_request_that_does_not_fit_evicts_nothing_and_leaves_the_step_as_it_was():
    kv = small()
    (a,) = admitted(kv, [1] * 9)
    kv.commit(kv.plan([a], [9]), [1] * 9)
    kv.release(0)
    cached = kv.stats()
    a, b = admitted(kv, [2] * 20, [3] * 99)
    step = kv.begin()
    step.add(a, 20)
    answer = step.add(b, 99)
    assert isinstance(answer, OutOfPages) and answer.needed > answer.free + answer.evictable
    assert kv.stats()["cached_segments"] == cached["cached_segments"] and len(step.parts) == 1
    assert step.plan().slots.tolist() == [a]


def planned_step() -> tuple[KVCache, int, int, Step]:
    kv = small(max_draft_tokens=2)
    a, b = admitted(kv, [1] * 9, [2] * 9)
    step = kv.begin()
    step.add(a, 9)
    step.plan()
    return kv, a, b, step


REFUSED = {
    "release": (lambda kv, a, b, step: kv.release(0), "request_id: expected a request that no step holds"),
    "rollback": (lambda kv, a, b, step: kv.rollback(a, 1), "slot: expected a request that no step holds"),
    "plan": (lambda kv, a, b, step: kv.plan([b, a], [1, 1]), "slot: expected a request that no step holds"),
    "add": (lambda kv, a, b, step: kv.begin().add(a), "slot: expected a request that no step holds"),
    "add to a planned one": (lambda kv, a, b, step: step.add(b), "add: expected a step whose plan was not asked for"),
    "drop of a planned one": (lambda kv, a, b, step: step.drop(a), "drop: expected a step whose plan was not asked"),
    "begin twice": (lambda kv, a, b, step: (kv.begin().add(b), kv.begin()), "begin: expected no step that is being built"),
    "plan beside one": (lambda kv, a, b, step: (kv.begin().add(b), kv.plan([b], [1])), "plan: expected no step that is"),
    "twice in one": (lambda kv, a, b, step: add_twice(kv, b), "slot: expected a request that no step holds"),
    "drop of another": (lambda kv, a, b, step: kv.begin().drop(b), "slot: expected one of"),
    "commit of one being built": (lambda kv, a, b, step: kv.begin().commit([]), "commit: expected a planned step"),
    "plan of an empty one": (lambda kv, a, b, step: kv.begin().plan(), "plan: expected a step with a request, got one that is empty"),
    "too few ids": (lambda kv, a, b, step: step.commit([1] * 8), "input_ids: expected 9 tokens"),
    "too many rejected": (lambda kv, a, b, step: step.commit([1] * 9, [6]), "accepted: expected between"),
    "more than planned": (lambda kv, a, b, step: step.commit([1] * 9, [10]), "accepted: expected at most"),
    "advance twice": (lambda kv, a, b, step: [step.advance() for _ in range(2)], "advance: expected a planned step, got one that is advanced"),
    "cancel of an advanced one": (lambda kv, a, b, step: (step.advance(), step.cancel()), "cancel: expected a step that has not"),
    "rejected after advance": (lambda kv, a, b, step: (step.advance(), step.commit([1] * 9, [8])), "accepted: expected all of"),
    "rollback of an advanced one": (lambda kv, a, b, step: (step.advance(), kv.rollback(a, 1)), "slot: expected a request whose steps"),
    "plan of an advanced one": (lambda kv, a, b, step: (step.advance(), kv.plan([a], [1])), "slot: expected a request whose steps"),
    "out of order": (lambda kv, a, b, step: (step.advance(), later(kv, a)), "commit: expected the steps of a request in their order"),
    "commit twice": (lambda kv, a, b, step: [step.commit([1] * 9) for _ in range(2)], "commit: expected a planned step, got one that is over"),
    "an empty one before": (lambda kv, a, b, step: [kv.begin(), kv.begin()][0].add(b), "add: expected a step whose plan was not asked for, got one that is over"),
    "no tokens": (lambda kv, a, b, step: kv.begin().add(b, 0), "num_new_tokens: expected at least 1 and at most 100"),
    "too many tokens": (lambda kv, a, b, step: kv.begin().add(b, 101), "num_new_tokens: expected at least 1 and at most 100"),
    "too far ahead": (lambda kv, a, b, step: kv.begin().add(b, 1, 3), "lookahead: expected an int <= 2"),
    "nobody": (lambda kv, a, b, step: kv.begin().add(2), "slot: expected the slot of an admitted request"),
    "no slot": (lambda kv, a, b, step: kv.begin().add(-1), "slot: expected an int >= 0, got -1"),
    "no int": (lambda kv, a, b, step: kv.begin().add(b, 1.0), "num_new_tokens: expected an int"),
}  # fmt: skip


def add_twice(kv: KVCache, slot: int) -> None:
    step = kv.begin()
    step.add(slot)
    step.add(slot)


def later(kv: KVCache, slot: int) -> None:
    step = kv.begin()
    step.add(slot)
    step.plan()
    step.commit([1])


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_harm_an_open_step_is_refused_by_name(what):
    call, message = REFUSED[what]
    kv, a, b, step = planned_step()
    with pytest.raises(ValueError, match=message):
        call(kv, a, b, step)
    kv.check_invariants()


def test_rows_that_arrive_later_hold_up_nobody_and_are_found_once_they_are_there():
    """An external load: pages first, rows while other steps run, findable at the commit; or it fails, and nothing happened."""
    kv = small(num_pages=40)
    a, b, c = admitted(kv, [1] * 17, [2] * 9, [3] * 9)
    load, lost = kv.begin(), None
    load.add(a, 16)
    load.plan()
    lost = kv.begin()
    lost.add(c, 8)
    lost.plan()
    for _ in range(9):
        kv.commit(kv.plan([b], [1]), [2])
    assert kv.match([1] * 30).num_tokens == 0 and kv.num_computed[a] == 0
    lost.cancel()
    load.commit([1] * 16)
    assert kv.match([1] * 30).num_tokens == 16 and kv.num_computed[[a, b, c]].tolist() == [16, 9, 0]
    kv.check_invariants()


def test_a_request_that_ends_with_a_step_in_flight_is_cached_as_far_as_its_tokens_are_known():
    kv = small(num_pages=40)
    (a,) = admitted(kv, [1] * 8)
    first, second = [], []
    for found, n in ((first, 8), (second, 4)):
        step = kv.begin()
        step.add(a, n)
        step.plan()
        step.advance()
        found.append(step)
    first[0].commit([1] * 8)
    kv.release(0)
    second[0].commit([7] * 4)  # nobody's tokens
    assert kv.match([1] * 9).num_tokens == 8 and kv.match([1] * 8 + [7] * 9).num_tokens == 8
    kv.check_invariants()
    kv.clear()
    assert kv.num_free_pages == 39


def test_a_boundary_whose_window_a_step_in_flight_has_passed_is_not_kept():
    """The ring has other blocks where its tail was."""
    kv = small(num_pages=60, retention="latest")
    (a,) = admitted(kv, [1] * 41)
    kv.commit(kv.plan([a], [8]), [1] * 8)
    step = kv.begin()
    step.add(a, 20)
    step.plan()
    step.advance()
    kv.release(0)
    step.commit([1] * 20)
    assert kv.match([1] * 41).num_tokens == 0
    kv.check_invariants()


def test_tokens_are_hashed_in_their_order_whichever_way_their_steps_end():
    kv = small(num_pages=60)
    (a,) = admitted(kv, [1] * 5)
    kv.commit(kv.plan([a], [5]), [1] * 5)
    tokens = [1] * 5
    for i in range(40):
        step = kv.begin()
        step.add(a)
        step.plan()
        if i % 3 == 1:
            step.advance()
        step.commit([i])
        tokens.append(i)
    kv.release(0)
    assert kv.match([*tokens, 1]).num_tokens == 44


def picture(kv: KVCache) -> list:
    arrays = kv.tables, kv.num_computed, kv.pool.free_pages(), kv.pool.counts, kv._chains.cached
    return [kv.stats(), kv.pool.num_reserved, *(a.tobytes() for a in arrays)]


def try_each(kv: KVCache, calls: list) -> list[str]:
    """Make the calls in their order; what is refused is named and changes nothing."""
    refused = []
    for call in calls:
        before = picture(kv)
        try:
            call()
        except ValueError as error:
            assert "expected" in str(error) and picture(kv) == before
            refused.append(str(error))
    return refused


def orders(rng: random.Random) -> list[str]:
    """Every order of planning, advancing and committing two steps of a request that is released; and some of three."""
    two = sorted({"".join(p) for p in permutations("aaabbbR")})
    three = ["".join(rng.sample("aaabbbcccR", 10)) for _ in range(150)]
    return two + three


def test_every_order_of_steps_works_or_is_refused_by_name():
    """Letters name steps, which are planned, advanced and committed as their letter comes; R is the release."""
    worked = 0
    for order in orders(random.Random(0)):
        kv = small(num_pages=60, max_requests=1)
        (a,) = admitted(kv, [1] * 6)
        steps: dict[str, Step] = {}
        sizes = {"a": 6, "b": 4, "c": 4}
        known = []

        def plan(name, kv=kv, a=a, steps=steps, sizes=sizes):
            step = kv.begin()
            try:
                step.add(a, sizes[name])
                step.plan()
            except ValueError:
                step.cancel()
                raise
            steps[name] = step

        def take(name, steps=steps, sizes=sizes, known=known, plan=plan, times=None):
            turn = times[name] = times.get(name, 0) + 1
            if turn == 1:
                plan(name)
            elif turn == 2 and name in steps:
                steps[name].advance()
            elif name in steps:
                steps[name].commit([ord(name)] * sizes[name])
                known.append(name)

        times: dict[str, int] = {}
        calls = [
            (lambda kv=kv: kv.release(0))
            if c == "R"
            else (lambda c=c, take=take, times=times: take(c, times=times))
            for c in order
        ]
        refused = try_each(kv, calls)
        worked += not refused
        kv.check_invariants()
        for step in list(steps.values()):
            if step.is_planned:
                step.commit([0] * len(step.plan().positions))
        if 0 in kv.sequences:
            kv.release(0)
        kv.clear()
        kv.check_invariants()
        assert kv.num_free_pages == 59, order
    assert worked > 5


def test_tables_of_a_replay_have_the_cached_pages_of_the_rows_computed_again():
    kv = small(num_pages=80, reads="pages", retention="latest", replay_tokens=8)
    long, other = list(range(60)), [*range(44), *[99] * 20]
    (a,) = admitted(kv, long)
    kv.commit(kv.plan([a], [60]), long)
    cached = kv.table(0)[a, :11].copy()
    kv.release(0)
    match = kv.match(other)
    assert (match.replay_from, match.replay_to) == (36, 44)
    slot = kv.admit("other", match)
    step = kv.begin()
    part = step.add(slot, 20)
    tables = linear_table(kv, 0, step.plan())[0]
    assert tables[:11].tolist() == cached.tolist() and (tables[11:14] > 0).all()
    assert part.replays[0].tolist() == [*range(8)]
    assert (linear_table(kv, 1, step.plan())[0, 9:14] > 0).all()
    blocks, mine = part.new_blocks(0)
    assert blocks.tolist() == [11, 12, 13] and mine.tolist() == tables[11:14].tolist()


def test_a_plan_is_void_once_pages_of_a_step_came_back_or_left():
    for end in ("cancel", "advance"):
        kv, _, b, step = planned_step()
        plan = kv.plan([b], [9])
        getattr(step, end)()
        with pytest.raises(ValueError, match="plan: expected the newest plan of this cache"):
            kv.commit(plan, [2] * 9)
        kv.check_invariants()
    step.commit([1] * 9)
    step.cancel()  # it is over: nothing to do
    kv.check_invariants()


def test_a_step_with_tokens_that_are_not_those_of_the_prompt_is_refused_when_debugging():
    kv = small(debug=True)
    (a,) = admitted(kv, [1] * 9)
    step = kv.begin()
    step.add(a, 9)
    step.plan()
    with pytest.raises(ValueError, match="input_ids: expected 1 at position 8 of slot 0"):
        step.commit([1] * 8 + [2])
    step.commit([1] * 9)
    assert kv.num_computed[a] == 9


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_two_steps_ahead_the_same_is_cached_in_the_end(mix):
    """One cache commits each step before the next begins, the other publishes two steps late."""
    caches = [
        KVCache(groups(*mix), num_pages=400, max_requests=3, max_model_len=160, retention="dense")
        for _ in range(2)
    ]
    rng = random.Random(5)
    prompts = [rng.choices((0, 1), k=n) for n in (9, 30, 41)]
    texts = [p + rng.choices((0, 1), k=90) for p in prompts]
    for kv, ahead in zip(caches, (0, 2), strict=True):
        slots, flying = admitted(kv, *prompts), []
        done = [0, 0, 0]
        for turn in range(75):
            counts = [max(1, min(16, len(p) - d)) for p, d in zip(prompts, done, strict=True)]
            if kv._tables.states and turn < 4:
                counts = kv.cut(slots, counts).tolist()
            step = kv.begin()
            for slot, n in zip(slots, counts, strict=True):
                assert not isinstance(step.add(slot, n), OutOfPages)
            step.plan()
            ids = [t for x, d, n in zip(texts, done, counts, strict=True) for t in x[d : d + n]]
            done = [d + n for d, n in zip(done, counts, strict=True)]
            if ahead:
                step.advance()
            flying.append((step, ids))
            if len(flying) > ahead:
                step, ids = flying.pop(0)
                step.commit(ids)
        for step, ids in flying:
            step.commit(ids)
        kv.check_invariants()
    now, late = caches
    for name in ("resume_points", "cached_segments", "resume_points_kept", "free_pages"):
        assert now.stats()[name] == late.stats()[name], name
    for text in texts:
        found = [kv.match([*text, 1]) for kv in caches]
        assert found[0].num_tokens == found[1].num_tokens >= 64
        assert found[0].dense_tokens == found[1].dense_tokens
