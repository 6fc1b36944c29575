"""bench.overhead launches nothing, and a call like an earlier one is cheaper than the first."""

import json

import torch

from quire.bench import overhead
from quire.kernels import recipes


def test_every_wrapper_is_timed(tmp_path, capsys):
    out = tmp_path / "overhead.json"
    assert overhead.main(["--repeats", "30", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())
    assert [row["wrapper"] for row in rows] == list(overhead.calls())
    for row in rows:
        assert 0 < row["again_us"] < row["first_us"]
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


def test_given_memory_means_no_allocation(monkeypatch):
    monkeypatch.setattr(overhead._launch, "launch", lambda *launch: None)
    calls = overhead.calls()
    recipes.forget()
    for name in ("empty", "empty_like", "zeros", "full", "tensor"):
        monkeypatch.setattr(torch, name, None)
    for call in calls.values():
        call()  # checked and prepared
        call()  # remembered
