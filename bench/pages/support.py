"""Which sizes each operator is tested and compiled with: ``tested.json``, ``static/VERSION.json``.

A line of a table is an operator, the channels of its rows and the dtype of its pages (of
``merge_partials``: of its arguments); a cell has the page sizes. What is refused is asked of the
operators' own checks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from quire.kernels.common.arch import named
from quire.kernels.common.checks import expect_head_dim

from ..static import report, rules, sass
from ..static.cases import ARCHS, all_cases, meta
from ..static.cases import attention as attention_cases
from ..static.cases import indexer as index_cases
from ..static.cases import mla_dense as mla_cases
from .data import NONE, percent, rows, table

VERSION = "3.7.1"
HOPPER = named("sm_90")  # refusals are those of any architecture
# Powers of two, and some that models have.
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 192, 256, 512)
KV_OPERATORS = ("paged_attention", "sliding_window_attention", "write_kv", "merge_partials")
LATENT_OPERATORS = (
    "mla_attention",
    "compressed_attention",
    "index_topk",
    "write_latent",
    "compress",
)
PLAIN = ("bfloat16", "float16", "float32")
E4M3, QUANTISED = "float8_e4m3fn", "uint8"
SHOWN = {E4M3: "e4m3", QUANTISED: "fp8 rows with scales"}
LEGEND = f"""\
A line has an operator, the channels of a row (`head_dim`; of MLA those that are values too, of
`index_topk` those of an index key), and the dtype of its pages (of `merge_partials`: of its
arguments). The other columns have the page sizes, in rows, or "yes" where there are no pages.

- *Tested*: a case table of the tests has these sizes. The Triton kernels, in Triton's interpreter
  on a CPU, and the torch implementation are each compared with an oracle (attention: in float64),
  within a bound that is derived from the arithmetic. No GPU is involved, and the interpreter has no
  architecture.
- *Compiled*: Triton {VERSION} compiles the kernels that a call with these sizes launches on that
  architecture; nothing spills, and shared memory suffices (`python -m bench.static --all`). Nothing
  ran.
- *Refused*: the operator raises an error before it launches anything.
- {NONE}: taken, but no test and no compiled case has this. Page sizes that are not listed are taken
  as well."""

Sizes = dict[tuple[str, int, str], set[int]]
"""Page sizes by (operator, head_dim, dtype of pages); empty for an operator without pages."""


def legend() -> str:
    """What the words of the tables say."""
    return LEGEND


def tested() -> Sizes:
    """What the case tables of the tests have."""
    return {
        (row["operator"], row["head_dim"], row["pages"]): set(row["block_sizes"])
        for row in rows("tested.json")
    }


@cache
def compiled() -> dict[str, Sizes]:
    """What is in the static table and breaks no rule of it, by architecture."""
    cases = all_cases()
    found: dict[str, Sizes] = defaultdict(lambda: defaultdict(set))
    for row in static_rows():
        case = cases[row["case"]]
        problems = rules.problems(row)
        if problems and rules.is_gated(row):
            raise ValueError(f"{row['case']} {row['arch']}: {problems}")
        if case.pages and not problems:
            key = (case.operator, case.head_dim, case.pages)
            found[row["arch"]][key] |= set(case.block_sizes)
    return {name: found[name] for name in ARCHS if name in found}


def static_rows() -> list[dict[str, Any]]:
    """Rows of the static table."""
    return report.read(report.RESULTS / f"{VERSION}.json")


def attention() -> str:
    """Operators over pages of keys and values."""
    dtypes = (*PLAIN, E4M3)
    return _table(
        [
            (operator, head_dim, pages)
            for operator in KV_OPERATORS
            for head_dim in HEAD_DIMS
            for pages in (PLAIN if operator == "merge_partials" else dtypes)
        ]
    )


def latent() -> str:
    """Operators over latents: MLA, and those of DeepSeek-V4."""
    keys = [
        (operator, head_dim, pages)
        for operator in LATENT_OPERATORS
        for head_dim in HEAD_DIMS
        for pages in (*PLAIN, E4M3 if operator == "mla_attention" else QUANTISED)
    ]
    return _table(keys)


def summary() -> str:
    """What compiled on each architecture."""
    found = static_rows()
    lines = []
    for arch in compiled():
        mine = [row for row in found if row["arch"] == arch]
        spilled = sum(bool(row["spill_bytes"] or row["stack_bytes"]) for row in mine)
        registers = max(row["registers"] for row in mine)
        shared = max(row["shared_bytes"] / row["shared_limit"] for row in mine)
        serial = sum(row["mma"] == sass.SERIAL for row in mine)
        figures = [str(len(mine)), str(spilled), str(registers), percent(shared), str(serial)]
        lines.append([arch, *figures])
    lines.append(["in all", str(len(found)), *[""] * 4])
    header = [
        f"Triton {VERSION}",
        "kernels",
        "that spill",
        "registers of a thread, at most",
        "shared memory, of its limit, at most",
        "without overlap of wgmma",
    ]
    return table(header, lines)


def _table(keys: list[tuple[str, int, str]]) -> str:
    """A line for each operator, head_dim and dtype, a column for each architecture.

    Lines that differ in head_dim alone, then in dtype alone, are one, and so are equal columns.
    """
    columns = [tested(), *compiled().values()]
    dims: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for key in keys:
        cells = [_cell(found, key) for found in columns]
        if refused(*key):
            assert cells == [NONE] * len(cells), f"{key} is refused, but tested or compiled"
            cells = ["refused"] * len(cells)
        operator, head_dim, pages = key
        dims[(f"`{operator}`", SHOWN.get(pages, pages), *cells)].append(str(head_dim))
    dtypes: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (operator, shown, *cells), found in dims.items():
        dtypes[(operator, ", ".join(found), *cells)].append(shown)
    lines = [[*line[:2], ", ".join(found), *line[2:]] for line, found in dtypes.items()]
    archs: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for at, arch in enumerate(compiled(), 4):
        archs[tuple(line[at] for line in lines)].append(str(arch))
    header = ["operator", "head_dim", "dtype", "tested"]
    header += [f"compiled, {', '.join(names)}" for names in archs.values()]
    return table(header, [[*line[:4], *cells] for line, *cells in zip(lines, *archs, strict=True)])


def _cell(found: Sizes, key: tuple[str, int, str]) -> str:
    if key not in found:
        return NONE
    return ", ".join(map(str, sorted(found[key]))) or "yes"


def refused(operator: str, head_dim: int, pages: str) -> bool:
    """Whether a call with these sizes raises an error; asked of the operator over tensors without
    storage.
    """
    try:
        PROBES[operator](head_dim, pages)
    except (NotImplementedError, ValueError):
        return True
    return False


def _attention(phase: str, sliding_window: int | None = None) -> Callable[[int, str], None]:
    def probe(head_dim: int, pages: str) -> None:
        expect_head_dim("head_dim", head_dim)  # as every launch of these operators does first
        fp8 = pages == E4M3
        shape = attention_cases.Shape(
            "", head_dim, 16, phase, dtype="bfloat16" if fp8 else pages,
            sliding_window=sliding_window, scales="rows" if fp8 else None,
        )  # fmt: skip
        attention_cases.launches(shape, HOPPER)

    return probe


def _mla(head_dim: int, pages: str) -> None:
    shape = mla_cases.Shape("", "decode", 16, dtype=pages, head_dim_v=head_dim)
    mla_cases.launches(shape, HOPPER)


def _index(head_dim: int, pages: str) -> None:
    fp8 = pages == QUANTISED
    shape = index_cases.Shape("", "decode", 512, 1 << 13, fp8, "bfloat16" if fp8 else pages)
    index_cases.launches(replace(shape, index_dim=head_dim), HOPPER)


def _latents(head_dim: int, pages: str) -> None:
    """Pages of latents with as many channels; the quantised layout has 512."""
    from quire.kernels.common.latent_pages import LatentPages, page_bytes

    if pages == QUANTISED:
        data = meta(8, page_bytes(64), dtype=QUANTISED)
    else:
        data = meta(8, 64, head_dim, dtype=pages)
    LatentPages(data, 64, head_dim, min(64, head_dim))


def _compressed(head_dim: int, pages: str) -> None:
    """Entries of latents, or index keys."""
    from quire.kernels.common.latent_pages import IndexPages, page_bytes

    if pages == QUANTISED:
        data = meta(8, page_bytes(64, head_dim + 4), dtype=QUANTISED)
    else:
        data = meta(8, 64, head_dim, dtype=pages)
    IndexPages(data, 64, head_dim)


PROBES: dict[str, Callable[[int, str], None]] = {
    "paged_attention": _attention("decode"),
    "sliding_window_attention": _attention("decode", 128),
    "write_kv": _attention("write"),
    "merge_partials": _attention("merge"),
    "mla_attention": _mla,
    "compressed_attention": _latents,
    "index_topk": _index,
    "write_latent": _latents,
    "compress": _compressed,
}
