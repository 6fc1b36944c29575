"""Largest distance between the logits of two right fp32 programs of one model, whatever the order of their sums."""

from weakref import WeakKeyDictionary

import torch
from torch import nn

from quire.bench.common.bounds import gamma

_known: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()
# Weights are moved by a part of what is allowed, so that top-k choices stay and fp32 still resolves the answer.
PART = 8


def tolerance(model: nn.Module) -> float:
    """The largest difference of logits that both programs' rounding errors may make.

    A product of a matrix [out, in] and a vector that is computed in fp32, in any order, is the exact product of a matrix that differs by
    gamma(in) relatively, at most (Higham, Accuracy and Stability of Numerical Algorithms, 3.5). So the answer of the logits to weights that are moved by
    all of gamma(in), to random sides, tells what rounding can do in this model; it is linear in the step, and is allowed for each of the two programs.
    The sides are drawn once: an estimate of the worst case, which is far above what rounding does, as errors of in terms grow with about sqrt(in).
    What is not a product with weights (norms, softmax, 150 keys' values) has fewer terms or weights that add up to one.
    """
    if model not in _known:
        _known[model] = 2 * PART * _answer(model)
    return _known[model]


@torch.no_grad()
def _answer(model: nn.Module) -> float:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 259, (150,), generator=generator).to(next(model.parameters()).device)
    before = model.full_forward(ids)
    weights = [w for w in model.parameters() if w.dtype == torch.float32]
    kept = [w.clone() for w in weights]
    try:
        for w in weights:
            step = gamma(w.shape[-1] if w.ndim > 1 else PART) / PART
            side = torch.randint(0, 2, w.shape, generator=generator).to(w.device) * 2 - 1
            w.copy_(w.double() * (1 + step * side))
        answer = (model.full_forward(ids) - before).abs().max().item()
    finally:
        for w, value in zip(weights, kept, strict=True):
            w.copy_(value)
    assert 0 < answer < float("inf")
    return answer
