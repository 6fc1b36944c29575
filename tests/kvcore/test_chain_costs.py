"""Long chains: nothing recurses along them, and what an operation does grows no faster than what it is asked for."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from quire.kvcore import LRU, S3FIFO, Adaptive, CostAware, GroupSpec, KVCache, StepPlan
from quire.kvcore.adaptive import Record

from .engine import groups

POLICIES = [Adaptive, LRU, CostAware, S3FIFO]


class Point:
    """An entry of one chain."""

    def __init__(self, depth: int, shorter: Point | None) -> None:
        self.depth, self.shorter = depth, shorter
        self.key = depth.to_bytes(32, "big")
        self.gain = self.num_pages = self.freed = 1
        self.last_used = self.num_uses = 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chain_filed_deepest_first_is_evicted(policy):
    """As a restored cache, or one whose pins end, files it."""
    chain: list[Point] = []
    for depth in range(1, 2001):
        chain.append(Point(depth, chain[-1] if chain else None))
    p = policy()
    for entry in chain[::-1]:
        p.add(entry)
    gone = [p.pop() for _ in chain]
    assert {id(e) for e in gone} == {id(e) for e in chain} and p.pop() is None
