"""Figures in the pages are those of the rows under bench/results, to the digits that are shown."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from quire.bench.pages import blocks, data, support
from quire.bench.pages.__main__ import main
from quire.kernels import merge_partials
from tests import tested

RESULTS = blocks.ROOT / "bench" / "results"
UNITS = {"%": 1e-2, "us": 1e-6, "ms": 1e-3, "s": 1.0, "B": 1.0, "MiB": 2.0**20}
PAGE = "# Title\n\nText.\n\n<!-- begin generated: {} -->\n<!-- end generated -->\n\nMore.\n"


def rows(name: str) -> list[dict]:
    return json.loads((RESULTS / name).read_text())


def table(block: str) -> list[list[str]]:
    """Cells of a block's table, header first."""
    lines = [line for line in blocks.BLOCKS[block]().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert set(cells.pop(1)) == {"---"}
    return cells


def same(shown: str, value: float) -> bool:
    """Whether `value`, rounded as `shown` is, is what it says."""
    number, unit = re.fullmatch(r"([\d.]+) (\S+)", shown).groups()
    digits = len(number.partition(".")[2])
    return abs(value / UNITS[unit] - float(number)) <= 0.5001 * 10**-digits


def test_the_pages_of_this_checkout():
    pages = blocks.pages(blocks.ROOT)
    assert RESULTS / "README.md" in pages
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert blocks.replaced(text) == text, f"{path}: run python -m bench.pages"


@pytest.mark.parametrize("block", blocks.BLOCKS)
def test_a_block_is_written_once_and_then_found_right(block, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(block), encoding="utf-8")
    assert main(["--check", str(page)]) == 1
    assert page.read_text(encoding="utf-8") == PAGE.format(block)
    assert main([str(page)]) == 0 and main(["--check", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Title\n\nText.\n\n<!-- begin") and text.endswith("-->\n\nMore.\n")
    # A digit that somebody has changed by hand.
    at = text.index("|---|") if "|---|" in text else 0
    changed = text[:at] + re.sub(r"\d", lambda d: str((int(d[0]) + 1) % 10), text[at:], count=1)
    assert changed != text
    page.write_text(changed, encoding="utf-8")
    assert main(["--check", str(page)]) == 1
    assert f"differs from the results: {block}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ("first-figures", "kvcore.json"),
        ("allocator-costs", "kvcore.json"),
        ("tier-costs", "kvcore.json"),
        ("replay-round-robin", "replay_round_robin.json"),
        ("replay-conversation", "replay_conversation_gemma.json"),
        ("replay-conversation-parts", "replay_conversation_8001.json"),
        ("replay-prefix-sweep", "replay_prefix_sweep.json"),
        ("replay-pr43447", "replay_pr43447.json"),
    ],
)
def test_rows_that_change_are_noticed(block, name, tmp_path, monkeypatch):
    before = blocks.BLOCKS[block]()
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(data, "RESULTS", tmp_path)
    assert blocks.BLOCKS[block]() == before
    changed = rows(name)
    for row in changed:
        for key in {"value", "hit_rate"} & row.keys():
            row[key] *= 0.9
    (tmp_path / name).write_text(json.dumps(changed))
    assert blocks.BLOCKS[block]() != before


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- begin generated: no-such -->\n<!-- end generated -->\n", "line 1: expected one of"),
        ("<!-- begin generated: v4-memory -->\n", "v4-memory: expected '<!-- end generated -->'"),
        ("text\n<!-- end generated -->\n", "line 2: expected blocks one after another"),
        ("<!-- begin generated v4-memory -->\n", "line 1: expected a marker"),
        ("<!-- begin generated: v4-memory -->\n" * 2, "line 2: expected blocks one after another"),
    ],
)
def test_markers_that_are_wrong(page, message, tmp_path, capsys):
    path = tmp_path / "page.md"
    path.write_text(page)
    assert main([str(path)]) == 2
    assert message in capsys.readouterr().err
    assert path.read_text() == page


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
    header, *lines = table("allocator-costs")
    assert header[1:] == ["V4-like, ours", "vLLM", "Gemma-like, ours", "vLLM"]
    columns = [(s, p) for s in ("v4", "gemma4-31b") for p in ("", "vllm_")]
    assert [line[0] for line in lines] == [*ALLOCATOR, "a pool of 1M pages"]
    for what, *cells in lines:
        for (spec, prefix), cell in zip(columns, cells, strict=True):
            names = [ALLOCATOR[what]] if what in ALLOCATOR else ["pool_1m_build", "pool_1m_bytes"]
            if cell == data.NONE:
                assert (spec, prefix + names[0]) not in value
                continue
            for name, shown in zip(names, cell.split(", "), strict=True):
                assert same(shown, value[spec, prefix + name]), (what, spec, shown)
    first = {line[0]: line[1:] for line in table("first-figures")[1:]}
    for line, name in (("one decode step of 256 requests", "decode_step_256"), ("look-up", "lookup_1m_hit")):  # fmt: skip
        (cells,) = [c for what, c in first.items() if line in what]
        for shown, prefix in zip(cells, ("", "vllm_"), strict=True):
            assert same(shown, value["v4", prefix + name]), (line, shown)


TIER_CALLS = {
    "`stores`": "store",
    "`done` of a store": "store_done",
    "`match`": "match",
    "`load`": "load",
    "`done` of a load": "load_done",
}


def test_what_tiers_cost():
    value = {(r["spec"], r["name"]): r["value"] for r in rows("kvcore.json")}
    header, *lines = table("tier-costs")
    assert [line[0] for line in lines] == list(TIER_CALLS)
    prompts = {"one of 8,192 tokens": "tier", "eight of them together": "tier_batch", "one of 131,072 tokens": "tier_chain"}  # fmt: skip
    for title, *cells in zip(header[1:], *(line[1:] for line in lines), strict=True):
        spec = "v4" if title.startswith("V4") else "gemma4-31b"
        row = prompts[title.partition(", ")[2]]
        for call, cell in zip(TIER_CALLS.values(), cells, strict=True):
            assert float(cell) == pytest.approx(value[spec, f"{row}_{call}"] * 1e6, abs=0.005)


def hits(*names: str) -> dict[tuple, float]:
    """Hit rates by preset, eviction and pool."""
    found = [r for name in names for r in rows(name) if r["retention"] != "any" or r["pool"]]
    return {(r["preset"], r["eviction"], r["pool"]): r["hit_rate"] for r in found}


def test_round_robin():
    found = hits("replay_round_robin.json")
    _, *lines = table("replay-round-robin")
    for pool, *cells in lines:
        kinds = (("lru", pool), ("s3fifo", pool), ("adaptive", pool), ("infinite", None))
        for shown, (kind, size) in zip(cells, kinds, strict=True):
            assert same(shown, found["gemma-4-31b", kind, size and size.replace(" ", "")]), (pool, kind)  # fmt: skip


def test_conversation():
    found = hits("replay_conversation.json", "replay_conversation_gemma.json")
    header, *lines = table("replay-conversation")
    assert len(lines) == 12
    for what, *cells in lines:
        model, _, policy = what.partition(", ")
        kind = {"`CostAware`": "cost-aware"}.get(policy, policy.strip("`").lower())
        for pool, shown in zip(header[1:], cells, strict=True):
            if not policy.startswith("infinite"):
                assert same(shown, found[model.lower(), kind, pool.replace(" ", "")]), (what, pool)
            elif "auto" in policy:
                assert same(shown, found[model.lower(), "infinite", None]), (what, pool)


def test_requests_that_were_not_looked_at():
    found = hits("replay_conversation_8001.json")
    header, *_, line = table("replay-conversation-parts")
    assert line[0] == "8,001 to 12,000"
    for shown, pool in zip(line[1:5], header[1:5], strict=True):
        assert same(shown, found["v4-flash", "adaptive", pool.replace(" ", "")]), pool


@pytest.mark.parametrize("name", sorted(p.name for p in RESULTS.glob("*.json")))
def test_rows_say_how_they_were_made(name):
    assert f"`{name}`" in (RESULTS / "README.md").read_text()


# The support matrix.


def test_what_is_called_tested_is_in_the_case_tables():
    assert tested.PATH.read_text(encoding="utf-8") == tested.text(), "run python -m tests.tested"


def test_what_is_called_compiled_is_in_the_static_table(monkeypatch):
    names = {row["case"] for row in support.static_rows() if row["arch"] == "sm_90"}
    assert {"decode-fp8-d256-p128-q1", "mla-decode-h16-p16-pages-only"} <= names
    assert support.compiled()["sm_90"]["paged_attention", 256, "float8_e4m3fn"] == {64, 128}
    assert support.compiled()["sm_90"]["mla_attention", 512, "bfloat16"] == {16, 64}
    spills = [row | {"spill_bytes": 8} for row in support.static_rows()[:1]]
    monkeypatch.setattr(support, "static_rows", lambda: spills)
    with pytest.raises(ValueError, match="spills 8 bytes"):
        support.compiled.__wrapped__()


def test_nothing_is_both_refused_and_tested(monkeypatch):
    assert support.refused("paged_attention", 96, "bfloat16")
    assert support.refused("mla_attention", 512, "float8_e4m3fn")
    assert support.refused("compressed_attention", 256, "uint8")
    with pytest.raises(NotImplementedError, match="head_dim 96"):
        parts = support.meta(2, 3, 4, 96)
        merge_partials(parts, support.meta(2, 4, 3, dtype="float32"))
    monkeypatch.setattr(support, "tested", lambda: {("paged_attention", 96, "bfloat16"): {16}})
    with pytest.raises(AssertionError, match="is refused, but tested"):
        support.attention()
