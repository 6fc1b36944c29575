"""Jobs: pages to copy, locks while they are open, entries afterwards."""

import pytest

from quire.kvcore import GroupSpec, Ranked
from tests.kvcore.tier.setup import HYBRID, PAGE, PROMPT, Setup


def test_blocks_that_points_of_a_job_share_are_copied_once():
    """Windows of 36 tokens; points every 32."""
    specs = [HYBRID[0], GroupSpec("local", "window", 4, PAGE, 36)]
    s = Setup(specs, pages=200, retention=32)
    s.serve(PROMPT)
    [job] = s.tiers.stores(1 << 30)
    points = job.point_pages
    assert job.depths == [4, 8, 12] and set(points[0]) & set(points[1]) - {0}
    assert len(job.sources) == 12 + len(set(points.ravel().tolist()) - {0})
    s.end(job)
    s.forget()
    assert s.load([*PROMPT[:70], 1]).num_saved_tokens == s.serve([*PROMPT[:70], 1]) == 64


def test_a_policy_that_raises_leaves_everything_as_it_was():
    class Moody(Ranked):
        fails = False

        def rank(self, entry):
            return entry.last_used

        def pop(self):
            if self.fails:
                raise KeyError("mood")
            return super().pop()

    policy = Moody()
    s = Setup(policy_of_host=policy, host=30)
    for i in range(4):
        s.serve([i, *PROMPT[:60]])
        policy.fails = i == 3
        if policy.fails:
            with pytest.raises(KeyError):
                s.store()
        else:
            s.store()
    s.check()
    policy.fails = False
    s.e.kv.match([3, *PROMPT[:60], 1])
    s.serve([3, *PROMPT[:60], 1])  # what was looked at is due again once it is used
    assert s.store()
