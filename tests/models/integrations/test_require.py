"""Adapters name a package that is missing, or has a version that they were not tested with."""

import importlib
import sys
from importlib import metadata

import pytest

VERSIONS = [
    ("vllm_attention", "0.32.0", "vllm: expected 0.33, got 0.32.0"),
    ("vllm_scheduler", "0.330.0", "vllm: expected 0.33, got 0.330.0"),
    ("transformers", "5.22.0", "transformers: expected 5.23 or 5.24, got 5.22.0"),
    ("transformers", "5.25.0", "transformers: expected 5.23 or 5.24, got 5.25.0"),
    ("vllm_attention", None, "needs vllm 0.33: pip install 'quire-attention[vllm]'"),
]


@pytest.mark.parametrize(("module", "found", "message"), VERSIONS)
def test_other_versions_are_refused_by_name(module, found, message, monkeypatch):
    def version(name):
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    name = f"quire.models.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ImportError) as error:
        importlib.import_module(name)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("module", "package"), [("kv_events", "msgspec"), ("kv_events_zmq", "zmq")]
)
def test_a_missing_package_is_named(module, package, monkeypatch):
    name = f"quire.models.integrations.{module}"
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match=r"pip install 'quire-attention\[events\]'"):
        importlib.import_module(name)
