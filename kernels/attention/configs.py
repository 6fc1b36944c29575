"""Launch choices of ``paged_attention`` as pure functions of host integers.

Tile shapes, and how decode is split. Nothing is autotuned on the call path. ``tiles.json`` holds
what compiles without spills and fits the shared memory of each architecture
(``python -m bench.static`` shows it); ``common.tile_tables`` says how to tune it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..common.arch import Arch
from ..common.decode_plans import MIN_SPLIT_KEYS, partial_numel, programs_at_once
from ..common.tile_shapes import MAX_ROWS, PROGRAMS_PER_SM, tile_heads, tile_rows
from ..common.tile_tables import TileTable


@dataclass(frozen=True)
class Config:
    """One launch.

    Attributes:
        block_m: rows of the query tile.
        block_n: keys of the K/V tile.
        num_warps: warps of a program.
        num_stages: stages of the K/V pipeline.
        value_parts: programs that share a query tile in prefill; each computes all scores, and its
            part of the value channels: a taller tile for the same registers, at the price of scores
            computed several times.
        new_kv_tma: in prefill, whether whole tiles of new K/V are copied by tensor descriptors
            (``Arch.descriptors``) where the rows can be described: 16-byte strides and addresses.
            The host encodes two descriptors a launch.
        programs_per_sm: in prefill, so many programs for each SM take query tiles in turns, longest
            and shortest paired; 0: a program for each.
        mask_all: one loop with masks for each source of keys, instead of one without for whole
            tiles and one with for the edges.
        fp16_values: of fp8 pages, see ``uses_fp16_values``.
        matrix_instr_nonkdim: rows of the matrix instructions, 16 or 32 (AMD's MFMA); None: Triton's
            choice, which is 32 for tiles that have them: then fewer warps have rows of their own.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    value_parts: int = 1
    new_kv_tma: bool = False
    programs_per_sm: int = 0
    mask_all: bool = False
    fp16_values: Literal["never", "one_scale", "always"] = "never"
    matrix_instr_nonkdim: int | None = None


TILES = TileTable(Path(__file__).with_name("tiles.json"), Config)


@dataclass(frozen=True)
class DecodePlan:
    """How the decode part of a batch is split (``split_kv``).

    Attributes:
        block_m: rows of the query tile.
        target_items: KV splits that the keys of the whole batch are divided into, about.
        max_items: KV splits of the batch, at most.
        workspace_numel: fp32 elements; 0 where no sequence can be split.
    """

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
    """Plan split-KV decode from host integers only.

    The kernel itself divides the keys of the whole batch by ``target_items`` and splits every
    sequence into KV splits of that many keys (at least MIN_SPLIT_KEYS); ``max_items`` bounds how
    many splits that can give.

    Args:
        num_decodes: sequences on the decode path.
        max_seqlen_q: new tokens of the longest of them. A longer one is still right, but not split.
        num_heads, num_kv_heads, head_dim: of the layer.
        num_sms: streaming multiprocessors of the device.
        dtype_bytes: 2 or 4; fp32 tiles have 16 rows only, and need no more workspace.
        max_seq_len: upper bound of the sequence lengths; None if unknown.
        sliding_window: tokens a query sees; None if all.

    Source: FlashDecoding (split-KV); FlashMLA's tile scheduler divides the batch's keys in the same
        way.
    """
    group = num_heads // num_kv_heads
    block_m = tile_rows(group, max_seqlen_q, most=MAX_ROWS if dtype_bytes == 2 else 16)
    block_q, _, head_tiles = tile_heads(group, block_m)
    target_items = programs_at_once(num_sms, PROGRAMS_PER_SM, num_kv_heads * head_tiles)
    max_keys = min(x for x in (max_seq_len, sliding_window, sys.maxsize) if x is not None)
    # A window bounds every sequence alike: with enough of them there is no long one to split.
    enough = sliding_window is not None and num_decodes >= target_items
    if max_keys <= MIN_SPLIT_KEYS or enough:
        return DecodePlan(block_m, target_items, num_decodes, 0)
    max_items = target_items + num_decodes
    workspace_numel = partial_numel(max_items, block_q, num_heads, head_dim)
    return DecodePlan(block_m, target_items, max_items, workspace_numel)


def uses_fp16_values(config: Config, row_scales: bool) -> bool:
    """Whether values of fp8 pages become fp16 on their way to the tensor cores, not bf16.

    A pair of them takes one instruction then, not four; queries of two bytes become fp16 with them.
    In a tile of few rows, where a value serves few products, that is always worth it.

    Args:
        config: the launch; ``fp16_values`` counts in a tile of more than 32 rows.
        row_scales: whether each row has a scale, or all have one.
    """
    wanted = ("always",) if row_scales else ("always", "one_scale")
    return config.block_m <= 32 or config.fp16_values in wanted


def select_config(
    head_dim: int,
    dtype_bytes: int,
    phase: str,
    block_size: int,
    arch: Arch,
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
        arch: of the GPU.
        rows: query rows of a decode tile, ``DecodePlan.block_m``: 16, 32 or 64; where no tile of as
            many fits, it has the most that do. Ignored for prefill.
        page_bytes: of one element in the pages: 1 (e4m3) or ``dtype_bytes``, as None is.

    Returns:
        Config, the same for all architectures of one class (``Arch.tiles``).
    """
    return TILES.select(
        arch,
        dtype_bytes=dtype_bytes,
        head_dim=head_dim,
        fp8=page_bytes == 1,
        phase=phase,
        rows=rows,
    )
