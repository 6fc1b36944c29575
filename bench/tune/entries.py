"""Tile shapes that `bench.tune` may choose: entries of the ``tiles.py`` of attention and of latent
attention.

Each family of kernels has its own dataclass of entries: the current shape, the shapes worth
compiling in its place, and the launches of `bench.static` that show whether those hold. A function
in ``FAMILIES`` gives the entry that a case uses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

from quire.kernels.attention import launch as paged
from quire.kernels.attention import tiles
from quire.kernels.common.arch import Arch
from quire.kernels.common.tile_shapes import tile_rows
from quire.kernels.latent import launch as latent_launch
from quire.kernels.latent import tiles as latent_tiles

from ..cases import latent_shapes as mla_shapes
from ..cases import shapes
from ..cases.latent_shapes import LatentCase
from ..peers.attention import quire_calls
from ..peers.latent import quire_latent_calls

Case = shapes.Case | LatentCase
# Tokens of a page in the static cases, and queries of those that fill tiles of so many rows.
STATIC_BLOCK_SIZES = (16, 128)
STATIC_QUERIES = {16: 1, 32: 8, 64: 16}
# Of the latent kernels, which have many: those at the front are enough.
CASES_PER_ENTRY = 4


def _launch_choices(arch: Arch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Warps and stages that are worth compiling for.

    AMD's copies go through registers, so that one tile on its way is much, and none is a choice.
    """
    return (4, 8), ((2, 3, 4, 5) if arch.maker == "nvidia" else (1, 2, 3))


class TableEntry(ABC):
    """A tile shape that a kernel family looks up.

    Attributes:
        columns: names of what ``values`` returns.
        modules: those that look its launch choices up by ``select_config``.
        file: that has the table.
    """

    columns: tuple[str, ...]
    modules: tuple[ModuleType, ...]
    file: str

    @property
    @abstractmethod
    def name(self) -> str:
        """Readable, and unique."""

    @abstractmethod
    def current(self, arch: Arch) -> Any:
        """The launch choices that the operator makes today."""

    @abstractmethod
    def candidates(self, arch: Arch) -> list[Any]:
        """Tile shapes worth compiling, the table's own first.

        Those whose tiles of keys in all stages but one fit the shared memory.
        """

    @abstractmethod
    def static_cases(self, arch: Arch) -> list[str]:
        """Cases of `bench.static` whose first kernel has the entry's tile shape."""

    @abstractmethod
    def calls(self, problem: Any, impl: str | None) -> list[Any]:
        """One call for each copy of a problem's tensors."""

    def values(self, config: Any) -> tuple[Any, ...]:
        """A tile shape as it is shown."""
        return astuple(config)

    @contextmanager
    def using(self, config: Any) -> Iterator[None]:
        """Kernels are launched with this tile shape, whatever the table says."""
        before = self.modules[0].select_config
        for module in self.modules:
            module.select_config = lambda *args, **kwargs: config
        try:
            yield
        finally:
            for module in self.modules:
                module.select_config = before


@dataclass(frozen=True)
class _AttentionEntry(TableEntry):
    """An entry of attention.

    Attributes:
        phase: "prefill" or "decode".
        head_dim: 32 stands for less.
        rows: of a decode tile, else 0.
        e4m3: whether pages are quantized.
    """

    phase: str
    head_dim: int
    rows: int = 0
    e4m3: bool = False

    columns = ("m", "n", "warps", "stages", "parts")
    modules, file = (paged,), "kernels/attention/tiles.py"

    @property
    def name(self) -> str:
        rows = f" x{self.rows}" if self.rows else ""
        return f"{self.phase} {self.head_dim}{rows}" + (" e4m3" if self.e4m3 else "")

    def current(self, arch: Arch) -> tiles.Config:
        """The shape that `tiles` gives."""
        rows = self.rows or None
        return tiles.select_config(self.head_dim, 2, arch, quantized=self.e4m3, rows=rows)

    def candidates(self, arch: Arch) -> list[tiles.Config]:
        heights = (32, 64, 128) if self.phase == "prefill" else (self.rows,)
        parts = (1, 2) if self.phase == "prefill" and self.head_dim >= 256 else (1,)
        found = [self.current(arch)]
        warps, stages = _launch_choices(arch)
        for shape in product(heights, (16, 32, 64, 128), warps, stages, parts):
            config = tiles.Config(*shape)
            # Tiles of new K/V have two bytes an element in any case.
            if _fits(config, 2 * 2 * self.head_dim, arch) and config not in found:
                found.append(config)
        return found

    def static_cases(self, arch: Arch) -> list[str]:
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


@dataclass(frozen=True)
class _LatentEntry(TableEntry):
    """An entry of latent attention.

    Attributes:
        rows: of the query tile that are asked for.
        fp8: whether pages are quantized.
    """

    rows: int
    fp8: bool = False

    columns = ("m", "n", "warps", "stages")
    modules, file = (latent_launch, latent_tiles), "kernels/latent/tiles.py"

    @property
    def name(self) -> str:
        return f"latent x{self.rows}" + (" fp8" if self.fp8 else "")

    def current(self, arch: Arch) -> latent_tiles.Config:
        """The shape that `tiles` gives."""
        return latent_tiles.select_config(
            dtype_bytes=2, quantized=self.fp8, arch=arch, num_heads=self.rows, tokens=1
        )

    def candidates(self, arch: Arch) -> list[latent_tiles.Config]:
        found = [self.current(arch)]
        warps, stages = _launch_choices(arch)
        for shape in product((16, 32, 64), (16, 32, 64), warps, stages):
            config = latent_tiles.Config(*shape)
            # Tiles of new rows have two bytes an element in any case.
            if _fits(config, 2 * (512 if self.fp8 else 512 + 64), arch) and config not in found:
                found.append(config)
        return found

    def static_cases(self, arch: Arch) -> list[str]:
        if not self.fp8:
            kinds = {16: ["compressed-decode-csa-h16-k512"], 32: ["compressed-decode-hca-h16-q2"], 64: ["compressed-decode-csa-h64-k512", "mla-prefill-h128"]}  # fmt: skip
            return [f"mla-decode-h{self.rows}", *kinds[self.rows]]
        kinds = {16: ["decode-csa-h16-k512-fp8-pages"], 32: ["decode-hca-h16-fp8-q2"], 64: ["decode-csa-h64-k512-fp8-pages", "prefill-csa-h64-k512-fp8"]}  # fmt: skip
        return [f"compressed-{kind}" for kind in kinds[self.rows]]

    def calls(self, problem: Any, impl: str | None) -> list[Any]:
        return quire_latent_calls(problem, impl)


def _fits(config: Any, row_bytes: int, arch: Arch) -> bool:
    tiles = config.block_n * row_bytes * (config.num_stages - 1)
    return tiles <= arch.shared_memory


def _attention_entry(e4m3: bool, case: Case, arch: Arch) -> TableEntry | None:
    shape = case.shape
    if not isinstance(case, shapes.Case) or case.phase == "mixed" or shape.fp8 != e4m3:
        return None
    dim, rows = max(32, shape.head_dim), 0
    if case.phase == "decode":
        rows = tiles.plan_decode(
            num_decodes=case.batch, max_seqlen_q=1, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim, num_sms=1,
        ).block_m  # fmt: skip
    return _AttentionEntry(case.phase, dim, rows, e4m3)


def _latent_entry(case: Case, arch: Arch) -> TableEntry | None:
    shape = case.shape
    if not isinstance(case, LatentCase) or shape.op not in ("mla", "window", "csa", "hca"):
        return None
    tokens = 1 if case.phase == "decode" or shape.op == "csa" else case.q_lens[0]
    return _LatentEntry(tile_rows(shape.num_heads, tokens), case.fp8)


# The entry that a case of each family uses: (case, arch) -> entry or None.
FAMILIES = (
    partial(_attention_entry, False),
    partial(_attention_entry, True),
    _latent_entry,
)


def table_entries(cases: Sequence[Case], arch: Arch) -> dict[TableEntry, list[Case]]:
    """The entries that cases use, in the order of the cases that matter most."""
    found: dict[TableEntry, list[Case]] = {}
    for case in cases:
        for entry_of in FAMILIES:
            if (entry := entry_of(case, arch)) is not None:
                found.setdefault(entry, []).append(case)
    headline = [*shapes.headline(), *mla_shapes.headline()]
    ranks = {case.name: i for i, case in enumerate(headline)}

    def rank(entry: TableEntry) -> int:
        return min(ranks.get(case.name, len(ranks)) for case in found[entry])

    return {
        entry: found[entry]
        if isinstance(entry, _AttentionEntry)
        else found[entry][:CASES_PER_ENTRY]
        for entry in sorted(found, key=rank)
    }


def tuned_cases() -> list[Case]:
    """The cases to tune for.

    Decode at two batches and prefill at two contexts of every named shape, over pages of both
    kinds; of the latent kernels their headline, and what else uses their tables.
    """
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


def by_hand(chosen: dict[TableEntry, Any], arch: Arch) -> list[str]:
    """Lines that name the new shapes of the tables, which are edited by hand."""
    return [
        f"{entry.file}: {entry.name} on {arch.tiles}: {config}"
        for entry, config in chosen.items()
        if config != entry.current(arch)
    ]
