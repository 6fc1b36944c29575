"""A rank that `quire.models.parallel.launch` starts; stdin has its number and ports.

The heartbeat starts before torch is imported, which takes seconds.
"""

from __future__ import annotations

import json
import signal
import sys

from .heartbeat import LOCAL, Heartbeat


def main() -> None:
    """Run the rank until rank 0 closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to end
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
