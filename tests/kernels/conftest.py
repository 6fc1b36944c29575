"""Tests take ``impl`` in turn, and fresh memory is poison."""

import pytest
import torch


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    """Run a test that takes ``impl`` with both implementations, unless it has a table of its own."""
    tables = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "impl" in metafunc.fixturenames and not any("impl" in names for names in tables):
        metafunc.parametrize("impl", ["triton", "torch"])


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    """``torch.empty`` and its like give NaN: what a kernel does not write shows at once."""

    def poison(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    for name in ("empty", "empty_like", "empty_strided"):
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, made=made, **k: poison(made(*a, **k)))
