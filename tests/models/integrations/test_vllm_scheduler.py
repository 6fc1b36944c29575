"""vLLM's Scheduler on kvcore beside its own (`tests.support.models.vllm_requests`), where vLLM is."""

import pytest

from tests.support.models.vllm_python import expect_named, expect_refused, said_by

REQUESTS, SIZES = 110, (130, 400)  # of each case; pages of the pool
CASES = ("dense", "hybrid", "hybrid, every boundary", "hybrid, intervals", "hybrid, async", "hybrid, drafts", "hybrid, async, drafts",
         "hybrid, priorities", "block sizes 16 and 32", "no caching, async, drafts", "dense, async, drafts")  # fmt: skip


@pytest.fixture(scope="session")
def said(tmp_path_factory) -> dict:
    sizes = ",".join(map(str, SIZES))
    return said_by(tmp_path_factory, "vllm_requests.py", str(REQUESTS), sizes)


@pytest.mark.parametrize("name", CASES)
def test_answers_are_right_and_so_is_each_row_that_a_query_reads(name, said):
    rows = [row for row in said["cases"] if row["case"] == name]
    assert [row["pages"] for row in rows] == list(SIZES)
    for row in rows:
        ours, theirs = row["quire"], row["vllm"]
        assert ours["wrong"] == ours["differ"] == 0
        assert ours["rows"] > 100_000 and ours["aborted"] > 0
        assert ours["left"] == 0  # pages are free or cached at the end; free once that is forgotten
        if "drafts" in name:
            assert ours["accepted"] > 500 and ours["rejected"] > 500
        if "priorities" not in name:
            assert theirs["differ"] == 0
    assert rows[0]["quire"]["preempted"] + rows[0]["vllm"]["preempted"] > 0


def test_no_more_tokens_are_computed_than_with_vllms_manager(said):
    """In all. Of one run of so few requests, a preemption more or less, or which prefix it costs, is a few percent."""
    computed = {who: [row[who]["computed"] for row in said["cases"]] for who in ("quire", "vllm")}
    assert sum(computed["quire"]) < 0.98 * sum(computed["vllm"])
    for ours, theirs in zip(computed["quire"], computed["vllm"], strict=True):
        assert ours < 1.04 * theirs


def test_slots_are_given_no_slower_than_by_vllms_manager(said):
    assert len(said["timings"]) == 8
    for row in said["timings"]:
        assert row["quire"] < row["vllm"], row


REFUSED = {
    "chunked": "cache group 0: ChunkedLocalAttentionSpec",
    "cross": "cache group 0: CrossAttentionSpec",
    "mamba": "cache group 1: MambaSpec",
    "no groups": "models without cache groups",
    "connector": "KV connectors (kv_transfer_config)",
    "events": "KV events (enable_kv_cache_events)",
    "DCP": "decode context parallelism",
    "PP": "pipeline parallelism",
}


def test_what_is_not_served_is_refused_by_name(said):
    start = "QuireScheduler: supported are decoders with full and sliding-window attention, got "
    assert said["refusals"] == {"served": None} | {name: start + what for name, what in REFUSED.items()}  # fmt: skip


def test_a_hit_leaves_a_drafter_the_block_that_it_cannot_trust(said):
    """Of prompts of 100, 97 and 81 equal tokens, one after the other: the last whole block that is found is computed again."""
    assert said["drafter"] == [0, 96, 80, 0, 80, 64]


def test_an_abort_in_any_state_frees_all(said):
    aborts = said["aborts"]
    assert aborts["left"] == {str(steps): [0, 0] for steps in (0, 1, 2, 3, 5, 8)}
    assert aborts["wrong"] == aborts["usage"] == 0
    assert aborts["reset"] == [True, 299]


def test_what_a_preempted_request_was_given_in_its_step_is_not_found(said):
    """Then what is, once it is computed after all."""
    assert said["findable"] == [96, 192]


@pytest.mark.parametrize("version", ["0.32.0", "0.330.0", "1.33.0"])
def test_other_versions_are_refused(version, monkeypatch):
    modules = "core.sched.scheduler", "core.sched.async_scheduler", "kv_cache_interface"
    expect_refused(monkeypatch, "vllm_scheduler", version, *modules)


def test_absent_vllm_is_named(monkeypatch):
    expect_named(monkeypatch, "vllm_scheduler")
