"""How many pages a request takes, and how long a request a pool holds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from quire.kvcore import GroupSpec
from quire.kvcore.spec import GroupClass, Layout


def pages_of_request(
    groups: Sequence[GroupSpec], num_tokens: int, max_draft_tokens: int = 0
) -> int:
    """Pages that are enough for one request of ``num_tokens`` tokens while it decodes.

    Whatever is cached besides.
    """
    total = 0
    for spec in Layout(groups, num_tokens, max_draft_tokens).classes:
        pages = spec.num_tables * -(-num_tokens // spec.block_size)
        if spec.spec.kind == "window":
            pages = min(pages, fixed_pages(spec))
        total += fixed_pages(spec) if spec.spec.kind == "state" else pages
    return total


def fixed_pages(spec: GroupClass) -> int:
    """Pages of a ring and the block that is planned before its oldest one goes.

    Of a state, the live one, the newest snapshot and the next.
    """
    return spec.num_tables * (spec.width + 1)


def longest_request(
    groups: Sequence[GroupSpec], num_pages: int, limit: int, max_draft_tokens: int = 0
) -> int:
    """Tokens of the longest request that a pool holds alone; 0 = none.

    Args:
        groups: of the cache.
        num_pages: of the pool, page 0 included.
        limit: tokens, the most to return.
        max_draft_tokens: of a step.
    """
    return bisect_left(
        range(1, limit + 1), num_pages, key=lambda n: pages_of_request(groups, n, max_draft_tokens)
    )
