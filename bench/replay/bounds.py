"""Upper bounds of the hits, computed from the whole trace.

A prompt is seen as its aligned segments (equal keys mean equal prefixes). A segment is a hit if it
is there. That relaxes five rules: resume points exist at every boundary, and neither they nor
window and state groups take pages; a hit does not need the segments before it; running requests
hold no page; a request is cached before the next one arrives; a look-up leaves its prompt behind.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from quire.kvcore import KVCache

from .requests import Workload

KEY_BYTES = 32
NEVER = 1 << 60
Uses = list[tuple[int, list[bytes]]]


def segment_uses(workload: Workload, cache: KVCache) -> Uses:
    """(segments that a hit may have, keys of prompt and answer) of each request."""
    return [
        (
            (request.input - 1) // cache.alignment,
            [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)],
        )
        for request, keys in zip(workload.requests, workload.chains(cache), strict=True)
    ]


def clairvoyant_hits(uses: Uses, capacity: int = NEVER) -> int:
    """Segments that the best schedule of ``capacity`` segments takes from the cache.

    Keeping a segment from one use to its next is an interval worth one segment, and at most
    ``capacity`` intervals may overlap. Dropping the one that ends last whenever there are too many
    is optimal. So no policy of any retention has more hits.

    Source: Belady 1966, with the freedom not to keep a segment that was just used.
    """
    following: list[Sequence[int]] = []
    later: dict[bytes, int] = {}  # -> next request that can hit it; NEVER if it is recomputed first
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
    return hits


def dense_working_set(workload: Workload, cache: KVCache) -> int:
    """Dense pages of all distinct ids of the trace, each counted once."""
    distinct = {(r.scope, i, r.ids_block_size) for r in workload.requests for i in r.ids.tolist()}
    tokens = sum(size for _, _, size in distinct)
    return -(-tokens // cache.alignment) * cache.layout.pages_per_segment
