"""Steps by `plan` and `commit`, and by `reserve`, `arrays`, `advance` and `publish`."""

import pytest

from quire.kvcore import GroupSpec, KVCache, OutOfPages, linear_table, paged_rows
from tests.kvcore.engine import Runner, groups
from tests.kvcore.expected import contents

STATE = GroupSpec("state", "state", 4, 4096)
LISTS = {"reads": "pages", "adopt": False, "append_only": True}


def small(**options) -> KVCache:
    sizes = {"num_pages": 20, "max_requests": 3, "max_model_len": 100}
    return KVCache(groups((4, None), (4, 9)), **(sizes | options))


def admitted(kv: KVCache, *prompts: list[int]) -> list[int]:
    return [kv.admit(i, kv.match(p)) for i, p in enumerate(prompts)]


# Only the newest plan of a cache can be committed.


NEWER = "plan: expected the newest plan of this cache"
CHANGES = {
    "plan": lambda kv: kv.plan([1], [1]),
    "commit": lambda kv: kv.commit(kv.plan([1], [1]), [2]),
    "admit": lambda kv: kv.admit("new", kv.match([9] * 9)),
    "release": lambda kv: kv.release("b"),
    "rollback": lambda kv: kv.rollback(1, 1),
    "evict": lambda kv: kv.evict(1),
    "evict-nothing": lambda kv: kv.evict(0),
    "clear": lambda kv: kv.clear(),
    "reserve": lambda kv: kv.reserve(1, 30),
    "arrays": lambda kv: (kv.reserve(1, 13), kv.arrays(1, 10, 13)),
    "advance": lambda kv: kv.advance(1, 10),
}
PINS = {"now": 0.0, "ttl": 1.0}  # which change the order of eviction alone
NO_CHANGES = (
    lambda kv: (kv.match([1] * 30), kv.cut([0], [9]), kv.describe(), kv.stats()),
    lambda kv: (kv.pin(kv.match([1] * 30), **PINS), kv.unpin(kv.match([1] * 30))),
    lambda kv: (kv.pin(kv.match([1] * 30), **PINS), kv.expire_pins(2.0)),
)
FAIL = (
    lambda kv: kv.plan([0], [0]),
    lambda kv: kv.release("unknown"),
    lambda kv: kv.rollback(1, 99),
    lambda kv: kv.admit("a", kv.match([1])),
)


def planned(pages: int):
    """A cache of `pages`, and the plan of 20 tokens 3 of its request 0."""
    e = Runner((8, None), (4, 10), STATE, num_pages=pages, max_model_len=200, max_draft_tokens=2)
    e.run("old", [1] * 29, [5])
    e.admit("a", [3] * 20)
    e.admit("b", [2] * 9)
    e.finish_prompt("b")
    e.decode("b", [2])
    return e.kv, e.kv.plan([0], [20])


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_a_page_or_a_request_voids_a_plan(name):
    kv, plan = planned(120)
    CHANGES[name](kv)
    before = contents(kv)
    with pytest.raises(ValueError, match=NEWER):
        kv.commit(plan, [3] * 20)
    assert contents(kv) == before


def test_what_changes_nothing_and_what_fails_leaves_a_plan():
    kv, plan = planned(30)
    for call in NO_CHANGES:
        call(kv)
    for call in FAIL:
        with pytest.raises(ValueError, match="expected"):
            call(kv)
    assert isinstance(kv.plan([0], [180]), OutOfPages)
    with pytest.raises(ValueError, match="input_ids: expected 20 tokens"):
        kv.commit(plan, [3])
    kv.commit(plan, [3] * 20)
    assert kv.num_computed[0] == 20


def test_keys_that_are_published_void_a_plan_of_another_request():
    kv = small(num_pages=60)
    keyed = kv.admit("keyed", kv.match(keys=b"", num_tokens=9))
    other = kv.admit("other", kv.match([1] * 9))
    kv.reserve(keyed, 8)
    kv.arrays(keyed, 0, 8)
    kv.advance(keyed, 8)
    plan = kv.plan([other], [9])
    kv.publish(keyed, 8, keys=b"k" * 64)
    with pytest.raises(ValueError, match=NEWER):
        kv.commit(plan, [1] * 9)


# Tables of a step.


def test_tables_of_a_step_are_refused_where_pages_do_not_hold_its_rows():
    for reads in ("step", "pages"):
        kv = small(num_pages=40, reads=reads)
        (a,) = admitted(kv, [1] * 60)
        plan = kv.plan([a], [40])
        assert linear_table(kv, 0, plan)[0].tolist() == (plan.slot_mapping[0, ::4] // 4).tolist()
        if reads == "pages":
            assert linear_table(kv, 1, plan)[0].all()
        else:
            with pytest.raises(ValueError, match="group 'g1' all have pages, got one with 32"):
                linear_table(kv, 1, plan)
        kv.commit(plan, [1] * 40)
        live = 2 if reads == "step" else 3  # what the step alone needed is free again
        assert kv.num_free_pages == 39 - 10 - live
        with pytest.raises(ValueError, match="slots: expected a plan that is not committed yet"):
            paged_rows(kv, 0, plan)
        plan = kv.plan([a], [1])  # one token a request: nothing is missing
        assert (linear_table(kv, 1, plan)[0, 8:] > 0).all()


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


def test_only_survivors_get_pages():
    e = Runner((32, None), (16, 64), (16, 64), max_model_len=9000, retention="latest")
    e.admit("a", range(9000))
    written = (e.step("a", 8192).slot_mapping >= 0).sum(axis=1).tolist()
    assert written == [8192, 64, 64]  # of windows the last 63 tokens, in whole blocks
    assert e.kv.stats()["pages_in_use"] == 8192 // 32 + 2 * 4


FAR = (GroupSpec("dense", "dense", 512, 4096), (16, 32))  # a ring has room for 34 blocks


@pytest.mark.parametrize("specs", [((256, None), (64, 128)), FAR], ids=["v4", "far-boundaries"])
def test_a_ring_holds_the_window_and_the_tail_of_the_last_boundary(specs):
    e = Runner(*specs, max_model_len=4096)
    e.admit("a", range(e.kv.alignment))
    e.step("a")
    held = []
    for t in range(600):
        e.decode("a", [t])
        held.append(int((e.kv.table(1)[0] != 0).sum()))
    assert max(held) == 5 and min(held) >= 2, "2 blocks of the tail, and 3 of the window"


# What a request cannot get.


def test_out_of_pages_names_what_each_group_needs():
    e = Runner((32, None), (16, 64), (16, 64), num_pages=40, max_model_len=4096)
    e.admit("a", range(400))
    e.step("a", 200)
    e.admit("b", range(1000, 3000))
    out = e.step("b")
    # Dense blocks; of each window the next query's rows and the tail of boundary 1536.
    assert out.needed == 63 + 2 * (5 + 4) and out.free == e.kv.num_free_pages and out.evictable == 0
    assert out.group == "g0" and out.per_group == {"g0": 63, "g1": 9, "g2": 9}
    assert "81" in str(out) and "g0" in str(out)


def test_pages_that_must_stay_available_refuse_a_request_and_change_nothing():
    kv = small(num_pages=30)
    (a,) = admitted(kv, [1] * 21)
    kv.commit(kv.plan([a], [21]), [1] * 21)
    kv.release(0)
    match = kv.match([1] * 21)
    every = kv.num_free_pages + kv.num_evictable_pages
    before = contents(kv)
    out = kv.admit("b", match, least=every)  # the hit needs some of these
    assert isinstance(out, OutOfPages) and out.needed == every > out.free + out.evictable
    assert contents(kv) == before
    most = out.free + out.evictable
    assert isinstance(kv.admit("b", match, least=most + 1), OutOfPages)
    slot = kv.admit("b", match, least=most)
    assert kv.num_free_pages + kv.num_evictable_pages == most
    assert isinstance(kv.reserve(slot, 22, least=most + 1), OutOfPages)
    assert isinstance(kv.reserve(slot, 20, least=most + 1), OutOfPages)  # which needs no page
    assert kv.reserve(slot, 22, least=most) != [[], []]
    kv.check_invariants()


def test_several_requests_get_all_that_they_ask_for_or_nothing():
    kv = small(num_pages=40, **LISTS)
    a, b = admitted(kv, [1] * 10, [2] * 10)
    kv.reserve([a, b], [1, 1])
    given = kv.reserve([a, b], [4, 12])
    assert [[len(x) for x in pages] for pages in given] == [[0, 0], [2, 2]]
    free = kv.num_free_pages
    assert isinstance(kv.reserve([a, b], [40, 60]), OutOfPages)  # each alone would fit
    assert kv.num_free_pages == free and len(kv.pages_of(a)[0]) == 1
    assert not len(kv.advance([a, b], [4, 12], [4, 12]))
    kv.check_invariants()


def test_a_table_of_long_blocks_gets_no_page_that_its_tokens_do_not_need():
    kv = KVCache(
        groups((4, None), (16, None)), num_pages=40, max_requests=3, max_model_len=100, **LISTS
    )
    (a,) = admitted(kv, [1] * 10)
    for end, pages in (5, [2, 1]), (9, [1, 0]), (17, [2, 1]), (32, [3, 0]):
        (given,) = kv.reserve([a], [end])
        assert [len(x) for x in given] == pages


def test_one_wrong_count_of_accepted_tokens_refuses_a_step_of_two():
    kv = small(num_pages=40, max_draft_tokens=2)
    a, b = admitted(kv, [1] * 10, [2] * 10)
    kv.commit(kv.plan([a, b], [10, 10]), [1] * 10 + [2] * 10)
    plan = kv.plan([a, b], [3, 3])
    for accepted in ([3, 0], [4, 1]):
        with pytest.raises(ValueError, match=r"accepted: expected between \[1, 1\] and \[3, 3\]"):
            kv.commit(plan, [1] * 3 + [2] * 3, accepted)
    kv.commit(plan, [1] * 3 + [2] * 3, [3, 1])
    assert kv.num_computed[[a, b]].tolist() == [13, 11]


# Steps in flight.


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
    more = kv.arrays([a, b], [0, 0], [13, 7])  # with the slots of a drafter within the step
    assert plan.seq_lens.tolist() == [10, 7] and more.seq_lens.tolist() == [13, 7]
    for t in (0, 1):
        where = [first[t][p // 4] * 4 + p % 4 for p in range(13)]
        assert more.slot_mapping[t, :13].tolist() == where
        assert plan.slot_mapping[t, :10].tolist() == where[:10]
        assert plan.slot_mapping[t, 10:].tolist() == more.slot_mapping[t, 13:].tolist()
    assert (plan.state_pages[2] > 0).all() and plan.copies.tolist() == more.copies.tolist()
    free = kv.num_free_pages
    kv.advance([a, b], [10, 7])
    # Block 3 of two tables, of tokens that did not come, and two snapshots of no boundary.
    assert kv.num_free_pages == free + 4
    kv.publish([a, b], [10, 7], [1] * 10 + [2] * 7)
    kv.check_invariants()
    assert kv.match([1] * 30).dense_tokens == 8


def test_a_request_that_ends_with_a_step_in_flight_is_cached_as_far_as_its_tokens_are_known():
    kv = small(num_pages=40)
    (a,) = admitted(kv, [1] * 8)
    for end in (8, 12):
        kv.reserve(a, end)
        kv.arrays(a, kv.num_computed[a], end)
        kv.advance(a, end)
    kv.publish(a, 8, [1] * 8)
    kv.release(0)
    assert kv.match([1] * 9).num_tokens == 8 and kv.match([1] * 8 + [7] * 9).num_tokens == 8
    kv.clear()
    assert kv.num_free_pages == 39


def test_a_boundary_whose_window_a_step_in_flight_has_passed_is_not_kept():
    """The ring has other blocks where its tail was."""
    kv = small(num_pages=60, retention="latest")
    (a,) = admitted(kv, [1] * 41)
    kv.commit(kv.plan([a], [8]), [1] * 8)
    kv.reserve(a, 28)
    kv.arrays(a, 8, 28)
    kv.advance(a, 28)
    kv.release(0)
    assert kv.match([1] * 41).num_tokens == 0
    kv.check_invariants()


@pytest.mark.parametrize("options", [{}, LISTS], ids=["tables", "lists"])
def test_an_engine_may_bring_its_own_keys(options):
    kv = small(num_pages=60, retention="dense", **options)
    keys = b"".join(bytes([i]) * 32 for i in range(10))
    a = kv.admit("a", kv.match(keys=keys, num_tokens=41))
    kv.reserve(a, 41)
    if not options:
        kv.arrays(a, 0, 41)
        kv.advance(a, 41)
    kv.publish(a, 20, keys=keys[: 5 * 32])
    kv.check_invariants()
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


def test_lists_without_caching_keep_nothing_for_others():
    kv = KVCache(groups((8, None), (8, 20)), num_pages=100, max_requests=1, max_model_len=160, enable_caching=False, **LISTS)  # fmt: skip
    for _ in range(2):  # both in one slot
        a = kv.admit("a", kv.match(keys=b"", num_tokens=80))
        kv.reserve(a, 80)
        kv.publish(a, 80, keys=bytes(range(10)) * 32)
        kv.advance(a, 80)
        assert [pages.count(0) for pages in kv.pages_of(a)] == [0, 7]
        assert kv.room(a) == 80
        kv.check_invariants()
        kv.release("a")


def test_states_of_one_token_leave_no_room():
    kv = KVCache(groups(GroupSpec("s", "state", 1, 64)), num_pages=9, max_requests=1, max_model_len=9)  # fmt: skip
    slot = kv.admit("a", kv.match([1, 2, 3]))
    kv.reserve(slot, 1)
    kv.arrays([slot], [0], [1])
    kv.advance(slot, 1)
    assert kv.room(slot) == 1


@pytest.mark.parametrize(("enable_caching", "room"), [(True, 15), (False, 16)])
def test_room_ends_before_the_token_that_completes_a_segment(enable_caching, room):
    """Its key is due then; without caching the block has room for it."""
    kv = KVCache(groups((16, None)), num_pages=9, max_requests=1, max_model_len=64, enable_caching=enable_caching)  # fmt: skip
    slot = kv.admit("a", kv.match(range(5)))
    kv.reserve(slot, 5)
    kv.arrays([slot], [0], [5])
    kv.advance(slot, 5)
    assert kv.room(slot) == room
