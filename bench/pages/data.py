"""Rows under ``bench/results``, and how figures and tables are written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "results"
NONE = "–"


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a file of results; OSError where there is none, as outside of a checkout."""
    found: list[dict[str, Any]] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    for line in lines:
        assert len(line) == len(header), line
    first, *rest = (f"| {' | '.join(line)} |".replace("|  |", "| |") for line in (header, *lines))
    return "\n".join([first, "|---" * len(header) + "|", *rest])


def seconds(value: float) -> str:
    """Seconds, of two digits or three."""
    if value >= 1:
        return f"{value:.2f} s"
    size, unit = (1e-3, "ms") if value >= 1e-3 else (1e-6, "us")
    return f"{value / size:.{0 if value >= 10 * size else 1}f} {unit}"


def mebibytes(value: float) -> str:
    """Bytes in MiB, with a digit behind the point below a hundred."""
    number = value / 2**20
    return f"{number:.{0 if number >= 100 else 1}f} MiB"


def percent(value: float) -> str:
    """A share in percent with a digit behind the point."""
    return f"{value:.1%}".replace("%", " %")
