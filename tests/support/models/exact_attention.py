"""Attention of one sequence in float64, with bounds of what a right program may be off; needs torch and `quire.bench` alone."""

import math

import torch

from quire.bench.common.bounds import bounding


def attention(q, k, v, *, scale=None, softcap=0.0, left=-1, right=0, sinks=None):
    """Bounded (out [n, heads, dim], lse [heads, n], +inf where a query sees no key).

    Args:
        q: [n, heads, dim], aligned with the last n of the keys.
        k, v: [m, kv_heads, dim].
        left, right: keys that a query sees before and behind its own, -1 = all.
        sinks: [heads] logits, which only the out has in its denominator, or None.
    """
    n, m, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    behind = torch.arange(m, device=q.device) - torch.arange(m - n, m, device=q.device)[:, None]
    hidden = torch.zeros(n, m, dtype=torch.bool, device=q.device)
    if left >= 0:
        hidden |= behind < -left
    if right >= 0:
        hidden |= behind > right
    none = hidden.all(1)
    outs, lses = [], []
    with bounding(weights=q.dtype):
        q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
        for h in range(q.shape[0]):
            logits = q[h] @ k[h // group].mT * (scale or q.shape[-1] ** -0.5)
            if softcap:
                logits = torch.tanh(logits / softcap) * softcap
            logits = logits.masked_fill(hidden, -math.inf)
            lses.append(torch.logsumexp(logits, -1).masked_fill(none, math.inf))
            logits = logits.masked_fill(none[:, None], 0.0)
            if sinks is not None:
                logits = torch.cat([logits, sinks[h].double().expand(n, 1)], 1)
            weights = torch.softmax(logits, -1)[:, :m].masked_fill(none[:, None], 0.0)
            outs.append(weights @ v[h // group])
        return torch.stack(outs, 1), torch.stack(lses)
