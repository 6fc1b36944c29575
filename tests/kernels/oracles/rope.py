"""Oracle of ``norm_rope``: plain torch, one head of one token at a time."""

import torch

from .norm import normed


def roped(head, cos, sin):
    """One head [head_dim] whose pairs (i, i + head_dim / 2) are turned by angle i."""
    half = head.shape[0] // 2
    first, second = head[:half], head[half:]
    cos, sin = cos.to(head.dtype), sin.to(head.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin])


def norm_rope(
    qkv, cos, sin, *, num_kv_heads, has_v=True, q_weight=None, k_weight=None, norm_v=False,
    eps=1e-6, offset=0.0,
):  # fmt: skip
    """Queries, keys and, with ``norm_v``, values, [num_tokens, out_heads, head_dim] float64;
    arguments as in ``quire.kernels.norm_rope``.
    """
    rows = []
    num_heads = qkv.shape[1] - num_kv_heads * (2 if has_v else 1)
    for token, row in enumerate(qkv.double()):
        angles = cos[token], sin[token]
        q, k = row[:num_heads], row[num_heads : num_heads + num_kv_heads]
        heads = [roped(normed(head, q_weight, eps, offset), *angles) for head in q]
        heads += [roped(normed(head, k_weight, eps, offset), *angles) for head in k]
        if norm_v:
            values = row[num_heads + num_kv_heads :] if has_v else k
            ones = torch.ones(row.shape[1], device=qkv.device)
            heads += [normed(head, ones, eps, 0.0) for head in values]
        rows.append(torch.stack(heads) if heads else row[:0])
    return torch.stack(rows)
