"""Launch choices of paged attention as pure functions of host integers.

Tiles compile without spills for 16-bit and e4m3 pages, head_dim 64 to 512, on sm_80 and sm_90
(``python -m bench.static``).
"""

from __future__ import annotations

from dataclasses import replace

from ..common.arch import Arch
from ..common.tile_shapes import PROGRAMS_PER_SM, Config

_HOPPER = {
    32: Config(64, 64, 4, 3),
    64: Config(128, 64, 8, 3),
    128: Config(128, 64, 8, 3),
    256: Config(128, 32, 8, 3),
    512: Config(32, 32, 8, 2, 2),
}
_OTHER = {
    32: Config(64, 64, 4, 3),
    64: Config(128, 64, 8, 3),
    128: Config(64, 64, 8, 3),
    256: Config(64, 32, 8, 3),
    512: Config(64, 16, 8, 2, 2),
}
# Prefill of 16-bit queries, by class of GPUs and head_dim. (Of blackwell, two accumulators of 64
# rows would take all tensor memory.)
PREFILL = {
    "hopper": _HOPPER,
    "blackwell": _HOPPER,
    "other": _OTHER,
}
# The same over e4m3 pages, which take more registers.
E4M3_PREFILL = {
    "hopper": _HOPPER | {256: Config(64, 32, 8, 2)},
    "blackwell": {
        32: Config(64, 64, 4, 3),
        64: Config(128, 64, 8, 2),
        128: Config(128, 32, 8, 3),
        256: Config(64, 32, 8, 2),
        512: Config(32, 32, 8, 2, 2),
    },
    "other": _OTHER | {512: Config(32, 16, 8, 2, 2)},
}
# Decode by head_dim: keys of a tile, stages, and the most rows.
DECODE = {32: (64, 4, 64), 64: (64, 4, 64), 128: (64, 3, 64), 256: (32, 3, 64), 512: (16, 3, 32)}
# The first two over e4m3 pages with 64 rows, where they differ.
E4M3_64_ROWS = {64: (32, 4), 256: (32, 2)}


def select_config(
    head_dim: int, dtype_bytes: int, arch: Arch, *, quantized: bool, rows: int | None
) -> Config:
    """Tile shape for queries of ``dtype_bytes`` and e4m3 (``quantized``) or other pages.

    rows: wanted rows of a decode tile; None: prefill. The tile has as many of them as registers
    allow, and as many of its stages as shared memory holds.
    """
    dim = max(32, head_dim)
    if dtype_bytes == 4:
        # Without tensor cores: small tiles, for both phases and every GPU.
        tile = Config(16, 32 if dim <= 64 else 16, 4 if dim == 32 else 8, 1 if dim == 512 else 2)
    elif rows is not None:
        block_n, num_stages, most_rows = DECODE[dim]
        rows = min(rows, 16 if quantized and dim == 512 and not arch.widens_e4m3 else most_rows)
        many = rows * dim >= 1 << 14 or (quantized and dim == 512)
        many = many or (rows >= 32 and (quantized or dim == 256))
        if quantized and rows == 64:
            block_n, num_stages = E4M3_64_ROWS.get(dim, (block_n, num_stages))
        tile = Config(rows, block_n, 8 if many else 4, num_stages)
    else:
        kind = arch.tiles if arch.tiles in ("hopper", "blackwell") else "other"
        tile = (E4M3_PREFILL if quantized else PREFILL)[kind][dim]
    if arch.maker == "amd":  # 4 wavefronts have 512 registers each, 8 have 256
        tile = replace(tile, block_m=min(tile.block_m, 64), num_warps=4)
        if quantized and rows is None:
            tile = replace(tile, block_n=min(tile.block_n, 32))
    # Triton holds the queries, and all stages of the K/V tiles but one.
    rows_held = arch.shared_memory // (dim * dtype_bytes) - tile.block_m
    most = 1 + rows_held // (2 * tile.block_n)
    return replace(tile, num_stages=max(1, min(tile.num_stages, most)))


def target_splits(num_sms: int, num_kv_heads: int, head_tiles: int) -> int:
    """Approximate KV splits of a batch: two resident programs an SM, and as many to even out the
    end."""
    return max(1, PROGRAMS_PER_SM * num_sms // (num_kv_heads * head_tiles))
