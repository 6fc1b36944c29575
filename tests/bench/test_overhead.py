"""bench.overhead launches nothing, and a call like an earlier one is cheaper than the first."""

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire import kernels
from quire.bench import overhead
from quire.kernels import merge_partials
from quire.kernels.common import launch_cache


def test_every_wrapper_is_timed(tmp_path, capsys):
    out = tmp_path / "overhead.json"
    assert overhead.main(["--rounds", "3", "--repeats", "10", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [row["wrapper"] for row in rows] == list(overhead.calls())
    for row in rows:
        assert 0 < row["again_us"] < row["first_us"]
    *lines, note = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(rows) and note == "no GPU: wrappers only"


VIEWS = {
    "aten.slice.Tensor",
    "aten.view.default",
    "aten.transpose.int",
    "aten.view.dtype",
    "aten.detach.default",
    "aten.as_strided.default",
}


EMPTY = {
    f"aten.{name}" for name in ("empty.memory_format", "new_empty.default", "empty_strided.default")
}
# These take no ``out``.
MAKE_RESULTS = {
    "collapse_streams",
    "expand_streams",
    "route_tokens",
    "expert_mlp",
    "combine_experts",
    "sample_tokens",
}


class Operators(TorchDispatchMode):
    """Notes the name of every operator that torch runs."""

    def __init__(self):
        super().__init__()
        self.ran = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.add(str(func))
        return func(*args, **kwargs or {})


@pytest.fixture
def wrappers(monkeypatch):
    """The calls on tensors of a device, with nothing remembered and nothing launched."""
    monkeypatch.setattr(overhead.launching, "launch", lambda *launch: None)
    launch_cache.clear()
    return overhead.calls


def test_given_memory_means_no_allocation(wrappers):
    """No operator runs but views, in a first call and in those like it."""
    for name, call in wrappers().items():
        for _ in range(2):
            with Operators() as operators:
                call()
            allowed = VIEWS | EMPTY if name.split(",")[0] in MAKE_RESULTS else VIEWS
            assert operators.ran <= allowed, name


def test_every_public_wrapper_is_among_them():
    others = ("Pages", "Rows", "numel", "bytes", "_for")  # they launch nothing
    names = {name for name in kernels.__all__ if not name.endswith(others)}
    assert {name.split(",")[0] for name in overhead.calls()} == names


def test_the_instrument_sees_an_allocation(wrappers):
    with Operators() as operators:
        merge_partials(torch.zeros(2, 3, 4, 16), torch.zeros(2, 4, 3), impl="triton")
    assert "aten.empty.memory_format" in operators.ran


def test_no_wrapper_reads_a_value(wrappers):
    """Tensors without values do: a captured graph launches the same, whatever its tensors hold."""
    meta = wrappers("meta")
    with pytest.raises(RuntimeError, match="meta"):
        torch.zeros(1, device="meta").item()
    for call in (*meta.values(), *meta.values()):
        call()
