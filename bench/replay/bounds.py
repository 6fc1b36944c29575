"""Upper bound of the hits of any policy, computed from the whole trace.

A prompt is seen as its aligned segments (equal keys mean equal prefixes). A hit of d segments needs
the dense pages of all of them, and the window and state pages of a resume point at its end. Each
page is held from the last request that had its segment until the hit. That relaxes three rules: a
resume point may be anywhere; running requests hold no page; a request is cached before the next one
arrives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.kvcore import KVCache

from .simulate import TraceWorkload

KEY_BYTES = 32
ROUNDS = 400  # of prices; 1000 rounds change the bound of a trace by less than 0.5 %


@dataclass(frozen=True)
class Uses:
    """Segments of prompts that an earlier request had: of each prompt, its first ones.

    Attributes:
        request, before: [n] number of a request, and of the last one before it with the segment.
        owner, depth: [n] place of `request` among those with any, and of the segment in the prompt.
        first: [m] index of the first segment of each request with any.
    """

    request: np.ndarray
    before: np.ndarray
    owner: np.ndarray
    depth: np.ndarray
    first: np.ndarray


def segment_uses(workload: TraceWorkload, cache: KVCache) -> Uses:
    last: dict[bytes, int] = {}
    request: list[int] = []
    before: list[int] = []
    counts: list[int] = []
    for i, (r, keys) in enumerate(zip(workload.requests, workload.chains(cache), strict=True)):
        each = [keys[k : k + KEY_BYTES] for k in range(0, len(keys), KEY_BYTES)]
        known = [last[key] for key in each[: (r.input - 1) // cache.alignment] if key in last]
        if known:
            counts.append(len(known))
        before += known
        request += [i] * len(known)
        last.update(dict.fromkeys(each, i))
    first = np.cumsum([0, *counts[:-1]]) if counts else np.zeros(0, np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    depth = np.arange(len(before)) - first[owner]
    return Uses(np.array(request, dtype=int), np.array(before, dtype=int), owner, depth, first)


def clairvoyant_hits(uses: Uses, cache: KVCache, num_pages: int | None) -> int:
    """Segments that no policy of any retention exceeds in a pool; None: of any size.

    A Lagrangian bound: a page has a price from each request to the next. All hits together save at
    most the price of the pool, plus the best that each request saves beyond the price of its pages.
    Prices rise where the pages of these hits exceed the pool, and fall where they do not.
    """
    n = len(uses.before)
    if num_pages is None or not n:
        return n
    num_requests = int(uses.request[-1]) + 1
    costs = [_Priced(uses, cache, np.full(num_requests, x)) for x in np.logspace(-9, -1, 50)]
    best = min(costs, key=lambda priced: priced.bound(num_pages))
    bound, prices = best.bound(num_pages), best.prices
    for i in range(ROUNDS):
        priced = _Priced(uses, cache, prices)
        bound = min(bound, priced.bound(num_pages))
        excess = priced.pages_held() / num_pages - 1
        prices = prices * np.exp(50 / (100 + i) * excess.clip(-1, 2))
    return int(min(n, bound * (1 + 1e-9)))


class _Priced:
    """The best hit of each request at `prices` [num_requests] of a page until the next request."""

    def __init__(self, uses: Uses, cache: KVCache, prices: np.ndarray) -> None:
        self._uses, self.prices, layout = uses, prices, cache.layout
        self._tail, self._dense = tail_pages(cache), layout.pages_per_segment
        self._paid = np.append(0.0, prices.cumsum())
        cost = self._paid[uses.request] - self._paid[uses.before]
        each = 1 - self._dense * cost
        gain = each.cumsum()
        gain -= (gain - each)[uses.first][uses.owner]
        for back, pages in enumerate(self._tail):
            deep = np.flatnonzero(uses.depth >= back)
            gain[deep] -= pages * cost[deep - back]
        self._gain, self._most = gain, np.maximum.reduceat(gain, uses.first)

    def bound(self, num_pages: int) -> float:
        """Segments that no set of hits exceeds."""
        return float(num_pages * self._paid[-1] + self._most.clip(0).sum())

    def pages_held(self) -> np.ndarray:
        """Pages [num_requests] held after each request for the best hits."""
        uses, n, num_requests = self._uses, len(self._gain), len(self.prices)
        is_best = (self._gain == self._most[uses.owner]) & (self._gain > 0)
        owners, which = np.unique(uses.owner[is_best], return_index=True)
        last = np.flatnonzero(is_best)[which]
        ends = np.full(len(uses.first), -1)
        ends[owners] = last
        pages = np.where(np.arange(n) <= ends[uses.owner], self._dense, 0)
        for back, count in enumerate(self._tail):
            pages[last[uses.depth[last] >= back] - back] += count
        taken = np.bincount(uses.before, pages, num_requests)
        return (taken - np.bincount(uses.request, pages, num_requests)).cumsum()


def tail_pages(cache: KVCache) -> list[int]:
    """Pages of a resume point, by segment, from the last one back."""
    pages: dict[int, int] = {}
    for c in cache.layout.classes:
        per_segment = c.per_segment if c.spec.kind == "window" else 1
        for block in range(c.tail):
            back = block // per_segment
            pages[back] = pages.get(back, 0) + c.num_tables
    return [pages[back] for back in sorted(pages)]


def dense_working_set(workload: TraceWorkload, cache: KVCache) -> int:
    """Dense pages of all distinct ids of the trace, each counted once."""
    distinct = {(r.scope, i, r.ids_block_size) for r in workload.requests for i in r.ids.tolist()}
    tokens = sum(size for _, _, size in distinct)
    return -(-tokens // cache.alignment) * cache.layout.pages_per_segment
