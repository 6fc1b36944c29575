"""Pages of tiers that are smaller than those of the pool: what entries take there, and copies of parts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from quire.kvcore import LRU, GroupSpec, KVCache
from quire.kvcore.tier import Job, Tiers, TierSpec
from tests.support.kvcore.engine import Engine
from tests.support.kvcore.tiers import Contents, Memory

# As of a model whose window pages leave a sixth of the pool's unused, and whose last group most of it.
GROUPS = [
    GroupSpec("full", "dense", 8, 6000),
    GroupSpec("local", "window", 4, 6000, 10),
    GroupSpec("state", "state", 8, 6000, pages_per_block=2),
]
PARTS = [6, 5, 3]
PROMPT = list(range(100))
SEGMENT = 6  # pages of a tier for 8 tokens: one block
POINT = 3 * 5 + 2 * 3  # three blocks have the 9 tokens before; two pages of state
SPEC = TierSpec(10, 1e9)


class Setup:
    def __init__(self, host=2000, pages=60, specs=GROUPS, parts=PARTS):
        self.e = Engine(specs, num_pages=pages, max_requests=4, max_model_len=300, retention=32, policy=LRU())  # fmt: skip
        self.tiers = Tiers(
            self.e.kv, host=TierSpec(host, 1e9, LRU()), prefill_tokens_per_second=1.0,
            page_bytes=1000, parts=parts, watermark=60,
        )  # fmt: skip
        self.memory, self.ids = Memory(self.e, self.tiers), 0

    def serve(self, tokens):
        self.ids += 1
        return self.e.run(self.ids, list(tokens), [], 8, b"")

    def store(self):
        jobs = []
        while some := self.tiers.stores(1 << 30):
            for job in some:
                self.memory.copy(job)
                self.tiers.done(job)
            jobs += some
        self.check()
        return jobs

    def load(self, tokens) -> Job:
        job = self.tiers.load(self.tiers.match(tokens))
        assert isinstance(job, Job)
        return job

    def check(self):
        self.e.check()
        self.memory.check()
        self.memory.poison_free_pages()


def taken(tier) -> int:
    return tier.index.pool.num_pages - 1 - tier.index.pool.num_free


def test_entries_take_the_bytes_of_their_groups():
    s = Setup()
    s.serve(PROMPT)
    jobs = s.store()
    index = s.tiers.host.index
    depths = [d for r in index.runs() for d in r.points]
    blocks = {2 * d - i for d in depths for i in (1, 2, 3)}  # neighbours share some
    assert index.num_segments and len(depths) > 1
    counts = [6 * index.num_segments, 5 * len(blocks), 2 * 3 * len(depths)]
    assert s.tiers.pages_by_group() == counts and taken(s.tiers.host) == sum(counts)
    assert all(job.num_bytes == 1000 * sum(map(len, job.copies)) for job in jobs)
    s.e.kv.evict(60)
    match = s.tiers.match([*PROMPT, 1])
    job = s.load([*PROMPT, 1])
    segments = match.num_tokens // 8
    assert job.num_pages == SEGMENT * segments + POINT
    assert job.num_bytes == match.num_bytes == 1000 * job.num_pages
    # Pages of the pool: one of each block, two of a state.
    assert sum(len({*c.targets.tolist()}) for c in job.copies) == segments + 3 + 2
    s.memory.copy(job)
    s.tiers.done(job)
    s.check()
    assert s.serve([*PROMPT, 1]).num_tokens == match.num_tokens > 0


def test_parts_of_a_page_are_copied_in_their_order():
    s = Setup()
    s.serve(PROMPT)
    s.store()
    s.e.kv.evict(60)
    job = s.load([*PROMPT, 1])
    for c in job.copies:
        n = PARTS[c.group]
        assert c.parts.dtype == np.int32 and Counter(c.parts.tolist()) == {i: len(c) // n for i in range(n)}  # fmt: skip
    rows = [tuple(x) for c in job.copies for x in zip(c.sources, c.targets, c.parts, strict=True)]
    cut = [tuple(x) for p in job.cut(7) for c in p for x in zip(c.sources, c.targets, c.parts, strict=True)]  # fmt: skip
    assert cut == rows
    s.tiers.cancel(job)
    s.check()


def test_a_resume_point_between_two_others():
    """Its blocks are parts of pages of both."""
    specs = [GROUPS[0], GroupSpec("local", "window", 4, 6000, 36)]
    s = Setup(specs=specs, parts=[2, 3], pages=80)
    s.serve(PROMPT)
    s.store()
    s.e.kv.evict(80)
    depths = [d for r in s.tiers.host.index.runs() for d in r.points]
    assert 6 not in depths and {4, 8} <= {*depths}
    prompt = [*PROMPT[:48], 7, 8]
    job = s.load(prompt)
    assert job.num_tokens == 48 and job.num_pages == 2 * 6 + 3 * 9
    s.memory.copy(job)
    s.tiers.done(job)
    s.check()
    assert s.serve(prompt).num_tokens == 48


def test_out_of_pages_counts_pages_of_the_pool():
    s = Setup(pages=50)
    s.serve(PROMPT)
    s.store()
    s.e.kv.evict(60)
    other = s.e.admit("other", list(range(1000, 1300 - 8)))
    assert not other.num_tokens
    s.e.step({"other": 280})
    lack = s.tiers.load(s.tiers.match([*PROMPT, 1]))
    assert not isinstance(lack, Job) and lack.needed == sum(lack.per_group.values()) == 12 + 3 + 2
    assert lack.per_group == {"full": 12, "local": 3, "state": 2}
    s.check()


def test_one_part_of_a_store_that_fails_takes_its_point_alone():
    s = Setup()
    s.serve(PROMPT)
    (job, *others) = s.tiers.stores(1 << 30)
    for other in others:
        s.tiers.cancel(other)
    assert job.parts.depths == [4, 8, 12]
    states = next(c for c in job.copies if c.group == 2)
    s.memory.copy(job)
    s.tiers.done(job, states.targets[-1:])
    host = s.tiers.host
    assert {d for r in host.index.runs() for d in r.points} == {4, 8}
    assert host.index.num_segments == len(job.parts.segments) == 12
    assert taken(host) == SEGMENT * 12 + 2 * POINT
    s.check()


def test_a_page_of_the_pool_that_fails_takes_what_all_its_parts_belong_to():
    s = Setup()
    s.serve(PROMPT)
    s.store()
    s.e.kv.evict(60)
    before = Contents(s.tiers.host.index)
    job = s.load([*PROMPT, 1])
    bad = int(job.parts.segments[7, 0])
    s.memory.copy(job)
    s.tiers.done(job, [bad])
    s.check()
    assert s.e.kv.match([*PROMPT, 1]).dense_tokens == 56
    after = Contents(s.tiers.host.index)
    assert len(after.segments) == 7 and after.points.keys() < before.points.keys()
    assert taken(s.tiers.host) == SEGMENT * 7 + POINT  # that at 32
    with pytest.raises(ValueError, match="failed: expected pages that are targets"):
        job = s.load([*PROMPT, 1])
        s.tiers.done(job, [bad, 10_000])


def test_parts_that_are_none():
    kv = KVCache(GROUPS, num_pages=60, max_requests=4, max_model_len=300)
    for parts, message in [
        ([1, 1], r"parts: expected 3 ints, one a group, got \[1, 1\]"),
        (6, "parts: expected 3 ints, one a group, got 6"),
        ([1, 0, 1], r"parts\[1\]: expected an int >= 1, got 0"),
        ([1, 1.5, 1], r"parts\[1\]: expected an int >= 1, got 1.5"),
        ([1, 1, 2**16], r"parts\[2\]: expected an int <= 32768"),
    ]:
        with pytest.raises(ValueError, match=message):
            Tiers(kv, host=SPEC, prefill_tokens_per_second=1.0, parts=parts)
    assert kv.tiers is None
