"""Time of a decode step over requests, context, pages and groups: `bench.kvcore --scaling`."""

from __future__ import annotations

from statistics import median

from quire.kvcore import GroupSpec

from .measure import SPECS, Row, decode_times, decoding, row, shown

# Name of a curve -> the values that it varies; the other sizes stay as below.
CURVES: dict[str, list[int]] = {
    "requests": [16, 64, 256, 1024, 4096],
    "context": [2048, 8192, 32768, 131072, 524288],
    "pages": [1 << 18, 1 << 20, 1 << 22],
    "groups": [1, 2, 4, 8],
}
REQUESTS, CONTEXT, PAGES = 64, 8192, 1 << 22
LONG_REQUESTS = 8  # of the context curve: 64 requests of 524,288 tokens would not fit the pool


def curves(spec: str, steps: int) -> list[Row]:
    """Measure and print rows ``scaling_<curve>_<value>``: median seconds of plan and commit."""
    rows: list[Row] = []
    for curve, values in CURVES.items():
        for value in values:
            groups, requests, context, pages = SPECS[spec], REQUESTS, CONTEXT, PAGES
            if curve == "requests":
                requests = value
            elif curve == "context":
                requests, context = LONG_REQUESTS, value
            elif curve == "pages":
                pages = value
            else:
                groups = first_groups(spec, value)
            cache, slots = decoding(groups, requests, pages, context=context)
            seconds = median(decode_times(cache, slots, steps)[1])
            rows.append(row(f"scaling_{curve}_{value}", spec, seconds, "s"))
            print(shown(rows[-1]), flush=True)
    return rows


def first_groups(spec: str, count: int) -> list[GroupSpec]:
    """The first groups of a spec, then copies of its first window group."""
    groups = list(SPECS[spec])
    window = next(g for g in groups if g.kind == "window")
    groups += [
        GroupSpec(f"more.{i}", "window", window.block_size, 1, window.sliding_window)
        for i in range(len(groups), count)
    ]
    return groups[:count]
