"""Tile shapes of ``expert_mlp`` as a pure function of host integers.

Decode reads each expert's weights once for up to 16 rows: many small programs, each with some tiles
of weights on their way. Prefill has more rows of an expert than a tile of 128 holds.

``python -m bench.static --only experts`` shows registers and shared memory of each shape.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertConfig:
    """One launch.

    Attributes:
        block_m: rows of an expert in a tile.
        block_n: rows of its matrix; a multiple of 2, as gate and up come in pairs.
        block_k: columns of its matrix; a power of two in 32..128.
        num_warps: warps of a program.
        num_stages: stages of the pipeline.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# By the rows of an expert that are enough for the tile, fewest first. Half a tile of 128 costs
# nothing: while an SM reads a weight of two bytes (0.1 clocks of an H200, 0.15 of an A100), it
# multiplies it with 128 rows (0.06 and 0.13).
PLAIN = {
    1: ExpertConfig(16, 32, 128, 4, 4),
    17: ExpertConfig(128, 128, 64, 8, 3),
}
# Of quantized weights the work on a tile is the program's own, and it is about the same for 64 rows as
# for 128: a weight takes 0.36 instructions of a warp there and 0.39 here (fp4, sm_90), and as many
# warps or more are on an SM.
PACKED = {
    1: ExpertConfig(16, 64, 128, 4, 4),
    17: ExpertConfig(128, 128, 64, 8, 3),
}
# No matrix instruction multiplies fp32, but with 64 rows Triton 3.7.1 takes that of tf32 on sm_100
# for dequantized weights, whatever input_precision says.
FP32 = {
    1: ExpertConfig(16, 32, 32, 4, 3),
    17: ExpertConfig(32, 64, 32, 8, 2),
}


def select_config(num_rows: int, num_experts: int, dtype_bytes: int, packed: bool) -> ExpertConfig:
    """Tile shape of both products.

    Args:
        num_rows: of all experts together, num_tokens * k.
        num_experts: those that there are.
        dtype_bytes: of a value of x, 2 or 4.
        packed: whether the weights are quantized.
    """
    table = FP32 if dtype_bytes == 4 else PACKED if packed else PLAIN
    rows = max(1, -(-num_rows // num_experts))
    return table[max(least for least in table if least <= rows)]
