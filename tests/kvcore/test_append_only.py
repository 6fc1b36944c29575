"""`AppendOnlyCache` under random traffic: a device that writes before it reads and tables that only grow; every row that a query sees is checked."""

from __future__ import annotations

import random
from collections import Counter
from hashlib import sha256

import numpy as np
import pytest

from quire.kvcore import LRU, AppendOnlyCache, GroupSpec, OutOfPages

MIXES = {
    "dense": ((8, None),),
    "hybrid": ((8, None), (8, 20), (8, 33)),
    "block sizes": ((16, None), (8, 20), (4, 9)),
    "windows": ((8, 20), (16, 40)),
}
LONGEST = 160


def groups(mix: str) -> list[GroupSpec]:
    return [
        GroupSpec(str(i), "window" if window else "dense", size, 1, window)
        for i, (size, window) in enumerate(MIXES[mix])
    ]


def keys_of(tokens: list[int], alignment: int) -> bytes:
    keys, key = b"", b""
    for end in range(alignment, len(tokens) + 1, alignment):
        key = sha256(key + repr(tokens[end - alignment : end]).encode()).digest()
        keys += key
    return keys


def row_of(tokens: list[int], position: int, group: int) -> int:
    data = repr((tokens[: position + 1], group)).encode()
    return int.from_bytes(sha256(data).digest()[:7], "little") | 1


class Request:
    def __init__(self, tables, tokens):
        self.tables, self.tokens, self.done = tables, tokens, tables.cached
        self.own = [list(t) for t in tables.tables]  # a worker's: appended to, never rewritten


class Engine:
    def __init__(self, mix, seed, num_pages, **options):
        self.rng, self.specs = random.Random(seed), groups(mix)
        self.cache = AppendOnlyCache(
            self.specs, num_pages=num_pages, max_model_len=LONGEST, **options
        )
        self.memory = np.zeros((num_pages, 16), dtype=np.int64)
        self.running: list[Request] = []
        self.texts: list[list[int]] = [[]]
        self.counts: Counter[str] = Counter()

    def admit(self, batch):
        rng, cache = self.rng, self.cache
        known = rng.choice([*self.texts[-6:], *(r.tokens for r in self.running)])
        tokens = known[: rng.choice((0, len(known), rng.randint(0, len(known))))]
        tokens = (tokens + rng.choices((0, 1), k=rng.choice((1, 9, 40))))[: LONGEST - 20]
        keys = keys_of(tokens, cache.alignment)
        hit, _ = cache.find(keys, len(tokens) - 1)
        n = min(len(tokens) - hit, rng.choice((5, 30, 200)))
        free = cache.num_available
        tables = cache.admit(keys, len(tokens), hit, hit + n, rng.choice((0, 0, 4)))
        if isinstance(tables, OutOfPages):
            assert tables.needed > tables.free + tables.evictable
            assert cache.num_available == free
            self.counts["refused"] += 1
            return
        assert tables.cached == hit
        self.counts["hits"] += hit > 0
        request = Request(tables, tokens)
        self.running.append(request)
        batch.append((request, n, 0))
        self.publish(request, request.done + n)  # others of this step may hit it

    def publish(self, request, until):
        a, tables = self.cache.alignment, request.tables
        first = tables.cached // a
        self.cache.publish(tables, keys_of(request.tokens[:until], a)[32 * first :], first)

    def step(self):
        rng, batch = self.rng, []
        for request in self.running[:]:
            if request not in self.running:
                continue
            left = len(request.tokens) - request.done
            drafts = 0 if left > 1 else rng.choice((0, 0, 1, 5))
            n = min(left + drafts, rng.choice((1, 7, 64)) if left > 1 else 9)
            drafts = min(drafts, n - 1) if left == 1 else 0
            self.cache.let_go(request.tables, request.done, rng.random() < 0.9)
            while (given := self.give(request, request.done + n)) is None:
                self.counts["preempted"] += 1
                victim = self.running[-1]
                batch = [part for part in batch if part[0] is not victim]
                self.end(victim)
                if victim is request:
                    break
            if given is not None:
                batch.append((request, n, drafts))
        scheduled = [part for part in batch if part[0] in self.running]
        for request, n, drafts in scheduled:
            self.publish(request, request.done + n - drafts)
        for _ in range(rng.choice((0, 1, 3)) if len(self.running) < 8 else 0):
            self.admit(scheduled)
        self.device(scheduled)
        for request, n, drafts in scheduled:
            accepted = rng.randint(0, drafts)
            request.done += n - drafts + accepted
            request.tokens += [7] * accepted
            if request.done == len(request.tokens):
                request.tokens.append(rng.randrange(2))
            if len(request.tokens) > LONGEST - 10 or rng.random() < 0.06:
                self.texts.append(request.tokens)
                self.end(request, rng.random() < 0.8)

    def give(self, request, end):
        given = self.cache.reserve(request.tables, end)
        if isinstance(given, OutOfPages):
            return None
        for own, new in zip(request.own, given, strict=True):
            own += new
        return given

    def end(self, request, keep=True):
        self.cache.release(request.tables, keep)
        self.running.remove(request)

    def device(self, batch):
        """All writes of a step, then all reads; drafts are tokens like others, and are gone after it."""
        texts, written = [], {}
        for request, n, drafts in batch:
            text = request.tokens[: request.done + n - drafts] + [7] * drafts
            texts.append(text)
            for g, spec in enumerate(self.specs):
                for p in range(request.done, request.done + n):
                    page, row = request.own[g][p // spec.block_size], p % spec.block_size
                    content = row_of(text, p, g)
                    assert page and written.setdefault((page, row), content) == content
                    self.memory[page, row] = content
        for (request, n, _), text in zip(batch, texts, strict=True):
            for g, spec in enumerate(self.specs):
                low = (
                    0
                    if spec.sliding_window is None
                    else max(0, request.done - spec.sliding_window + 1)
                )
                for p in range(low, request.done + n):
                    page = request.own[g][p // spec.block_size]
                    assert self.memory[page, p % spec.block_size] == row_of(text, p, g)
                    self.counts["rows"] += 1


@pytest.mark.parametrize(
    ("mix", "retention"), [("hybrid", "latest"), ("block sizes", "dense"), ("windows", "latest")]
)
def test_every_row_that_a_query_sees_is_right(mix, retention):
    counts: Counter[str] = Counter()
    for seed, num_pages in enumerate((32 * len(MIXES[mix]), 150, 400)):
        e = Engine(mix, seed, num_pages, retention=retention)
        for i in range(40):
            e.step()
            if i % 8 == 0:
                e.cache.check_invariants()
        for request in e.running[:]:
            e.end(request)
        e.cache.check_invariants()
        assert e.cache.num_available == num_pages - 1  # nothing is held any more
        e.cache.clear()
        assert e.cache.pool.num_free == num_pages - 1
        counts += e.counts
    assert counts["rows"] > 5_000 and counts["hits"] > 10
    assert counts["preempted"] > 0 and counts["refused"] > 0


def full(num_pages=20, **options):
    return AppendOnlyCache(groups("hybrid"), num_pages=num_pages, max_model_len=LONGEST, **options)


def test_pages_of_rejected_tokens_stay_with_their_request():
    cache = full()
    tables = cache.admit(b"", 10, 0, 10)
    more = cache.reserve(tables, 30)
    assert [len(pages) for pages in more] == [2, 2, 2]
    assert cache.reserve(tables, 20) == [
        [],
        [],
        [],
    ]  # after a step of which ten tokens were rejected
    assert tables.room == 32


def test_without_caching_windows_keep_nothing_for_others():
    cache = full(100, enable_caching=False)
    tables = cache.admit(b"", 80, 0, 80)
    cache.publish(tables, keys_of(list(range(80)), 8), 0)
    assert cache.find(keys_of(list(range(80)), 8), 79) == (0, 0) and tables.cached == 0
    cache.let_go(tables, 80)
    assert tables.num_gone == [0, 7, 6]
    cache.check_invariants()


def test_what_lacks_is_said_and_nothing_changes():
    cache = full()
    tables = cache.admit(b"", 40, 0, 40)
    assert cache.pool.num_free == 4
    lacks = cache.reserve(tables, 60)
    assert isinstance(lacks, OutOfPages)
    assert (lacks.needed, lacks.free, lacks.evictable, lacks.group) == (9, 4, 0, "0")
    assert isinstance(cache.reserve(tables, 41, least=5), OutOfPages)
    assert cache.pool.num_free == 4 and len(tables.tables[0]) == 5
    cache.check_invariants()


def test_a_policy_that_raises_ends_the_admission_alone():
    class Raises(LRU):
        def asked(self, keys, hit, kept=()):
            if hit:
                raise RuntimeError("no")

    cache, tokens = full(100, policy=Raises()), list(range(40))
    keys = keys_of(tokens, cache.alignment)
    tables = cache.admit(keys, 40, 0, 40)
    cache.publish(tables, keys, 0)
    before = cache.num_available
    with pytest.raises(RuntimeError, match="no"):
        cache.admit(keys, 40, 32, 40)
    assert cache.num_available == before and len(cache.requests) == 1
    cache.check_invariants()


def test_hits_end_where_a_resume_point_is():
    cache, tokens = full(100, retention="latest"), list(range(50))
    keys = keys_of(tokens, cache.alignment)
    tables = cache.admit(keys, 50, 0, 50)
    cache.publish(tables, keys, 0)
    assert cache.find(keys, 49) == (48, 48)
    assert cache.find(keys, 47) == (0, 48)
    cache.let_go(tables, 50)
    assert tables.tables[1][:2] == [0, 0] and all(tables.tables[0])
    cache.release(tables)
    again = cache.admit(keys, 50, 49, 50)
    assert again.cached == 48 and again.tables[1][:3] == [0, 0, 0] and all(again.tables[1][3:])


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (GroupSpec("s", "state", 8, 1), "state"),
        (GroupSpec("s", "dense", 8, 1, pages_per_block=2), "pages_per_block=2"),
        (GroupSpec("s", "dense", 8, 1, lookahead=1), "lookahead=1"),
    ],
)
def test_other_groups_are_refused(spec, named):
    with pytest.raises(ValueError, match=f"groups: expected dense and window groups.*{named}"):
        AppendOnlyCache([spec], num_pages=9, max_model_len=LONGEST)
