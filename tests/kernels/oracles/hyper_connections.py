"""Oracle of ``collapse_streams`` and ``expand_streams``: one token and one matrix entry at a time.

Tensors are those of one token, in the dtype of the arithmetic: streams [n, hidden_size].

Source: DeepSeek-V4 report 2.2 (manifold-constrained hyper-connections).
"""

import torch


def mixes(streams, fn, norm_eps):
    """The projection [rows of fn] of a token's streams."""
    flat = streams.flatten()
    flat = flat / torch.sqrt((flat * flat).mean() + norm_eps)
    return fn.to(flat.dtype) @ flat


def weights(mixes, base, scale, eps, num_streams):
    """(pre [n], post [n], rows' softmax [n, n]); post and the softmax are empty of n mixes.

    sigmoid(x) is the first weight of a softmax over (x, 0).
    """
    n = num_streams
    base, scale = base.to(mixes.dtype), scale.to(mixes.dtype)

    def sigmoid(x):
        return torch.softmax(torch.stack([x, x * 0.0]), 0)[0]

    pre = sigmoid(mixes[:n] * scale[0] + base[:n]) + eps
    if mixes.shape[0] == n:
        return pre, mixes[n:], mixes[n:]
    post = sigmoid(mixes[n : 2 * n] * scale[1] + base[n : 2 * n]) * 2.0
    logits = (mixes[2 * n :] * scale[2] + base[2 * n :]).unflatten(0, (n, n))
    return pre, post, torch.softmax(logits, 1)


def sinkhorn(softmax, eps, iterations):
    """[n, n]: eps added, then columns, and (rows, columns) iterations - 1 times, divided by their
    sums + eps."""
    n = len(softmax)
    matrix = [[float(softmax[i, j]) + eps for j in range(n)] for i in range(n)]
    for turn in range(2 * iterations - 1):
        if turn % 2:
            matrix = [[entry / (sum(row) + eps) for entry in row] for row in matrix]
        else:
            sums = [sum(row[j] for row in matrix) + eps for j in range(n)]
            matrix = [[row[j] / sums[j] for j in range(n)] for row in matrix]
    return torch.tensor(matrix, dtype=torch.float64, device=softmax.device)


def collapsed(streams, pre, norm_weight, norm_eps, rounded):
    """``out`` [hidden_size]; rounded: what is left of the sum before it is normed."""
    out = rounded((pre[:, None] * streams).sum(0))
    return out / torch.sqrt((out * out).mean() + norm_eps) * norm_weight.to(out.dtype)


def written(y, rows, weights):
    """The result of the sub-block [hidden_size]; rows [k, hidden_size], weights [k]: added to y."""
    if rows is None or weights is None:
        return y
    return torch.stack([y, *(weights[i] * rows[i] for i in range(len(rows)))]).sum(0)


def expanded(streams, y, post, comb):
    """The two terms [n, hidden_size] whose sum is ``expand_streams``."""
    n = streams.shape[0]
    written = torch.stack([post[k] * y for k in range(n)])
    mixed = torch.stack([(comb[:, k, None] * streams).sum(0) for k in range(n)])
    return written, mixed
