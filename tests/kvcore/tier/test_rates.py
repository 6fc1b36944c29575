"""Rates of links and of prefill: what they say after small work, after a slow spell, and while one lasts."""

import pytest

from quire.kvcore.tier.jobs import Job
from quire.kvcore.tier.rates import DOUBLING, Rate
from tests.kvcore.tier.test_tiers import PROMPT, Setup


def test_a_rate_becomes_what_is_measured():
    for told in (1.0, 1e3, 1e6):
        rate = Rate(told, memory=1.0)
        for _ in range(80):
            rate.measured(50, 0.05)
        assert rate.value == pytest.approx(1e3, rel=1e-3)


def test_short_remainders_say_little_of_a_long_prefill():
    """Steps of 3 tokens take little less than those of 200: what a prefill takes is that of large steps."""
    s, seconds = Setup(prefill=5000.0), lambda n: 0.02 + n / 4000
    for _ in range(30):
        s.tiers.computed(1024, seconds(1024))
    for _ in range(3000):
        s.tiers.computed(3, seconds(3))
    assert s.tiers.prefill_seconds(1024) == pytest.approx(seconds(1024), rel=0.05)
    for _ in range(30):
        s.tiers.computed(1024, 3 * seconds(1024))  # it is still measured
    assert s.tiers.prefill_seconds(1024) == pytest.approx(3 * seconds(1024), rel=0.05)


def loads(s, prompt, seconds):
    """Whether a prompt that is on the host alone is loaded; in so many seconds then."""
    s.forget()
    job = s.tiers.load(s.tiers.match([*prompt, 1]))
    if job is None:
        return False
    assert isinstance(job, Job)
    s.memory.copy(job)
    s.tiers.done(job, seconds=seconds)
    return True


@pytest.mark.parametrize("slow", [5.0, 50.0, 5000.0])
def test_a_link_that_was_slow_is_tried_again(slow):
    """Seldom while it is slow; and once it is quick, it is used as before."""
    s = Setup(rate=1e9, prefill=100.0)
    s.serve(PROMPT)
    s.store()
    s.forget()
    host, quick = s.tiers.host, s.tiers.match([*PROMPT, 1]).num_bytes / 1e9
    # In so many seconds comes what is computed in 1.
    assert 0 < sum(loads(s, PROMPT, slow) for _ in range(200)) < 100
    counts = []
    for seconds in (slow, quick):
        counts.append(0)
        for _ in range(360):
            host.rate.relax(10.0)
            counts[-1] += loads(s, PROMPT, seconds)
    assert 1 <= counts[0] <= 3600 / DOUBLING * 3
    assert counts[1] > 360 - 3 * DOUBLING / 10
    assert host.bytes_per_second == pytest.approx(1e9, rel=0.1)
