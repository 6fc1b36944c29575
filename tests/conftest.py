"""Where there is no GPU, Triton kernels run in its interpreter; tests marked ``gpu`` are skipped with a reason."""

import gc
import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this when it is first imported, so it has to be set before any test module is.
    os.environ["TRITON_INTERPRET"] = "1"

    from tests.support import interpreter

    interpreter.repair()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish() -> None:
    """What is imported and collected stays to the end: full collections, which tests and programs ask
    for, need not look at its half a million objects each time.
    """
    gc.collect()
    gc.freeze()
