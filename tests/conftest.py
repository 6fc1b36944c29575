"""Where there is no GPU, Triton kernels run in its interpreter."""

import os

import pytest
import torch

from tests.support import lost_device

if not torch.cuda.is_available():
    # Triton reads this when it is first imported, so it has to be set before any test module is.
    os.environ["TRITON_INTERPRET"] = "1"

    from tests.support import interpreter

    interpreter.repair()


def pytest_configure(config: pytest.Config) -> None:
    lost_device.pytest_configure(config)
