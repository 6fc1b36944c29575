"""Where there is no GPU, Triton kernels run in its interpreter."""

import gc
import os

import pytest
import torch

import bench  # noqa: F401  makes `quire` importable where it is not installed
from tests.support import budgets, lost_device

if not torch.cuda.is_available():
    # Triton reads this when it is first imported, so it has to be set before any test module is.
    os.environ["TRITON_INTERPRET"] = "1"

    from tests.support import interpreter

    interpreter.repair()


def pytest_configure(config: pytest.Config) -> None:
    lost_device.pytest_configure(config)


@pytest.hookimpl(tryfirst=True)  # what is marked long here is selected by `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():  # a GPU is quick
        budgets.leave_out(items, whole=not any("::" in name for name in config.args))


def pytest_collection_finish() -> None:
    """What is imported and collected stays to the end: full collections, which tests and programs ask
    for, need not look at its half a million objects each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)  # collections of the youngest take several percent of all time else
