"""A copy may go in many ways: then its entry is stored again."""

import numpy as np

from quire.kvcore.tier import Job
from tests.kvcore.tier.test_tiers import DENSE, HYBRID, PAGE, PROMPT, Setup


def test_a_copy_that_a_failed_load_took_is_stored_again():
    """What could not be read is dropped, and points that share its blocks with it."""
    s = Setup(HYBRID, pages=200, host=400, watermark=200, retention=8)
    s.serve(PROMPT)
    s.store()
    index, host = s.e.kv.index, s.tiers.host.index

    def points(of):
        return {p.depth: p for run in of.runs() for p in run.points.values()}

    before = set(points(index))
    s.e.kv.evict(1)
    [gone] = before - set(points(index))
    job = s.tiers.load(s.tiers.match([*PROMPT[: gone * 8], 777]))
    assert isinstance(job, Job)
    s.memory.copy(job)
    s.tiers.done(job, failed=[int(t) for c in job.copies for t in c.targets])
    alone = points(index).keys() - points(host).keys()
    assert alone
    for _ in range(200):  # though not at once
        s.store()
    assert points(index).keys() <= points(host).keys()
    s.forget()
    longest = max(alone) * 8
    assert s.tiers.match([*PROMPT[:longest], 777]).num_tokens == longest


def test_a_wrong_page_past_what_a_store_brings_now():
    """A job locks an entry whole, though it brings a part of it: what is wrong behind the part goes too."""
    s = Setup(DENSE, pages=60, host=200)
    s.serve(PROMPT)
    [job] = s.tiers.stores(2 * PAGE)
    assert job.num_tokens == 16
    [run] = s.e.kv.index.runs()
    s.e.kv.evict_pages(np.array([run.look()[-1][0]]))
    assert job.parts.is_void
    assert s.e.kv.match([*PROMPT, 1]).num_tokens == 88
    assert s.tiers.match([*PROMPT, 1]).num_tokens == 88
    s.tiers.done(job)
    s.check()
