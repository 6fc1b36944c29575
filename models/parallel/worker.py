"""A rank that `quire.models.parallel.launch.Ranks` starts.

It reads from stdin which rank it is and of what, and runs until rank 0 is done.
"""

from __future__ import annotations

import pickle
import sys

from ..llm import LLM
from .launch import join


def main() -> None:
    """Runs the rank; does not return."""
    spec = pickle.load(sys.stdin.buffer)
    join(spec)
    LLM(**spec["work"])
