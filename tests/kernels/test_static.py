"""The compiled kernels, on machines without a GPU: a sample of ``bench.static`` (all of it takes minutes)."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from bench import static

ROOT = Path(__file__).resolve().parents[2]
# Triton compiles only where it does not interpret.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
GOOD = {
    "case": "c", "kernel": "decode_kernel", "arch": 90, "tile": "16x64", "registers": 200, "spill": 0, "shared": 71680,
    "limit": 232448, "warps": 4, "stages": 3, "mma": "mma.sync", "copy": 16, "flight": 128,
}  # fmt: skip


@pytest.mark.parametrize("only, arch", [("decode-d128-p", 90), ("prefill-d256-p128", 90)])
def test_no_spills_and_wide_copies(tmp_path, only, arch):
    report = tmp_path / "static.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.static", "--only", only, "--arch", str(arch), "--jobs", "1", "--json", str(report)],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [r for r in json.loads(report.read_text())["rows"] if r["kernel"] in static.PIPELINED]
    assert rows
    for row in rows:
        assert row["copy"] == 16
        # Little's law for an H200: about 4.8 TB/s * 1 us over 132 SMs.
        assert row["flight"] >= 36
        if row["kernel"] == "prefill_kernel":
            assert row["mma"] == "wgmma"


def test_the_pipeline_is_real():
    """Each stage past the second adds a K and a V tile of shared memory; loaded inside the loop, a page id would prevent that."""
    code = """
from bench import static
from quire.kernels import configs, paged
case = next(c for c in static.cases() if c.name == "decode-d128-p16-q1")
used = []
for stages in (2, 3, 4):
    paged.select_config = lambda *a, **k: configs.Config(16, 64, 4, stages, mask_all=True)
    used.append(static.measure(case, 90)[0]["shared"])
print(*used)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    used = [int(word) for word in done.stdout.split()]
    tiles = 2 * 64 * 128 * 2
    assert [b - a for a, b in pairwise(used)] == [tiles, tiles]


@pytest.mark.parametrize(
    "change, problem",
    [
        ({}, []),
        ({"spill": 8}, ["spills 8 bytes"]),
        ({"shared": 232449}, ["needs 232449 bytes of shared memory, limit 232448"]),
        ({"copy": 8}, ["copies K/V 8 bytes at a time"]),
        ({"copy": 0, "mma": "fma"}, []),
        ({"copy": 0, "kernel": "write_kv_kernel"}, []),
    ],
)
def test_problems(change, problem):
    assert static.problems(GOOD | change) == problem


def test_table_aligns():
    lines = static.table([GOOD, GOOD | {"case": "longer"}]).splitlines()
    assert len({line.index("decode_kernel") for line in lines[1:]}) == 1
