"""bench.tune on a CPU: which tile shapes it tries, takes and writes."""

import dataclasses
import json

import pytest
import torch

from quire.bench import shapes, tune
from quire.bench.timing import Timing
from quire.bench.tune import Cell
from quire.kernels import configs, paged, tile_tables
from quire.kernels.configs import Config


def test_a_dry_run_compiles_measures_and_takes_the_fastest(tmp_path, capsys, monkeypatch):
    def time_calls(calls, device, seconds):
        config = paged.select_config()  # what a call would launch with
        each = 1e-6 * config.block_n / max(1, config.programs_per_sm)
        return Timing(each, each, each, 1, 1)

    monkeypatch.setattr(tune, "time_calls", time_calls)
    tiny = [c for c in shapes.tiny_cases() if c.shape.name == "tiny/local"]
    monkeypatch.setattr(shapes, "tiny_cases", lambda: tiny)
    out = tmp_path / "tune.json"
    before = paged.select_config
    assert tune.main(["--dry-run", "--jobs", "1", "--json", str(out)]) == 0
    assert paged.select_config is before
    result = json.loads(out.read_text())
    assert not result["refused"] and not result["not_run"]
    assert [(row["cell"], row["config"], row["ratio"]) for row in result["rows"]] == [
        ("decode 32 x16", [16, 64, 4, 4, 1], 1.0),
        ("decode 32 x16", [16, 32, 4, 4, 1], pytest.approx(0.5)),
        ("prefill 32", [64, 64, 4, 3, 1], 1.0),
        ("prefill 32", [64, 32, 4, 3, 1], pytest.approx(0.5)),
        # The shape that was taken, and one other way of launching it.
        ("prefill 32", [64, 64, 4, 3, 1], 1.0),
        ("prefill 32", [64, 32, 4, 3, 1], pytest.approx(0.5)),
        ("prefill 32", [64, 32, 4, 3, 1, True, 2], pytest.approx(0.25)),
    ]
    for row in result["rows"]:
        assert row["wrong"] is None and len(row["ms"]) == 1
    taken = [line for line in capsys.readouterr().out.splitlines() if line.startswith("taken")]
    assert [line.split()[2] for line in taken] == ["32", "32", "32"]
    assert taken[-1].split()[6:8] == ["1", "2"]


def test_the_chosen_tile_shape_is_the_one_that_runs(monkeypatch):
    monkeypatch.setattr(tune, "time_calls", lambda *a, **k: Timing(1.0, 1.0, 1.0, 1, 1))
    (case,) = [
        c for c in shapes.tiny_cases() if c.phase == "prefill" and c.shape.name == "tiny/local"
    ]
    cell, broken = Cell("prefill", 32), Config(64, 48, 4, 3)  # no power of two
    rows = tune.measure(
        cell, [case], [cell.current(90), broken], torch.device("cpu"), seconds=0.001
    )
    assert rows[0]["wrong"] is None and rows[0]["ratio"] == 1
    assert "power of 2" in rows[1]["wrong"] and rows[1]["ratio"] is None


def test_a_wrong_result_is_not_timed(monkeypatch):
    (case,) = [
        c for c in shapes.tiny_cases() if c.phase == "decode" and c.shape.name == "tiny/local"
    ]
    right, made = tune.quire_calls, []

    def off_by_one_at_first(*args, **kwargs):
        made.append(right(*args, **kwargs))
        if len(made) > 1:
            return made[-1]
        out, *more = made[0][0]()
        return [lambda: (out + 1, *more)]

    monkeypatch.setattr(tune, "quire_calls", off_by_one_at_first)
    cell = Cell("decode", 32, 16)
    # A right result of another case makes up for nothing.
    (row,) = tune.measure(cell, [case] * 2, [cell.current(90)], torch.device("cpu"), seconds=0.001)
    assert len(made) == 2 and row["wrong"] and not row["ms"] and row["ratio"] is None


@pytest.mark.parametrize("wrong", [None, "error 1, budget 0"])
def test_a_wrong_result_is_the_exit_status(wrong, monkeypatch):
    def measure(cell, cases, candidates, device, seconds):
        row = {"config": [16, 64, 4, 4, 1], "ms": {}, "ratio": 1.0, "wrong": None}
        return [row] * (len(candidates) - 1) + [row | {"wrong": wrong}]

    monkeypatch.setattr(tune, "compile_all", lambda cell, candidates, *_: [None] * len(candidates))
    monkeypatch.setattr(tune, "measure", measure)
    assert tune.main(["--dry-run", "--only", "decode 32"]) == (wrong is not None)


def test_what_breaks_a_static_rule_is_refused():
    cell = Cell("decode", 512, 64)
    fits, spills = cell.current(90), Config(64, 64, 4, 2, mask_all=True)
    with tune.compilers(1) as pool:
        reasons = tune.compile_all(cell, [fits, spills], 90, pool)
    assert reasons[0] is None and "spills" in reasons[1]


def test_every_case_fits_the_memory():
    cases = tune.tuned_cases()
    assert len(cases) == 4 * len(shapes.SHAPES)
    assert all(case.cache_bytes <= shapes.MAX_CACHE_BYTES for case in cases)


def test_candidates_start_with_the_table_and_fit():
    for cell in tune.cells(tune.tuned_cases()):
        for arch in (80, 86, 90):
            found = cell.candidates(arch)
            assert found[0] == cell.current(arch) and len(set(found)) == len(found) > 5
            for c in found[1:]:
                row = 2 * (cell.head_dim + cell.head_dim // c.value_parts)
                tiles = c.block_n * row * (c.num_stages - 1)
                assert tiles <= configs.SHARED_MEMORY[arch] and c.mask_all == found[0].mask_all


@pytest.mark.parametrize(("group", "rows"), [(5, 16), (16, 16), (17, 32), (64, 64)])
def test_a_cell_has_the_rows_that_its_cases_decode_with(group, rows):
    case = next(c for c in tune.tuned_cases() if c.phase == "decode")
    shape = dataclasses.replace(case.shape, num_heads=group * case.shape.num_kv_heads)
    (cell,) = tune.cells([dataclasses.replace(case, shape=shape)])
    assert cell == Cell("decode", case.shape.head_dim, rows)


def test_variants_launch_the_same_shape_otherwise():
    shape = Config(128, 64, 8, 2)
    for arch, count in ((80, 2), (90, 5)):
        found = Cell("prefill", 128).variants(shape, arch)
        assert len(set(found)) == count and shape not in found
        assert {c.fresh_tma for c in found} == {False, arch >= 90}
        assert {c.programs_per_sm for c in found} == {0, 1, 2} - ({0} if arch < 90 else set())
        for c in found:
            assert dataclasses.replace(c, fresh_tma=False, programs_per_sm=0) == shape
    assert Cell("decode", 128, 16).variants(shape, 90) == []


@pytest.mark.parametrize(("ratios", "taken"), [([1.0, 0.97, 0.9], 2), ([1.0, 0.99], 0), ([1.0, None], 0)])  # fmt: skip
def test_another_entry_has_to_be_clearly_faster(ratios, taken):
    rows = [{"ratio": ratio} for ratio in ratios]
    assert tune.best(rows) is rows[taken]


def test_the_table_is_written_for_one_class_of_gpus():
    source = tune.TABLES.read_text(encoding="utf-8")
    assert tune.tables_with({}, 90) == source
    chosen = {Cell("prefill", 128): Config(128, 128, 8, 3, 2, True), Cell("decode", 256, 16): Config(16, 64, 8, 2, mask_all=True)}  # fmt: skip
    written: dict = {}
    exec(tune.tables_with(chosen, 120), written)
    assert written["PREFILL"]["small"][128] == (128, 128, 8, 3, 2, True, 0)
    assert Config(*written["PREFILL"]["small"][128]) == chosen[Cell("prefill", 128)]
    assert written["DECODE"]["small"][256][16] == (64, 8, 2)
    for name in ("PREFILL", "DECODE"):
        written[name]["small"] = getattr(tile_tables, name)["small"]
        assert written[name] == getattr(tile_tables, name)


def test_no_cell_is_started_after_its_time(capsys, monkeypatch):
    monkeypatch.setattr(tune, "compile_all", None)
    assert tune.main(["--dry-run", "--only", "decode", "--seconds", "0"]) == 0
    assert capsys.readouterr().out.startswith("out of time: decode ")


def test_bad_arguments_are_named(capsys):
    assert tune.main(["--dry-run", "--only", "decode 7"]) == 2
    assert "only: expected part of a cell's name, got 'decode 7'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tune.main(["--dry-run", "--write"])
    if not torch.cuda.is_available():
        assert tune.main([]) == 2
