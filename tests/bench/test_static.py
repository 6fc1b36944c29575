"""``bench.static``: rows of compiled kernels on a machine without a GPU, and its rules."""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire.bench.static import __main__ as static
from quire.bench.static import compiling, limits
from tests.support.forked import printed

ROOT = Path(__file__).resolve().parents[2]
# Triton compiles only where it does not interpret.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
ROW = {
    "kernel": "decode_kernel", "case": "c", "config": "16x64 w4 s3", "arch": "sm_90",
    "dtype": "bfloat16", "registers": 200, "spill_bytes": 0, "shared_bytes": 71680,
    "shared_limit": 232448, "ctas_per_sm": 2, "serial_loops": 0,
    "bytes_in_flight_per_sm": 131072,
    "triton": "3.7.1", "seconds": 2.5,
}  # fmt: skip

MEASURE = """
import json
from quire.bench.static.compiling import measure
from quire.kernels.attention import launch as paged
from quire.kernels.attention.tiles import Config
rows = {"table": measure("decode-d128-p16-q1", "sm_90", 0)}
rows["amd"] = measure("write-d128", "gfx942", 0)
rows["two parts"] = measure("prefill-d512-p128", "sm_90", 0)
paged.select_config = lambda *a, **k: Config(16, 64, 4, 3)
rows["3 stages"] = measure("decode-d128-p16-q1", "sm_90", 0)
paged.MAX_REGISTERS = 40
rows["40 registers"] = measure("decode-d128-p16-q1", "sm_90", 0)
print(json.dumps(rows))
"""

COMPILED = """
from quire.bench.static.compiling import distinct
print(*(name for name, *_ in distinct((), "prefill", tiles=("sm_90",))))
"""


@pytest.mark.slow
def test_rows_say_what_was_compiled():
    measured = json.loads(printed(MEASURE, cwd=ROOT, env=ENVIRONMENT).splitlines()[-1])
    for name, row in measured.items():
        assert row.keys() == ROW.keys()
        assert 0 < row["registers"] <= 512 and row["ctas_per_sm"] > 0, name
        # Too few registers are seen to spill: the rule holds for machine code.
        assert (compiling.problems(row) == []) == (name != "40 registers")
    assert measured["40 registers"]["spill_bytes"] > 0
    row = measured["table"]
    stages = int(row["config"].split("s")[-1])
    tile_bytes = int(row["config"].split("x")[1].split()[0]) * 2 * 128 * 2
    assert row["bytes_in_flight_per_sm"] == (stages - 1) * tile_bytes * row["ctas_per_sm"]
    row = measured["two parts"]  # of the accumulator: the values of a tile are loaded whole
    assert row["config"].endswith("v2") and row["bytes_in_flight_per_sm"] % (2 * 512 * 2) == 0
    assert measured["amd"]["bytes_in_flight_per_sm"] == 0  # no tiles of keys


def test_loops_that_copy_no_tile_ahead():
    """Of a kernel with two loops in one: the inner ones alone, if they multiply tiles."""
    copy = "      %6 = ttg.async_copy_global_to_local %5, %4 mask %3 : !tt.ptr<i8>\n"
    product = "      %8 = ttng.warp_group_dot %1, %2, %7 : tensor<64x16xf32>\n"

    def kernel(*bodies):
        loops = [f"    %9 = scf.for %i = %a to %b {{\n{body}    }}\n" for body in bodies]
        return f"  scf.while {{\n{copy}{''.join(loops)}{copy}  }}\n"

    assert compiling.serial_loops(kernel(copy + product, "")) == 0
    assert compiling.serial_loops(kernel(copy + product, product)) == 1
    assert compiling.serial_loops(kernel(product, "      scf.if %0 {\n      }\n" + product)) == 2
    assert compiling.serial_loops(f"  scf.while {{\n  }} do {{\n{product}  }}\n") == 1


@pytest.mark.parametrize(
    ("scratch", "spilled", "spill_bytes"), [(0, 0, 0), (0, 3, 12), (64, 3, 64)]
)
def test_what_amd_metadata_says(scratch, spilled, spill_bytes):
    values = {"agpr_count": 8, "private_segment_fixed_size": scratch}
    values |= {"vgpr_count": 40, "vgpr_spill_count": spilled}
    text = "".join(f"    .{name}: {value}\n" for name, value in values.items())
    assert compiling.amd_usage(text) == (40, spill_bytes)
    with pytest.raises(ValueError, match="vgpr_count"):
        compiling.amd_usage(text.replace(".vgpr_count", ".count"))


@pytest.mark.parametrize(
    "change, problem",
    [
        ({}, []),
        ({"spill_bytes": 8}, ["spills 8 bytes"]),
        ({"shared_bytes": 232448}, []),
        ({"shared_bytes": 232449}, ["needs 232449 bytes of shared memory, limit 232448"]),
        ({"ctas_per_sm": 0}, ["cannot be launched: 16x64 w4 s3, 200 registers a thread"]),
        ({"serial_loops": 2}, ["copies no tile ahead in 2 of its loops"]),
    ],
)
def test_problems(change, problem):
    assert compiling.problems(ROW | change) == problem


@pytest.mark.slow
def test_each_optional_argument_is_compiled_with_and_without():
    compiled = set(printed(COMPILED, cwd=ROOT, env=ENVIRONMENT).splitlines()[-1].split())
    features = ("softcap-sinks", "pages-only", "fp8-window", "fp8-softcap-sinks")
    assert compiled >= {f"prefill-{name}" for name in features}
    assert compiled >= {f"prefill-d{dim}-window" for dim in (64, 128, 256, 512)}


def test_two_launches_of_a_kernel_are_compared_in_their_order():
    rows = [ROW, ROW | {"registers": 100}]
    assert static.differences(rows, rows) == []
    changed = [ROW, ROW | {"registers": 90}, ROW | {"case": "d"}]
    assert static.differences(changed, rows) == ["c decode_kernel sm_90: registers 100 -> 90"]


def test_a_broken_rule_is_the_exit_status(monkeypatch, tmp_path, capsys):
    """Differences from the baseline are shown and are no failure."""
    results, path = [ROW | {"registers": 100}], tmp_path / "baseline.json"
    pool = SimpleNamespace(map=lambda *_: results)
    monkeypatch.setattr(static, "Workers", lambda *_: nullcontext(pool))
    monkeypatch.setattr(static, "distinct", lambda *_, **__: [("c", "sm_90", 0)] * len(results))

    def run(*arguments):
        return static.main(["--baseline", str(path), *arguments]), capsys.readouterr().out

    path.write_text(json.dumps([ROW]))
    status, out = run("--json", str(path))
    assert status == 0 and "c decode_kernel sm_90: registers 200 -> 100" in out
    assert json.loads(path.read_text()) == results
    status, out = run()
    assert status == 0 and "differs" not in out
    for broken, message in (
        ("d sm_90: does not compile: E: why", "d sm_90: does not compile: E: why"),
        (ROW | {"spill_bytes": 4}, "c decode_kernel sm_90: spills 4 bytes"),
    ):
        results[1:] = [broken]
        status, out = run()
        assert status == 1 and f"FAIL {message}" in out


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
