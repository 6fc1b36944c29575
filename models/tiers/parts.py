"""The parts of a page that the host keeps, so that each group takes there what it fills, and little more.

The pages of a pool are equal, and some groups leave a good share of theirs unused. In the host a page
is kept in parts of equal bytes, those alone that hold rows::

    a page of DeepSeek-V4-Flash     a page of Gemma-3-27B: ten tensors
    compressed  ======|======|===   full     0 1 2 3 4 5 6 7 8 9
    window.0    ======|======|      sliding  0 1 2 3 4 5 6 7 8
    overlap     ======|
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.kernels import E4m3Rows, PoolPages
from quire.kvcore import GroupSpec

MOST_UNUSED = 0.04  # of the bytes that hold rows
MOST_PARTS = 32  # of a page: each is an id, a row and a transfer of its own
PART_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class PageParts:
    """How pages are kept in the host.

    Attributes:
        pages: of the pool, in parts.
        counts: [num_groups] parts that a page of each group has in the host, the first ones.
        filled: [num_groups] bytes that the host has of the rows of such a page.
        unused: of the bytes that a segment, and a resume point, take there, over those that hold
            rows; less 1.
    """

    pages: PoolPages
    counts: tuple[int, ...]
    filled: tuple[int, ...]
    unused: tuple[float, float]


def page_parts(
    groups: Sequence[GroupSpec],
    tensors: Sequence[Tensor],
    filled: Sequence[tuple[int, int]],
    *,
    e4m3_rows: E4m3Rows | None = None,
) -> PageParts:
    """The fewest parts with which neither segments nor resume points leave over 4 % unused.

    Where nothing does, those that leave least.

    Args:
        groups: of the cache.
        tensors: of [num_pages, page_bytes] uint8, as of `PoolPages`.
        filled: [num_groups] (tensors, bytes of each) that hold rows in a page of the group, the
            first ones.
        e4m3_rows: that the host has of pages; None = their bytes. All pages begin with rows.
    """
    unit, kept = PART_ALIGNMENT, int
    if e4m3_rows is not None:
        unit, kept = e4m3_rows.row_bytes, e4m3_rows.kept_bytes
    num_tensors, page_bytes = len(tensors), tensors[0].shape[1] // unit * unit
    # Tensors and bytes of each of a part.
    sizes = [(n, page_bytes) for n in range(num_tensors, 0, -1) if num_tensors % n == 0]
    sizes += [(num_tensors, size) for size in _slices(filled, page_bytes, unit)]
    rows = [(t, kept(b)) for t, b in filled]
    best: tuple[tuple[float, ...], int, int, list[int]] | None = None
    for n, size in sizes:
        counts = [max(1, -(-t // n) * -(-b // size)) for t, b in filled]
        unused = _unused(groups, [count * n * kept(size) for count in counts], rows)
        excess = max(0.0, max(unused) - MOST_UNUSED)
        rank = (excess, float(max(counts)), *unused)
        if max(counts) <= MOST_PARTS and (best is None or rank < best[0]):
            best = rank, n, size, counts
    assert best is not None  # at least whole pages
    (_, _, segment, point), n, size, counts = best
    views = [
        tensor[:, first : first + size]
        for j in range(0, num_tensors, n)
        for first in _starts(page_bytes, size)
        for tensor in tensors[j : j + n]
    ]
    pages = PoolPages(views, len(views) // n, e4m3_rows)
    return PageParts(pages, tuple(counts), tuple(t * b for t, b in rows), (segment, point))


def _slices(filled: Sequence[tuple[int, int]], page_bytes: int, unit: int) -> list[int]:
    """Bytes of parts that some group's pages divide into, multiples of ``unit``."""
    found = set()
    for _, size in filled:
        for n in range(1, MOST_PARTS + 1):
            found.add(-(-size // (n * unit)) * unit)
    return sorted((x for x in found if x < page_bytes), reverse=True)


def _starts(page_bytes: int, size: int) -> list[int]:
    """Where the parts of one tensor begin; the last may overlap the one before."""
    starts = range(0, page_bytes, size)
    return [min(first, page_bytes - size) for first in starts]


def _unused(
    groups: Sequence[GroupSpec], taken: Sequence[int], filled: Sequence[tuple[int, int]]
) -> tuple[float, float]:
    """Of a segment and of a resume point, bytes taken over bytes that hold rows; less 1."""
    alignment = math.lcm(*(g.block_size for g in groups))
    segment = [alignment // g.block_size * (g.kind == "dense") for g in groups]
    shares = []
    for blocks in (segment, [g.tail_blocks for g in groups]):
        pages = [n * g.pages_per_block for n, g in zip(blocks, groups, strict=True)]
        rows = sum(n * t * b for n, (t, b) in zip(pages, filled, strict=True))
        all_ = sum(n * size for n, size in zip(pages, taken, strict=True))
        shares.append(all_ / rows - 1 if rows else 0.0)
    return shares[0], shares[1]
