"""Tables of tile shapes: what is read of a file, which entry answers a question, and what is refused."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Literal

import pytest

from quire.kernels.common.arch import named
from quire.kernels.common.tile_tables import Entry, Key, TileTable, dump, parse
from quire.kernels.compressed import configs as compressed_configs
from quire.kernels.mla import configs as mla_configs

TABLES = (compressed_configs.TILES, mla_configs.TILES)


@dataclass(frozen=True)
class Config:
    """Launch choices with a field of every kind that a table may hold."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 0
    mask_all: bool = False
    fp16_values: Literal["never", "one_scale", "always"] = "never"
    matrix_instr_nonkdim: int | None = None


SHAPE = {"block_n": 32, "num_warps": 4, "num_stages": 2}


def written(folder, *rows):
    path = folder / "tiles.json"
    path.write_text(json.dumps({"comments": ["why"], "entries": rows}))
    return TileTable(path, Config)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.path.parent.name)
def test_a_table_is_one_entry_a_line(table):
    text = table.path.read_text(encoding="utf-8")
    comments, entries = table.contents
    assert dump(comments, entries) == text
    assert len(entries) == sum(line.startswith('{"') for line in text.splitlines())


def test_a_missing_field_stands_for_any_value(tmp_path):
    table = written(
        tmp_path,
        {"dtype": "fp32", "block_m": 16, **SHAPE},
        {"dtype": "16-bit", "rows": 16, **SHAPE},
    )
    for arch in map(named, ("sm_75", "sm_80", "sm_90", "sm_100", "gfx942", "gfx950")):
        for phase in (None, "prefill", "decode"):
            for head_dim in (16, 512):
                config = table.select(arch, dtype_bytes=4, head_dim=head_dim, phase=phase, rows=64)
                assert config == Config(16, 32, 4, 2)


def test_the_smallest_head_dim_and_the_most_rows_that_fit_answer(tmp_path):
    rows = [
        {"head_dim": d, "rows": r, **SHAPE, "block_n": n}
        for d, r, n in ((64, 16, 16), (64, 64, 32), (256, 16, 64))
    ]
    table = written(tmp_path, *rows)

    def shape(head_dim, rows):
        config = table.select(named("sm_90"), dtype_bytes=2, head_dim=head_dim, rows=rows)
        return config.block_m, config.block_n

    assert [shape(d, 64) for d in (16, 64, 128, 256)] == [(64, 32), (64, 32), (16, 64), (16, 64)]
    assert [shape(64, rows) for rows in (16, 32, 64, None)] == [
        (16, 16),
        (16, 16),
        (64, 32),
        (64, 32),
    ]
    for head_dim, rows in ((512, 64), (64, 8)):
        with pytest.raises(
            LookupError, match=r"tiles\.json: expected an entry for Key\(gpu='hopper', .*, got none"
        ):
            shape(head_dim, rows)


def test_only_some_launch_choices_change_and_those_lose_their_comment(tmp_path):
    rows = [{"gpu": gpu, "rows": 16, **SHAPE, "comment": "measured"} for gpu in ("hopper", "small")]
    table = written(tmp_path, *rows)
    key, config = Key(gpu="small", rows=16), Config(16, 64, 8, 3)
    comments, entries = parse(table.with_configs({key: config}), Config, "new")
    assert comments == ["why"]
    assert (
        entries == [table.contents[1][0], Entry(key, config)] and entries[0].comment == "measured"
    )
    same = table.with_configs({key: Config(16, 32, 4, 2)})
    assert same == dump(*table.contents)
    with pytest.raises(LookupError, match=r"tiles\.json: expected an entry of the key"):
        table.with_configs({replace(key, rows=32): config})


REFUSED = [
    ({"rows": 16, **SHAPE, "gpu": "turing"}, "gpu: expected one of hopper, blackwell, medium, small, cdna3, cdna4, got 'turing'"),
    ({"rows": 16, **SHAPE, "block_n": 48}, "block_n: expected a power of two, got 48"),
    ({"rows": 16, **SHAPE, "num_warps": 0}, "num_warps: expected a power of two, got 0"),
    ({"rows": 16, **SHAPE, "num_stages": 0}, "num_stages: expected 1 or more, got 0"),
    ({"rows": 16, **SHAPE, "num_stages": True}, "num_stages: expected int, got True"),
    ({"rows": 16, **SHAPE, "programs_per_sm": -1}, "programs_per_sm: expected 0 or more, got -1"),
    ({"rows": 16, **SHAPE, "mask_all": 1}, "mask_all: expected bool, got 1"),
    ({"rows": 16, **SHAPE, "fp16_values": "often"}, "fp16_values: expected one of never, one_scale, always, got 'often'"),
    ({"rows": 16, **SHAPE, "swap": True}, "swap: expected no such field"),
    ({"rows": 16, **SHAPE, "comment": 1}, "comment: expected a text, got 1"),
    ({"rows": 16, "block_n": 32, "num_warps": 4}, "num_stages: expected a value, got none"),
    ({"head_dim": 64, **SHAPE}, "block_m: expected a value, got none"),
    ([16, 32, 4, 2], "expected an object"),
]  # fmt: skip


@pytest.mark.parametrize("row, why", REFUSED, ids=[why for _, why in REFUSED])
def test_what_is_wrong_is_named_with_its_file_and_entry(row, why, tmp_path):
    table = written(tmp_path, {"rows": 32, **SHAPE}, row)
    with pytest.raises(ValueError) as error:
        table.select(named("sm_90"), dtype_bytes=2, head_dim=64)
    assert str(error.value) == f"{table.path}: entry 2, {json.dumps(row)}: {why}"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"entries": []}', '{"comments": [], "entries": [], "more": 1}']
)
def test_what_is_no_table_is_refused(text):
    with pytest.raises(ValueError, match=r"^some\.json: expected "):
        parse(text, Config, "some.json")


def test_two_entries_for_one_question_are_refused(tmp_path):
    """Whatever fields of their keys are missing; other rows or another head_dim are another question."""
    first = {"phase": "decode", "rows": 16, **SHAPE}
    for other in ({"dtype": "fp32", "rows": 16}, {"rows": 16}, {"phase": "decode", "rows": 16}):
        table = written(tmp_path, first, {**other, **SHAPE})
        with pytest.raises(
            ValueError, match=r"tiles\.json: entry 2: expected another key than entry 1 has"
        ):
            table.select(named("sm_90"), dtype_bytes=2, head_dim=64)
    for other in ({"phase": "prefill", "rows": 16}, {"rows": 32}, {"rows": 16, "head_dim": 64}):
        assert len(written(tmp_path, first, {**other, **SHAPE}).contents[1]) == 2


def test_an_entry_that_names_the_gpu_comes_before_one_that_names_none(tmp_path):
    rows = [{"rows": 16, **SHAPE}, {"gpu": "cdna3", "rows": 16, **SHAPE, "block_n": 64}]
    for order in (rows, rows[::-1]):
        table = written(tmp_path, *order)
        found = {
            name: table.select(named(name), dtype_bytes=4, head_dim=64).block_n
            for name in ("gfx942", "gfx950", "sm_90")
        }
        assert found == {"gfx942": 64, "gfx950": 32, "sm_90": 32}


AMD = {"gfx942": "cdna3", "gfx950": "cdna4"}


def answers(table, arch, head_dim, **question):
    """The key of the entry that answers, whose launch choices are those that are selected."""
    dtype = {2: "16-bit", 4: "fp32"}[question["dtype_bytes"]]
    pages = "fp8" if question["fp8"] else "same"
    key = Key(AMD[arch], dtype, pages, question.get("phase"), head_dim, question.get("rows"))
    entry = table.find(key)
    assert entry.config == table.select(named(arch), head_dim=head_dim, **question)
    return entry.key


@pytest.mark.parametrize("arch", AMD)
def test_each_class_of_amd_gpus_has_entries_of_its_own(arch):
    """Of two-byte values one for each phase, kind of pages and head_dim: the next greater head_dim or
    a GPU's of another maker would do as well, and spill."""
    for rows in (16, 32, 64):
        key = answers(mla_configs.TILES, arch, 512, dtype_bytes=2, fp8=False, rows=rows)
        assert key.gpu == AMD[arch] and key.rows <= rows
        answers(mla_configs.TILES, arch, 512, dtype_bytes=4, fp8=False, rows=rows)
        for fp8 in (False, True):
            key = answers(compressed_configs.TILES, arch, 512, dtype_bytes=2, fp8=fp8, rows=rows)
            assert (key.gpu, key.head_dim) == (AMD[arch], 512) and key.rows <= rows
            for head_dim in (16, 256, 512):
                answers(
                    compressed_configs.TILES, arch, head_dim, dtype_bytes=4, fp8=False, rows=rows
                )


def test_no_amd_entry_asks_for_what_only_nvidia_has():
    entries = [entry for table in TABLES for entry in table.contents[1]]
    amd = [entry for entry in entries if entry.key.gpu in AMD.values()]
    assert amd and not any(getattr(entry.config, "new_kv_tma", False) for entry in amd)
    for entry in entries:
        nonkdim = entry.config.matrix_instr_nonkdim
        assert nonkdim is None or (nonkdim == 16 and entry.key.gpu in ("cdna3", "cdna4"))


def test_tables_are_read_without_torch_and_triton(tmp_path):
    """So a plan, or a prediction, needs neither."""
    code = """
import sys
for name in ("torch", "triton"):
    sys.modules[name] = None
from quire.kernels.attention.tiles import select_config
from quire.kernels.common.arch import named
from quire.kernels.compressed import configs as compressed_configs
from quire.kernels.mla import configs as mla_configs
assert select_config(128, 2, named("sm_90"), quantized=False, rows=16).block_m == 16
assert compressed_configs.select_config(512, 2, True, named("sm_90"), rows=64).block_m == 64
assert mla_configs.select_config(2, 64, named("sm_90")).block_m == 64
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
