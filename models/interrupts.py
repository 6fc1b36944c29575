"""Ctrl-C between the steps of an engine; within one it would leave pages without an owner."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class HeldInterrupts:
    """A handler of SIGINT that holds back the first one; a second one is handled at once."""

    def __init__(self, handler: Any) -> None:
        self.handler = handler
        self._held: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        """Handle SIGINT."""
        self._held.append(arguments)
        if len(self._held) > 1:
            self.handler(*arguments)

    def handle(self) -> None:
        """Handle a signal that is held back, if any; by default that raises KeyboardInterrupt."""
        held, self._held = self._held, []
        if len(held) == 1:
            self.handler(*held[0])


@contextmanager
def interrupts_wait() -> Iterator[HeldInterrupts]:
    """Hold back SIGINT until the outermost such block has ended.

    Only in the main thread, and where a Python function handles the signal. `handle` of the yielded
    object handles it inside the block.
    """
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, HeldInterrupts):
        yield handler
        return
    held = HeldInterrupts(handler)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield held
        return
    signal.signal(signal.SIGINT, held)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, handler)
        held.handle()
