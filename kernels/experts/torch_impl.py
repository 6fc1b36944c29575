"""``expert_mlp`` in plain torch, on sorted rows.

Rows (a token once for each of its experts) are sorted by expert, so that an expert's rows are
adjacent and one grouped matrix multiplication serves all experts::

    token, expert       (0, 5) (0, 2) (1, 2) (1, 7)
    sorted by expert    (0, 2) (1, 2) | (0, 5) | (1, 7)

Quantized experts are dequantized where a token goes to them, a few at a time.

Source: as ``triton_impl``.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from ..common.dequantize import DEQUANTIZE
from ..common.launching import arch_of
from ..gating.torch_impl import gated_product
from .call import weight_format

EXPERTS_AT_ONCE = 16  # experts whose dequantized weights exist at one time


@torch.no_grad()
def expert_mlp(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    limit: float | None,
    alpha: float,
    up_offset: float,
    gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:
    """The rows of checked arguments; shapes as in ``quire.kernels.expert_mlp``."""
    k, flat = ids.shape[1], ids.flatten()
    product = partial(
        gated_product, activation=activation, limit=limit, alpha=alpha, up_offset=up_offset,
        out=None,
    )  # fmt: skip
    tokens = torch.arange(len(flat), device=x.device) // k
    if gate_up_scale is None or down_scale is None:
        return _rows(x, tokens, flat, gate_up, down, gate_up_bias, down_bias, product)
    out = x.new_empty(len(flat), x.shape[1])
    for some in flat.unique().split(EXPERTS_AT_ONCE):
        rows = torch.isin(flat, some).nonzero()[:, 0]
        out[rows] = _rows(
            x, tokens[rows], torch.searchsorted(some, flat[rows]),
            _dequantized(gate_up, gate_up_scale, some, x.dtype),
            _dequantized(down, down_scale, some, x.dtype),
            None if gate_up_bias is None else gate_up_bias[some],
            None if down_bias is None else down_bias[some],
            product,
        )  # fmt: skip
    return out


def grouped_matmul(
    x_sorted: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Multiplies consecutive groups of rows by a matrix each.

    ``y[start:end] = x_sorted[start:end] @ weights[group].T``.

    torch's ``grouped_mm`` where its layout rule (rows of whole 16 bytes) and dtypes allow, else a
    loop over the groups that have rows, which looks them up on the host. On a CPU ``grouped_mm`` is
    such a loop too, and the faster by half at tiny sizes.

    Args:
        x_sorted: [num_rows, in_size], the rows of group 0 first.
        weights: [num_groups, out_size, in_size].
        offsets: [num_groups] int32, ascending: where each group ends; the last is num_rows.

    Returns:
        [num_rows, out_size].
    """
    if has_grouped_mm(x_sorted, weights):
        return F.grouped_mm(x_sorted, weights.transpose(1, 2), offs=offsets)
    out = x_sorted.new_empty(len(x_sorted), weights.shape[1])
    start = 0
    for group, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(x_sorted[start:end], weights[group].T, out=out[start:end])
        start = end
    return out


def has_grouped_mm(x: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether torch multiplies groups of these on their device."""
    if len(x) == 0:
        return False
    # Elsewhere torch reads the offsets on the host, for a loop like that of `grouped_matmul`.
    if x.is_cuda and (x.dtype != torch.bfloat16 or not arch_of(x.device).grouped_products):
        return False
    return all(size * x.element_size() % 16 == 0 for size in weights.shape[1:])


def _rows(x, tokens, experts, gate_up, down, gate_up_bias, down_bias, product):  # type: ignore[no-untyped-def]
    """[len(tokens), hidden_size]: what expert ``experts[i]`` gives for token ``tokens[i]``."""
    sorted_ids, order = experts.sort(stable=True)
    numbers = torch.arange(len(gate_up), device=x.device)
    offsets = torch.searchsorted(sorted_ids, numbers, right=True, out_int32=True)
    merged, interleaved = _merged(gate_up)
    both = grouped_matmul(x[tokens[order]], merged, offsets)
    if gate_up_bias is not None:
        bias = gate_up_bias.transpose(1, 2) if interleaved else gate_up_bias
        both = (both + bias.flatten(1)[sorted_ids]).to(x.dtype)
    gate, up = (both[:, 0::2], both[:, 1::2]) if interleaved else both.chunk(2, dim=-1)
    sorted_rows = grouped_matmul(product(gate, up), down, offsets)
    if down_bias is not None:
        sorted_rows = (sorted_rows + down_bias[sorted_ids]).to(x.dtype)
    return torch.empty_like(sorted_rows).index_copy_(0, order, sorted_rows)


def _merged(gate_up: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """[num_experts, 2 * width, hidden_size] without a copy, and whether gate and up rows lie in
    turns."""
    interleaved = gate_up.stride(1) < gate_up.stride(2)
    return (gate_up.transpose(1, 2) if interleaved else gate_up).flatten(1, 2), interleaved


def _dequantized(
    weight: torch.Tensor, scale: torch.Tensor, which: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Matrices ``which`` [n] of a stack, in ``dtype``."""
    # Indexing knows no fp8 dtype: take bytes.
    values = weight.view(torch.uint8)[which].view(weight.dtype)
    return DEQUANTIZE[weight_format(weight)](values, scale[which], dtype)
