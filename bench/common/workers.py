"""Worker processes that compile kernels."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import runpy
import signal
import threading
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1] / "checkout.py"


class Workers(concurrent.futures.ProcessPoolExecutor):
    """A pool of fresh processes in which ``quire`` can be imported, installed or not.

    They ignore Ctrl-C. An exception that leaves the ``with`` block ends them.
    """

    def __init__(self, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")
        # A new process knows no package of a bare checkout, and work is unpickled from ``quire``.
        super().__init__(jobs, context, runpy.run_path, (str(CHECKOUT),))

    def submit(self, *args: Any, **kwargs: Any) -> concurrent.futures.Future:
        """As of any executor; a process that starts here inherits that SIGINT is blocked."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super().submit(*args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is None:
            self.shutdown()
            return
        before = threading.excepthook

        def hook(args: threading.ExceptHookArgs) -> None:
            # Up to Python 3.11 the executor's thread fails at a future that was cancelled before
            # its process ended.
            if args.exc_type is not concurrent.futures.InvalidStateError:
                before(args)

        threading.excepthook = hook
        try:
            for process in multiprocessing.active_children():
                process.terminate()
            self.shutdown(cancel_futures=True)
        finally:
            threading.excepthook = before
