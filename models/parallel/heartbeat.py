"""Heartbeat: notice that a rank died, is stuck or failed, and end the others with its name.

The store of torch.distributed has the state of each rank. Rank 0 reads those of all others, and the
others read that of rank 0. A rank is dead when it was silent too long, when the process that rank 0
started has ended, or, if it is rank 0, when its store is gone. The other ranks print that and exit;
rank 0's call fails.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from subprocess import Popen

import torch.distributed as dist

BEAT, LONGEST_VERDICT = 0.5, 1000  # seconds; characters
VERDICT = "quire/verdict"  # key in the store
EXIT_STATUS = 1


class RankError(RuntimeError):
    """Another rank died, failed or is stuck; the message names it."""


def end_process(rank: int, reason: str) -> None:
    """End the process of a rank at once, from any thread."""
    print(f"quire: rank {rank} ends: {reason}", file=sys.stderr, flush=True)
    os._exit(EXIT_STATUS)


class Heartbeat(threading.Thread):
    """The heartbeat of one rank. Creating it starts it.

    Args:
        rank, size: this rank, and the number of ranks.
        timeout: seconds of silence, or of a step without progress, after which a rank is dead.
        store: the same one in all ranks; this object's alone.
        processes: processes that this rank has started, by rank.
        give_up: called in rank 0 after a verdict, to make a call fail that waits for other ranks.

    Attributes:
        verdict: the rank that died, and the reason; "" = none did.
        calls: returns the number of calls that this rank has made together with the others.
        is_stepping: True in rank 0 during a step, in which all ranks make progress.
    """

    def __init__(
        self, rank: int, size: int, timeout: float, store: dist.Store,
        processes: Mapping[int, Popen[bytes]], give_up: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__(name="quire-heartbeat", daemon=True)
        self.rank, self.timeout = rank, timeout
        self.verdict, self.is_stepping, self._left = "", False, threading.Event()
        self.calls: Callable[[], int] = lambda: 0
        self._store, self._processes, self._give_up = store, processes, give_up
        others = range(1, size) if rank == 0 else [0]
        self._states = dict.fromkeys(others, b"")
        self._silent = dict.fromkeys(others, 0.0)  # seconds since each state changed
        self._sum, self._stalled = 0, 0.0  # calls of all, and seconds since the last one
        # Calls of the store may hang, so another thread waits for them.
        self._exchanging = threading.Thread(target=self._exchange, daemon=True)
        self._exchanging.start()
        self.start()

    def leave(self, failed: str = "") -> None:
        """End this heartbeat; if this rank failed, the others end too."""
        if failed:
            with suppress(dist.DistError):  # of a store that is gone
                self._store.set(VERDICT, f"rank {self.rank} failed: {failed}"[:LONGEST_VERDICT])
        self._left.set()
        self._exchanging.join(2 * BEAT)

    def run(self) -> None:
        now = time.monotonic()
        while not self._left.wait(BEAT) and not self.verdict:
            last, now = now, time.monotonic()
            passed = min(now - last, self.timeout / 2)  # more: this process was stopped itself
            self._stalled += passed
            for rank in self._silent:
                self._silent[rank] += passed
            self.verdict = self._judge()
        if self.verdict and not self._left.is_set():
            if self.rank != 0:
                end_process(self.rank, self.verdict)
            with suppress(dist.DistError):
                self._store.set(VERDICT, self.verdict)
            self._give_up()

    def _exchange(self) -> None:
        keys = {rank: f"quire/states/{rank}" for rank in self._states}
        try:
            for beat in count():
                state = json.dumps([beat, self.calls()])
                self._store.set(f"quire/states/{self.rank}", state)
                for rank, key in keys.items():
                    state = self._store.get(key) if self._store.check([key]) else b""
                    if state != self._states[rank]:
                        self._states[rank], self._silent[rank] = state, 0.0
                self.verdict = self.verdict or self._said()
                if self._left.wait(BEAT):
                    return
        except dist.DistError:
            self.verdict = self.verdict or "rank 0 died: its store is gone"

    def _said(self) -> str:
        """The verdict of another rank."""
        is_there = self._store.check([VERDICT])
        return self._store.get(VERDICT).decode() if is_there else ""

    def _judge(self) -> str:
        for rank, process in self._processes.items():
            if process.poll() is not None:
                ended = f"rank {rank} died: its process ended, status {process.returncode}"
                return self._said() or ended
        for rank, seconds in self._silent.items():
            if seconds > self.timeout:
                return f"rank {rank} died: nothing was heard of it for {self.timeout:g} s"
        states = {rank: json.loads(state)[1] for rank, state in self._states.items() if state}
        calls = states | {self.rank: self.calls()}
        if not self.is_stepping or sum(calls.values()) != self._sum:
            self._sum, self._stalled = sum(calls.values()), 0.0
        elif self._stalled > self.timeout + 2 * BEAT:
            least = [str(rank) for rank, made in calls.items() if made == min(calls.values())]
            return f"rank {', '.join(least)} is stuck: no progress for {self.timeout:g} s"
        return self.verdict
