"""Without a GPU, Triton kernels run in Triton's interpreter."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import bench  # noqa: F401  makes `quire` importable where it is not installed
from tests.support import lost_device

ROOT = Path(__file__).resolve().parent.parent
KERNELS = find_spec("quire.kernels").origin
if not Path(KERNELS).resolve().is_relative_to(ROOT):
    raise pytest.UsageError(
        f"quire: expected the one of this checkout, {ROOT}, got {KERNELS}: run `pip install -e .` here"
    )

# `tests.ptx.plugin` runs what the compiler makes instead.
if not torch.cuda.is_available() and "tests.ptx.plugin" not in sys.modules:
    # Triton reads this when it is first imported, so it has to be set before any test module is.
    os.environ["TRITON_INTERPRET"] = "1"

    from tests.support import interpreter

    interpreter.repair()


def pytest_configure(config: pytest.Config) -> None:
    lost_device.pytest_configure(config)


def pytest_collection_finish() -> None:
    """Imported and collected objects stay to the end: full collections, which tests and programs ask
    for, need not look at its half a million objects each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)  # collections of the youngest take several percent of all time else


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt: it may be ignored, as where tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
