"""Figures in the documents are those of the rows under bench/results, to the digits that are shown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = (ROOT / "docs" / "results.md").read_text()
UNITS = {"%": 1e-2, "us": 1e-6, "ms": 1e-3, "s": 1.0, "MiB": 2.0**20}


def rows(name: str) -> list[dict]:
    return json.loads((RESULTS / name).read_text())


def table(header: str) -> list[list[str]]:
    """Cells of the page's table whose header starts with `header`, header first."""
    lines = PAGE[PAGE.index(f"| {header} |") :].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cells[0], *cells[2:]]


def same(shown: str, value: float) -> bool:
    """Whether `value`, rounded as `shown` is, is what it says."""
    number, unit = re.fullmatch(r"([\d.]+) (\S+)", shown).groups()
    digits = len(number.partition(".")[2])
    return abs(value / UNITS[unit] - float(number)) <= 0.5001 * 10**-digits


ALLOCATOR = {
    "segment keys of a prompt of 1,048,576 tokens": "hash_1m",
    "plan and commit of its 128 chunks, `retention=32768`": "admit_1m_interval",
    'the same, `retention="dense"`': "admit_1m_dense",
    "look it up, all cached": "lookup_1m_hit",
    "look it up, no resume point left": "lookup_1m_tails_gone",
    "release it": "release_1m",
    "one decode step of 256 requests at 8k tokens": "decode_step_256",
    "the same, each step with another batch": "decode_step_256_churn",
}


def test_what_the_allocator_costs():
    value = {(r["spec"], r["name"]): r["value"] for r in rows("kvcore.json")}
    header, *lines = table("| V4-like, ours")
    assert header[1:] == ["V4-like, ours", "vLLM", "Gemma-like, ours", "vLLM"]
    columns = [(s, p) for s in ("v4", "gemma4-31b") for p in ("", "vllm_")]
    assert [line[0] for line in lines] == [*ALLOCATOR, "a pool of 1M pages"]
    for what, *cells in lines:
        for (spec, prefix), cell in zip(columns, cells, strict=True):
            names = [ALLOCATOR[what]] if what in ALLOCATOR else ["pool_1m_build", "pool_1m_bytes"]
            if cell == "–":
                assert (spec, prefix + names[0]) not in value
                continue
            for name, shown in zip(names, cell.split(", "), strict=True):
                assert same(shown, value[spec, prefix + name]), (what, spec, shown)
    first = {line[0]: line[1:] for line in table("measured or counted without a GPU")[1:]}
    for line, name in (("one decode step of 256 requests", "decode_step_256"), ("look-up", "lookup_1m_hit")):  # fmt: skip
        (cells,) = [c for what, c in first.items() if line in what]
        for shown, prefix in zip(cells, ("", "vllm_"), strict=True):
            assert same(shown, value["v4", prefix + name]), (line, shown)


def hits(*names: str) -> dict[tuple, float]:
    """Hit rates by preset, eviction and pool."""
    found = [r for name in names for r in rows(name)]
    return {(r["preset"], r["eviction"], r["pool"]): r["hit_rate"] for r in found}


def test_round_robin():
    found = hits("replay_round_robin.json")
    _, *lines = table("pool, of the dense working set | `LRU`")
    for pool, *cells in lines:
        kinds = (("lru", pool), ("s3fifo", pool), ("adaptive", pool), ("infinite", None))
        for shown, (kind, size) in zip(cells, kinds, strict=True):
            assert same(shown, found["gemma-4-31b", kind, size and size.replace(" ", "")]), (pool, kind)  # fmt: skip


def test_conversation():
    found = hits("replay_conversation.json", "replay_conversation_gemma.json")
    header, *lines = table("pool, of the dense working set | 5 %")
    assert len(lines) == 12
    for what, *cells in lines:
        model, _, policy = what.partition(", ")
        if policy.startswith("infinite"):
            continue
        kind = {"`CostAware`": "cost-aware"}.get(policy, policy.strip("`").lower())
        for pool, shown in zip(header[1:], cells, strict=True):
            assert same(shown, found[model.lower(), kind, pool.replace(" ", "")]), (what, pool)


@pytest.mark.parametrize("name", sorted(p.name for p in RESULTS.glob("*.json")))
def test_rows_say_how_they_were_made(name):
    assert f"`{name}`" in (RESULTS / "README.md").read_text()


def test_requests_that_were_not_looked_at():
    found = hits("replay_conversation_8001.json")
    header, *_, (part, *cells) = table("requests, V4-Flash, `Adaptive`")
    assert part == "8,001 to 12,000"
    for shown, pool in zip(cells[:4], header[1:5], strict=True):
        assert same(shown, found["v4-flash", "adaptive", pool.replace(" ", "")]), pool
