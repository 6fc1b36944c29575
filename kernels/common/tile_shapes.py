"""What tile shapes depend on, as pure functions of host integers.

The shared memory and registers of a GPU, and the heads and tokens of a query tile.
"""

from __future__ import annotations

# Shared memory that one program may use, in bytes.
# Source: CUDA programming guide, table of compute capabilities: 227, 163 and 99 KiB.
SHARED_MEMORY = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}
# Registers of a thread, said outright: left alone, ptxas aims for one more program an SM and spills
# a few of them.
MAX_REGISTERS = 255
# Decode work is split so that about this many programs come to an SM: two resident ones, and as
# many to even out the end.
PROGRAMS_PER_SM = 4
# Rows of a query tile of decode, at most.
MAX_ROWS = 64


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def tile_heads(group: int, block_m: int) -> tuple[int, int, int]:
    """How a query tile of ``block_m`` rows is shared by the ``group`` query heads of a KV head.

    Returns:
        (tokens of a tile, heads of a tile, tiles that cover the group). Rows past tokens * heads
        are idle, so that a group of 3 or 5 is not padded to a power of two.
    """
    heads = min(group, block_m)
    return block_m // heads, heads, -(-group // heads)


def tile_rows(num_heads: int, tokens: int, most: int = MAX_ROWS) -> int:
    """Rows, 16 to ``most``, of a query tile of up to ``tokens`` tokens of ``num_heads`` heads."""
    return min(most, max(16, next_power_of_2(num_heads * max(1, tokens))))


def gpu_class(arch: int) -> str:
    """The GPUs that share entries of a table of tile shapes.

    Args:
        arch: compute capability as major * 10 + minor.

    Returns:
        "hopper", "blackwell" (the data-center one; both have 227 KiB of shared memory for a
        program), "medium" (163 KiB: A100) or "small" (99 KiB: all others).
    """
    if 90 <= arch < 120:
        return "hopper" if arch < 100 else "blackwell"
    return "medium" if arch in (80, 87) else "small"
