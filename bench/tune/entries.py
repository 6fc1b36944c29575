"""Entries of the tile tables ``kernels/attention/tiles.py`` and ``kernels/latent/tiles.py``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

from quire.kernels.attention import tiles as attention
from quire.kernels.common.arch import Arch
from quire.kernels.latent import tiles as latent
from quire.kernels.latent.tiles import wanted_rows

from ..cases.shapes import CHUNK, Case

CASES_PER_ENTRY = 4
# Tables by file and name.
DECODE = ("attention", "DECODE")
PREFILL, E4M3_PREFILL = ("attention", "PREFILL"), ("attention", "E4M3_PREFILL")
LATENT, FP8_LATENT = ("latent", "TILES"), ("latent", "FP8_TILES")


@dataclass(frozen=True)
class TileEntry:
    """One entry of a table.

    Attributes:
        table: file and name of the table.
        kind: class of GPUs; "" in a table that all GPUs share.
        key: head_dim of attention, wanted rows of latent attention.
    """

    table: tuple[str, str]
    kind: str
    key: int

    @property
    def name(self) -> str:
        """The entry as Python writes it."""
        kind = f"[{self.kind!r}]" if self.kind else ""
        return f"{'.'.join(self.table)}{kind}[{self.key}]"

    @property
    def _values(self) -> dict[int, Any]:
        file, table = self.table
        found = getattr(attention if file == "attention" else latent, table)
        return found[self.kind] if self.kind else found

    @property
    def current(self) -> Any:
        return self._values[self.key]

    @contextmanager
    def using(self, value: Any) -> Iterator[None]:
        """Launch kernels with this value."""
        values, before = self._values, self.current
        values[self.key] = value
        try:
            yield
        finally:
            values[self.key] = before

    def candidates(self, arch: Arch) -> list[Any]:
        """Values worth trying, the table's own first; tiles of keys in flight fit shared memory."""
        # AMD's GPUs copy through registers.
        stages = (2, 3, 4, 5) if arch.maker == "nvidia" else (1, 2, 3)
        warps, keys = (4, 8), (16, 32, 64, 128)
        # Rows of 16 bits, also of quantized pages: tiles of the step's own rows are as wide.
        row_bytes = 2 * 576 if self.table[0] == "latent" else 2 * 2 * self.key
        tiles = [
            (block_n, depth)
            for block_n, depth in product(keys, stages)
            if block_n * row_bytes * (depth - 1) <= arch.shared_memory
        ]
        found: list[Any]
        if self.table == DECODE:
            found = [(*tile, splits) for tile, splits in product(tiles, (16, 32, 64))]
        elif self.table in (PREFILL, E4M3_PREFILL):
            choices = product((32, 64, 128), tiles, warps, (1, 2) if self.key >= 256 else (1,))
            found = [attention.Config(m, n, w, depth, p) for m, (n, depth), w, p in choices]
        else:
            choices = product((16, 32, 64), tiles, warps)
            found = [latent.Config(m, n, w, depth) for m, (n, depth), w in choices if n < 128]
        return list(dict.fromkeys([self.current, *found]))


def entry_of(case: Case, arch: Arch) -> TileEntry | None:
    """The entry that a case of 16-bit queries uses; None if there is none, or several."""
    shape = case.shape
    if shape.op == "attention":
        dim = max(32, shape.head_dim)
        if case.phase == "decode":
            return TileEntry(DECODE, "", dim)
        kind = arch.tiles if arch.tiles in attention.PREFILL else "other"
        table = E4M3_PREFILL if shape.fp8 else PREFILL
        return TileEntry(table, kind, dim) if case.phase == "prefill" else None
    if shape.op == "index":
        return None
    tokens = 1 if case.phase == "decode" or shape.op == "csa" else CHUNK
    kind = "amd" if arch.maker == "amd" else arch.tiles
    table = FP8_LATENT if shape.fp8 else LATENT
    return TileEntry(table, kind, wanted_rows(shape.num_heads, tokens))


def table_entries(cases: Sequence[Case], arch: Arch) -> dict[TileEntry, list[Case]]:
    """Entries in the order of the cases, each with the first cases that use it."""
    found: dict[TileEntry, list[Case]] = {}
    for case in cases:
        if (entry := entry_of(case, arch)) is not None:
            found.setdefault(entry, []).append(case)
    return {entry: cases[:CASES_PER_ENTRY] for entry, cases in found.items()}
