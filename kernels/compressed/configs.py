"""Launch choices of ``compressed_attention`` as pure functions of host integers.

Tile shapes, and how decode work may be split. Nothing is autotuned on the call path. ``tiles.json``
holds what compiles without spills and fits the shared memory of each architecture (``python -m
bench.static --only compressed`` shows it); ``common.tile_tables`` says how to tune it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..common.arch import Arch
from ..common.decode_plans import LAUNCH_COST, SPLIT_COST, partial_numel, plan_stream_k
from ..common.tile_tables import TileTable

# A KV split of fewer keys leaves more partial results behind than it reads.
MIN_SPLIT_KEYS = 128


@dataclass(frozen=True)
class CompressedConfig:
    """One launch.

    Attributes:
        block_m: rows of the query tile.
        block_n: keys of a tile.
        num_warps: warps of a program.
        num_stages: stages of the pipeline.
        swap: whether the products are swapped, so that keys and channels lie along the tensor
            cores' tiles of 64.
        divide: whether warps divide the scores of a tile between them (``common.tiles.update``).
        matrix_instr_nonkdim: rows of the matrix instructions, 16 or 32 (AMD's MFMA); None: Triton's
            choice, which is 32 for tiles that have them: then fewer warps have rows of their own.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    swap: bool
    divide: bool = False
    matrix_instr_nonkdim: int | None = None


TILES = TileTable(Path(__file__).with_name("tiles.json"), CompressedConfig)


@dataclass(frozen=True)
class DecodePlan:
    """How the decode part of a batch is split.

    Attributes:
        num_unsplit: sequences at the front that are not split.
        num_splits: KV splits of each query tile of the others.
        programs: those that divide all query tiles between them instead (``common.stream_k``); 0:
            none do.
        workspace_numel: fp32 elements; 1 where no tile is split: with memory for parts and without
            it would be two kernels.
    """

    num_unsplit: int
    num_splits: int
    programs: int
    workspace_numel: int

    @property
    def is_split(self) -> bool:
        """Whether there are parts to merge."""
        return self.programs > 0 or self.num_splits > 1


def select_config(
    head_dim: int, dtype_bytes: int, fp8: bool, arch: Arch, *, rows: int
) -> CompressedConfig:
    """Tile shape of the attention kernel, of prefill and of decode.

    Args:
        head_dim: a power of two in 16..512.
        dtype_bytes: of a query value, 2 or 4.
        fp8: whether the pages are quantized.
        arch: of the GPU.
        rows: of the query tile, ``tile_rows``.

    Returns:
        CompressedConfig; its ``block_m`` is ``rows`` or less.
    """
    return TILES.select(arch, dtype_bytes=dtype_bytes, head_dim=head_dim, fp8=fp8, rows=rows)


def plan_decode(
    *,
    num_decodes: int,
    seq_tiles: int,
    block_q: int,
    block_m: int,
    num_heads: int,
    head_tiles: int,
    head_dim: int,
    num_sms: int,
    max_keys: int | None,
    bounded: bool,
) -> DecodePlan:
    """Plan decode from host integers only, so that a captured graph stays right at any length.

    Where keys are bounded, query tiles have about as many, and those of as many sequences as fill
    the device a whole number of times stay unsplit; those left are split if that makes the last
    wave shorter. Else lengths differ, and the device divides what there is (``common.stream_k``).

    Args:
        num_decodes: sequences on the decode path.
        seq_tiles: query tiles of each, at most.
        block_q, block_m: tokens and rows of a tile.
        num_heads, head_dim: of the layer.
        head_tiles: tiles that cover the heads.
        num_sms: streaming multiprocessors of the device; each holds one program.
        max_keys: upper bound of the keys of a tile; None if unknown.
        bounded: whether the keys of a tile stay few at any context length (a window, top-k).

    Source: FlashDecoding (split-KV); ``common.stream_k``.
    """
    stream_k = plan_stream_k(
        num_sms=num_sms,
        per_sm=1,
        head_tiles=head_tiles,
        block_q=block_q,
        num_heads=num_heads,
        head_dim=head_dim,
        max_keys=max_keys,
        min_split_keys=MIN_SPLIT_KEYS,
    )
    if not stream_k.workspace_numel:
        return DecodePlan(num_decodes, 1, 0, 1)
    programs = stream_k.programs
    if not bounded or max_keys is None:
        return DecodePlan(0, 1, programs, stream_k.workspace_numel)
    num_unsplit = num_decodes * seq_tiles // programs * programs // seq_tiles
    tiles = (num_decodes - num_unsplit) * seq_tiles

    def cost(num_splits: int) -> float:
        """Keys that a program could attend to until the last one ends."""
        waves = -(-tiles * num_splits // programs)
        if num_splits == 1:
            return waves * max_keys
        merge = LAUNCH_COST + SPLIT_COST * block_m * tiles * num_splits / programs
        return waves * (max_keys / num_splits + SPLIT_COST * block_m) + merge

    most = min(max_keys // MIN_SPLIT_KEYS, 2 * programs // max(1, tiles))
    num_splits = min(range(1, max(1, most) + 1), key=cost)
    if num_splits == 1:
        return DecodePlan(num_decodes, 1, 0, 1)
    numel = partial_numel(tiles * num_splits, block_q, num_heads, head_dim)
    return DecodePlan(num_unsplit, num_splits, 0, numel)
