"""What the operators' plans of decode have in common, as pure functions of host integers.

A plan says how many programs work on a decode batch, whether they split the keys of a query tile,
and how much workspace the partial results of KV splits take. It comes from host integers only, so
that a captured graph stays right at any sequence length: the device divides the keys that there are
(``attention.split_kv``, ``stream_k``).
"""

from __future__ import annotations

from dataclasses import dataclass

# Attention over all heads' K/V, and over latents: a KV split of fewer keys costs more in the merge
# than it wins in parallelism.
MIN_SPLIT_KEYS = 256
# Keys that a program could attend to instead of storing, or merging, the partial result of a row of
# its query tile; and in the time that launching the merge takes. Own estimates.
SPLIT_COST, LAUNCH_COST = 2, 64


@dataclass(frozen=True)
class StreamKPlan:
    """Programs that divide the keys of all query tiles evenly (``stream_k``).

    Attributes:
        programs: that do, for each of the tiles that cover the heads.
        workspace_numel: fp32 elements; 0 where no query tile may be split.
    """

    programs: int
    workspace_numel: int


def programs_at_once(num_sms: int, per_sm: int, tiles: int) -> int:
    """Programs that ``num_sms`` SMs run at once for each of ``tiles`` tiles of heads; 1 or more."""
    return max(1, per_sm * num_sms // tiles)


def partial_numel(splits: int, block_q: int, num_heads: int, head_dim: int) -> int:
    """fp32 elements of partial results: for each split, token and head a row and its lse."""
    return splits * block_q * num_heads * (head_dim + 1)


def plan_stream_k(
    *,
    num_sms: int,
    per_sm: int,
    head_tiles: int,
    block_q: int,
    num_heads: int,
    head_dim: int,
    max_keys: int | None,
    min_split_keys: int,
) -> StreamKPlan:
    """Plan decode whose programs divide all keys.

    Args:
        num_sms: streaming multiprocessors of the device.
        per_sm: programs that share one.
        head_tiles: tiles that cover the heads.
        block_q: tokens of a query tile.
        num_heads: of the layer.
        head_dim: channels of an output row.
        max_keys: upper bound of the keys of a query tile; None if unknown.
        min_split_keys: of a KV split, at least. Fewer than two of them are not split.
    """
    programs = programs_at_once(num_sms, per_sm, head_tiles)
    if programs == 1 or (max_keys is not None and max_keys < 2 * min_split_keys):
        return StreamKPlan(programs, 0)
    # Of each program the end of one query tile and the beginning of another.
    return StreamKPlan(programs, partial_numel(2 * programs, block_q, num_heads, head_dim))
