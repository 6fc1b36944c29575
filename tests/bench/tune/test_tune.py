"""bench.tune on a CPU: which tile shapes it tries, takes and writes."""

import dataclasses
import json
from time import perf_counter

import pytest
import torch

from quire.bench.cases import latent_shapes as mla_shapes
from quire.bench.cases import shapes
from quire.bench.common.timing import Timing
from quire.bench.static import cases as static_cases
from quire.bench.tune import __main__ as tune
from quire.bench.tune import entries as tune_cells
from quire.bench.tune.entries import _AttentionEntry as AttentionEntry
from quire.bench.tune.entries import _LatentEntry as LatentEntry
from quire.kernels.attention import launch as paged
from quire.kernels.attention.tiles import Config
from quire.kernels.common.arch import named
from quire.kernels.latent import launch as latent_launch
from quire.kernels.latent import tiles as latent_tiles

ARCHS = [
    named(name) for name in ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
]
HOPPER = named("sm_90")


def case_of(phase):
    (case,) = [c for c in shapes.tiny_cases() if c.phase == phase and c.shape.name == "tiny/local"]
    return case


@pytest.mark.nightly
@pytest.mark.slow
def test_a_dry_run_compiles_measures_and_takes_the_fastest(tmp_path, capsys, monkeypatch):
    def time_calls(calls, device, seconds):
        config = paged.select_config()  # what a call would launch with
        each = 1e-6 * config.block_n
        return Timing(each, each, each, 1, 1)

    monkeypatch.setattr(tune, "time_calls", time_calls)
    monkeypatch.setattr(tune, "tiny_cases", lambda: [case_of("decode"), case_of("prefill")])
    out = tmp_path / "tune.json"
    before = paged.select_config
    assert tune.main(["--dry-run", "--jobs", "1", "--json", str(out)]) == 0
    assert paged.select_config is before
    result = json.loads(out.read_text())
    assert not result["refused"] and not result["not_run"]
    assert [(row["entry"], row["config"], row["ratio"]) for row in result["rows"]] == [
        ("decode 32 x16", [16, 64, 4, 4, 1], 1.0),
        ("decode 32 x16", [16, 32, 4, 4, 1], pytest.approx(0.5)),
        ("prefill 32", [64, 64, 4, 3, 1], 1.0),
        ("prefill 32", [64, 32, 4, 3, 1], pytest.approx(0.5)),
    ]
    for row in result["rows"]:
        assert row["wrong"] is None and len(row["ms"]) == 1
    taken = [line for line in capsys.readouterr().out.splitlines() if line.startswith("taken")]
    assert [line.split()[2] for line in taken] == ["32", "32"]


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
def test_a_dry_run_for_another_architecture(name, monkeypatch):
    """Its entries' own shapes are compiled for it, and run in the interpreter."""
    asked = []

    def compile_all(entry, candidates, arch, pool, deadline):
        assert candidates[0] == entry.current(named(name))
        asked.append((entry.name, arch))
        return [None] * len(candidates)

    monkeypatch.setattr(tune, "compile_all", compile_all)
    monkeypatch.setattr(tune, "time_calls", lambda *a, **k: Timing(1.0, 1.0, 1.0, 1, 1))
    monkeypatch.setattr(tune, "tiny_cases", lambda: [case_of("decode")])
    assert tune.main(["--dry-run", "--arch", name, "--jobs", "1"]) == 0
    assert ("decode 32 x16", named(name)) in asked and {arch for _, arch in asked} == {named(name)}


@pytest.mark.nightly
@pytest.mark.slow
def test_a_dry_run_measures_every_family(tmp_path, monkeypatch):
    """And the kernels of each are launched with the tile shape in question."""
    seen = []
    modules = (paged, latent_launch)

    def time_calls(calls, device, seconds):
        (module,) = [m for m in modules if m.select_config.__module__.endswith("tune.entries")]
        config, asked = module.select_config(), []
        with monkeypatch.context() as patch:
            patch.setattr(module, "select_config", lambda *a, **k: asked.append(config) or config)
            calls[0]()
        assert asked, "the kernels of this family look their tile shapes up elsewhere"
        seen.append(config)
        return Timing(config.block_n, config.block_n, config.block_n, 1, 1)

    monkeypatch.setattr(tune, "time_calls", time_calls)
    monkeypatch.setattr(tune, "compile_all", lambda entry, candidates, *_: [None] * len(candidates))
    # One case of a entry is enough.
    first = {}
    for case in tune_cells.tiny_cases():
        for entry in tune_cells.table_entries([case], HOPPER):
            first.setdefault(entry, case)
    monkeypatch.setattr(tune, "tiny_cases", lambda: list(first.values()))
    out = tmp_path / "tune.json"
    assert tune.main(["--dry-run", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    names = {"decode 32 x16", "prefill 32", "decode 32 x16 e4m3", "prefill 32 e4m3"}
    latent = {name for name in (row["entry"] for row in rows) if name.startswith("latent")}
    assert {row["entry"] for row in rows} == names | latent and len(latent) >= 3
    assert all(row["wrong"] is None and row["ms"] for row in rows)
    assert {type(config) for config in seen} == {Config, latent_tiles.Config}
    assert all(0.4 < row["ratio"] <= 1 for row in rows), [row["ratio"] for row in rows]


def test_the_chosen_tile_shape_is_the_one_that_runs(monkeypatch):
    monkeypatch.setattr(tune, "time_calls", lambda *a, **k: Timing(1.0, 1.0, 1.0, 1, 1))
    entry, broken = AttentionEntry("prefill", 32), Config(64, 48, 4, 3)  # no power of two
    rows = tune.measure(
        entry,
        [case_of("prefill")],
        [entry.current(HOPPER), broken],
        torch.device("cpu"),
        seconds=0.001,
    )
    assert rows[0]["wrong"] is None and rows[0]["ratio"] == 1
    assert "power of 2" in rows[1]["wrong"] and rows[1]["ratio"] is None


def test_a_wrong_result_is_not_timed(monkeypatch):
    case = case_of("decode")
    right, made = tune_cells.quire_calls, []

    def off_by_one_at_first(*args, **kwargs):
        made.append(right(*args, **kwargs))
        if len(made) > 1:
            return made[-1]
        out, *more = made[0][0]()
        return [lambda: (out + 1, *more)]

    monkeypatch.setattr(tune_cells, "quire_calls", off_by_one_at_first)
    entry = AttentionEntry("decode", 32, 16)
    # A right result of another case makes up for nothing.
    (row,) = tune.measure(
        entry, [case] * 2, [entry.current(HOPPER)], torch.device("cpu"), seconds=0.001
    )
    assert len(made) == 2 and row["wrong"] and not row["ms"] and row["ratio"] is None


@pytest.mark.parametrize("wrong", [None, "error 1, budget 0"])
def test_a_wrong_result_is_the_exit_status(wrong, monkeypatch):
    def measure(entry, cases, candidates, *_):
        row = {"config": [16, 64, 4, 4, 1], "ms": {}, "ratio": 1.0, "wrong": None}
        return [row] * (len(candidates) - 1) + [row | {"wrong": wrong}]

    monkeypatch.setattr(tune, "compile_all", lambda entry, candidates, *_: [None] * len(candidates))
    monkeypatch.setattr(tune, "measure", measure)
    assert tune.main(["--dry-run", "--only", "prefill 32 e4m3"]) == (wrong is not None)


@pytest.fixture(scope="module")
def pool():
    """One process that compiles; it takes longer to start than most kernels to compile."""
    with tune.Workers(1) as started:
        yield started


@pytest.mark.slow
def test_what_breaks_a_static_rule_is_refused(pool):
    entry = AttentionEntry("decode", 512, 64)
    fits, spills = entry.current(HOPPER), Config(64, 64, 4, 2)
    reasons = tune.compile_all(entry, [fits, spills], HOPPER, pool)
    assert reasons[0] is None and "spills" in reasons[1]


@pytest.mark.slow
def test_what_is_not_compiled_in_time_is_not_tried(pool):
    entry = AttentionEntry("decode", 32, 16)
    fits = entry.current(HOPPER)
    reasons = tune.compile_all(entry, [fits] * 3, HOPPER, pool, deadline=perf_counter())
    assert reasons[0] is None and reasons[-1] == "out of time"


def test_no_case_is_timed_after_the_time_but_the_first(monkeypatch):
    monkeypatch.setattr(tune, "time_calls", lambda *a, **k: Timing(1.0, 1.0, 1.0, 1, 1))
    entry, case = AttentionEntry("decode", 32, 16), case_of("decode")
    more = dataclasses.replace(case, context=30)
    device = torch.device("cpu")
    for deadline, count in ((perf_counter(), 1), (perf_counter() + 1000, 2)):
        (row,) = tune.measure(entry, [case, more], [entry.current(HOPPER)], device, 0.001, deadline)
        assert len(row["ms"]) == count and row["ratio"] == 1


def test_every_case_fits_the_memory():
    cases = tune.tuned_cases()
    plain = [case for case in cases if isinstance(case, shapes.Case)]
    assert len(plain) == 4 * (len(shapes.SHAPES) + len(shapes.FP8_SHAPES))
    assert all(case.cache_bytes <= shapes.MAX_CACHE_BYTES for case in plain)
    assert all(case.pool_bytes <= shapes.MAX_CACHE_BYTES for case in cases if case not in plain)


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_candidates_start_with_the_table_and_fit(arch):
    work = tune.table_entries(tune.tuned_cases(), arch)
    assert len({entry.name for entry in work}) == len(work)
    assert {type(entry) for entry in work} == {AttentionEntry, LatentEntry}
    for entry, cases in work.items():
        found = entry.candidates(arch)
        assert cases and found[0] == entry.current(arch) and len(set(found)) == len(found) > 5
        if isinstance(entry, AttentionEntry):
            row_bytes = dict.fromkeys(found, 2 * 2 * entry.head_dim)
        else:
            row_bytes = dict.fromkeys(found, 1024 if entry.fp8 else 1152)
        for c in found[1:]:
            tiles = c.block_n * row_bytes[c] * (c.num_stages - 1)
            assert tiles <= arch.shared_memory
        launched = []
        for name in entry.static_cases(arch):
            # It is the entry that this case compiles.
            case = static_cases.all_cases()[name]
            launch = static_cases.launches_of(case, arch)[0].values
            launched.append((launch["BLOCK_M"], launch["BLOCK_N"], launch["num_warps"], launch["num_stages"]))  # fmt: skip
        rows = getattr(found[0], "block_m", getattr(entry, "rows", 0))
        now = (rows, found[0].block_n, found[0].num_warps, found[0].num_stages)
        assert launched and set(launched) == {now}


def test_the_most_valuable_entries_come_first():
    work = tune.table_entries(tune.tuned_cases(), HOPPER)
    names = [entry.name for entry in work]
    assert names[0] == "decode 512 x16"  # of the first case of the headline
    headline = {case.name for case in (*shapes.headline(), *mla_shapes.headline())}
    wanted = [any(case.name in headline for case in cases) for cases in work.values()]
    assert wanted == sorted(wanted, reverse=True) and not all(wanted)


@pytest.mark.parametrize(("group", "rows"), [(5, 16), (16, 16), (17, 32), (64, 64)])
def test_an_entry_has_the_rows_that_its_cases_decode_with(group, rows):
    case = next(c for c in tune.tuned_cases() if c.phase == "decode")
    shape = dataclasses.replace(case.shape, num_heads=group * case.shape.num_kv_heads)
    for fp8 in (False, True):
        (entry,) = tune.table_entries([dataclasses.replace(case, shape=dataclasses.replace(shape, fp8=fp8))], HOPPER)  # fmt: skip
        assert entry == AttentionEntry("decode", case.shape.head_dim, rows, fp8)


@pytest.mark.parametrize(
    ("name", "rows"), [("v3/mla", 64), ("v3/mla/tp8", 16), ("v4-flash/csa", 64)]
)
def test_a_latent_entry_has_the_rows_that_are_asked_for(name, rows):
    (entry,) = tune.table_entries([mla_shapes.case_of(name, "decode", 16, 4096)], HOPPER)
    assert entry == LatentEntry(rows, "mla" not in name)


@pytest.mark.parametrize(("ratios", "taken"), [([1.0, 0.97, 0.9], 2), ([1.0, 0.99], 0), ([1.0, None], 0)])  # fmt: skip
def test_another_entry_has_to_be_clearly_faster(ratios, taken):
    rows = [{"ratio": ratio} for ratio in ratios]
    assert tune.best(rows) is rows[taken]


def test_new_shapes_are_named():
    chosen = {
        AttentionEntry("prefill", 128): Config(128, 128, 8, 3, 2),
        LatentEntry(32): latent_tiles.Config(32, 16, 4, 2),
    }
    found = tune_cells.by_hand(chosen, named("sm_120"))
    assert found[0].startswith(
        "kernels/attention/tiles.py: prefill 128 on small: Config(block_m=128"
    )
    assert found[1].startswith("kernels/latent/tiles.py: latent x32 on small: Config(block_m=32")
    assert not tune_cells.by_hand({entry: entry.current(HOPPER) for entry in chosen}, HOPPER)


def test_no_entry_is_begun_after_its_time(capsys, monkeypatch):
    monkeypatch.setattr(tune, "compile_all", None)
    assert tune.main(["--dry-run", "--only", "decode", "--seconds", "0"]) == 0
    assert "out of time: decode " in capsys.readouterr().out


@pytest.mark.nightly
def test_bad_arguments_are_named(capsys):
    assert tune.main(["--dry-run", "--only", "decode 7"]) == 2
    assert "only: expected part of an entry's name, got 'decode 7'" in capsys.readouterr().err
    assert tune.main(["--arch", "gfx942"]) == 2
    assert "arch: expected --dry-run with it" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert tune.main([]) == 2
