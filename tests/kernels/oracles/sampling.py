"""Oracle of ``sample_tokens``: the rules one after another, over one row, with lists and loops.

Source: transformers ``generation/logits_process``.
"""

import math
from itertools import accumulate


def largest(logits):
    """The lowest id of the largest logit; -1 where none is finite or one is no number."""
    top = max(logits, key=lambda x: math.inf if math.isnan(x) else x)
    return logits.index(top) if math.isfinite(top) else -1


def probabilities(logits, temperature, top_k, top_p, min_p):
    """The distribution of a row of temperature > 0, by id."""
    top = max(logits)
    mass = [math.exp((x - top) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k:
        order = order[:top_k]
    total = math.fsum(mass[token] for token in order)
    before = [0.0, *accumulate(mass[token] / total for token in order)]
    kept = {
        token
        for rank, token in enumerate(order)
        if (rank == 0 or before[rank] < top_p or top_p == 1) and mass[token] >= min_p
    }
    total = math.fsum(mass[token] for token in kept)
    return [mass[token] / total if token in kept else 0.0 for token in range(len(logits))]


def drawn(probabilities, u):
    """The first id at which the cumulative probability exceeds u."""
    last = max(token for token, p in enumerate(probabilities) if p > 0)
    cumulative = accumulate(probabilities)
    return next((token for token, total in enumerate(cumulative) if total > u), last)
