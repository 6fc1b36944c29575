"""A kernel launch as a value: what to run over which grid with which arguments.

Wrappers build it and run it; ``bench.static`` builds the same one over tensors without storage and compiles it for another machine.
"""

from dataclasses import dataclass
from typing import Any

from triton.runtime import JITFunction


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid, and its arguments and launch options by name."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def run(self) -> None:
        """Launch the kernel on the current device and stream; an empty grid runs nothing."""
        if min(self.grid) > 0:
            self.kernel[self.grid](**self.arguments)
