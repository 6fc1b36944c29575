"""Launch choices of latent attention as pure functions of host integers.

Tiles compile without spills for 16-bit and quantized pages on sm_80 and sm_90.
"""

from __future__ import annotations

from ..common.arch import Arch
from ..common.tile_shapes import MAX_ROWS, Config, tile_rows

_LARGE = {16: Config(16, 32, 8, 3), 32: Config(32, 32, 8, 3), 64: Config(64, 16, 8, 5)}
_FEW_ROWS = dict.fromkeys((16, 32, 64), Config(16, 32, 8, 3))
# Tiles of 16-bit queries by class of GPUs and wanted rows.
TILES = {
    "hopper": _LARGE,
    "medium": _LARGE | {64: Config(32, 32, 8, 3)},
    "blackwell": _FEW_ROWS,
    "small": dict.fromkeys((16, 32, 64), Config(16, 32, 8, 2)),
    "amd": dict.fromkeys((16, 32, 64), Config(16, 32, 4, 1)),
}
# The same over quantized pages, whose rows take more registers.
FP8_TILES = {
    "hopper": _FEW_ROWS | {64: Config(64, 16, 8, 5)},
    "medium": _FEW_ROWS,
    "blackwell": _FEW_ROWS,
    "small": dict.fromkeys((16, 32, 64), Config(16, 16, 8, 2)),
    "amd": dict.fromkeys((16, 32, 64), Config(16, 16, 4, 1)),
}


def select_config(
    *, dtype_bytes: int, quantized: bool, arch: Arch, num_heads: int, tokens: int
) -> Config:
    """Tile shape for queries of ``dtype_bytes`` and quantized or plain pages.

    tokens: tokens that may share a query tile.
    """
    kind = "amd" if arch.maker == "amd" else arch.tiles
    if dtype_bytes == 4:  # without tensor cores, for checks more than for speed
        return Config(16, 16, 4 if kind == "amd" else 8, 1)
    return (FP8_TILES if quantized else TILES)[kind][wanted_rows(num_heads, tokens)]


def wanted_rows(num_heads: int, tokens: int) -> int:
    """Rows of the tables for tokens that may share a query tile."""
    # Of more than four tokens of few heads, the masks take registers that 64 rows do not leave.
    return tile_rows(num_heads, min(tokens, 4))


def target_splits(num_sms: int, config: Config, head_tiles: int) -> int:
    """Approximate KV splits of a batch: one wave of programs; an SM holds one of 64 rows."""
    return max(1, num_sms * (MAX_ROWS // config.block_m) // head_tiles)
