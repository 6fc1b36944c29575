"""What tile shapes depend on, as pure functions of host integers: the shared memory and registers
of an architecture, the heads of a tile."""

from __future__ import annotations

# Shared memory that one program may use, in bytes (CUDA programming guide, compute capabilities
# table: 227, 163 and 99 KiB).
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
# Decode work is cut so that about this many programs come to an SM: two resident ones, and as many
# to even out the end.
PROGRAMS_PER_SM = 4


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


def shared_memory_class(arch: int) -> str:
    """ "large" (227 KiB a program: Hopper, data-centre Blackwell), "medium" (163 KiB: A100) or
    "small" (99 KiB: all others)."""
    if 90 <= arch < 120:
        return "large"
    return "medium" if arch in (80, 87) else "small"


def tile_class(arch: int) -> str:
    """Key of the tables of tile shapes: ``shared_memory_class``, of which "large" is "hopper" or
    "blackwell"."""
    size = shared_memory_class(arch)
    if size != "large":
        return size
    return "hopper" if arch < 100 else "blackwell"


MAX_ROWS = 64
