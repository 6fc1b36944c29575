"""Launch choices of paged attention as pure functions of host integers: tiles, and split-KV decode.

Tiles compile without spills for 16-bit and e4m3 pages, head_dim 64 to 512, on sm_80 and sm_90
(``python -m bench.static``).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from ..common.arch import Arch
from ..common.tile_shapes import (
    MAX_ROWS,
    MIN_SPLIT_KEYS,
    PROGRAMS_PER_SM,
    Config,
    tile_heads,
    tile_rows,
)

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
# Prefill of 16-bit queries, by class of GPUs and head_dim. (Of blackwell, two accumulators of 64 rows
# would take all tensor memory.)
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
        128: Config(128, 64, 8, 2),
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

    rows: of a decode, ``DecodePlan.block_m``, as far as registers allow; None: prefill. The tile
    has as many of its stages as shared memory holds.
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


@dataclass(frozen=True)
class DecodePlan:
    """Split of the decode part of a batch (`common.split_kv`)."""

    block_m: int  # rows of the query tile
    target_splits: int  # approximate KV splits of the whole batch
    max_splits: int  # KV splits of the batch, at most
    workspace_numel: int  # fp32 elements; 0 where no sequence can be split


def plan_decode(
    *,
    num_decodes: int,
    max_seqlen_q: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_sms: int,
    dtype_bytes: int = 2,
    max_seq_len: int | None = None,
    sliding_window: int | None = None,
) -> DecodePlan:
    """Plan split-KV decode of ``num_decodes`` sequences of at most ``max_seqlen_q`` new tokens; a
    longer one is still right, but not split.

    Tiles of fp32 queries (dtype_bytes 4) have 16 rows only, and need no more workspace.
    """
    group = num_heads // num_kv_heads
    block_m = tile_rows(group, max_seqlen_q, most=MAX_ROWS if dtype_bytes == 2 else 16)
    block_q, _, head_tiles = tile_heads(group, block_m)
    target_splits = max(1, PROGRAMS_PER_SM * num_sms // (num_kv_heads * head_tiles))
    max_keys = min(x for x in (max_seq_len, sliding_window, sys.maxsize) if x is not None)
    # A window bounds every sequence alike: with enough of them there is no long one to split.
    enough = sliding_window is not None and num_decodes >= target_splits
    if max_keys <= MIN_SPLIT_KEYS or enough:
        return DecodePlan(block_m, target_splits, num_decodes, 0)
    max_splits = target_splits + num_decodes
    workspace_numel = max_splits * block_q * num_heads * (head_dim + 1)
    return DecodePlan(block_m, target_splits, max_splits, workspace_numel)
