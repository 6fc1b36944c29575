"""Outcome of each test of a part: lines of JSON, one when a test starts and one when it ends.

A test without a second line ended its process, or was ended with it.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

UNFINISHED = "unfinished"
GOOD = ("passed", "skipped")


def read_outcomes(path: Path) -> dict[str, str]:
    """{test: outcome}, the last one of each test; in the order in which they started."""
    outcomes: dict[str, str] = {}
    if not path.is_file():
        return outcomes
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # ended while writing
        outcomes[row["test"]] = row["outcome"]
    return outcomes


def summary_of(outcomes: dict[str, str]) -> dict[str, Any]:
    """Number of tests by outcome, and the names of failed ones."""
    bad = sorted(test for test, outcome in outcomes.items() if outcome not in GOOD)
    return {"counts": dict(Counter(outcomes.values())), "bad": bad}
