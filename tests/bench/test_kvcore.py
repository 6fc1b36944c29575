"""`bench.kvcore`: rows of its figures, and vLLM beside it."""

from __future__ import annotations

import gc
import json
import sys
from importlib import metadata
from importlib.util import find_spec

import pytest

from quire.bench import kvcore
from quire.bench.kvcore import measure
from quire.bench.kvcore.__main__ import VLLM_VERSION, main, vllm_rows

STEP = ("", "_mean", "_plan", "_churn", "_add", "_garbage")
PROMPT = (
    "pool_1m_build", "hash_1m", "admit_1m_interval", "release_1m", "lookup_1m_hit",
    "admit_1m_dense", "lookup_1m_tails_gone",
)  # fmt: skip


def test_rows_of_the_command(tmp_path, capsys):
    path = tmp_path / "rows.json"
    arguments = ["--model", "v4", "--repeats", "0", "--requests", "1", "3", "--steps", "1"]
    assert main([*arguments, "--json", str(path)]) == 0
    rows = [r for r in json.loads(path.read_text()) if not r["name"].startswith("vllm_")]
    assert all(set(r) == {"name", "spec", "value", "unit"} and r["spec"] == "v4" for r in rows)
    values = {r["name"]: (r["value"], r["unit"]) for r in rows}
    names = [f"decode_step_{n}{part}" for n in (1, 3) for part in STEP]
    assert set(values) == {"pool_1m_bytes", *names, "drafts_step_1", "drafts_step_3"}
    assert values["decode_step_3"][1] == "s" and 0 < values["decode_step_3"][0] < 1
    assert values["pool_1m_bytes"][1] == "B" and values["pool_1m_bytes"][0] < 64 * 2**20
    printed = capsys.readouterr()
    assert "decode_step_3" in printed.out
    assert ("vllm not installed: no comparison\n" in printed.err) == (find_spec("vllm") is None)


@pytest.mark.parametrize("spec", measure.SPECS)
def test_other_figures(spec, monkeypatch):
    """Each function checks what it measures; here on smaller prompts and pools."""
    monkeypatch.setattr(measure, "MILLION", 1 << 17)
    rows = measure.million(spec, 1) + measure.split_lookup(spec, 8)
    assert [r["name"] for r in rows] == [*PROMPT, "lookup_whole_8", "lookup_left_8"]
    monkeypatch.setattr(measure, "CHUNK", 1024)
    full = measure.full_pool(1)
    assert [r["name"] for r in full] == ["plan_8k_full_adaptive", "plan_8k_full_lru"]
    assert all(0 < r["value"] < 10 and r["unit"] == "s" for r in rows + full)


def test_the_tokens_of_a_timed_step_are_computed():
    cache, slots = measure.decoding("v4", 2, context=600)
    for run in (measure.decode_times, measure.reserve_times):
        before = cache.num_computed[slots].copy()
        run(cache, slots, 3)
        assert (cache.num_computed[slots] == before + 3).all()


@pytest.mark.parametrize(
    ("version", "reason"),
    [("0.32.0", "expected 0.33"), ("0.330.0", "expected 0.33"), ("0.33.1", "import of")],
)
def test_a_vllm_that_cannot_be_measured_is_named(version, reason, monkeypatch, capsys):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    monkeypatch.delattr(kvcore, "vllm", raising=False)
    monkeypatch.setitem(sys.modules, "quire.bench.kvcore.vllm", None)  # importing it fails
    assert vllm_rows("v4", [1], 1, 1) == []
    assert capsys.readouterr().out.startswith(f"vllm {version}: not measured: {reason}")


@pytest.mark.parametrize("spec", measure.SPECS)
def test_every_figure_of_an_installed_vllm(spec, monkeypatch, capsys):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    monkeypatch.setattr(measure, "MILLION", 1 << 16)
    rows = vllm_rows(spec, [3], 1, 8)
    if not rows:
        pytest.skip(f"needs vLLM {VLLM_VERSION}: {capsys.readouterr().out}")
    names = {f"vllm_{name}" for name in (*PROMPT, "pool_1m_bytes", "decode_step_3")}
    assert {r["name"] for r in rows} == names and all(r["value"] > 0 for r in rows)
    assert gc.get_freeze_count() == 0
