"""One picture of a report: what the prefix cache gave, and the time to the first token."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_plot(result: dict[str, Any], path: Path) -> None:
    """Write the picture in the format of the file's suffix."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    cached, uncached = result["cached"]["groups"], result["uncached"]
    groups = [str(row["group"]) for row in cached]
    group_name = result["workload"]["group_name"]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    hit_axes, ttft_axes = figure.subplots(1, 2)

    bars = hit_axes.bar(groups, [row["hit_rate"] for row in cached], color="tab:green")
    hit_axes.bar_label(bars, fmt=lambda rate: f"{rate:.0%}")
    hit_axes.set(ylim=(0, 1.05), xlabel=group_name, title="prompt tokens from the prefix cache")
    hit_axes.yaxis.set_major_formatter(PercentFormatter(1.0))

    runs = [("caching on", cached, "tab:green")]
    if uncached is not None:
        runs.append(("caching off", uncached["groups"], "tab:gray"))
    width = 0.8 / len(runs)
    for i, (label, rows, color) in enumerate(runs):
        left = [x + (i - (len(runs) - 1) / 2) * width for x in range(len(groups))]
        heights = [row["ttft_p50_ms"] for row in rows]
        bars = ttft_axes.bar(left, heights, width, color=color, label=label)
        ttft_axes.bar_label(bars, fmt="%.0f")
    ttft_axes.set_xticks(range(len(groups)), groups)
    ttft_axes.set(xlabel=group_name, ylabel="ms", title="time to first token, p50")
    ttft_axes.margins(y=0.15)
    ttft_axes.legend()

    title = f"{result['model']['name']}, {result['machine']['device']}"
    figure.suptitle(f"{title}\n{result['workload']['title']}", fontsize=10)
    figure.savefig(path, dpi=120)
