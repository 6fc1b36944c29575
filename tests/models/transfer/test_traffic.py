"""Random prompts between two caches in pools that evict, whose engines do other things during hand-offs; every row that is read is checked."""

import os
import random
from collections import Counter
from contextlib import suppress

import pytest

from quire.models.transfer.memory import DictStore
from quire.models.transfer.run import Forgotten, NoRoom
from quire.models.transfer.store import DamagedObject, MissingObject
from tests.support.models.handoff import GROUPS, End, NoPages, text

STEPS = int(os.environ.get("QUIRE_HANDOFF_STEPS", "25"))
SEED = int(os.environ.get("QUIRE_HANDOFF_SEED", "0"))


class Busy:
    """A store whose calls come after something that the engine did."""

    def __init__(self, store, end, rng):
        self._store, self._end, self._rng = store, end, rng

    def __getattr__(self, name):
        def call(*args):
            chance, end = self._rng.random(), self._end
            if chance < 0.1:
                with suppress(NoPages):
                    end.serve(prompt(self._rng))
            elif chance < 0.2:
                end.kv.evict(self._rng.randrange(1 + end.kv.num_evictable_pages))
            elif chance < 0.21:
                end.kv.clear()
            elif chance < 0.23:
                end.kv.evict_pages([self._rng.randrange(1, end.kv.num_pages)])
            end.kv.check_invariants()
            return getattr(self._store, name)(*args)

        return call


def prompt(rng):
    """Some that share prefixes."""
    tokens = text(rng.randrange(3), 60)[: rng.randint(10, 60)]
    return tokens + text(10 + rng.randrange(3), rng.randrange(25))


@pytest.mark.parametrize("name", GROUPS)
def test_random_traffic(name):
    rng, store, seen = random.Random(f"{name} {SEED}"), DictStore(timeout=20), Counter()
    ends = [End(name, num_pages=90), End(name, num_pages=110)]
    for _ in range(STEPS):
        end, tokens = rng.choice(ends), prompt(rng)
        end.serve(tokens)
        other = ends[1 - ends.index(end)]
        try:
            sent = end.sent(tokens, Busy(store, end, rng))
            damaged = rng.random() < 0.1
            if damaged:
                key = rng.choice(sorted(store.objects))
                data = bytearray(store.objects[key])
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                store.objects[key] = bytes(data)
            before = other.kv.match(tokens).num_tokens
            came = other.received(tokens, Busy(store, other, rng), remove=rng.random() < 0.3)
            seen["whole"] += bool(came.num_bytes)
            assert damaged or came.num_tokens >= min(before, sent.num_tokens)
        except (Forgotten, NoRoom, DamagedObject, MissingObject) as error:
            seen[type(error).__name__] += 1
        other.serve(tokens)
    assert seen["whole"] > STEPS // 5 and len(seen) > 1, seen
    for end in ends:
        end.kv.clear()
        end.expect_closed()
        assert end.kv.num_free_pages == end.kv.num_pages - 1
    store.close()
