"""The adapters for vLLM beside vLLM itself, in the Python that ``VLLM_PYTHON`` names (``make test-
vllm``), or this one.

The programs that run there are `tests.support.models.vllm_requests` (scheduler) and `vllm_layers`
(attention, events).
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import models
from tests.support.shared import once_a_run

ROOT = Path(__file__).resolve().parents[3]
SIZES = (130, 400)  # pages of the pool


def said_by(factory, program, *arguments) -> dict:
    """The JSON of a program, run once with this checkout and its entry points."""
    python = os.environ.get("VLLM_PYTHON") or None
    if python is None and importlib.util.find_spec("vllm") is None:
        pytest.skip(
            "needs vLLM 0.33: make test-vllm VLLM_PYTHON=... names a Python that imports it"
        )

    def make(root: Path) -> None:
        # What an installation would have of entry points, without one.
        info = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(root)]
        subprocess.run(info, cwd=ROOT, check=True, capture_output=True)
        file = Path(models.__file__).with_name(program)
        command = [python or sys.executable, file, ROOT, *arguments, root / "said.json"]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]

    return json.loads((once_a_run(factory, program, make) / "said.json").read_text())


@pytest.fixture(scope="session")
def scheduled(tmp_path_factory) -> dict:
    return said_by(tmp_path_factory, "vllm_requests.py", "110", ",".join(map(str, SIZES)))


@pytest.fixture(scope="session")
def layers(tmp_path_factory) -> dict:
    return said_by(tmp_path_factory, "vllm_layers.py")


def test_answers_are_right_and_so_is_each_row_that_a_query_reads(scheduled):
    preempted = Counter()
    for row in scheduled["cases"]:
        name, ours, theirs = row["case"], row["quire"], row["vllm"]
        assert ours["wrong"] == ours["differ"] == 0, name
        assert ours["rows"] > 100_000 and ours["aborted"] > 0
        assert ours["left"] == 0  # pages are free or cached at the end; free once that is forgotten
        if "drafts" in name:
            assert ours["accepted"] > 500 and ours["rejected"] > 500
        if "priorities" not in name:
            assert theirs["differ"] == 0
        preempted[name] += (ours["preempted"] + theirs["preempted"]) * (row["pages"] == SIZES[0])
    assert len(preempted) == 11 and min(preempted.values()) > 0


def test_no_more_tokens_are_computed_than_with_vllms_manager(scheduled):
    """Tokens of all runs; in one run a preemption more or less is a few percent."""
    cases = scheduled["cases"]
    computed = {who: [row[who]["computed"] for row in cases] for who in ("quire", "vllm")}
    assert sum(computed["quire"]) < 0.98 * sum(computed["vllm"])
    for ours, theirs in zip(computed["quire"], computed["vllm"], strict=True):
        assert ours < 1.04 * theirs


def test_a_hit_leaves_a_drafter_the_block_that_it_cannot_trust(scheduled):
    """Prompts of 100, 97 and 81 equal tokens: the last whole block of a hit is computed again."""
    assert scheduled["drafter"] == [0, 96, 80, 0, 80, 64]


def test_a_request_whose_look_up_is_out_of_date_waits_for_another(scheduled):
    """(hit, admitted) of both: rows before the hit are those that are cached at the admission, no
    fewer and no more.
    """
    assert scheduled["late"] == {
        "nothing": [[96, True], [96, True]],
        "forgotten": [[96, False], [0, True]],
        "published": [[0, False], [96, True]],
    }


def test_what_a_preempted_request_was_given_in_its_step_is_not_found(scheduled):
    """Then what is, once it is computed after all."""
    assert scheduled["findable"] == [96, 192]


def test_every_row_of_attention_is_right(layers):
    """Shared prefixes, chunks, decodes and blocks that change their group, in NaN memory."""
    for name, case in layers["cases"].items():
        assert case["wrong"] == 0, name
        assert case["rows"] > 1000 and case["hits"] > 0
        assert case["of budget"] > 1e-3  # the bound would see a small mistake


def test_cases_are_what_they_say_and_use_the_backend_of_the_entry_point(layers):
    cases = layers["cases"]
    assert [cases[n]["groups"] for n in ("full", "hybrid", "shared keys")] == [1, 3, 2]
    assert {case["layout"] for case in cases.values()} == {"LBNHC", "BLNHC", "LBHNC"}
    assert layers["backend"] == "quire.models.integrations.vllm_attention.QuireBackend"


NO_SCHEDULER = "QuireScheduler: supported are decoders with full and sliding-window attention, got "
UNSCHEDULED = {
    "chunked": "cache group 0: ChunkedLocalAttentionSpec",
    "cross": "cache group 0: CrossAttentionSpec",
    "mamba": "cache group 1: MambaSpec",
    "no groups": "models without cache groups",
    "connector": "KV connectors (kv_transfer_config)",
    "events": "KV events (enable_kv_cache_events)",
    "DCP": "decode context parallelism",
    "PP": "pipeline parallelism",
}
NO_ATTENTION = {
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


def test_what_is_not_served_is_refused_by_name(scheduled, layers):
    refused = {name: NO_SCHEDULER + what for name, what in UNSCHEDULED.items()}
    assert scheduled["refusals"] == {"served": None} | refused
    refused = {name: [what] for name, what in NO_ATTENTION.items()}
    assert layers["refusals"] == {"served": [], "e4m3": []} | refused


def test_vllm_reads_adapter_images_salt_and_session_of_events(layers):
    full, *rest = layers["events"]
    keys = [["sql", "tenant"], ["sql", ["c0ffee00" * 8, 1]], ["sql"]]
    assert full == ["BlockStored", "sql", keys, "s", 0, "full_attention"]
    stored = [event for event in rest if event[0] == "BlockStored"]
    assert {tuple(event[4:]) for event in stored} == {(1, "sliding_window")}
    assert all(event[1] == "sql" for event in stored)
    assert rest[-1][0] == "AllBlocksCleared"
