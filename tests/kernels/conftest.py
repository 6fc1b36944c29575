"""Fresh memory is poison: what a kernel does not write shows at once."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    """``torch.empty`` and ``torch.empty_like`` give NaN."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
