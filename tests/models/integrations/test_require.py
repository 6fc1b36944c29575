"""Adapters refuse packages that are missing, or of another version than the ones that they were tested with."""

import importlib

import pytest


@pytest.mark.parametrize("module", ["vllm_attention", "vllm_scheduler", "transformers"])
@pytest.mark.parametrize("change", [-1, +1])
def test_other_versions_are_refused_by_name(module, change, monkeypatch):
    supported = {"transformers": "5.23 or 5.24"}.get(module, "0.33")
    major, minor = supported.split()[-1].split(".")
    other = f"{major}.{int(minor) + 2 * change}.0"
    monkeypatch.setattr("importlib.metadata.version", lambda name: other)
    with pytest.raises(ImportError, match=rf"^\w+: expected {supported}, got {other}$"):
        importlib.import_module(f"quire.models.integrations.{module}")


def test_a_version_is_compared_by_its_parts(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.330.0")
    with pytest.raises(ImportError, match=r"^vllm: expected 0\.33, got 0\.330\.0$"):
        importlib.import_module("quire.models.integrations.vllm_scheduler")


def test_a_missing_package_is_named(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(
        ImportError, match=r"^needs vllm 0\.33: pip install 'quire-attention\[vllm\]'$"
    ):
        importlib.import_module("quire.models.integrations.vllm_attention")
