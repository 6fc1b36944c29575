"""One thread at a time steps, and others may call meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepTurns:
    """Who steps.

    Attributes:
        lock: held whenever requests or the allocator change, but not while the model runs.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._one_step = threading.Lock()  # held for all of a step
        self._stepping: int | None = None  # the thread that steps

    @property
    def is_taken(self) -> bool:
        """Whether a step runs."""
        return self._stepping is not None

    @contextmanager
    def take(self, at_end: Callable[[], None] = lambda: None) -> Iterator[None]:
        """One step, behind that of another thread.

        Args:
            at_end: is called with the lock.

        Raises:
            RuntimeError: called from within a step.
        """
        if self._stepping == threading.get_ident():
            raise RuntimeError(
                "step: expected to be called between steps, got a call from within one"
            )
        with self._one_step:
            with self.lock:
                self._stepping = threading.get_ident()
            try:
                yield
            finally:
                with self.lock:
                    self._stepping = None
                    at_end()
