"""Attention of vLLM's own layers over its blocks through our kernels (`tests.support.models.vllm_layers`), where vLLM is."""

import pytest

from tests.support.models.vllm_python import expect_named, expect_refused, said_by

CASES = ("full", "hybrid", "hybrid, blocks outermost", "heads before rows", "sinks and softcap", "shared keys", "bf16", "e4m3")  # fmt: skip


@pytest.fixture(scope="session")
def said(tmp_path_factory) -> dict:
    return said_by(tmp_path_factory, "vllm_layers.py")


def test_the_entry_point_registers_the_backend(said):
    assert said["backend"] == "quire.models.integrations.vllm_attention.QuireBackend"


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_right(name, said):
    """Prefixes that are shared, chunks, decodes and blocks that change their group, in one allocation that is NaN at first."""
    case = said["cases"][name]
    assert case["wrong"] == 0
    assert case["rows"] > 1000 and case["hits"] > 0
    assert case["of budget"] > 1e-3  # the bound would see a small mistake


def test_cases_are_what_they_say(said):
    cases = said["cases"]
    assert set(cases) == set(CASES)
    assert [cases[n]["groups"] for n in ("full", "hybrid", "shared keys")] == [1, 3, 2]
    assert {case["layout"] for case in cases.values()} == {"LBNHC", "BLNHC", "LBHNC"}


REFUSED = {
    "e5m2": "kv_cache_dtype not supported",
    "head size": "head_size not supported",
    "MLA": "MLA not supported",
    "images": "partial multimodal token full attention not supported",
    "encoder": "attention type encoder_only not supported",
    "blocks": "block_size not supported",
    "not causal": "non-causal attention not supported",
    "R-SWA": "R-SWA not supported",
    "DCP": "DCP not supported",
    "PCP": "PCP not supported",
    "scales of heads": "per-head quant scales not supported",
    "alibi": "QuireBackend: supported are decoders, got {'alibi_slopes': [0.5, 0.5, 0.5, 0.5]}",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_served_is_refused_by_name(what, said):
    assert said["refusals"][what] == [REFUSED[what]]


def test_what_is_served_is_not_refused(said):
    assert said["refusals"]["served"] == said["refusals"]["e4m3"] == []


@pytest.mark.parametrize("version", ["0.32.0", "0.330.0", "1.33.0"])
def test_other_versions_are_refused(version, monkeypatch):
    modules = "attention.backend", "attention.backends.registry"
    expect_refused(monkeypatch, "vllm_attention", version, *modules)


def test_absent_vllm_is_named(monkeypatch):
    expect_named(monkeypatch, "vllm_attention")
