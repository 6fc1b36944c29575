"""bench.tune on a CPU: the values that it tries, refuses and takes."""

import argparse
import json
import os
from pathlib import Path
from time import perf_counter

import pytest
import torch

from quire.bench.cases.shapes import TINY_SHAPES, Case, all_cases, tiny_cases
from quire.bench.common import timing
from quire.bench.common.timing import Timing
from quire.bench.tune import __main__ as tune
from quire.bench.tune import entries
from quire.bench.tune.entries import TileEntry, table_entries
from quire.kernels.attention.tiles import Config
from quire.kernels.common.arch import named
from tests.support.forked import printed

ROOT = Path(__file__).resolve().parents[2]
HOPPER = named("sm_90")
ARCHS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
DECODE = TileEntry(entries.DECODE, "", 32)
PREFILL = TileEntry(entries.PREFILL, "hopper", 32)
ARGS = argparse.Namespace(dry_run=True, per_call=0.001, jobs=1)
SAME = Timing(1.0, 1.0, 1.0, 1.0)


def case(phase, context=40):
    return Case(TINY_SHAPES["tiny/local"], phase, 2, context)


def measured(entry, values, cases, deadline=float("inf")):
    return tune.measure(entry, values, cases, ARGS, HOPPER, deadline)


@pytest.mark.parametrize("arch", [named(name) for name in ARCHS], ids=ARCHS)
def test_candidates_start_with_the_table_and_fit(arch):
    work = table_entries(all_cases(), arch)
    assert len({entry.name for entry in work}) == len(work)
    names = ("DECODE", "PREFILL", "E4M3_PREFILL", "LATENT", "FP8_LATENT")
    assert {entry.table for entry in work} == {getattr(entries, name) for name in names}
    for entry, cases in work.items():
        values = entry.candidates(arch)
        assert 1 <= len(cases) <= entries.CASES_PER_ENTRY and len(set(values)) == len(values) > 5
        assert values[0] == entry.current
        row_bytes = 2 * 576 if entry.table[0] == "latent" else 4 * entry.key
        for value in values[1:]:
            is_tuple = isinstance(value, tuple)
            block_n, stages = value[:2] if is_tuple else (value.block_n, value.num_stages)
            assert block_n * row_bytes * (stages - 1) <= arch.shared_memory
    assert next(iter(work)) == TileEntry(entries.DECODE, "", 512)  # first of the headline


LAUNCHED = """
import json
import torch
from quire.bench.cases.problem import make_problem
from quire.bench.cases.shapes import SHAPES, Case, tiny_cases
from quire.bench.peers.quire_calls import quire_calls
from quire.bench.static.compiling import config
from quire.bench.static.launches import record
from quire.bench.tune.__main__ import refusals
from quire.bench.tune.entries import entry_of
from quire.kernels.attention.tiles import Config
from quire.kernels.common.arch import named
arch = named("sm_90")
def call_of(case):
    problem = make_problem(case, torch.device("meta"), copies=1)
    return quire_calls(problem, in_step=case.phase == "prefill", impl="triton")[0]
found = []
for case in tiny_cases():
    entry = entry_of(case, arch)
    if entry is not None:
        call, shapes = call_of(case), []
        for value in entry.candidates(arch)[:2]:
            with entry.using(value):
                shapes.append(config(record(call, arch)[0]))
        found.append([entry.name, shapes])
case = Case(SHAPES["gemma-4-e4b/global"], "prefill", 1, 64)
entry = entry_of(case, arch)
values = entry.current, Config(64, 64, 4, 2), Config(100, 16, 4, 2)
print(json.dumps([found, refusals(entry, values, call_of(case), arch, 2)]))
"""


@pytest.mark.slow
def test_a_value_is_what_is_launched_and_compiled():
    """For every tiny case, in a process where Triton compiles."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    found, reasons = json.loads(printed(LAUNCHED, cwd=ROOT, env=environment).splitlines()[-1])
    assert len({name for name, _ in found}) == len(table_entries(tiny_cases(), HOPPER)) == 5
    for name, shapes in found:
        assert len(set(shapes)) == 2, name
    assert reasons[0] is None
    assert "spills" in reasons[1] and reasons[2].startswith("does not compile: ")


def test_a_value_that_cannot_be_launched_is_not_timed(monkeypatch):
    monkeypatch.setattr(timing, "time_calls", lambda *a, **k: SAME)
    broken = Config(64, 48, 4, 3)  # no power of two
    rows = measured(PREFILL, [PREFILL.current, broken], [case("prefill")])
    assert rows[0]["wrong"] is None and rows[0]["ratio"] == 1
    assert "power of 2" in rows[1]["wrong"] and rows[1]["ratio"] is None


def test_a_wrong_result_is_not_timed(monkeypatch):
    right, made = tune.quire_calls, []

    def off_by_one_at_first(*args, **kwargs):
        made.append(right(*args, **kwargs))
        if len(made) > 1:
            return made[-1]
        out, *more = made[0][0]()
        return [lambda: (out + 1, *more)]

    monkeypatch.setattr(tune, "quire_calls", off_by_one_at_first)
    # A right result of another case makes up for nothing.
    (row,) = measured(DECODE, [DECODE.current], [case("decode")] * 2)
    assert len(made) == 2 and row["wrong"] and not row["ms"] and row["ratio"] is None


def test_no_entry_and_no_further_case_begins_after_the_time(monkeypatch, capsys):
    monkeypatch.setattr(timing, "time_calls", lambda *a, **k: SAME)
    cases = [case("decode"), case("decode", 30)]
    for deadline, count in ((perf_counter(), 1), (perf_counter() + 1000, 2)):
        (row,) = measured(DECODE, [DECODE.current], cases, deadline)
        assert len(row["ms"]) == count and row["ratio"] == 1
    assert tune.main(["--dry-run", "--only", "DECODE", "--seconds", "0"]) == 0
    assert "out of time: attention.DECODE[32]" in capsys.readouterr().out
    assert tune.main(["--dry-run", "--only", "decode 7"]) == 2
    assert "only: expected part of an entry's name, got 'decode 7'" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert tune.main([]) == 2
