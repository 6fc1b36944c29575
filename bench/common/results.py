"""Files of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(path: Path | None, result: Any, *, final: bool = True, indent: int = 1) -> None:
    """Writes a result, or nothing without a path.

    The file is whole at any moment, for a program may be ended while it writes: with what was known
    before, or with this. A pipe or a terminal gets the final result alone.
    """
    if path is None:
        return
    text = json.dumps(result, indent=indent) + "\n"
    if path.is_file() or not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    elif final:
        path.write_text(text, encoding="utf-8")
