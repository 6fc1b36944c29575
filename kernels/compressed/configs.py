"""Launch choices of ``compressed_attention`` as pure functions of host integers: tile shapes, and how decode work may be cut.

Nothing is autotuned on the call path. The table holds what compiles without spills and fits the shared memory of each architecture
(``python -m bench.static --only compressed`` shows it).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..common.stream_k import LAUNCH_COST, PIECE_COST
from ..common.tile_shapes import MAX_ROWS, next_power_of_2, shared_memory_class

# A piece of fewer keys leaves more partial results behind than it reads.
MIN_PIECE_KEYS = 128


@dataclass(frozen=True)
class CompressedConfig:
    """One launch: rows of the query tile, keys of a tile, warps of a program, stages of the pipeline.

    swap: whether the products are swapped, so that keys and channels lie along the tensor cores' tiles of 64.
    divide: whether warps divide the scores of a tile between them (``_tiles.update``).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    swap: bool
    divide: bool = False


@dataclass(frozen=True)
class DecodePlan:
    """How the decode part of a batch is cut: see ``plan_decode``.

    num_whole: sequences at the front that are not cut. pieces: of each query tile of the others. programs: those that divide all query tiles
    between them instead (``common.stream_k``); 0: none do.
    """

    num_whole: int
    pieces: int
    programs: int
    workspace_numel: int


# head_dim 512, two-byte queries: (rows, quantised pages) -> (block_n, num_warps, num_stages, swap[, divide]). Where 64 rows are missing, 32
# are the most: an accumulator of 64 x 512 beside the widened rows (or, on sm_100, beside its copy in tensor memory) does not fit the registers.
# To divide scores pays from 32 rows on, with swapped products from 16; tensor memory belongs to no warp.
WIDE = {
    "hopper": {
        (16, False): (64, 8, 3, True, True),
        (32, False): (64, 8, 2, True, True),
        (64, False): (64, 8, 2, False, True),
        (16, True): (32, 8, 3, True),
        (32, True): (32, 8, 3, True),
        (64, True): (32, 8, 3, False, True),
    },
    "blackwell": {
        (16, False): (64, 8, 2, True),
        (32, False): (32, 8, 3, True),
        (16, True): (32, 8, 3, True),
        (32, True): (32, 8, 3, True),
    },
    # Tiles of mma.sync have 16 rows, so nothing is gained by a swap, and plain rows would not be copied asynchronously with it.
    "ampere": {
        (16, False): (32, 8, 3, False),
        (32, False): (32, 8, 3, False, True),
        (64, False): (32, 8, 2, False, True),
        (16, True): (32, 8, 3, False),
        (32, True): (32, 8, 3, True),
    },
    # With 99 KiB quantised tiles have 16 keys, whose roped channels only 4 warps copy 16 bytes at a time; they have no registers for 32 rows.
    "small": {
        (16, False): (16, 8, 3, False),
        (32, False): (16, 8, 2, False, True),
        (16, True): (16, 4, 3, True, True),
    },
}


def tile_rows(num_heads: int, tokens: int) -> int:
    """Rows of a query tile that holds up to ``tokens`` tokens of ``num_heads`` heads: 16, 32 or 64."""
    return min(MAX_ROWS, max(16, next_power_of_2(num_heads * tokens)))


def select_config(
    head_dim: int, dtype_bytes: int, fp8: bool, arch: int, *, rows: int
) -> CompressedConfig:
    """Tile shape of the attention kernel, of prefill and of decode.

    Args:
        head_dim: a power of two in 16..512.
        dtype_bytes: of a query value, 2 or 4.
        fp8: whether the pages are quantised.
        arch: compute capability as major * 10 + minor.
        rows: of the query tile, ``tile_rows``.

    Returns:
        CompressedConfig; its ``block_m`` is ``rows`` or less.
    """
    if dtype_bytes == 4:
        # Without tensor cores, for checks more than for speed.
        if head_dim == 512:
            return CompressedConfig(16, 16, 16, 1, True)
        return CompressedConfig(16, 64 if head_dim <= 64 else 16, 8, 1, rows < 64)
    if head_dim < 512:
        return CompressedConfig(rows, 32, 4, 3, rows < 64)
    table = WIDE[_generation(arch)]
    while (rows, fp8) not in table:
        rows //= 2
    return CompressedConfig(rows, *table[rows, fp8])


def _generation(arch: int) -> str:
    size = shared_memory_class(arch)
    if size == "large":
        return "hopper" if arch < 100 else "blackwell"
    return "ampere" if size == "medium" else "small"


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
    """Plan decode from host integers only, so that a captured graph stays right at any sequence length.

    Where keys are bounded, query tiles have about as many, and those of as many sequences as fill the device a whole number of times stay
    whole; those left are cut if that makes the last wave shorter. Else lengths differ, and the device divides what there is (``common.stream_k``).

    Args:
        num_decodes: sequences on the decode path.
        seq_tiles: query tiles of each, at most.
        block_q, block_m: tokens and rows of a tile.
        num_heads, head_dim: of the layer.
        head_tiles: tiles that cover the heads.
        num_sms: streaming multiprocessors of the device; each holds one program.
        max_keys: upper bound of the keys of a tile; None if unknown.
        bounded: whether the keys of a tile stay few at any context length (a window, picks).

    Returns:
        DecodePlan; ``workspace_numel`` is in fp32 elements, 0 where no tile can be cut.

    Source: FlashDecoding (split-KV); ``common.stream_k``.
    """
    places = num_sms // head_tiles
    row_numel = block_q * num_heads * (head_dim + 1)
    if places <= 1 or (max_keys is not None and max_keys < 2 * MIN_PIECE_KEYS):
        return DecodePlan(num_decodes, 1, 0, 0)
    if not bounded or max_keys is None:
        # Of each program the end of one query tile and the beginning of another.
        return DecodePlan(0, 1, places, 2 * places * row_numel)
    num_whole = num_decodes * seq_tiles // places * places // seq_tiles
    tiles = (num_decodes - num_whole) * seq_tiles

    def cost(pieces: int) -> float:
        waves = -(-tiles * pieces // places)
        if pieces == 1:
            return waves * max_keys
        merge = LAUNCH_COST + PIECE_COST * block_m * tiles * pieces / places
        return waves * (max_keys / pieces + PIECE_COST * block_m) + merge

    most = min(max_keys // MIN_PIECE_KEYS, 2 * places // max(1, tiles))
    pieces = min(range(1, max(1, most) + 1), key=cost)
    if pieces == 1:
        return DecodePlan(num_decodes, 1, 0, 0)
    return DecodePlan(num_whole, pieces, 0, tiles * pieces * row_numel)
