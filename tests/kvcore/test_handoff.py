"""What the two caches of a hand-off keep, and what they refuse. Rows are checked in `tests.models.transfer`."""

import numpy as np
import pytest

from quire.kvcore import KVCache, OutOfPages, snapshot
from quire.kvcore.handoff import incoming, outgoing
from tests.support.kvcore.engine import groups

PROMPT = list(range(50))


def cache(num_pages=60, **options):
    return KVCache(groups((4, None), (4, 10)), num_pages=num_pages, max_requests=2, max_model_len=200, **options)  # fmt: skip


def computed(kv, prompt=PROMPT):
    slot = kv.admit("r", kv.match(prompt))
    kv.commit(kv.plan([slot], [len(prompt)]), prompt)
    kv.release("r")
    return kv


def test_a_sender_holds_what_it_named():
    kv = computed(cache())
    assert outgoing(kv, kv.match([9] * 50)) is None
    out = outgoing(kv, kv.match(PROMPT), skip_tokens=16)
    assert (out.num_tokens, out.first, out.segments.shape) == (48, 4, (8, 1))
    assert out.keys == kv.match(PROMPT).prompt.keys and len(out.pages) == 8 + 3
    kv.check_invariants()
    kv.evict(kv.num_evictable_pages)
    kv.check_invariants()
    assert not np.isin(out.pages, kv.pool.free_pages()).any()
    with pytest.raises(ValueError, match="reset: expected no open hand-offs, got 1"):
        kv.reset()
    out.end()
    out.end()
    kv.check_invariants()
    assert kv.num_evictable_pages + kv.num_free_pages == kv.num_pages - 1 and not kv.handoffs
    with pytest.raises(ValueError, match="skip_tokens: expected a multiple of 4, got 6"):
        outgoing(kv, kv.match(PROMPT), skip_tokens=6)
    with pytest.raises(ValueError, match="match: expected what `match` returned"):
        outgoing(kv, PROMPT)


def test_a_receiver_has_nothing_before_it_adopts_and_all_after():
    kv = cache()
    match = kv.match(PROMPT)
    made = incoming(kv, match, 48)
    assert (made.first, made.segments.shape, int((made.point > 0).sum())) == (0, (12, 1), 3)
    kv.check_invariants()
    assert kv.num_free_pages == 59 - 15 and not kv.match(PROMPT).dense_tokens
    with pytest.raises(ValueError, match="kv: expected no open hand-offs"):
        snapshot.loads(kv, snapshot.dumps(cache()))
    assert made.adopt() and kv.match(PROMPT).num_tokens == 48
    kv.check_invariants()
    with pytest.raises(ValueError, match="adopt: expected one that is open"):
        made.adopt()
    assert incoming(kv, match, 48) is None
    again = incoming(kv, kv.match([*PROMPT[:30], *[1] * 30]), 56)
    assert again.first == 7
    again.end()
    kv.check_invariants()
    assert kv.match(PROMPT).num_tokens == 48


def test_where_there_is_no_room_nothing_changes():
    kv = computed(cache(num_pages=20), PROMPT[::-1])
    before = kv.stats()
    found = incoming(kv, kv.match([7] * 100), 80)
    assert isinstance(found, OutOfPages) and (found.needed, found.group) == (23, "g0")
    assert found.per_group == {"g0": 20, "g1": 3}
    assert kv.stats() == before
    kv.check_invariants()


@pytest.mark.parametrize(
    ("num_tokens", "message"),
    [(0, "expected 1..48 of this prompt, got 0"), (52, "expected 1..48"), (6, "a multiple of 4, got 6"), (-4, "int >= 0"), ("4", "int >= 0")],
)  # fmt: skip
def test_lengths_that_are_none_are_named(num_tokens, message):
    kv = cache()
    with pytest.raises(ValueError, match=f"num_tokens: .*{message}"):
        incoming(kv, kv.match(PROMPT), num_tokens)
    off = cache(enable_caching=False)
    with pytest.raises(ValueError, match="kv: expected a cache with enable_caching"):
        incoming(off, off.match(PROMPT), 48)
