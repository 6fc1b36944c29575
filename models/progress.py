"""Progress bars: those of tqdm, and none where it is not installed."""

from __future__ import annotations

from time import perf_counter
from typing import Any

__all__ = ["tqdm"]

try:
    from tqdm import tqdm
except ModuleNotFoundError:

    class tqdm:  # type: ignore[no-redef]
        """A bar with the methods of tqdm's that are used here; it shows nothing."""

        def __init__(self, **options: Any) -> None:
            self.n, self._start = 0, perf_counter()

        @property
        def format_dict(self) -> dict[str, float]:
            """Seconds since the bar was made."""
            return {"elapsed": perf_counter() - self._start}

        def update(self, n: int = 1) -> None:
            """Count."""
            self.n += n

        def close(self, *arguments: Any, **options: Any) -> None:
            """Do nothing."""

        set_description = set_postfix_str = __exit__ = close

        def __enter__(self) -> tqdm:
            return self
