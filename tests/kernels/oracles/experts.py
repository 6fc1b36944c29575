"""Oracle of ``expert_mlp``: its pieces, for one expert and the tokens that go to it.

Between them is ``gating.gated_product``.

Source: transformers ``modeling_gpt_oss``; OCP Microscaling Formats 1.0.
"""

import torch

# What the 8 patterns of e2m1 without its sign stand for.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def values(weight, scale):
    """The values of one stored matrix [rows, columns], not rounded."""
    if scale is None:
        return weight.double()
    if weight.dtype != torch.uint8:
        by_row = scale.double().repeat_interleave(128, 0)[: weight.shape[0]]
        return weight.double() * by_row.repeat_interleave(128, 1)[:, : weight.shape[1]]
    table = torch.tensor(
        [*E2M1, *(-value for value in E2M1)], dtype=torch.float64, device=weight.device
    )
    found = torch.stack((table[(weight & 15).long()], table[(weight >> 4).long()]), -1).flatten(1)
    powers = torch.tensor(
        [2.0 ** (e - 127) for e in range(256)], dtype=torch.float64, device=scale.device
    )
    return found * powers[scale.long()].repeat_interleave(32, 1)


def product(matrix, columns, bias, kept=lambda x: x):
    """[rows, n] of one expert's matrix [rows, columns] times n tokens, in the dtype of the
    arithmetic.

    Args:
        columns: [columns, n].
        bias: [rows].
        kept: what becomes of a sum that an implementation stores.
    """
    out = kept(matrix @ columns)
    return out if bias is None else kept(out + bias[:, None])
