"""How the time of a decode step grows: with requests, and with nothing else. Curves of
`bench.kvcore --scaling`, and their picture.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from quire.kvcore import GroupSpec

from . import measure
from .measure import Row

# What each curve varies, and the values; the others stay at the second value.
CURVES: dict[str, list[int]] = {
    "requests": [16, 64, 256, 1024, 4096],
    "context": [2048, 8192, 32768, 131072, 524288],
    "pages": [1 << 18, 1 << 20, 1 << 22],
    "groups": [1, 2, 4, 8],
}
REQUESTS, CONTEXT, PAGES = 64, 8192, 1 << 22
# Half a million tokens of 64 requests would not fit the pool: long contexts are measured with fewer
# requests.
LONG_REQUESTS = 8


def curves(spec: str, steps: int) -> list[Row]:
    """Rows `scaling_<what>_<value>`: median seconds of plan and commit of one token for each
    request.
    """
    rows: list[Row] = []
    for what, values in CURVES.items():
        for value in values:
            groups = measure.SPECS[spec]
            requests, context, pages = REQUESTS, CONTEXT, PAGES
            if what == "requests":
                requests = value
            elif what == "context":
                requests, context = LONG_REQUESTS, value
            elif what == "pages":
                pages = value
            else:
                groups = some_groups(spec, value)
            cache, slots = measure.decoding(groups, requests, context, pages)
            _, totals = measure.decode_times(cache, slots, steps)
            row = measure.row(f"scaling_{what}_{value}", spec, statistics.median(totals), "s")
            print(measure.shown(row), flush=True)
            rows.append(row)
    return rows


def some_groups(spec: str, count: int) -> list[GroupSpec]:
    """The first groups of a spec; more than it has are window groups like its first."""
    groups = list(measure.SPECS[spec])
    window = next(g for g in groups if g.kind == "window")
    while len(groups) < count:
        groups.append(
            GroupSpec(f"more.{len(groups)}", "window", window.block_size, 1, window.sliding_window)
        )
    return groups[:count]


def save_plot(rows: list[Row], path: str | Path) -> None:
    """Write one panel a curve, one line a spec."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.2), layout="constrained")
    panels = figure.subplots(1, len(CURVES), sharey=True)
    for axes, (what, values) in zip(panels, CURVES.items(), strict=True):
        for spec in sorted({str(r["spec"]) for r in rows}):
            times = {r["name"]: float(str(r["value"])) for r in rows if r["spec"] == spec}
            line = [times[f"scaling_{what}_{v}"] * 1e6 for v in values]
            axes.plot(values, line, marker="o", label=spec)
        axes.set(xscale="log", yscale="log", xlabel=what)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("us a decode step")
    panels[0].legend()
    figure.savefig(path, dpi=110)
