"""vLLM's host tier under `ResumePointPolicy` (`tests.support.models.vllm_tier`), where vLLM is."""

import importlib
import sys
from pathlib import Path

import pytest

from tests.support.models.vllm_python import other_version, said_by

TRACE = Path(__file__).resolve().parents[3].parent / "shared/traces/mooncake_conversation.jsonl.xz"


@pytest.fixture(scope="session")
def said(tmp_path_factory) -> dict:
    return said_by(tmp_path_factory, "vllm_tier.py", str(TRACE), "1000", "10000,20000")


def test_a_chat_resumes_at_its_end_where_other_policies_lost_it(said):
    """Its chunks of full attention and its last tail fit, all window chunks do not."""
    assert said["chat"] == {"lru": [0, 5120, 0], "arc": [0, 5120, 5120], "ResumePointPolicy": [0, 5120, 10240]}  # fmt: skip


def test_random_requests_find_what_is_stored_and_lose_nothing_pinned(said):
    assert said["random"] == [0] * 20


def test_more_of_a_trace_is_loaded_than_with_other_policies(said):
    """Where vLLM stores window chunks of more boundaries than the last. With that alone there is nothing to spare, and it is as LRU."""
    if said["trace"] is None:
        pytest.skip(f"the trace is not at {TRACE.parent.name}/{TRACE.name} next to the repository")
    for row in said["trace"]:
        others = max(row["lru"], row["arc"])
        assert others > 0
        if row["interval"] != 0:
            assert row["ResumePointPolicy"] > 1.1 * others
        else:
            assert row["ResumePointPolicy"] > 0.98 * row["lru"]


def test_the_page_prints_what_it_shows(said):
    [(printed, shown)] = said["page"]
    assert printed == shown


@pytest.mark.parametrize("version", ["0.32.0", "0.330.0", "1.33.0"])
def test_other_versions_are_refused(version, monkeypatch):
    other_version(monkeypatch, version, "kv_offload.base", "kv_offload.cpu.policies.base")
    with pytest.raises(ImportError, match=rf"vllm: expected 0\.33, got {version}"):
        importlib.import_module("quire.models.integrations.vllm_tier_policy")


def test_absent_vllm_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"needs vLLM 0\.33: pip install 'quire\[vllm\]'"):
        importlib.import_module("quire.models.integrations.vllm_tier_policy")
