"""Forks: requests that go on as another one does, case by case; `shadow` forks in random traffic."""

from __future__ import annotations

import pytest

from quire.kvcore import Fork, GroupSpec, OutOfPages
from tests.support.kvcore.engine import Engine, groups

MIXES = {
    "dense": ((16, None),),
    "hybrid": ((32, None), (16, 64), (16, 64)),
    "state": ((16, None), GroupSpec("s", "state", 16, 4096, pages_per_block=2)),
    "wide drafter": ((32, None), GroupSpec("d", "window", 16, 4096, 40, lookahead=2)),
    "drafter": ((16, None), GroupSpec("d", "window", 16, 4096, 40, lookahead=2)),
}


def engine(mix: str, **options) -> Engine:
    return Engine(
        groups(*MIXES[mix]), **({"num_pages": 400, "max_requests": 8, "max_model_len": 600} | options)
    )  # fmt: skip


def fork(e: Engine, rid, new):
    made = e.kv.fork(e.slots[rid], new)
    assert isinstance(made, Fork)
    e._copy(made.copies)
    e.slots[new], e.tokens[new], e.salts[new] = made.slot, e.tokens[rid][:], e.salts[rid]
    e.replays[new] = e.replays[rid]
    return made


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mix", MIXES)
def test_beams_part_and_end_in_any_order(mix, caching):
    """Four beams of one prompt write other tokens from the fork on; every row of each stays its own."""
    e = engine(mix, enable_caching=caching, max_draft_tokens=2)
    e.admit("a", list(range(75)))
    e.finish_prompt("a")
    e.decode("a", [1, 2, 3])
    for beam in "bcd":
        fork(e, "a", beam)
        e.check()
    for i in range(40):
        for beam in "abcd":
            e.tokens[beam].append(1000 * i + ord(beam))
        e.step(dict.fromkeys("abcd", 1))
        e.check()
    for beam in "cadb":
        e.release(beam)
        e.check()
    e.kv.clear()
    assert e.kv.num_free_pages == e.kv.num_pages - 1


def test_a_fork_copies_the_open_blocks_alone():
    e = engine("hybrid")
    e.admit("a", list(range(160 + 17)))
    e.finish_prompt("a")
    free = e.kv.num_free_pages
    made = fork(e, "a", "b")
    assert (
        len(made.copies) == 3
    )  # 17 tokens past the last segment: a dense block, one of each window
    assert e.kv.num_free_pages == free - 3
    fork(e, "b", "c")
    assert e.kv.num_free_pages == free - 6
    assert e.kv.stats()["forks"] == 2 and e.kv.stats()["requests"] == 1


def test_a_fork_at_a_boundary_copies_nothing():
    e = engine("hybrid")
    e.admit("a", list(range(160)))
    e.finish_prompt("a")
    assert len(fork(e, "a", "b").copies) == 0
    e.decode("b", list(range(40)))
    e.decode("a", list(range(40, 80)))
    e.check()


def test_both_answers_are_found_again():
    e = engine("hybrid")
    prompt = list(range(75))
    e.admit("a", prompt)
    e.finish_prompt("a")
    fork(e, "a", "b")
    for beam, token in (("a", 7), ("b", 8)):
        e.decode(beam, [token] * 60)
        e.release(beam)
    for token in (7, 8):
        assert e.kv.match([*prompt, *[token] * 61]).num_tokens == 128
    e.check()


def test_a_fork_that_does_not_fit_changes_nothing():
    e = engine("dense", num_pages=8)
    e.admit("a", list(range(90)))
    e.finish_prompt("a", chunk=90)  # five whole segments, and an open block
    e.admit("z", [1])
    e.finish_prompt("z")
    answer = e.kv.fork(e.slots["a"], "b")
    assert isinstance(answer, OutOfPages)
    assert (answer.needed, answer.free, answer.evictable, answer.group) == (1, 0, 0, "g0")
    e.check()
    e.release("z")
    fork(e, "a", "b")
    e.check()


def test_a_fork_evicts_what_no_request_needs():
    e = engine("dense", num_pages=9)
    e.run("old", [5] * 33)
    e.admit("a", list(range(90)))
    e.finish_prompt("a", chunk=90)
    assert e.kv.num_free_pages == 0 < e.kv.num_evictable_pages
    fork(e, "a", "b")
    assert e.kv.stats()["evicted_segments"] == 1
    e.check()


def test_a_fork_in_the_middle_of_a_prompt():
    e = engine("state")
    e.admit("a", list(range(100)))
    e.step({"a": 37})
    fork(e, "a", "b")
    e.finish_prompt("a")
    e.finish_prompt("b")
    e.decode("b", [3] * 30)
    e.decode("a", [4] * 30)
    e.check()


def test_rows_that_wait_for_a_token_that_is_taken_back_are_copied():
    """Row 15 of the drafter, the last one of a full block, waits for token 17: each of the two writes its own."""
    e = engine("wide drafter", max_draft_tokens=4)
    e.admit("a", [1, 2, 3])
    e.finish_prompt("a")
    e.decode("a", [100 + i for i in range(18)])
    fork(e, "a", "b")
    for rid, token in (("a", 7), ("b", 8)):
        assert e.kv.lowest_rollback(e.slots[rid]) == 17
        e.kv.rollback(e.slots[rid], 4)
        del e.tokens[rid][17:]
        e.decode(rid, [token] * 5)
    e.check()


def test_a_fork_is_refused_by_name():
    e = engine("dense", max_requests=2)
    e.admit("a", [1, 2])
    with pytest.raises(ValueError, match="slot: expected the slot of an admitted request, got 1"):
        e.kv.fork(1, "b")
    with pytest.raises(ValueError, match="request_id: expected a new id, got 'a'"):
        e.kv.fork(e.slots["a"], "a")
    fork(e, "a", "b")
    with pytest.raises(ValueError, match="request_id: all max_requests = 2 slots are taken"):
        e.kv.fork(e.slots["a"], "c")


def test_a_fork_and_a_reset_wait_for_open_steps():
    e = engine("hybrid", debug=False)
    e.admit("a", list(range(70)))
    e.finish_prompt("a")
    slot = e.slots["a"]
    step = e.kv.begin()
    step.add(slot, 40)
    with pytest.raises(ValueError, match="slot: expected a request that no step holds"):
        e.kv.fork(slot, "b")
    with pytest.raises(ValueError, match="end_requests: expected a request that no step holds"):
        e.kv.reset(end_requests=True)
    with pytest.raises(ValueError, match="withhold: expected no step that is being built"):
        e.kv.evict_pages([1], withhold=True)
    step.plan()
    step.advance()
    with pytest.raises(ValueError, match="slot: expected a request whose steps are committed"):
        e.kv.fork(slot, "b")
    step.commit([5] * 40)
    assert isinstance(e.kv.fork(slot, "b"), Fork)
    assert e.kv.reset(end_requests=True) == ["a", "b"]
    e.kv.check_invariants()
