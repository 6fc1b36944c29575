"""Rows of compiled kernels: as text, as files, and what changed between two files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from .cases import ARCHS

# Of a row: what says nothing of the kernel.
NOT_COMPARED = ("triton", "seconds")
RESULTS = Path(__file__).parent.parent / "results" / "static"


def differences(rows: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> list[str]:
    """What changed against a baseline, one line for each kernel that is in both, and one for those
    that are new.
    """

    def named(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Rows by case, kernel and arch; a case may launch a kernel in several ways, which are
        counted.
        """
        found: dict[str, dict[str, Any]] = {}
        for row in rows:
            name = first = f"{row['case']} {row['kernel']} {row['arch']}"
            for i in itertools.count(2):
                if name not in found:
                    break
                name = f"{first} ({i})"
            found[name] = row
        return found

    before = named(baseline)
    lines, new = [], 0
    for name, row in named(rows).items():
        old = before.get(name)
        if old is None:
            new += 1
            continue
        changed = [
            f"{key} {old.get(key)} -> {value}"
            for key, value in row.items()
            if value != old.get(key) and key not in (*NOT_COMPARED, "key")
        ]
        if changed:
            lines.append(f"{name}: {', '.join(changed)}")
    if new:
        lines.append(f"{new} kernels are not in the baseline")
    return lines


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text."""
    if not rows:
        return "no case"
    columns = {
        "case": "case", "kernel": "kernel", "arch": "arch", "config": "config", "registers": "registers", "acc": "accumulators", "spill": "spill_bytes",
        "stack": "stack_bytes", "shared": "shared_bytes", "limit": "shared_limit", "ctas": "ctas_per_sm", "waves": "waves_per_simd", "mma": "mma",
        "copy": "kv_copy_bytes", "loads": "loads", "tiles": "tiles_in_flight",
    }  # fmt: skip
    cells = [[*columns, "flight", "sass"]]
    for row in rows:
        flight, instructions = row["bytes_in_flight_per_sm"] / 1024, row["sass_per_tile"]
        cells.append(
            [
                *("-" if row.get(key) in (None, "") else str(row[key]) for key in columns.values()),
                f"{flight:g}",
                "-" if instructions is None else str(instructions),
            ]
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def write(rows: list[dict[str, Any]], path: str | Path) -> None:
    """Write rows as a JSON list, a row to a line."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    Path(path).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def write_baseline(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows without what is not compared: the names of the columns once, and the values of a
    row to a line.

    Of what ``path`` has already the rows of other architectures stay.
    """
    archs = {row["arch"] for row in rows}
    kept = [row for row in read(path) if row["arch"] not in archs] if path.exists() else []
    rows = sorted(kept + rows, key=lambda row: ARCHS.index(row["arch"]))
    columns = [name for name in dict.fromkeys(itertools.chain(*rows)) if name not in NOT_COMPARED]
    lines = ",\n".join(json.dumps([row.get(name) for name in columns]) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'{{"columns": {json.dumps(columns)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8"
    )


def read(path: str | Path) -> list[dict[str, Any]]:
    """The rows that ``write`` or ``write_baseline`` has written."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            found = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
        _ = {(row["case"], row["kernel"], row["arch"]) for row in found}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"baseline: expected rows of this program in {str(path)!r}, got {error!r}"
        ) from error
    return found
