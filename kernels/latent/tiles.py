"""Launch choices of latent attention as pure functions of host integers: tiles, and split-KV decode.

Tiles compile without spills for 16-bit and quantized pages on sm_80 and sm_90, but for two prefills
on sm_90: MLA of 8 heads, and under Triton 3.9 CSA (docs/results.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..common.arch import Arch
from ..common.tile_shapes import MAX_ROWS, MIN_SPLIT_KEYS, Config, tile_heads, tile_rows

_LARGE = {16: Config(16, 32, 8, 3), 32: Config(32, 32, 8, 3), 64: Config(64, 32, 8, 3)}
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
    return (FP8_TILES if quantized else TILES)[kind][tile_rows(num_heads, tokens)]


@dataclass(frozen=True)
class DecodePlan:
    """Split of the decode part of a batch (`common.split_kv`)."""

    config: Config
    decode_tokens: int  # most new tokens of a sequence on the decode path
    target_splits: int  # approximate KV splits of the whole batch
    max_items: int  # query tiles and KV splits of the batch, at most
    workspace_numel: int  # fp32 elements; 0 where nothing can be split


def plan_decode(
    *,
    num_decodes: int,
    max_seqlen_q: int,
    num_heads: int,
    head_dim: int,
    dtype_bytes: int,
    quantized: bool,
    lists: bool,
    max_keys: int | None,
    bounded: bool,
    arch: Arch,
    num_sms: int,
) -> DecodePlan:
    """Plan split-KV decode of ``num_decodes`` sequences of at most ``max_seqlen_q`` new tokens.

    Args:
        lists: every token has keys of its own, so a query tile holds one token.
        max_keys: upper bound of the keys of a query tile; None if unknown.
        bounded: these stay few at any context length (a window, top-k).
    """
    tokens = max(1, max_seqlen_q)
    config = select_config(
        dtype_bytes=dtype_bytes,
        quantized=quantized,
        arch=arch,
        num_heads=num_heads,
        tokens=1 if lists else tokens,
    )
    block_q, _, head_tiles = tile_heads(num_heads, config.block_m)
    block_q = 1 if lists else block_q
    tokens = max(tokens, block_q)
    tiles = num_decodes * -(-tokens // block_q)
    # One wave: an SM holds one program of 64 rows.
    target_splits = max(1, num_sms * (MAX_ROWS // config.block_m) // head_tiles)
    short = max_keys is not None and max_keys < MIN_SPLIT_KEYS
    # What is bounded is so for every tile alike: with enough of them there is no long one to split.
    if target_splits == 1 or short or (bounded and tiles >= target_splits):
        return DecodePlan(config, tokens, target_splits, tiles, 0)
    workspace_numel = target_splits * block_q * num_heads * (head_dim + 1)
    return DecodePlan(config, tokens, target_splits, target_splits + tiles, workspace_numel)
