"""Tests on a real device. ``QUIRE_DRY_RUN=1`` runs what a CPU can of them, on the Triton interpreter and at tiny sizes, so that they are
known to work before there is a GPU."""

import os

import pytest
import torch

DRY_RUN = os.environ.get("QUIRE_DRY_RUN") == "1" and not torch.cuda.is_available()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """In a dry run, take back the skip that tests marked ``gpu`` get where there is no GPU."""
    if not DRY_RUN:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "skip"]


@pytest.fixture
def cuda():
    """The device of tests about CUDA itself: graphs, streams, allocations."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU, also in a dry run")
    return torch.device("cuda")
