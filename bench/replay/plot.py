"""Picture of a table: hit rate and median time to the first token over the size of the pool."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .experiment import Row


def save_plot(rows: list[Row], path: str | Path) -> None:
    """Draw one column of axes a workload and preset, one line a retention and eviction."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    cases = list(dict.fromkeys((r["workload"], r["preset"]) for r in rows))
    figure = Figure(figsize=(5.2 * len(cases), 6.4), layout="constrained")
    axes = figure.subplots(2, len(cases), squeeze=False)
    for case, (hit, ttft) in zip(cases, np.transpose(axes), strict=True):
        lines: dict[tuple[object, str], list[Row]] = {}
        for row in (r for r in rows if (r["workload"], r["preset"]) == case):
            lines.setdefault((row["retention"], row["eviction"]), []).append(row)
        for (retention, eviction), line in lines.items():
            if eviction == "infinite":
                level = line[0]["hit_rate"]
                hit.axhline(level, color="gray", linewidth=0.8, linestyle="--")
                x, side = (0, "left") if retention == "any" else (1, "right")  # both may be close
                label = f" infinite pool, {retention} "
                place = {"xycoords": ("axes fraction", "data"), "ha": side, "va": "bottom"}
                hit.annotate(label, (x, level), fontsize=7, color="gray", **place)
                continue
            line.sort(key=lambda r: r["pool_bytes"])
            x = [r["pool_bytes"] / 2**30 for r in line]
            rates = [r["hit_rate"] for r in line]
            if eviction == "clairvoyant":
                hit.plot(x, rates, label="clairvoyant bound", color="black", linestyle=":")
                continue
            dots = {"marker": "o", "markersize": 3}
            [drawn] = hit.plot(x, rates, label=f"{eviction}, {retention}", **dots)
            ttft.plot(x, [r["ttft_p50"] for r in line], color=drawn.get_color(), **dots)
        hit.set(title=f"{case[0]}, {case[1]}", ylabel="hit rate of prompt tokens", ylim=(0, None))
        hit.yaxis.set_major_formatter(PercentFormatter(1.0))
        hit.legend(fontsize=7)
        ttft.set(xlabel="pool, GiB", ylabel="time to first token, p50, s", ylim=(0, None))
        for ax in (hit, ttft):
            ax.grid(alpha=0.3)
    with matplotlib.rc_context({"svg.hashsalt": "quire"}):  # the same bytes every time
        date = {"Date": None} if str(path).endswith(".svg") else None
        figure.savefig(path, dpi=110, metadata=date)
