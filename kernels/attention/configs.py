"""Launch choices as pure functions of host integers: tile shapes, and how decode work is cut into splits.

Nothing is autotuned on the call path. The tables (`tile_tables`, `tile_tables_e4m3`) hold what compiles without spills and fits the shared memory of each
architecture (``python -m bench.static`` shows it); the split constants state what they trade.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ..common.tile_shapes import PROGRAMS_PER_SM, next_power_of_2, tile_class, tile_heads
from . import tile_tables, tile_tables_e4m3

# A split of fewer keys costs more in the merge than it wins in parallelism.
MIN_SPLIT_TOKENS = 256


@dataclass(frozen=True)
class Config:
    """One launch: rows of the query tile, keys of the K/V tile, warps of a program, stages of the K/V pipeline.

    value_parts: programs that share a query tile in prefill; each computes all scores, and its part of the value channels: a taller tile
        for the same registers, at the price of scores computed several times.
    fresh_tma: in prefill, whether whole tiles of fresh rows are copied by tensor descriptors (TMA, sm_90 and later) where the rows can be
        described: 16-byte strides and addresses. The host encodes two descriptors a launch.
    programs_per_sm: in prefill, so many programs for each SM take query tiles in turns, longest and shortest paired; 0: a program for each.
    mask_all: one loop with masks for each source of keys, instead of one without for whole tiles and one with for the edges.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    value_parts: int = 1
    fresh_tma: bool = False
    programs_per_sm: int = 0
    mask_all: bool = False


# fp32 runs without tensor cores, for checks more than for speed: small tiles, for both phases and every architecture.
FP32 = {
    32: Config(16, 32, 4, 2, mask_all=True),
    64: Config(16, 32, 8, 2, mask_all=True),
    128: Config(16, 16, 8, 2, mask_all=True),
    256: Config(16, 16, 8, 2, mask_all=True),
    512: Config(16, 16, 8, 1, mask_all=True),
}


@dataclass(frozen=True)
class DecodePlan:
    """How the decode part of a batch is cut: see ``plan_decode``."""

    block_m: int
    target_items: int
    max_items: int
    workspace_numel: int


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
    """Plan split-KV decode from host integers only, so that a captured graph stays right at any sequence length.

    The kernel itself divides the keys of the whole batch by ``target_items`` and cuts every sequence into pieces of that many keys (at
    least MIN_SPLIT_TOKENS); ``max_items`` bounds how many pieces that can give.

    Args:
        num_decodes: sequences on the decode path.
        max_seqlen_q: new tokens of the longest of them. A longer one is still right, but not split.
        num_heads, num_kv_heads, head_dim: of the layer.
        num_sms: streaming multiprocessors of the device.
        dtype_bytes: 2 or 4; fp32 tiles have 16 rows only, and need no more workspace.
        max_seq_len: upper bound of the sequence lengths; None if unknown.
        sliding_window: tokens a query sees; None if all.

    Returns:
        DecodePlan; ``workspace_numel`` is in fp32 elements, 0 where no sequence can be split.

    Source: FlashDecoding (split-KV); FlashMLA's tile scheduler divides the batch's keys in the same way.
    """
    group = num_heads // num_kv_heads
    max_rows = 64 if dtype_bytes == 2 else 16
    block_m = min(max_rows, max(16, next_power_of_2(group * max(1, max_seqlen_q))))
    block_q, _, head_tiles = tile_heads(group, block_m)
    target_items = max(1, PROGRAMS_PER_SM * num_sms // (num_kv_heads * head_tiles))
    max_keys = min(x for x in (max_seq_len, sliding_window, sys.maxsize) if x is not None)
    # A window bounds every sequence alike: with enough of them there is no long one to cut.
    enough = sliding_window is not None and num_decodes >= target_items
    if max_keys <= MIN_SPLIT_TOKENS or enough:
        return DecodePlan(block_m, target_items, num_decodes, 0)
    max_items = target_items + num_decodes
    return DecodePlan(
        block_m, target_items, max_items, max_items * block_q * num_heads * (head_dim + 1)
    )


def halves_codes(head_dim: int, phase: str, arch: int, rows: int, row_scales: bool) -> bool:
    """Whether codes of e4m3 pages become fp16 on their way to the tensor cores, and queries of two bytes with them.

    They take one instruction for two of them then, not four. In a tile of few rows, where a code serves few products, that is always worth it.

    Args:
        head_dim, phase, arch: as in ``select_config``.
        rows: of the query tile.
        row_scales: whether each row has a scale, or all have one.
    """
    with_row_scales, with_one = tile_tables_e4m3.HALF_DIMS[tile_class(arch)][phase]
    return rows <= 32 or max(head_dim, 32) in (with_row_scales if row_scales else with_one)


def select_config(
    head_dim: int,
    dtype_bytes: int,
    phase: str,
    block_size: int,
    arch: int,
    *,
    rows: int = 16,
    page_bytes: int | None = None,
) -> Config:
    """Tile shape of the attention kernel.

    Args:
        head_dim: a power of two in 16..512.
        dtype_bytes: 2 (bf16, fp16) or 4 (fp32).
        phase: "prefill" or "decode".
        block_size: tokens of a page.
        arch: compute capability as major * 10 + minor.
        rows: query rows of a decode tile, ``DecodePlan.block_m``: 16, 32 or 64; where no tile of as many fits, it has the most that do. Ignored
            for prefill.
        page_bytes: of one element in the pages: 1 (e4m3), or ``dtype_bytes``, which None stands for.

    Returns:
        Config, the same for every architecture of one ``tile_class``.
    """
    size = tile_class(arch)
    dim = max(head_dim, 32)
    if dtype_bytes == 4:
        return FP32[dim]
    tables = tile_tables_e4m3 if page_bytes == 1 else tile_tables
    if phase == "prefill":
        return Config(*tables.PREFILL[size][dim])
    # Decode waits for memory, not for masks, and one loop fills the pipeline once.
    shapes = tables.DECODE[size][dim]
    rows = min(rows, max(shapes))
    return Config(rows, *shapes[rows], mask_all=True)
