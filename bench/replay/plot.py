"""A picture of a table: hit rate and median time to the first token over the size of the pool."""

from __future__ import annotations

from pathlib import Path

from ..common.plot import require_matplotlib
from .experiment import Row


def save_plot(rows: list[Row], path: str | Path) -> None:
    """One column of axes for each workload and preset; one line for each retention and eviction. The suffix gives the format.

    Raises: ImportError when matplotlib is missing; OSError, ValueError when the file cannot be written.
    """
    require_matplotlib(path)
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    cases = list(dict.fromkeys((r["workload"], r["preset"]) for r in rows))
    figure = Figure(figsize=(5.2 * len(cases), 6.4), layout="constrained")
    axes = figure.subplots(2, len(cases), squeeze=False)
    for column, case in enumerate(cases):
        mine = [r for r in rows if (r["workload"], r["preset"]) == case]
        sized = [r for r in mine if r["pool_bytes"] is not None]
        hit, ttft = axes[0][column], axes[1][column]
        for name in dict.fromkeys((r["retention"], r["eviction"]) for r in sized):
            line = sorted(
                (r for r in sized if (r["retention"], r["eviction"]) == name),
                key=lambda r: r["pool_bytes"],
            )
            x = [r["pool_bytes"] / 2**30 for r in line]
            bound = name[1] == "clairvoyant"
            style = (
                {"color": "black", "linestyle": ":"} if bound else {"marker": "o", "markersize": 3}
            )
            label = "clairvoyant bound" if bound else f"{name[1]}, {name[0]}"
            [drawn] = hit.plot(x, [r["hit_rate"] for r in line], label=label, **style)
            if not bound:
                ttft.plot(
                    x,
                    [r["ttft_p50"] for r in line],
                    color=drawn.get_color(),
                    marker="o",
                    markersize=3,
                )
        for r in mine:
            if r["eviction"] == "infinite":
                hit.axhline(r["hit_rate"], color="gray", linewidth=0.8, linestyle="--")
                # The two may be close.
                x, side = (0, "left") if r["retention"] == "any" else (1, "right")
                hit.annotate(f" infinite pool, {r['retention']} ", (x, r["hit_rate"]), xycoords=("axes fraction", "data"), ha=side, va="bottom", fontsize=7, color="gray")  # fmt: skip
        hit.set(title=f"{case[0]}, {case[1]}", ylabel="hit rate of prompt tokens", ylim=(0, None))
        hit.yaxis.set_major_formatter(PercentFormatter(1.0))
        hit.legend(fontsize=7)
        ttft.set(xlabel="pool, GiB", ylabel="time to first token, p50, s", ylim=(0, None))
        for ax in (hit, ttft):
            ax.grid(alpha=0.3)
    with matplotlib.rc_context({"svg.hashsalt": "quire"}):  # the same bytes every time
        figure.savefig(
            path, dpi=110, metadata={"Date": None} if str(path).endswith(".svg") else None
        )
