"""Tests on a real device. Where there is none, what a CPU can of them runs in Triton's interpreter at tiny sizes, so that they are known to work
before there is a GPU."""

import pytest
import torch

DRY_RUN = not torch.cuda.is_available()


@pytest.fixture
def cuda():
    """The device of tests about CUDA itself: graphs, streams, allocations."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return torch.device("cuda")
