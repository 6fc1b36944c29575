"""A rank that `quire.models.parallel.launch` starts; stdin says which one.

Torch is imported after the heartbeat has started: that takes seconds.
"""

from __future__ import annotations

import json
import signal
import sys

from .channel import LOCAL
from .heartbeat import Heartbeat


def main() -> None:
    """Run the rank until rank 0 closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 says when it is over
    spec = json.load(sys.stdin)
    rank, address = spec["rank"], (LOCAL, spec["heartbeat"])
    try:
        heartbeat = Heartbeat(rank, spec["size"], spec["timeout"], address)
    except OSError as error:
        sys.exit(f"quire: rank {rank} ends: rank 0 died: {error}")
    try:
        from .launch import run_rank

        run_rank(heartbeat, spec)
    except BaseException as error:
        heartbeat.leave(f"{type(error).__name__}: {error}")
        raise
