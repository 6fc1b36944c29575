"""Results made once a run of pytest, by the worker that needs them first."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def once_a_run(
    tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]
) -> Path:
    """A directory that ``make`` filled, in this process or in another worker; all others wait until it is done.

    Args:
        name: the directory's, in the temporary directory of the run.
        make: called with the empty directory. What it raises, every worker gets: each tries again.
    """
    run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a directory in that of the run
        run = run.parent
    root, done = run / name, run / f"{name}.done"
    with open(run / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            make(root)
            done.touch()
    return root
