"""Distributions of rows of logits, draws from them, and the numbers that decide a draw.

A token is drawn by inversion: the first one whose cumulative probability, in the order of ids,
exceeds u. The uniform number u is a hash of the request's seed and the position, not the next
number of a generator. So a request draws the same tokens whatever else runs beside it, after a
preemption, and with "strict" speculation, whose drafts are simply compared with what is drawn. With
"standard" speculation the numbers are as reproducible, but which of them decide depends on what was
drafted.

Source: transformers ``generation/logits_process`` for the filters and their order; SplitMix64
    (Steele et al. 2014) for the hash; Leviathan et al. (arXiv 2211.17192) for rejection sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kernels import sample_tokens
from quire.kvcore.device import Staging

from .request import SamplingParams

COLUMNS = ("temperature", "top_k", "top_p", "min_p", "u")  # of `sample_tokens`
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Purposes of the numbers of one position (`uniform`): the next token, whether a draft stays, what
# replaces it, and the draft itself.
TOKEN, ACCEPT, RESAMPLE, DRAFT = range(4)


def penalize(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Repetition penalty.

    Logits of seen tokens are divided by it where positive, multiplied where negative.

    Args:
        logits: [num_rows, vocab_size].
        seen: the same shape, bool.
        penalty: [num_rows].

    Source: CTRL (arXiv 1909.05858) 4.1, as in transformers.
    """
    factor = penalty[:, None].to(logits.dtype)
    return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)


def filter_columns(params: Sequence[SamplingParams]) -> list[np.ndarray]:
    """Temperature, top_k, top_p and min_p of rows, [num_rows] each, as ``sample_tokens`` has them."""
    temperature, top_k, top_p, min_p = (
        np.array([getattr(p, name) for p in params], dtype=dtype)
        for name, dtype in (
            ("temperature", "f4"),
            ("top_k", "i4"),
            ("top_p", "f4"),
            ("min_p", "f4"),
        )
    )
    # What fp32 would round to 0 is not greedy.
    drawn = np.array([p.temperature > 0 for p in params], dtype=bool)
    return [np.where(drawn, np.maximum(temperature, np.float32(1e-30)), 0), top_k, top_p, min_p]


def draw_columns(
    params: Sequence[SamplingParams], numbers: Sequence[np.ndarray], staging: Staging
) -> list[dict[str, Tensor]]:
    """How ``sample_tokens`` draws rows, by name: [num_rows] tensors on the device.

    Args:
        params: of each row.
        numbers: [num_rows] float64 in [0, 1) of each draw.

    Returns:
        One dict for each draw.
    """
    filters = filter_columns(params)
    sent = staging.send([*filters, *numbers])
    return [
        dict(zip(COLUMNS, [*sent[: len(filters)], u], strict=True)) for u in sent[len(filters) :]
    ]


def draw(mass: Tensor, u: Tensor, impl: str | None = None) -> Tensor:
    """Draws one index a row by inversion.

    Args:
        mass: [num_rows, n] fp32 >= 0, each row with a positive sum (not necessarily 1).
        u: [num_rows] float64 in [0, 1).
        impl: as in ``sample_tokens``.

    Returns:
        [num_rows] int64; never an index of mass 0. Of a row with NaN -1.
    """
    ones = mass.new_ones(len(mass))
    return sample_tokens(
        mass.log(),
        temperature=ones,
        top_k=torch.zeros_like(ones, dtype=torch.int32),
        top_p=ones,
        min_p=torch.zeros_like(ones),
        u=u,
        impl=impl,
    )


def rejection_sample(
    target: Tensor,
    drafts: Tensor,
    probs: Tensor | None,
    u_accept: Tensor,
    u_draw: Tensor,
    impl: str | None = None,
) -> Tensor:
    """Accepts drafts, or replaces them, so that the target's distribution comes out.

    Draft x of row i is accepted if u_accept < p(x) / q(x); else the row's token is drawn from max(p
    - q, 0), normalized.

    Args:
        target: [num_rows, vocab_size] fp32, p of each row.
        drafts: [num_rows] int64.
        probs: [num_rows, vocab_size] fp32, q that each draft was drawn from; None = they were not
            drawn: q is 1 at the draft.
        u_accept, u_draw: [num_rows] float64 in [0, 1), independent.
        impl: as in ``sample_tokens``.

    Returns:
        [num_rows] int64: the draft where it is accepted, else its replacement, which is another
        token.
    """
    at = drafts[:, None]
    p = target.gather(1, at).squeeze(1).double()
    if probs is None:
        accepted, rest = u_accept < p, target.scatter(1, at, 0.0)
    else:
        accepted = u_accept * probs.gather(1, at).squeeze(1).double() < p
        rest = (target - probs).clamp_min(0)
    # Where p = q nothing is left over, and nothing is rejected but by rounding: then p itself is
    # right.
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target)
    return torch.where(accepted, drafts, draw(rest, u_draw, impl))


def uniform(seeds: Sequence[int], positions: Sequence[int], purpose: int = TOKEN) -> np.ndarray:
    """One number in [0, 1) for each (seed, position, purpose), a multiple of 2^-32.

    The same one every time.

    Args:
        seeds, positions: [n] ints.
        purpose: keeps independent draws at one position apart.

    Returns:
        [n] float64.
    """
    with np.errstate(over="ignore"):
        x = _mix(np.array([s % 2**64 for s in seeds], dtype=np.uint64))
        x = _mix(x + np.asarray(positions, dtype=np.uint64) * GOLDEN)
        x = _mix(x ^ np.uint64(purpose))
    return (x >> np.uint64(32)).astype(np.float64) * 2.0**-32


def derived_seed(seed: int, sample: int) -> int:
    """Seed of one sample of a request; sample 0 has the request's own."""
    return seed if sample == 0 else (seed + sample * 0xD1B54A32D192ED03) % 2**64


def _mix(x: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64."""
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
