"""What `bench.tune` may choose: the entries of each table of tile shapes, what may stand there, and how a table's source is rewritten.

A cell is one entry for one class of architectures. Each family of kernels has its own dataclass, which says by its methods where the entry
stands, which cases use it, what is worth compiling, and which launches of `bench.static` show whether that holds. A new table is a new
dataclass, and a function in ``FAMILIES``.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from quire.kernels.attention import configs, tile_tables, tile_tables_e4m3
from quire.kernels.attention import triton_impl as paged
from quire.kernels.common import tile_shapes
from quire.kernels.compressed import configs as compressed_configs
from quire.kernels.compressed import triton_impl as compressed_triton
from quire.kernels.mla import triton_impl as dense_triton

from ..cases import latent_shapes as mla_shapes
from ..cases import shapes
from ..cases.latent_shapes import LatentCase
from ..peers.attention import quire_calls
from ..peers.latent import quire_latent_calls

Case = shapes.Case | LatentCase
# Tokens of a page in the static cases, and queries of those that fill tiles of so many rows.
STATIC_BLOCK_SIZES = (16, 128)
STATIC_QUERIES = {16: 1, 32: 8, 64: 16}
# The first architecture whose copies a tensor descriptor drives.
DESCRIPTOR_ARCH = 90
# Of the latent kernels, which have many: those at the front are enough.
CASES_PER_CELL = 4


class Cell(ABC):
    """An entry of a table.

    columns: names of what ``values`` returns. module: the one that looks its tile shape up by ``select_config``.
    table: module whose source has the table.
    """

    columns: tuple[str, ...]
    module: ModuleType
    table: ModuleType

    @property
    @abstractmethod
    def name(self) -> str:
        """Readable, and unique."""

    @abstractmethod
    def keys(self, arch: int) -> tuple[Any, ...]:
        """The name of the dictionary in the source, and the keys that lead to the entry."""

    @abstractmethod
    def current(self, arch: int) -> Any:
        """The tile shape that the table gives."""

    @abstractmethod
    def candidates(self, arch: int) -> list[Any]:
        """Tile shapes worth compiling, the table's own first: those whose tiles of keys in all stages but one fit the shared memory."""

    def variants(self, config: Any, arch: int) -> list[Any]:
        """Other ways of launching a tile shape."""
        return []

    @abstractmethod
    def static_cases(self, arch: int) -> list[str]:
        """Cases of `bench.static` whose first kernel has the cell's tile shape."""

    @abstractmethod
    def calls(self, problem: Any, impl: str | None) -> list[Any]:
        """One call for each copy of a problem's tensors."""

    def values(self, config: Any) -> tuple[Any, ...]:
        """A tile shape as it is shown."""
        return astuple(config)

    @abstractmethod
    def entry(self, config: Any) -> str:
        """A tile shape as the table's source has it."""

    @contextmanager
    def using(self, config: Any) -> Iterator[None]:
        """Kernels are launched with this tile shape, whatever the table says."""
        before = self.module.select_config
        self.module.select_config = lambda *args, **kwargs: config
        try:
            yield
        finally:
            self.module.select_config = before


@dataclass(frozen=True)
class _AttentionCell(Cell):
    """phase: "prefill" or "decode". head_dim: 32 stands for less. rows: of a decode tile, else 0. e4m3: whether pages are quantised."""

    phase: str
    head_dim: int
    rows: int = 0
    e4m3: bool = False

    columns = ("m", "n", "warps", "stages", "parts", "tma", "per sm")
    module = paged

    @property
    def name(self) -> str:
        rows = f" x{self.rows}" if self.rows else ""
        return f"{self.phase} {self.head_dim}{rows}" + (" e4m3" if self.e4m3 else "")

    @property
    def table(self) -> ModuleType:
        return tile_tables_e4m3 if self.e4m3 else tile_tables

    def keys(self, arch: int) -> tuple[Any, ...]:
        rows = (self.rows,) if self.rows else ()
        return (self.phase.upper(), tile_shapes.tile_class(arch), self.head_dim, *rows)

    def current(self, arch: int) -> configs.Config:
        page_bytes = 1 if self.e4m3 else 2
        return configs.select_config(
            self.head_dim, 2, self.phase, 16, arch, rows=self.rows or 16, page_bytes=page_bytes
        )

    def candidates(self, arch: int) -> list[configs.Config]:
        heights = (32, 64, 128) if self.phase == "prefill" else (self.rows,)
        parts = (1, 2) if self.phase == "prefill" and self.head_dim >= 256 else (1,)
        found = [self.current(arch)]
        for *shape, value_parts in product(heights, (16, 32, 64, 128), (4, 8), (2, 3, 4, 5), parts):
            config = configs.Config(*shape, value_parts, mask_all=found[0].mask_all)
            # Tiles of fresh rows have two bytes an element in any case.
            row_bytes = 2 * (self.head_dim + self.head_dim // value_parts)
            if _fits(config, row_bytes, arch) and config not in found:
                found.append(config)
        return found

    def variants(self, config: configs.Config, arch: int) -> list[configs.Config]:
        """Of prefill: with tensor descriptors where the GPU has them, and with programs that take turns."""
        if self.phase != "prefill":
            return []
        made = [
            replace(config, fresh_tma=fresh_tma, programs_per_sm=programs)
            for fresh_tma, programs in product((False, True), (0, 1, 2))
            if arch >= DESCRIPTOR_ARCH or not fresh_tma
        ]
        return [other for other in made if other != config]

    def static_cases(self, arch: int) -> list[str]:
        name = f"{self.phase}{'-fp8' if self.e4m3 else ''}-d{self.head_dim}"
        queries = f"-q{STATIC_QUERIES[self.rows]}" if self.rows else ""
        if self.e4m3:
            if self.head_dim == 32:
                return [name]
            sizes = STATIC_BLOCK_SIZES if self.head_dim == 128 else STATIC_BLOCK_SIZES[1:]
        else:
            sizes = STATIC_BLOCK_SIZES if self.head_dim >= 64 else STATIC_BLOCK_SIZES[:1]
        return [f"{name}-p{block_size}{queries}" for block_size in sizes]

    def calls(self, problem: Any, impl: str | None) -> list[Any]:
        return quire_calls(problem, in_step=self.phase == "prefill", impl=impl)

    def values(self, config: configs.Config) -> tuple[Any, ...]:
        """The last two as far as they are not the defaults."""
        shape = (config.block_m, config.block_n, config.num_warps, config.num_stages, config.value_parts)  # fmt: skip
        more = (config.fresh_tma, config.programs_per_sm)
        return shape + (more if more[1] else more[:1] if more[0] else ())

    def entry(self, config: configs.Config) -> str:
        values = self.values(config)
        return str(values if self.phase == "prefill" else values[1:4])


@dataclass(frozen=True)
class _MlaCell(Cell):
    """rows: of the query tile."""

    rows: int

    columns = ("n", "warps", "stages", "swap", "divide", "per sm")
    module = table = dense_triton

    @property
    def name(self) -> str:
        return f"mla x{self.rows}"

    def keys(self, arch: int) -> tuple[Any, ...]:
        return ("CONFIGS", tile_shapes.tile_class(arch), self.rows)

    def current(self, arch: int) -> dense_triton.MlaConfig:
        return dense_triton.select_config(2, self.rows, arch)

    def candidates(self, arch: int) -> list[dense_triton.MlaConfig]:
        found = [self.current(arch)]
        per_sm = (1, 2) if self.rows == 16 else (1,)
        for shape in product((16, 32, 64), (4, 8), (2, 3, 4), (True, False), (True, False), per_sm):
            config = dense_triton.MlaConfig(*shape)
            if _fits(config, 2 * (512 + 64), arch) and config not in found:
                found.append(config)
        return found

    def static_cases(self, arch: int) -> list[str]:
        pages = {f"mla-decode-h{self.rows}": 64, f"mla-decode-h{self.rows}-p16-pages-only": 16}
        # Decode of some architectures and page sizes goes without the tallest tiles.
        decode = partial(
            dense_triton.plan_decode, num_heads=self.rows, max_seqlen_q=1, num_sms=1, arch=arch
        )
        found = [name for name, size in pages.items() if decode(block_size=size).rows == self.rows]
        return found + (["mla-prefill-h128"] if self.rows == dense_triton.PREFILL_ROWS[2] else [])

    def calls(self, problem: Any, impl: str | None) -> list[Any]:
        return quire_latent_calls(problem, impl)

    def entry(self, config: dense_triton.MlaConfig) -> str:
        shape = (
            f"MlaConfig({config.block_n}, {config.num_warps}, {config.num_stages}, {config.swap}"
        )
        shape += ", divide=True" if config.divide else ""
        return shape + (f", per_sm={config.per_sm})" if config.per_sm > 1 else ")")


@dataclass(frozen=True)
class _CompressedCell(Cell):
    """rows: of the query tile. fp8: whether pages are quantised."""

    rows: int
    fp8: bool

    columns = ("m", "n", "warps", "stages", "swap", "divide")
    module, table = compressed_triton, compressed_configs

    @property
    def name(self) -> str:
        return f"compressed x{self.rows} {'fp8' if self.fp8 else 'bf16'}"

    def keys(self, arch: int) -> tuple[Any, ...]:
        return ("WIDE", compressed_configs._generation(arch), (self.rows, self.fp8))

    def current(self, arch: int) -> compressed_configs.CompressedConfig:
        return compressed_configs.select_config(512, 2, self.fp8, arch, rows=self.rows)

    def candidates(self, arch: int) -> list[compressed_configs.CompressedConfig]:
        found = [self.current(arch)]
        for shape in product((16, 32, 64), (4, 8), (2, 3, 4), (True, False), (True, False)):
            config = compressed_configs.CompressedConfig(self.rows, *shape)
            if _fits(config, 576 if self.fp8 else 2 * 512, arch) and config not in found:
                found.append(config)
        return found

    def static_cases(self, arch: int) -> list[str]:
        kinds = {16: ("decode-csa-h16-k512",), 32: ("decode-hca-h16",), 64: ("decode-csa-h64-k512", "prefill-csa-h64-k512")}  # fmt: skip
        ends = ("-q2",) if self.rows == 32 else ("-pages", "") if self.fp8 else ("", "")
        fp8 = "-fp8" if self.fp8 else ""
        return [f"compressed-{kind}{fp8}{end}" for kind, end in zip(kinds[self.rows], ends, strict=False)]  # fmt: skip

    def calls(self, problem: Any, impl: str | None) -> list[Any]:
        return quire_latent_calls(problem, impl)

    def entry(self, config: compressed_configs.CompressedConfig) -> str:
        shape = (config.block_n, config.num_warps, config.num_stages, config.swap)
        return str((*shape, True) if config.divide else shape)


def _fits(config: Any, row_bytes: int, arch: int) -> bool:
    tiles = config.block_n * row_bytes * (config.num_stages - 1)
    return tiles <= tile_shapes.SHARED_MEMORY[arch]


def _attention_cell(e4m3: bool, case: Case, arch: int) -> Cell | None:
    shape = case.shape
    if not isinstance(case, shapes.Case) or case.phase == "mixed" or shape.fp8 != e4m3:
        return None
    dim, rows = max(32, shape.head_dim), 0
    if case.phase == "decode":
        plan = configs.plan_decode(
            num_decodes=case.batch, max_seqlen_q=1, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim, num_sms=1,
        )  # fmt: skip
        rows = _AttentionCell("decode", dim, plan.block_m, e4m3).current(arch).block_m
    return _AttentionCell(case.phase, dim, rows, e4m3)


def _mla_cell(case: Case, arch: int) -> Cell | None:
    if not isinstance(case, LatentCase) or case.shape.op != "mla":
        return None
    rows = dense_triton.PREFILL_ROWS[2]
    if case.phase == "decode":
        rows = compressed_configs.tile_rows(case.shape.num_heads, 1)
    return _MlaCell(dense_triton.tile_rows(rows, arch))


def _compressed_cell(case: Case, arch: int) -> Cell | None:
    shape = case.shape
    if not isinstance(case, LatentCase) or shape.op not in ("window", "csa", "hca") or shape.head_dim != 512:  # fmt: skip
        return None
    tokens = 1 if case.phase == "decode" or shape.op == "csa" else case.q_lens[0]
    rows = compressed_configs.tile_rows(shape.num_heads, tokens)
    found = compressed_configs.select_config(512, 2, case.fp8, arch, rows=rows)
    return _CompressedCell(found.block_m, case.fp8)


# The cell that a case of each family uses: (case, arch) -> cell or None.
FAMILIES = (
    partial(_attention_cell, False),
    partial(_attention_cell, True),
    _mla_cell,
    _compressed_cell,
)


def cells(cases: Sequence[Case], arch: int) -> dict[Cell, list[Case]]:
    """The cells that cases use, in the order of the cases that matter most."""
    found: dict[Cell, list[Case]] = {}
    for case in cases:
        for cell_of in FAMILIES:
            if (cell := cell_of(case, arch)) is not None:
                found.setdefault(cell, []).append(case)
    headline = [*shapes.headline(), *mla_shapes.headline()]
    places = {case.name: i for i, case in enumerate(headline)}

    def place(cell: Cell) -> int:
        return min(places.get(case.name, len(places)) for case in found[cell])

    return {
        cell: found[cell] if isinstance(cell, _AttentionCell) else found[cell][:CASES_PER_CELL]
        for cell in sorted(found, key=place)
    }


def tuned_cases() -> list[Case]:
    """Decode at two batches and prefill at two contexts of every named shape, over pages of both kinds; of the latent kernels their headline, and
    what else uses their tables."""
    loads = (
        ("decode", 16, 32768), ("decode", 128, 4096), ("prefill", 1, 32768), ("prefill", 4, 4096),
    )  # fmt: skip
    plain: list[Case] = [
        shapes.Case(shape, *load, shape.block_size)
        for shape in (*shapes.SHAPES.values(), *shapes.FP8_SHAPES.values())
        for load in loads
    ]
    return [*plain, *mla_shapes.all_cases()]


def tiny_cases() -> list[Case]:
    """Of every family, for a CPU."""
    return [*shapes.tiny_cases(), *mla_shapes.tiny_cases()]


def rewritten(chosen: dict[Cell, Any], arch: int) -> dict[Path, str]:
    """The sources whose tables have other entries then, by their paths."""
    sources: dict[Path, str] = {}
    for cell, config in chosen.items():
        if config == cell.current(arch):
            continue
        path = Path(str(cell.table.__file__))
        source = sources.get(path) or path.read_text(encoding="utf-8")
        sources[path] = with_entry(source, cell.keys(arch), cell.entry(config))
    return sources


def with_entry(source: str, keys: Sequence[Any], entry: str) -> str:
    """Source with another expression where ``NAME = {key: {key: expression}}`` is, for keys (NAME, key, key).

    Raises: KeyError if there is none.
    """
    name, *rest = keys
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            node = statement.value
            break
    else:
        raise KeyError(name)
    for key in rest:
        assert isinstance(node, ast.Dict)
        found = {ast.literal_eval(k): v for k, v in zip(node.keys, node.values, strict=True) if k}
        node = found[key]
    lines = source.splitlines(keepends=True)
    assert node.lineno == node.end_lineno, "an entry stands on one line"
    line = lines[node.lineno - 1]
    lines[node.lineno - 1] = line[: node.col_offset] + entry + line[node.end_col_offset :]
    return "".join(lines)
