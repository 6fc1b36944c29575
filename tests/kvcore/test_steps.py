"""Steps built request by request with `reserve`, `arrays`, `advance` and `publish`."""

import pytest

from quire.kvcore import GroupSpec, KVCache, OutOfPages, StepPlan, linear_table, paged_rows
from tests.kvcore.engine import groups
from tests.kvcore.expected import digest

STATE = GroupSpec("state", "state", 4, 4096)


def test_tables_of_a_step_are_refused_where_pages_do_not_hold_its_rows():
    for reads in ("step", "pages"):
        kv = small(num_pages=40, reads=reads)
        (a,) = admitted(kv, [1] * 60)
        plan = kv.plan([a], [40])
        assert plan.copies.shape == (0, 2)
        assert linear_table(kv, 0, plan)[0].tolist() == (plan.slot_mapping[0, ::4] // 4).tolist()
        if reads == "pages":
            assert linear_table(kv, 1, plan)[0].all()
        else:
            with pytest.raises(
                ValueError, match="rows of group 'g1' all have pages, got one with 32"
            ):
                linear_table(kv, 1, plan)
        kv.commit(plan, [1] * 40)
        live = 2 if reads == "step" else 3  # what the step alone needed is free again
        assert kv.num_free_pages == 39 - 10 - live
        with pytest.raises(ValueError, match="slots: expected a plan that is not committed yet"):
            paged_rows(kv, 0, plan)
        plan = kv.plan([a], [1])  # one token a request: nothing is missing
        assert (linear_table(kv, 1, plan)[0, 8:] > 0).all()
    with pytest.raises(ValueError, match="reads: expected 'step' or 'pages', got 'tokens'"):
        small(reads="tokens")


def small(**options) -> KVCache:
    return KVCache(
        groups((4, None), (4, 9)),
        **({"num_pages": 20, "max_requests": 3, "max_model_len": 100} | options),
    )


def admitted(kv: KVCache, *prompts: list[int]) -> list[int]:
    return [kv.admit(i, kv.match(p)) for i, p in enumerate(prompts)]


def launched(kv: KVCache, slots: list[int], counts: list[int]) -> StepPlan:
    """Reserve and lay out a step."""
    starts = kv.num_computed[slots]
    assert not isinstance(kv.reserve(slots, starts + counts), OutOfPages)
    return kv.arrays(slots, starts, starts + counts)


def test_new_pages_are_told_in_the_order_of_their_blocks_and_again_by_slots():
    kv = KVCache(
        groups((4, None), (4, 9), STATE), num_pages=40, max_requests=3, max_model_len=100,
        max_draft_tokens=3, reads="pages",
    )  # fmt: skip
    a, b = admitted(kv, [1] * 10, [2] * 30)
    first, (second,) = kv.reserve(a, 13), kv.reserve([b], [7])
    assert [len(pages) for pages in first] == [4, 4, 0]  # a state's are in `state_pages`
    assert [len(pages) for pages in second] == [2, 2, 0]
    plan = kv.arrays([a, b], [0, 0], [10, 7])
    assert plan.cu_seqlens_q.tolist() == [0, 10, 17] and plan.seq_lens.tolist() == [10, 7]
    more = kv.arrays([a, b], [0, 0], [13, 7])  # with the slots of a drafter within the step
    assert more.seq_lens.tolist() == [13, 7]
    for t in (0, 1):
        where = [first[t][p // 4] * 4 + p % 4 for p in range(13)]
        assert more.slot_mapping[t, :13].tolist() == where
        assert plan.slot_mapping[t, :10].tolist() == where[:10]
        assert plan.slot_mapping[t, 10:].tolist() == more.slot_mapping[t, 13:].tolist()
    assert (plan.state_pages[2] > 0).all() and plan.copies.tolist() == more.copies.tolist()
    kv.check_invariants()
    free = kv.num_free_pages
    kv.advance([a, b], [10, 7])
    # Block 3 of two tables, of tokens that did not come, and two snapshots of no boundary.
    assert kv.num_free_pages == free + 4
    assert kv.num_computed[[a, b]].tolist() == [10, 7]
    kv.publish([a, b], [10, 7], [1] * 10 + [2] * 7)
    kv.check_invariants()
    assert kv.match([1] * 30).dense_tokens == 8


def test_pages_that_must_stay_available_refuse_a_request_and_change_nothing():
    kv = small(num_pages=30)
    (a,) = admitted(kv, [1] * 21)
    kv.commit(kv.plan([a], [21]), [1] * 21)
    kv.release(0)
    free, match = kv.num_free_pages, kv.match([1] * 21)
    every = free + kv.num_evictable_pages
    assert match.num_tokens == 20 and every == 29
    before = digest(kv)
    out = kv.admit("b", match, least=every)  # the hit needs some of these
    assert isinstance(out, OutOfPages) and out.needed == every > out.free + out.evictable
    assert digest(kv) == before and kv.num_free_slots == 3
    most = out.free + out.evictable
    slot = kv.admit("b", match, least=most)
    assert kv.num_free_pages + kv.num_evictable_pages == most
    assert isinstance(kv.reserve(slot, 22, least=most + 1), OutOfPages)
    assert isinstance(kv.reserve(slot, 20, least=most + 1), OutOfPages)  # which needs no page
    assert kv.reserve(slot, 22, least=most) != [[], []]
    kv.check_invariants()


def in_flight() -> tuple[KVCache, int, int]:
    kv = small(max_draft_tokens=2)
    a, b = admitted(kv, [1] * 9, [2] * 9)
    launched(kv, [a], [9])
    return kv, a, b


def after(kv: KVCache, slot: int, call) -> None:
    kv.advance(slot, 9)
    call()


HELD = "expected a request that no step holds"
REFUSED = {
    "release": (lambda kv, a, b: kv.release(0), f"request_id: {HELD}"),
    "reset": (lambda kv, a, b: kv.reset(end_requests=True), f"end_requests: {HELD}"),
    "rollback": (lambda kv, a, b: kv.rollback(a, 1), f"slots: {HELD}"),
    "plan": (lambda kv, a, b: kv.plan([b, a], [1, 1]), f"slots: {HELD}"),
    "reserve": (lambda kv, a, b: kv.reserve(a, 10), f"slots: {HELD}"),
    "reserve of several": (lambda kv, a, b: kv.reserve([b, a], [1, 10]), f"slots: {HELD}"),
    "plan beside what is reserved": (lambda kv, a, b: (kv.reserve(b, 9), kv.plan([b], [1])), "slots: expected a request without reserved"),
    "arrays of nothing reserved": (lambda kv, a, b: kv.arrays(b, 0, 9), "ends: expected tokens whose pages are reserved, got 9 of slot 1"),
    "arrays past it": (lambda kv, a, b: (kv.reserve(b, 4), kv.arrays(b, 0, 5)), "ends: expected tokens whose pages are reserved, got 5"),
    "arrays far before it": (lambda kv, a, b: (kv.reserve(b, 9), kv.arrays(b, 0, 6)), r"ends: expected at least \[7\], got \[6\]"),
    "arrays from elsewhere": (lambda kv, a, b: (kv.reserve(b, 9), kv.arrays(b, 1, 9)), r"starts: expected num_computed \[0\], got \[1\]"),
    "no tokens": (lambda kv, a, b: kv.arrays(b, 0, 0), r"ends: expected at least \[1\]"),
    "advance of nothing reserved": (lambda kv, a, b: kv.advance(b, 9), "ends: expected tokens whose pages are reserved"),
    "too many rejected": (lambda kv, a, b: kv.advance(a, 6), r"ends: expected at least \[7\], got \[6\]"),
    "more than reserved": (lambda kv, a, b: kv.advance(a, 13), "ends: expected tokens whose pages are reserved, got 13"),
    "oldest query of rings": (lambda kv, a, b: kv.advance(a, 9, 3), "oldest_query, keep_tails: expected None and True"),
    "publish before advance": (lambda kv, a, b: kv.publish(a, 9, [1] * 9), r"upto: expected 0..0 of slot 0"),
    "rollback of unpublished": (lambda kv, a, b: after(kv, a, lambda: kv.rollback(a, 1)), "slots: expected a request whose tokens are published, got slot 0, of which 0"),
    "plan of unpublished": (lambda kv, a, b: after(kv, a, lambda: kv.plan([a], [1])), "slots: expected a request whose tokens are published"),
    "publish past it": (lambda kv, a, b: after(kv, a, lambda: kv.publish(a, 10, [1] * 10)), r"upto: expected 0..9 of slot 0"),
    "publish back": (lambda kv, a, b: after(kv, a, lambda: (kv.publish(a, 9, [1] * 9), kv.publish(a, 8))), r"upto: expected 9..9 of slot 0"),
    "too few tokens": (lambda kv, a, b: after(kv, a, lambda: kv.publish(a, 9, [1] * 8)), r"tokens: expected 9, \[9\] of each request, got 8"),
    "keys of tokens": (lambda kv, a, b: after(kv, a, lambda: kv.publish(a, 9, keys=b"k" * 64)), "keys: expected None, as slot 0 was admitted with tokens"),
    "too many tokens": (lambda kv, a, b: kv.reserve(b, 101), "ends: slot 1 would reach 101 tokens"),
    "one of several too long": (lambda kv, a, b: kv.reserve([b], [101]), "ends: slot 1 would reach 101 tokens"),
    "unknown slot": (lambda kv, a, b: kv.reserve(2, 1), "slot: expected the slot of an admitted request"),
    "no slot": (lambda kv, a, b: kv.reserve(-1, 1), "slot: expected an int >= 0, got -1"),
    "no int": (lambda kv, a, b: kv.reserve(b, 1.0), "ends: expected an int"),
    "twice": (lambda kv, a, b: kv.reserve([b, b], [1, 1]), "slots: expected distinct slots"),
    "uneven": (lambda kv, a, b: kv.reserve([b], [1, 1]), "slots, ends: expected two vectors of one length"),
    "plan of a slot that was left": (lambda kv, a, b: (kv.plan([b], [1]), kv.release(1), kv.plan([b], [1])), "slots: expected slots of admitted requests"),
    "room of an unknown slot": (lambda kv, a, b: kv.room(2), "slot: expected the slot of an admitted request"),
    "pages of rings": (lambda kv, a, b: kv.pages_of(a), "pages_of: expected a cache with append_only=True"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_would_harm_a_step_in_flight_are_refused(name):
    call, message = REFUSED[name]
    kv, a, b = in_flight()
    with pytest.raises(ValueError, match=message):
        call(kv, a, b)
    kv.check_invariants()


def test_a_request_that_ends_with_a_step_in_flight_is_cached_as_far_as_its_tokens_are_known():
    kv = small(num_pages=40)
    (a,) = admitted(kv, [1] * 8)
    for n in (8, 4):
        launched(kv, [a], [n])
        kv.advance(a, kv.num_computed[a] + n)
    kv.publish(a, 8, [1] * 8)
    kv.release(0)
    assert kv.match([1] * 9).num_tokens == 8 and kv.match([1] * 8 + [7] * 9).num_tokens == 8
    kv.check_invariants()
    kv.clear()
    assert kv.num_free_pages == 39


def test_a_boundary_whose_window_a_step_in_flight_has_passed_is_not_kept():
    """The ring has other blocks where its tail was."""
    kv = small(num_pages=60, retention="latest")
    (a,) = admitted(kv, [1] * 41)
    kv.commit(kv.plan([a], [8]), [1] * 8)
    launched(kv, [a], [20])
    kv.advance(a, 28)
    kv.release(0)
    assert kv.match([1] * 41).num_tokens == 0
    kv.check_invariants()


@pytest.mark.parametrize("options", [{}, {"append_only": True, "adopt": False, "reads": "pages"}])
def test_an_engine_may_bring_its_own_keys(options):
    kv = small(num_pages=60, retention="dense", **options)
    keys = b"".join(bytes([i]) * 32 for i in range(10))
    a = kv.admit("a", kv.match(keys=keys, num_tokens=41))
    kv.reserve(a, 41)
    if not options:
        kv.arrays(a, 0, 41)
        kv.advance(a, 41)
    kv.publish(a, 20, keys=keys[: 5 * 32])
    kv.publish(a, 41, keys=keys[5 * 32 :])
    assert kv.match(keys=keys, num_tokens=41).num_tokens == 40
    b = kv.admit("b", kv.match(keys=keys[: 9 * 32], num_tokens=60))
    assert kv.num_computed[b] == 36
    for call, message in (
        (lambda: kv.publish(a, 42, [1]), "upto: expected"),
        (lambda: kv.publish(a, 41, keys=b"k" * 32), "keys: expected at most 0"),
        (lambda: kv.plan([a], [1]), "expected a (request admitted with|cache with)"),
        (lambda: small(debug=True).match(keys=keys, num_tokens=41), "keys: expected None beside tokens, or with ev"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    kv.release("a"), kv.release("b")
    kv.clear()
    assert kv.num_free_pages == 59


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
    new, plan = kv.reserve(slot, 56), kv.arrays(slot, 36, 56)
    tables = linear_table(kv, 0, plan)[0]
    assert tables[:11].tolist() == cached.tolist() and (tables[11:14] > 0).all()
    assert plan.replay_rows.tolist() == [*range(8)]
    assert (linear_table(kv, 1, plan)[0, 9:14] > 0).all()
    assert new[0] == tables[11:14].tolist() and len(new[1]) == 5


def test_states_of_one_token_leave_no_room():
    kv = KVCache(
        groups(GroupSpec("state", "state", 1, 64)), num_pages=9, max_requests=1, max_model_len=9
    )
    slot = kv.admit("a", kv.match([1, 2, 3]))
    kv.reserve(slot, 1)
    kv.arrays([slot], [0], [1])
    kv.advance(slot, 1)
    assert kv.room(slot) == 1
