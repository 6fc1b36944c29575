"""``bench.static``: a sample of the compiled kernels, on machines without a GPU (all of them take minutes), and the rules."""

import json
import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.bench.static import __main__ as static
from quire.bench.static import cases as static_cases
from quire.bench.static import compiling, limits, report, rules, sass
from tests.support.forked import printed
from tests.support.shared import once_a_run

ROOT = Path(__file__).resolve().parents[3]
# Triton compiles only where it does not interpret.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
GOOD = {
    "kernel": "decode_kernel", "case": "c", "config": "16x64 w4 s3", "arch": "sm_90", "dtype": "bfloat16", "registers": 200, "spill_bytes": 0,
    "stack_bytes": 0, "shared_bytes": 71680, "shared_limit": 232448, "ctas_per_sm": 2, "mma": "mma.sync", "kv_copy_bytes": 16,
    "min_copy_bytes": 16, "tiles_in_flight": 1, "bytes_in_flight_per_sm": 36864, "sass_per_tile": 647, "triton": "3.7.1",
}  # fmt: skip
MERGE = GOOD | {
    "kernel": "merge_splits_kernel", "kv_copy_bytes": 0, "tiles_in_flight": 0, "bytes_in_flight_per_sm": 0,
}  # fmt: skip
REQUIRED = {
    "kernel", "config", "arch", "registers", "spill_bytes", "shared_bytes", "shared_limit", "mma", "kv_copy_bytes",
    "tiles_in_flight", "bytes_in_flight_per_sm",
}  # fmt: skip


def check_rows(rows, head_dim):
    assert rows
    for row in rows:
        assert row.keys() >= REQUIRED
        assert row["spill_bytes"] == row["stack_bytes"] == 0
        if not row["kernel"].endswith(static_cases.PIPELINED):
            continue
        assert row["kv_copy_bytes"] == 16
        tile, _, stages, *parts = row["config"].split()
        # A tile is in use, and another one is asked for when its products are done.
        assert row["tiles_in_flight"] == int(stages[1:]) - 2
        # Keys and values of a program's part.
        channels = head_dim + head_dim // (int(parts[0][1:]) if parts else 1)
        ahead = int(tile.split("x")[1]) * 2 * channels * row["tiles_in_flight"]
        in_flight = ahead * row["ctas_per_sm"]
        assert row["bytes_in_flight_per_sm"] == in_flight >= rules.MIN_BYTES_IN_FLIGHT
        if row["kernel"] == "prefill_kernel":
            assert row["mma"] == "wgmma" and parts == ["v2"]
        # Each of the two products alone has a matrix instruction or more for a tile; no loop is as long as a kernel.
        assert 100 < row["sass_per_tile"] < 2000


# What each test asks of a process that compiles, which Triton does only where it does not interpret.
MEASURED = """
from quire.bench.static import compiling
from quire.kernels.attention import configs
from quire.kernels.attention import triton_impl as paged
answer = {}
answer["table"] = [compiling.measure(*work) for work in compiling.distinct(("sm_90",), "decode-d128-p16-q1")]
answer["prefill"] = compiling.measure("prefill-d128-p16", "sm_90", 0)
def measure(name, *config, **more):
    paged.select_config = lambda *a, **k: configs.Config(*config, **{"mask_all": True} | more)
    return compiling.measure(name, "sm_90", 0)
for stages in (2, 3, 4):
    answer[f"{stages} stages"] = measure("decode-d128-p16-q1", 16, 64, 4, stages)
for stages in (2, 3):  # one of its loops copies by tensor descriptors
    config = dict(new_kv_tma=True, mask_all=False)
    answer[f"prefill, {stages} stages"] = measure("prefill-d64-p128", 64, 64, 4, stages, **config)
registers, paged.MAX_REGISTERS = paged.MAX_REGISTERS, 40
answer["40 registers"] = measure("decode-d64-p128-q1", 16, 64, 4, 2)
paged.MAX_REGISTERS, prepare = registers, paged.prepare
def odd(*arguments):
    launches = prepare(*arguments)
    pages = launches[0].arguments["k_pages"]
    launches[0].arguments["k_pages"] = pages._replace(
        stride_page=pages.stride_page + 1, stride_row=pages.stride_row + 1
    )
    return launches
paged.prepare = odd
answer["odd strides"] = measure("decode-d64-p128-q1", 16, 64, 4, 2)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The answers of one process, whose cases take long to build: what the command reports, what each of ``LISTED`` raised, or
    nothing, and rows of kernels compiled for sm_90, those of the table and some that it would not launch."""

    def make(folder):
        code = f"""
import collections, json, traceback
from quire.bench.static import __main__ as static, cases as static_cases, compiling, report, rules
command = ["--only", "prefill-d512-p128", "--arch", "sm_90", "--jobs", "1", "--json", "command.json"]
assert static.main(command) == 0
from quire.kernels.common.arch import named as arch_of
known = {{"collections": collections, "compiling": compiling, "report": report, "rules": rules, "static_cases": static_cases, "arch_of": arch_of, "cases": static_cases.all_cases(), "everything": compiling.distinct(static_cases.ALL_ARCHS)}}
raised = {{}}
for name, body in {LISTED!r}.items():
    try:
        exec(body, dict(known))
        raised[name] = ""
    except Exception:
        raised[name] = traceback.format_exc()
with open("raised.json", "w") as file:
    json.dump(raised, file)
{MEASURED}
with open("measured.json", "w") as file:
    json.dump(answer, file)
"""  # fmt: skip
        environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
        printed("import bench\n" + code, cwd=folder, env=environment)

    folder = once_a_run(tmp_path_factory, "static", make)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.fixture
def measured(compiled):
    """Rows of ``MEASURED``."""
    return compiled["measured"]


@pytest.fixture(scope="module")
def committed():
    """Rows of all committed tables."""
    return [row for path in report.RESULTS.glob("*.json") for row in report.read(path)]


@pytest.mark.slow
def test_the_command_reports_wide_copies_without_spills(compiled):
    check_rows(compiled["command"], 512)


@pytest.mark.slow
def test_decode_has_wide_copies_without_spills(measured, committed):
    check_rows(measured["table"], 128)
    check_rows([r for r in committed if r["arch"] == "sm_90" and r["case"].startswith("decode-d128-p")], 128)  # fmt: skip


def test_wgmma_of_prefill_overlap(measured):
    """Also where each row of a tile has a page id, which takes registers."""
    assert measured["prefill"]["mma"] == "wgmma"


def test_the_pipeline_is_real(measured):
    """Each stage past the second adds a K and a V tile of shared memory, whose copies are under way during the products; loaded inside the
    loop, a page id would prevent that."""
    used = [measured[f"{stages} stages"]["shared_bytes"] for stages in (2, 3, 4)]
    tiles = 2 * 64 * 128 * 2
    assert [b - a for a, b in pairwise(used)] == [tiles, tiles]
    assert [measured[f"{stages} stages"]["tiles_in_flight"] for stages in (2, 3, 4)] == [0, 1, 2]
    assert [
        measured[f"{stages} stages"]["tiles_in_flight"] for stages in ("prefill, 2", "prefill, 3")
    ] == [0, 1]


def test_too_few_registers_are_seen_to_spill(measured):
    """The rule holds for machine code, not for a number that is always 0."""
    row = measured["40 registers"]
    assert row["spill_bytes"] > 0
    assert any("spills" in text for text in rules.problems(row))


def test_unaligned_rows_are_seen_to_be_copied_narrowly(measured):
    """Keys whose rows start at odd multiples of one element cannot be copied 16 bytes at a time."""
    row = measured["odd strides"]
    assert row["kv_copy_bytes"] == 2
    assert any("copies K/V" in text for text in rules.problems(row))


@pytest.mark.parametrize(
    "change, problem",
    [
        ({}, []),
        ({"spill_bytes": 8}, ["spills 8 bytes, stack frame 0 bytes"]),
        ({"stack_bytes": 16}, ["spills 0 bytes, stack frame 16 bytes"]),
        ({"shared_bytes": 232448}, []),
        ({"shared_bytes": 232449}, ["needs 232449 bytes of shared memory, limit 232448"]),
        ({"ctas_per_sm": 0}, ["cannot be launched: 16x64 w4 s3, 200 registers a thread"]),
        ({"kv_copy_bytes": 2}, ["copies K/V 2 bytes at a time"]),
        ({"kv_copy_bytes": 4, "kernel": "prefill_kernel"}, ["copies K/V 4 bytes at a time"]),
        ({"kv_copy_bytes": 0}, ["copies K/V 0 bytes at a time"]),
        ({"kv_copy_bytes": 8, "kernel": "index_scores_kernel"}, ["copies K/V 8 bytes at a time"]),
        ({"kv_copy_bytes": 8, "min_copy_bytes": 8}, []),
        ({"kv_copy_bytes": 4, "dtype": "float32"}, ["copies K/V 4 bytes at a time"]),
        ({"kv_copy_bytes": 0, "dtype": "float32"}, []),
        ({"mma": "wgmma"}, []),
        ({"mma": sass.SERIAL}, ["waits for each wgmma by itself"]),
        ({"mma": sass.SERIAL, "case": rules.SERIAL_CASES[0]}, []),
        ({"tiles_in_flight": 0}, []),
        ({"tiles_in_flight": 0, "ctas_per_sm": 1}, ["copies nothing while it multiplies"]),
        ({"tiles_in_flight": 0, "ctas_per_sm": 1, "kernel": "prefill_kernel", "arch": "sm_80"}, ["copies nothing while it multiplies"]),
        ({"tiles_in_flight": 0, "ctas_per_sm": 1, "dtype": "float32"}, []),
        ({"tiles_in_flight": 0, "ctas_per_sm": 1, "kernel": "compressed_decode_kernel", "dtype": "uint8", "arch": "sm_120"}, []),
        ({"tiles_in_flight": 0, "ctas_per_sm": 1, "kernel": "compressed_decode_kernel", "dtype": "uint8", "arch": "sm_80"}, ["copies nothing while it multiplies"]),
        ({"tiles_in_flight": 0, "ctas_per_sm": 1, "arch": "sm_120"}, ["copies nothing while it multiplies"]),
        ({"bytes_in_flight_per_sm": 36863}, ["keeps 36863 bytes in flight per SM"]),
        ({"bytes_in_flight_per_sm": 32768, "case": rules.LESS_IN_FLIGHT[0]}, []),
        ({"bytes_in_flight_per_sm": 32767, "case": rules.LESS_IN_FLIGHT[0]}, ["keeps 32767 bytes in flight per SM"]),
        ({"bytes_in_flight_per_sm": 36863, "dtype": "float16"}, ["keeps 36863 bytes in flight per SM"]),
        ({"bytes_in_flight_per_sm": 16384, "dtype": "float32"}, []),
        ({"bytes_in_flight_per_sm": 16384, "arch": "sm_80"}, []),
        ({"bytes_in_flight_per_sm": 16384, "kernel": "prefill_kernel"}, []),
    ],
)  # fmt: skip
def test_problems(change, problem):
    assert rules.problems(GOOD | change) == problem
    assert rules.problems(MERGE | {"spill_bytes": 8}) and not rules.problems(MERGE)


def test_a_broken_rule_is_the_exit_status(monkeypatch, tmp_path, capsys):
    """Rules decide, differences do not; ``--update`` leaves none of the latter."""
    row = GOOD | {"registers": 100, "seconds": 2.5}
    results = [row]

    class Pool:
        def __init__(self, *_, **__): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def map(self, *_):
            return results

    monkeypatch.setattr(static, "Workers", Pool)
    monkeypatch.setattr(static, "distinct", lambda *_, **__: [("c", "sm_90", i) for i in range(len(results))])  # fmt: skip
    monkeypatch.setattr(static, "key", lambda *_: "of today")
    assert static.main(["--baseline", str(tmp_path / "none.json")]) == 0
    results.append("d sm_90: does not compile: E: why")
    assert static.main(["--baseline", str(tmp_path / "none.json")]) == 1
    assert "FAIL d sm_90: does not compile: E: why" in capsys.readouterr().out
    results.pop()
    baseline, other = tmp_path / "baseline.json", GOOD | {"arch": "sm_80"}
    report.write([GOOD, MERGE, other], baseline)
    arguments = ["--baseline", str(baseline)]
    assert static.main(arguments) == 0
    assert "c decode_kernel sm_90: registers 200 -> 100" in capsys.readouterr().out
    row["spill_bytes"] = 4
    assert static.main(arguments) == 1
    assert "FAIL c decode_kernel sm_90: spills 4 bytes" in capsys.readouterr().out
    # Also those that break a rule; those of other architectures stay.
    assert static.main([*arguments, "--arch", "sm_90", "--update"]) == 1
    plain = [{k: v for k, v in r.items() if k not in report.NOT_COMPARED} for r in (other, row)]
    written = [{k: v for k, v in r.items() if k != "key"} for r in report.read(baseline)]
    assert written == plain
    capsys.readouterr()
    static.main(arguments)
    assert "0 differences" in capsys.readouterr().out


def test_what_decides_a_row_is_compiled_once(monkeypatch, tmp_path, capsys):
    """A row of the baseline stands while its key does, under today's name of the case; ``--fresh`` compiles it again."""
    asked = []

    class Pool:
        def __init__(self, *_, **__): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def map(self, _, *columns):
            asked.extend(columns[0])
            return [GOOD | {"case": name, "registers": 90, "seconds": 1.0} for name in columns[0]]

    baseline = tmp_path / "baseline.json"
    report.write_baseline([GOOD | {"case": "old name", "key": "same"}, GOOD | {"case": "b", "key": "before"}], baseline)  # fmt: skip
    monkeypatch.setattr(static, "Workers", Pool)
    monkeypatch.setattr(static, "distinct", lambda *_, **__: [("a", "sm_90", 0), ("b", "sm_90", 0)])
    monkeypatch.setattr(static, "key", lambda name, *_: {"a": "same", "b": "now"}[name])
    out = tmp_path / "out.json"
    arguments = ["--baseline", str(baseline), "--json", str(out)]
    assert static.main(arguments) == 0 and asked == ["b"]
    assert [(r["case"], r["registers"]) for r in report.read(out)] == [("a", 200), ("b", 90)]
    assert "2 kernels, 1 of them compiled now" in capsys.readouterr().out
    assert static.main([*arguments, "--fresh"]) == 0 and asked == ["b", "a", "b"]


def test_differences():
    assert report.differences([GOOD, MERGE], [MERGE, GOOD]) == []
    other = GOOD | {"registers": 210, "mma": "wgmma", "triton": "3.6.0", "seconds": 1.0}
    assert report.differences([other], [GOOD]) == [
        "c decode_kernel sm_90: registers 200 -> 210, mma mma.sync -> wgmma"
    ]
    assert report.differences([GOOD, MERGE], []) == ["2 kernels are not in the baseline"]
    # A case may launch a kernel twice.
    twice = [GOOD, GOOD | {"registers": 128}]
    assert report.differences(twice, twice) == []
    assert report.differences([GOOD, GOOD], twice) == [
        "c decode_kernel sm_90 (2): registers 128 -> 200"
    ]


class Matrix(NamedTuple):
    data: Any
    stride: Any
    other: Any


def test_arguments_are_specialised_as_the_launcher_does():
    rows = torch.empty(100, dtype=torch.bfloat16, device="meta")
    arguments = {
        "even": rows[8:], "odd": rows[1:], "none": None, "one": 1, "n": 32, "m": 33, "plain": 32, "plain_one": 1, "far": 2**31,
        "scale": 0.5, "SIZE": 64, "matrix": Matrix(rows, 32, 1), "plain_pair": Matrix(None, 1, 16), "CONFIG": Matrix(1, 2, 3),
    }  # fmt: skip
    params = [
        SimpleNamespace(
            name=name,
            is_constexpr=name.isupper(),
            do_not_specialize=name.startswith("plain"),
        )
        for name in arguments
    ]
    kernel = SimpleNamespace(params=params, arg_names=list(arguments))
    launch = SimpleNamespace(kernel=kernel, arguments=arguments | {"num_warps": 8})
    signature, constants, attributes, options = compiling.specialise(launch)
    assert list(signature.values()) == [
        "*bf16", "*bf16", "constexpr", "constexpr", "i32", "i32", "i32", "i32", "i64", "fp32", "constexpr",
        ("*bf16", "i32", "constexpr"), ("constexpr", "constexpr", "i32"), "constexpr",
    ]  # fmt: skip
    # The launcher's types are named as the tuple's fields are; kernels know them by these names.
    assert signature["matrix"].stride == "i32"
    assert constants == {
        (2,): None, (3,): 1, (10,): 64, (11, 2): 1, (12, 0): None, (12, 1): 1, (13,): (1, 2, 3)
    }  # fmt: skip
    names = list(arguments)
    hinted = [names[path[0]] + ".".join(["", *map(str, path[1:])]) for path in attributes]
    assert hinted == ["even", "n", "far", "matrix.0", "matrix.1", "plain_pair.2"]
    assert set(map(repr, attributes.values())) == {"[['tt.divisibility', 16]]"}
    assert options["num_warps"] == 8 and not set(options) & set(arguments)


def test_no_descriptor_is_launched_within_a_tuple():
    rows = TensorDescriptor(torch.empty(8, 16), [8, 16], [16, 1], [8, 16])
    params = [SimpleNamespace(name="m", is_constexpr=False, do_not_specialize=False)]
    kernel = SimpleNamespace(params=params, arg_names=["m"])
    launch = SimpleNamespace(kernel=kernel, arguments={"m": Matrix(rows, 1, 1)})
    with pytest.raises(NotImplementedError, match="descriptor within a tuple"):
        compiling.specialise(launch)


@pytest.mark.parametrize(
    "arguments, programs",
    [
        (("sm_90", 200, 71680, 128), 2),  # registers
        (("sm_90", 64, 71680, 128), 3),  # shared memory
        (("sm_86", 32, 0, 256), 6),  # threads
        (("sm_86", 16, 0, 32), 16),  # programs
        (("sm_100", 64, 1024, 128, 256), 2),  # tensor memory
        (("sm_90", 255, 240000, 256), 0),
    ],
)
def test_resident_programs(arguments, programs):
    assert limits.resident_programs(*arguments) == programs


# Run one after another by one process, as each needs the cases built without the interpreter.
LISTED = {
    "nothing compiles twice": """
def key(launch): return launch.kernel.__name__, repr(compiling.specialise(launch))
kept = [key(cases[c].launches(arch_of(arch))[i]) for c, arch, i in compiling.distinct(("sm_90",), "-d64-")]
every = [key(launch) for name in cases if "-d64-" in name for launch in cases[name].launches(arch_of("sm_90"))]
assert len(kept) == len(set(kept)) < len(every) and set(kept) == set(every)
def shape(name, arch, index):
    launch = cases[name].launches(arch_of(arch))[index]
    values = launch.values
    tile = [values.get(n) for n in ("HEAD_DIM", "VALUE_DIM", "BLOCK_M", "BLOCK_N", "num_warps", "num_stages")]
    return launch.kernel.__name__, cases[name].dtype, *tile
shapes = [shape(*w) for w in compiling.distinct((), tiles=("sm_90",))]
assert set(shapes) == {shape(*w) for w in everything if w[1] == "sm_90"}
assert len(shapes) == len(set(shapes)) < 180
""",
    "uses of a model that share a kernel": """
def keys(*names):
    return {repr(compiling.specialise(cases[name].launches(arch_of("sm_90"))[0])) for name in names}
for pages in ("fp8-prefill", "bf16-decode"):
    index = {"fp8-prefill": "index-fp8-decode", "bf16-decode": "index-bf16-prefill"}[pages]
    names = [f"compress-{kind}" for kind in (f"csa-{pages}", f"hca-{pages}", index)]
    assert len(keys(*names)) == 1, names
assert len(keys("latent-heads", "latent-index-heads")) == 1
assert len(keys("latent-heads", "latent-heads-fp32", "compress-csa-fp8-prefill", "compress-csa-bf16-decode")) == 4
""",
    "samples hold every kernel": """
every, sample = set(), set()
for name, case in cases.items():
    for arch in static_cases.ARCHS:
        kernels = {(launch.kernel.__name__, arch) for launch in case.launches(arch_of(arch))}
        assert kernels, (name, arch)
        every |= kernels
        sample |= kernels if case.sample else set()
missing = [k for k in every - sample if k[1] in static_cases.SAMPLE_ARCHS]
assert not missing, missing
work = compiling.distinct((), samples=static_cases.SAMPLE_ARCHS, tiles=("sm_90",))
compiled = {(cases[n].launches(arch_of(a))[i].kernel.__name__, a) for n, a, i in work}
assert compiled == {k for k in every if k[1] in (static_cases.DEFAULT_ARCH, *static_cases.SAMPLE_ARCHS)}
assert set(work) <= set(everything), set(work) - set(everything)
assert all(cases[n].sample for n, a, _ in work if a != "sm_90")
""",
    "keys": """
work = [w for w in everything if w[1] in ("sm_80", "sm_90", "gfx942")]
keys = [compiling.key(*w) for w in work]
assert len(set(keys)) == len(keys) and keys == [compiling.key(*w) for w in work]
name, arch, index = next(w for w in work if w[0] == "decode-d128-p128-q1")
before = compiling.key(name, arch, index)
kernel = cases[name].launches(arch_of(arch))[index].kernel
source, kernel.hash = kernel.hash, "other sources"
assert compiling.key(name, arch, index) != before
kernel.hash = source
assert compiling.key(name, arch, index) == before
import triton
version, triton.__version__ = triton.__version__, "3.0.0"
assert compiling.key(name, arch, index) != before
triton.__version__ = version
assert compiling.key(name, arch, index) == before
""",
    "committed tables": """
def named(name, arch, index):
    launch = cases[name].launches(arch_of(arch))[index]
    return name, launch.kernel.__name__.strip("_"), compiling.config(launch), arch
most = set()
for path in report.RESULTS.glob("*.json"):
    rows = report.read(path)
    assert not [row for row in rows if rules.problems(row)], path
    archs = {row["arch"] for row in rows}
    most = max(most, archs, key=len)
    table = collections.Counter((r["case"], r["kernel"], r["config"], r["arch"]) for r in rows)
    now = collections.Counter(named(*work) for work in everything if work[1] in archs)
    assert table == now, f"{path}: make static ARGS='--all --update': {now - table} {table - now}"
assert most == set(static_cases.ALL_ARCHS), most
""",
}


@pytest.mark.parametrize("name", LISTED)
def test_the_list_of_kernels(name, compiled):
    """What an earlier case has compiled already gives no row, and no kernel is lost; ``tiles`` keeps one launch of each tile shape. Every case
    can be built for every architecture. The committed tables have every kernel with the tile shapes of today, on the architectures that a table
    has (one has all), and break no rule."""
    assert not compiled["raised"][name], compiled["raised"][name]


def test_only_whole_architectures_become_the_baseline():
    for more in ([], ["--only", "write"], ["--all", "--only", "write"]):
        with pytest.raises(ValueError, match="update: expected --all or --arch without --only"):
            static.parse(["--update", *more])
    with pytest.raises(ValueError, match="samples: expected --all or --arch with it"):
        static.parse(["--samples"])
    assert static.parse(["--update", "--all"]).all
    assert static.parse(["--update", "--arch", "sm_80"]).arch == ["sm_80"]


def test_a_kernel_that_does_not_compile_is_named(monkeypatch):
    def measure(name, arch, index):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(compiling, "measure", measure)
    assert (
        compiling.attempt("c", "sm_90", 0)
        == "c sm_90: does not compile: RuntimeError: no such instruction"
    )


def test_table_aligns():
    lines = report.table([GOOD, GOOD | {"case": "longer", "sass_per_tile": None}]).splitlines()
    assert len({line.index("decode_kernel") for line in lines[1:]}) == 1
    assert lines[1].split()[-2:] == ["36", "647"]
    assert lines[2].split()[-2:] == ["36", "-"]
