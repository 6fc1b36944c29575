"""Shapes of query tiles, as pure functions of host integers."""

from __future__ import annotations

from dataclasses import dataclass

# Registers of a thread: all that there are where the limit is said (``Arch.register_limit``).
MAX_REGISTERS = 255
# Decode work is split so that about this many programs come to an SM: two resident ones, and as
# many to even out the end.
PROGRAMS_PER_SM = 4
# Rows of a query tile of decode, at most.
MAX_ROWS = 64


@dataclass(frozen=True)
class Config:
    """Tile shape of an attention launch."""

    block_m: int  # rows of the query tile
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int  # at most; fewer where shared memory is short
    value_parts: int = 1  # accumulators that share the value channels


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def tile_heads(group: int, block_m: int) -> tuple[int, int, int]:
    """Share a query tile of ``block_m`` rows between the ``group`` query heads of a KV head.

    Returns:
        (tokens of a tile, heads of a tile, tiles that cover the group). Rows past tokens * heads
        are idle, so that a group of 3 or 5 is not padded to a power of two.
    """
    heads = min(group, block_m)
    return block_m // heads, heads, -(-group // heads)


def tile_rows(num_heads: int, tokens: int) -> int:
    """Rows, 16 to MAX_ROWS, of a query tile of up to ``tokens`` tokens of ``num_heads`` heads."""
    return min(MAX_ROWS, max(16, next_power_of_2(num_heads * max(1, tokens))))
