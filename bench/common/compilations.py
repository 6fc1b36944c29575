"""List of the kernels that Triton compiled or found compiled.

With ``QUIRE_COMPILATIONS`` set each process of `bench` and of the tests adds a line of JSON to that
file for each kernel that it loads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "QUIRE_COMPILATIONS"


def record_compilations(file: str) -> None:
    """From now on adds a line to ``file`` for each kernel that this process compiles or finds
    compiled.
    """
    from triton import knobs

    knobs.compilation.listener = _writer(file)


def _writer(file: str) -> Callable[..., None]:
    def listener(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        row = {"kernel": src.name, "hit": cache_hit, "seconds": times.total / 1e6}
        line = f"{json.dumps(row)}\n".encode()
        # One write at the end of the file: lines of several processes do not mix.
        handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)

    return listener


def count_compilations(file: Path) -> dict[str, float]:
    """Kernels that were compiled, the seconds that took in all processes together, and hits."""
    if not file.is_file():
        return {"compiled": 0, "seconds": 0.0, "hits": 0}
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    compiled = [row["seconds"] for row in rows if not row["hit"]]
    return {
        "compiled": len(compiled),
        "seconds": round(sum(compiled), 1),
        "hits": len(rows) - len(compiled),
    }
