"""Mixture-of-experts feed-forward.

Every token through its experts, as two matrix multiplications over sorted rows.

Rows (a token once for each of its experts) are sorted by expert, so that an expert's rows are
adjacent and one grouped matrix multiplication serves all experts::

    token, expert       (0, 5) (0, 2) (1, 2) (1, 7)
    sorted by expert    (0, 2) (1, 2) | (0, 5) | (1, 7)

Shapes depend on the number of tokens alone: there are always tokens * k rows, whoever they go to.
No loop over tokens, no host synchronization where torch's grouped matrix multiplication has a
device kernel or a CUDA graph is captured, and a token's result is summed over its experts in the
router's order, in fp32, whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import combine_experts

from .capture import must_be_capturable

# Rows whose experts are gathered at one time where groups must not be looked up on the host.
ROWS_AT_ONCE = 16


def run_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor, Tensor], Tensor],
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    interleaved: bool = False,
    addend: Tensor | None = None,
    numbers: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Sum over a token's experts e of weight * down[e](activation(gate[e] x, up[e] x)).

    Args:
        x: [num_tokens, hidden_size].
        expert_ids: [num_tokens, k] int64 below num_experts.
        expert_weights: [num_tokens, k], used in fp32.
        gate_up: [num_experts, 2 * intermediate_size, hidden_size], rows of gate first, or with
            ``interleaved`` in turns with those of up.
        down: [num_experts, hidden_size, intermediate_size].
        activation: (gate, up), each [rows, intermediate_size] -> the same shape.
        gate_up_bias, down_bias: [num_experts, 2 * intermediate_size] and [num_experts,
            hidden_size], or None.
        addend: [num_tokens, hidden_size], added to the sum; None = nothing.
        numbers: [num_experts] int64, 0, 1, and so on; None = made here.
        impl: "triton" or "torch" for the sum; default: by device.

    Returns:
        [num_tokens, hidden_size] in the dtype of x.
    """
    k = expert_ids.shape[1]
    sorted_ids, order = expert_ids.flatten().sort(stable=True)
    if numbers is None:
        numbers = torch.arange(len(gate_up), device=x.device)
    offsets = torch.searchsorted(sorted_ids, numbers, right=True, out_int32=True)
    both = _rows(x[order // k], gate_up, gate_up_bias, sorted_ids, offsets)
    gate, up = (both[:, 0::2], both[:, 1::2]) if interleaved else both.chunk(2, dim=-1)
    y_sorted = _rows(activation(gate, up), down, down_bias, sorted_ids, offsets)
    y = torch.empty_like(y_sorted).index_copy_(0, order, y_sorted)
    return combine_experts(y, expert_weights, addend=addend, impl=impl)


def grouped_matmul(x_sorted: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Multiplies consecutive groups of rows by a matrix each.

    ``y[start:end] = x_sorted[start:end] @ weights[group].T``.

    torch's ``grouped_mm`` where its layout rule (rows of whole 16 bytes) and dtypes allow, else a
    loop over the groups that have rows; while a CUDA graph is captured, which cannot know these, a
    product for each row with the matrix of its group. On a CPU ``grouped_mm`` is such a loop too,
    and the faster by half at tiny sizes.

    Args:
        x_sorted: [num_rows, in_size], the rows of group 0 first.
        weights: [num_groups, out_size, in_size].
        offsets: [num_groups] int32, ascending: where each group ends; the last is num_rows.

    Returns:
        [num_rows, out_size].
    """
    if _has_grouped_mm(x_sorted, weights):
        return F.grouped_mm(x_sorted, weights.transpose(1, 2), offs=offsets)
    if must_be_capturable():
        return row_matmul(x_sorted, weights, offsets)
    out = x_sorted.new_empty(len(x_sorted), weights.shape[1])
    start = 0
    for group, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(x_sorted[start:end], weights[group].T, out=out[start:end])
        start = end
    return out


def row_matmul(x_sorted: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_matmul` row by row.

    A copy of a matrix for each row, but nothing that the host must know.
    """
    rows = torch.arange(len(x_sorted), dtype=offsets.dtype, device=x_sorted.device)
    groups = torch.searchsorted(offsets, rows, right=True)
    return torch.cat(
        [
            torch.bmm(weights[some], x[:, :, None]).squeeze(2)
            for some, x in zip(
                groups.split(ROWS_AT_ONCE), x_sorted.split(ROWS_AT_ONCE), strict=True
            )
        ]
    )


def _rows(
    x: Tensor, weights: Tensor, bias: Tensor | None, sorted_ids: Tensor, offsets: Tensor
) -> Tensor:
    y = grouped_matmul(x, weights, offsets)
    return y if bias is None else y + bias[sorted_ids]


def _has_grouped_mm(x: Tensor, weights: Tensor) -> bool:
    if len(x) == 0:
        return False
    # Elsewhere torch reads the offsets on the host, for a loop like that of `grouped_matmul`.
    if x.is_cuda and (
        x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device)[0] not in (9, 10)
    ):
        return False
    return all(size * x.element_size() % 16 == 0 for size in weights.shape[1:])
