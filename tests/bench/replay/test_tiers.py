"""A host tier behind a replayed pool: times by hand, bytes, and an infinite tier."""

import numpy as np
import pytest
import torch

from quire.bench.replay.bounds import clairvoyant_hits
from quire.bench.replay.engine import Timing
from quire.bench.replay.experiment import empty_cache
from quire.bench.replay.presets import PRESETS
from quire.bench.replay.requests import Request
from quire.bench.replay.simulate import Workload, replay
from quire.bench.replay.tiers import Link, TierMemory, serving_pages
from quire.kvcore import LRU, Adaptive, GroupSpec
from quire.models.deepseek_v4.cache import CacheFormat, plan_cache
from quire.models.deepseek_v4.config import CONFIGS as V4_CONFIGS
from tests.bench.replay.traffic import random_requests

PAGE = 100  # bytes
DENSE = [GroupSpec("d", "dense", 32, PAGE)]
HYBRID = [GroupSpec("d", "dense", 32, PAGE), GroupSpec("w", "window", 16, PAGE, 64)]
TIMING = Timing(prefill_rate=1000.0, decode_rate=100.0, max_requests=2)
FAST = Timing(prefill_rate=1e6, decode_rate=1e4, max_requests=1)
INFINITE = 1e15  # bytes a second


def request(arrival, first, tokens=320):
    """A prompt of blocks `first`, `first` + 1 .. of 32 tokens."""
    return Request(arrival, 0, tokens, 1, np.arange(first, first + -(-tokens // 32)), 32)


def run(
    requests, pages, groups=DENSE, timing=TIMING, *, host=0, link=10_000.0, policy=LRU, **options
):
    """Replay over a host of `host` pages that stores at once; 0: over none."""

    def behind(cache):
        return TierMemory(
            cache, host=host, link=link, policy=policy, prefill_rate=timing.prefill_rate,
            chunk=timing.chunk, watermark=cache.num_pages,
        )  # fmt: skip

    return replay(
        Workload("w", requests), groups, num_pages=1 + pages, timing=timing, policy=policy(),
        behind=behind if host else None, **options,
    )  # fmt: skip


def test_a_link_is_a_queue():
    link = Link(100.0)
    assert link.send(1.0, 50) == 1.5 and link.send(1.2, 100) == 2.5 and link.send(9.0, 10) == 9.1
    assert link.num_bytes == 160
    assert link.room(9.0, 1.0) == 90 and link.room(9.0, 0.05) == 0 and link.room(20.0, 1.0) == 100


def test_a_load_takes_the_time_of_its_bytes():
    """A, then B that evicts it, then A: 9 of 10 pages come back at 10,000 bytes a second."""
    requests = [request(0.0, 0), request(1.0, 100), request(10.0, 0)]
    alone = run(requests, 11)
    assert alone.hits.tolist() == [0, 0, 0] and alone.ttft == pytest.approx([0.32] * 3)
    tiers = run(requests, 11, host=1000)
    assert tiers.hits.tolist() == [0, 0, 288]
    assert tiers.from_device.tolist() == [0, 0, 0]
    assert tiers.ttft == pytest.approx([0.32, 0.32, 9 * PAGE / 10_000 + 0.032])
    assert tiers.stalled == pytest.approx(0.09)


@pytest.mark.parametrize(("tokens", "expected"), [(64, 0.09 + 0.032), (200, 0.2 + 0.032)])
def test_a_load_does_not_hold_up_the_request_behind_it(tokens, expected):
    requests = [request(0.0, 0), request(1.0, 100, 23 * 32)]  # which fills the pool
    requests += [request(10.0, 0), request(10.0, 200, tokens)]
    tiers = run(requests, 24, host=1000)
    assert tiers.hits[2] == 288
    assert tiers.ttft[2:] == pytest.approx([expected, tokens / 1000])


def test_loads_wait_for_each_other_on_their_link():
    """Two prompts come back at once: the second's pages come after the first's. A third one, of the
    first's prefix, waits for that load and moves nothing."""
    requests = [request(0.0, 0), request(1.0, 100), request(2.0, 200, 33 * 32)]
    requests += [request(10.0, 0), request(10.0, 100), request(10.0, 0)]
    timing = Timing(prefill_rate=1000.0, decode_rate=100.0, max_requests=4)
    tiers = run(requests, 34, timing=timing, host=1000)
    assert tiers.hits[3:].tolist() == [288, 288, 288]
    assert tiers.ttft[3:] == pytest.approx([0.09 + 0.032, 0.18 + 0.032, 0.09 + 0.064])
    assert tiers.behind.links["host>device"].num_bytes == 2 * 9 * PAGE


@pytest.mark.parametrize("preset", ["v4-flash", "v4-pro"])
def test_presets_are_what_an_engine_has(preset):
    config = V4_CONFIGS[f"deepseek-{preset}"]
    plan = plan_cache(config, CacheFormat(torch.bfloat16, True), drafters=False)
    shapes = [(g.kind, g.block_size, g.page_bytes, g.sliding_window) for g in PRESETS[preset]]
    assert shapes == [(g.kind, g.block_size, g.page_bytes, g.sliding_window) for g in plan.groups]


@pytest.mark.parametrize("groups", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_an_infinite_host_is_an_infinite_pool(groups):
    pages = 40 if groups is DENSE else 120
    for seed in range(2):
        requests = random_requests(seed, every=0.5, lookups=0)
        infinite = run(requests, 20_000, groups, FAST, retention="dense")
        small = run(requests, pages, groups, FAST, retention="dense")
        tiers = run(requests, pages, groups, FAST, host=20_000, link=INFINITE, retention="dense")
        assert tiers.hits.tolist() == infinite.hits.tolist()
        assert small.hits.sum() < infinite.hits.sum()
        assert tiers.from_device.sum() < tiers.hits.sum()


@pytest.mark.parametrize(("seed", "policy"), [(3, LRU), (4, Adaptive)])
def test_tiers_are_within_the_bounds_of_their_bytes(seed, policy):
    requests = random_requests(seed, every=0.5, lookups=0)
    workload = Workload("random", requests)
    alone = run(requests, 40, timing=FAST, policy=policy)
    tiers = run(requests, 40, timing=FAST, host=60, link=INFINITE, policy=policy)
    bound = clairvoyant_hits(workload, empty_cache(DENSE, workload), 100)
    assert alone.hits.sum() < tiers.hits.sum() <= bound


def test_pages_that_serve_hits():
    """Counted over every prefix of every chain; a chain without a resume point serves none."""
    requests = random_requests(2, every=0.5, lookups=0)
    index = run(requests, 80, HYBRID, FAST, host=200, link=INFINITE).behind.tiers.index
    serving, points = set(), set()
    for chain in index.runs():
        for depth, point in chain.points.items():
            serving.update(index.pages_between(chain, 0, depth).ravel().tolist())
            points.update(point.pages[point.pages != 0].tolist())
    assert serving_pages(index) == len(serving) + len(points) > 0
