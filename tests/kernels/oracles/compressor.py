"""Oracle of ``compress``: a whole sequence at once, one window after another, without state.

An entry is looked up by what it is made of and not by how it was made: a chunked, batched or
rolled-back run has to end with these entries.

Source: DeepSeek-V4, compressed attention: the compressors of the latents and of the indexer.
"""

import torch

from .latent_write import roped
from .norm import normed


def compress(kv, gate, ape, *, ratio, overlap, norm_weight, eps, cos_sin, first=0):
    """The entries of a sequence.

    Args:
        kv, gate: [num_tokens, channels] rows of the tokens from position ``first`` on.
        ape, ratio, overlap, norm_weight, eps, cos_sin: as in ``quire.kernels.compress``.
        first: position of the first row; windows that need an earlier token are left out.

    Returns:
        Number of an entry -> its row [dim], before it is rounded to what the page holds.
    """
    dim = norm_weight.shape[0]
    entries = {}
    for w in range(first // ratio, (first + kv.shape[0]) // ratio):
        parts = [(t, 0) for t in range(w * ratio, (w + 1) * ratio)]
        if overlap:
            # Series b of the window's own tokens, series a of those before; window 0 has none
            # before.
            parts = [(t, dim) for t, _ in parts]
            parts = [(t, 0) for t in range(max(0, (w - 1) * ratio), w * ratio)] + parts
        if parts[0][0] < first:
            continue
        values, logits = [], []
        for t, column in parts:
            channels = slice(column, column + dim)
            values.append(kv[t - first, channels].double())
            logits.append(gate[t - first, channels].double() + ape[t % ratio, channels].double())
        weights = torch.softmax(torch.stack(logits), 0)
        pooled = (weights * torch.stack(values)).sum(0)
        entries[w] = roped(normed(pooled, norm_weight, eps), cos_sin[w * ratio])
    return entries
