"""From scores to weights: one step of the online softmax of paged attention."""

import triton
import triton.language as tl

from ..common.query_tiles import LOG2E
from .quantized_tile import HEADROOM, LEAST_SCALE


@triton.jit
def _softcapped(scores, inner_scale, outer_scale):
    """outer_scale * tanh(inner_scale * scores), to fp32 accuracy everywhere.

    tanh by exp2 is right at both infinities but loses its digits to cancellation near 0, where its
    series takes over (to x^9).
    """
    x = inner_scale * scores
    square = x * x
    series = 1.0 + square * (
        -1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))
    )
    by_exp = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return outer_scale * tl.where(square < 0.0625, x * series, by_exp)


@triton.jit
def weigh(
    row_max, row_sum, scores, key_scales, value_scales, visible, inner_scale, outer_scale,
    HALF: tl.constexpr, FIT: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: what a tile of keys adds.

    Args:
        row_max, row_sum: [BLOCK_M], log2 units; of the tiles before.
        scores: [BLOCK_M, BLOCK_N] fp32, unscaled.
        key_scales, value_scales: [BLOCK_N], or None.
        visible: [BLOCK_M, BLOCK_N], or None if all is.
        inner_scale: a number, with HALF one for each row [BLOCK_M].
        outer_scale: as in ``Softmax``.
        FIT: the weights, times the scales of their values, are to fit fp16: the largest is about
            2^HEADROOM. Else the maxima are those of scores.

    Returns:
        (weights [BLOCK_M, BLOCK_N], the factor [BLOCK_M] of what has been summed up so far, the
        new row_max, the new row_sum).
    """
    if key_scales is not None:
        scores = scores * key_scales[None, :]
    row_scale = inner_scale
    scale = inner_scale[:, None] if HALF else inner_scale
    if outer_scale is not None:
        scores = _softcapped(scores, scale, outer_scale)
        row_scale = 1.0
        scale = 1.0
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    if FIT and value_scales is not None:
        # The bits of a positive number, as an integer, are its log2 to 0.09: (log2 + 127) * 2^23.
        bits = tl.maximum(value_scales.to(tl.int32, bitcast=True), LEAST_SCALE)
        logs = bits.to(tl.float32) * 2.0**-23 - (127.0 + HEADROOM)
        highest = tl.max(scores * scale + logs[None, :], 1)
    else:
        highest = tl.max(scores, 1) * row_scale - (HEADROOM if FIT else 0.0)
    new_max = tl.maximum(row_max, highest)
    base = new_max
    if visible is not None:
        # A row that has seen nothing yet: subtracting its -inf would give NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale - base[:, None])
    decay = tl.exp2(row_max - base)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    if value_scales is not None:
        weights = weights * value_scales[None, :]
    return weights, decay, new_max, row_sum
