"""What no policy can exceed, computed from the whole trace.

A prompt is seen as its aligned segments (equal keys mean equal prefixes). A segment is served if it is there, whatever else is. That relaxes:

* resume points cost no page and exist at every boundary; window and state groups take no page at all;
* a segment is served even without the segments before it (the schedule below keeps those anyway: they are used whenever it is);
* running requests hold no page: a segment need not be kept once it was used;
* nothing is in flight: what a request computes is there for the next one, in the order of arrival;
* a look-up leaves behind what it asked for.

Then keeping a segment from one use to its next is an interval that is worth one segment, and at most `capacity` intervals may
overlap. Dropping the one that ends last whenever there are too many is optimal for that (Belady 1966, with the freedom not to
keep what was just used), so `clairvoyant_hits` is the most hits of any schedule, and no policy of any retention can have more.
"""

from __future__ import annotations

import heapq

from quire.kvcore import KVCache

from .simulate import Workload

KEY_BYTES = 32
NEVER = 1 << 60


def infinite_hits(workload: Workload, cache: KVCache) -> int:
    """Tokens served when nothing is ever dropped and every boundary is resumable. `cache`: for the alignment only."""
    return clairvoyant_hits(workload, cache, NEVER)


def clairvoyant_hits(workload: Workload, cache: KVCache, capacity: int) -> int:
    """Tokens served by the best schedule of `capacity` segments."""
    uses = _uses(workload, cache)
    following: list[list[int]] = []
    later: dict[
        bytes, int
    ] = {}  # -> next request that is served this segment; NEVER if it is computed anew before
    for i in range(len(uses) - 1, -1, -1):
        usable, keys = uses[i]
        following.append([later.get(key, NEVER) for key in keys])
        later.update((key, i if depth < usable else NEVER) for depth, key in enumerate(keys))
    kept: dict[bytes, int] = {}  # -> next use
    heap: list[tuple[int, bytes]] = []
    hits = 0
    for (usable, keys), after in zip(uses, reversed(following), strict=True):
        hits += sum(key in kept for key in keys[:usable])
        for key, use in zip(keys, after, strict=True):
            if use == NEVER:
                kept.pop(key, None)
            else:
                kept[key] = use
                heapq.heappush(heap, (-use, key))
        while len(kept) > capacity:
            use, key = heapq.heappop(heap)
            if kept.get(key) == -use:
                del kept[key]
    return hits * cache.alignment


def dense_working_set(workload: Workload, cache: KVCache) -> int:
    """Dense pages of everything that the ids of the trace stand for, each once."""
    distinct = {(r.scope, i, r.ids_block_size) for r in workload.requests for i in r.ids.tolist()}
    tokens = sum(size for _, _, size in distinct)
    return -(-tokens // cache.alignment) * cache.layout.pages_per_segment


def _uses(workload: Workload, cache: KVCache) -> list[tuple[int, list[bytes]]]:
    """Of each request: segments that a hit may have, and the keys of its prompt and of its answer."""
    return [
        (
            (request.input - 1) // cache.alignment,
            [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)],
        )
        for request, keys in zip(workload.requests, workload.chains(cache), strict=True)
    ]
