"""`bench.kvcore` as its readers see it: the names of its figures, its curves, and that decoding leaves nothing behind."""

from __future__ import annotations

import json

import numpy as np
import pytest

from quire.bench.kvcore import measure, scaling, tiers
from quire.bench.kvcore.__main__ import main


def test_the_figures_have_the_names_that_others_read(tmp_path, capsys):
    path = tmp_path / "rows.json"
    main(["--spec", "v4", "--repeats", "0", "--requests", "3", "--steps", "4", "--json", str(path)])
    rows = json.loads(path.read_text())
    names = {r["name"]: r for r in rows}
    assert {"pool_1m_bytes", "decode_step_3", "decode_step_3_churn", "drafts_step_3"} <= set(names)
    assert all(set(r) == {"name", "spec", "value", "unit"} and r["spec"] == "v4" for r in rows)
    assert names["decode_step_3"]["unit"] == "s" and 0 < names["decode_step_3"]["value"] < 1
    assert names["pool_1m_bytes"]["unit"] == "B"
    assert names["pool_1m_bytes"]["value"] < 64 * 2**20
    assert "decode_step_3" in capsys.readouterr().out


@pytest.mark.parametrize("spec", list(measure.SPECS))
def test_a_decode_step_leaves_no_garbage(spec):
    cache, slots = measure.decoding(measure.SPECS[spec], 16, context=512, num_pages=10_000)
    left = measure.garbage(cache, slots, 200)
    assert abs(left) < 16 * 4, "a few bytes a request would be noticed"
    kept = []
    commit = cache.commit
    cache.commit = lambda plan, ids: kept.append(plan) or commit(plan, ids)
    assert measure.garbage(cache, slots, 50) > 1000, "a kept plan is noticed"


def test_curves_and_their_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    few = {"requests": [2, 4], "context": [512, 1024], "pages": [1 << 12], "groups": [1, 8]}
    monkeypatch.setattr(scaling, "CURVES", few)
    monkeypatch.setattr(scaling, "CONTEXT", 512)
    monkeypatch.setattr(scaling, "PAGES", 1 << 12)
    monkeypatch.setattr(scaling, "REQUESTS", 2)
    picture = tmp_path / "curves.png"
    numbers = tmp_path / "curves.json"
    arguments = ["--spec", "v4", "--steps", "3", "--plot", str(picture), "--json", str(numbers)]
    assert main(arguments) == 0
    rows = json.loads(numbers.read_text())
    expected = [f"scaling_{what}_{v}" for what, values in few.items() for v in values]
    assert [r["name"] for r in rows] == expected
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_more_groups_are_windows_like_the_first():
    groups = scaling.some_groups("v4", 8)
    assert [g.kind for g in groups] == ["dense", "window", "window", "state"] + ["window"] * 4
    assert len({g.name for g in groups}) == 8 and np.all([g.page_bytes == 1 for g in groups])


@pytest.mark.parametrize("spec", list(measure.SPECS))
def test_entries_of_tiers_go_to_the_host_and_come_back(spec, monkeypatch):
    monkeypatch.setattr(measure, "MILLION", 1 << 14)
    rows = tiers.entry_times(spec, 2)
    which = ("tier", "tier_batch", "tier_chain")
    names = [f"{tier}_{name}" for tier in which for name in tiers.CALLS]
    assert [r["name"] for r in rows] == names
    assert all(0 < r["value"] < 1 and (r["spec"], r["unit"]) == (spec, "s") for r in rows)


def test_a_chain_that_was_left_everywhere_is_looked_up_and_a_full_pool_makes_room(monkeypatch):
    monkeypatch.setattr(measure, "CHUNK", 1024)
    monkeypatch.setattr(measure, "MILLION", 1 << 17)
    rows = [*measure.split_lookup("v4", 8), *measure.full_pool(1)]
    assert [r["name"] for r in rows] == [
        "lookup_whole_8", "lookup_left_8", "plan_8k_full_adaptive", "plan_8k_full_lru",
    ]  # fmt: skip
    assert all(0 < r["value"] < 10 and r["unit"] == "s" for r in rows)
