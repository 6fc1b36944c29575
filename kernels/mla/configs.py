"""Launch choices of ``mla_attention`` as pure functions of host integers.

Nothing is autotuned on the call path. ``tiles.json`` holds what compiles without spills and fits
the shared memory of each architecture (``python -m bench.static --only mla`` shows it);
``common.tile_tables`` says how to tune it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..common.arch import Arch
from ..common.decode_plans import MIN_SPLIT_KEYS, StreamKPlan, plan_stream_k
from ..common.tile_shapes import MAX_ROWS, tile_heads, tile_rows
from ..common.tile_tables import TileTable

# Rows of a query tile in prefill, where so many fit.
PREFILL_ROWS = 64


@dataclass(frozen=True)
class MlaConfig:
    """One launch.

    Attributes:
        block_m: rows of the query tile.
        block_n: keys of a tile.
        num_warps: warps of a program.
        num_stages: stages of the pipeline.
        swap: whether keys take the rows of the matrix instructions.
        divide: whether warps divide the scores of a tile between them (``common.tiles.update``).
        per_sm: programs that share an SM and its registers.
        matrix_instr_nonkdim: rows of the matrix instructions, 16 or 32 (AMD's MFMA); None: Triton's
            choice, which is 32 for tiles that have them: then fewer warps have rows of their own.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    swap: bool
    divide: bool = False
    per_sm: int = 1
    matrix_instr_nonkdim: int | None = None


TILES = TileTable(Path(__file__).with_name("tiles.json"), MlaConfig)


def select_config(dtype_bytes: int, rows: int, arch: Arch) -> MlaConfig:
    """Tile shape of the attention kernels.

    Args:
        dtype_bytes: 2 (bf16, fp16) or 4 (fp32).
        rows: of the query tile, 16, 32 or 64; where no tile of as many fits, the most that do.
        arch: of the GPU.
    """
    return TILES.select(arch, dtype_bytes=dtype_bytes, head_dim=512, rows=rows)


def decode_rows(*, num_heads: int, max_seqlen_q: int, arch: Arch, block_size: int = 64) -> int:
    """Rows of a query tile of decode that are worth asking ``select_config`` for.

    Args:
        num_heads: of the layer.
        max_seqlen_q: new tokens of the longest sequence on the decode path.
        arch: of the GPU.
        block_size: tokens of a page.
    """
    # The loop over query tiles leaves no registers for 64 rows beside tensor memory's copy of them
    # or, on Ampere, several page ids a tile.
    full = arch.tiles == "blackwell" or (arch.tiles == "medium" and block_size % 32 > 0)
    return tile_rows(num_heads, max_seqlen_q, most=32 if full else MAX_ROWS)


def plan_decode(
    *,
    config: MlaConfig,
    num_heads: int,
    head_dim_v: int,
    num_sms: int,
    max_seq_len: int | None = None,
) -> StreamKPlan:
    """Plan decode from host integers only: all programs are at work at once and divide all keys.

    Args:
        config: of ``select_config``, for ``decode_rows``.
        num_heads: of the layer.
        head_dim_v: channels of an output row.
        num_sms: streaming multiprocessors of the device.
        max_seq_len: upper bound of the sequence lengths; None if unknown.
    """
    block_q, _, head_tiles = tile_heads(num_heads, config.block_m)
    return plan_stream_k(
        num_sms=num_sms,
        per_sm=config.per_sm,
        head_tiles=head_tiles,
        block_q=block_q,
        num_heads=num_heads,
        head_dim=head_dim_v,
        max_keys=max_seq_len,
        min_split_keys=MIN_SPLIT_KEYS,
    )
