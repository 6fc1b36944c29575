"""Random traffic with hypothesis, which shrinks what fails. The steps and the model they are checked against: `traffic`."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.kvcore import traffic


class Draw:
    """Choices of hypothesis; `traffic.Dice` has the same."""

    def __init__(self) -> None:
        self.data = None  # of the rule that runs

    def one(self, options):
        return self.data.draw(st.sampled_from(options))

    def number(self, low, high):
        return self.data.draw(st.integers(low, high))

    def bits(self, low, high):
        return self.data.draw(st.lists(st.integers(0, 1), min_size=low, max_size=high))


def _rule(name: str):
    @precondition(lambda self: name in self.traffic.steps())
    @rule(data=st.data())
    def take(self, data):
        self.draw.data = data
        getattr(self.traffic, name)()

    return take


class Machine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def build(self, data):
        self.draw = Draw()
        self.draw.data = data
        self.traffic = traffic.Traffic(self.draw)

    @invariant()
    def sound(self):
        if hasattr(self, "traffic"):
            self.traffic.check()


for _name in traffic.WEIGHTS:
    setattr(Machine, _name, _rule(_name))

TestTraffic = pytest.mark.slow(Machine.TestCase)
TestTraffic.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [5])
def test_long_lives(budget):
    """Caches that live for hundreds of steps with full pools."""
    taken, evicted = Counter(), 0
    for seed in range(budget):
        evicted += traffic.run(seed, 300, taken)
    assert evicted > 60 * budget
    assert all(taken[name] > 3 * budget for name in traffic.WEIGHTS)
