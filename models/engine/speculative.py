"""Speculative decoding: a drafter guesses the next tokens, one step of the model verifies them all.

Row i of a request with drafts d_1..d_k gives the token a_i after d_1..d_i. Drafts before the first
a_i != d_(i+1) are accepted, and a_i follows. `EngineConfig.rejection_sample_method` chooses a_i of
sampled requests. "strict": the draw of this seed and position, so the output is that without
drafts. "standard": draft x, drawn from q, is accepted with probability min(1, p(x) / q(x)), else
a_i is drawn from max(p - q, 0): the same distribution, other tokens. A draft not drawn has q(x) =
1.

Source: Leviathan et al. (arXiv 2211.17192); prompt lookup (Saxena 2023); vLLM for the names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..config.fields import shown
from .request import Request


class Drafter(Protocol):
    """Guesses the next tokens of requests.

    One that can draw, for "standard" rejection sampling, has ``sample(requests)`` too. It returns
    for each request its ids, and their distributions [num_drafts, vocab_size] fp32 on the model's
    device, None where they were not drawn. Draws use `uniform` numbers of purpose
    `quire.models.engine.sampler.DRAFT`.

    Attributes:
        max_draft_tokens: drafts of one request in one step; sizes the allocator.
    """

    max_draft_tokens: int

    def propose(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """For each request [0..max_draft_tokens] int32 ids that may follow `Request.tokens`."""


class NGramDrafter:
    """Prompt lookup: draft the continuation of the last earlier match of the sequence's end.

    Args:
        max_draft_tokens: most drafts of a request in a step.
        max_ngram, min_ngram: lengths of the match; longer ones are tried first.

    Raises:
        ValueError: unless 1 <= min_ngram <= max_ngram and max_draft_tokens >= 1.
    """

    def __init__(
        self, max_draft_tokens: int = 4, *, max_ngram: int = 4, min_ngram: int = 2
    ) -> None:
        if max_draft_tokens < 1:
            raise ValueError(f"max_draft_tokens: expected >= 1, got {max_draft_tokens}")
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"min_ngram, max_ngram: expected 1 <= min_ngram <= max_ngram, got {min_ngram} and "
                f"{max_ngram}"
            )
        self.max_draft_tokens = max_draft_tokens
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def propose(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """As `Drafter.propose`."""
        return [self._continuation(request.tokens) for request in requests]

    def _continuation(self, tokens: np.ndarray) -> np.ndarray:
        length = len(tokens)
        ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1  # behind equals of the last token
        found = ends[:0]
        for size in range(1, min(self.max_ngram, length - 1) + 1):
            if size > 1:
                ends = ends[ends >= size]
                ends = ends[tokens[ends - size] == tokens[length - size]]
            if not len(ends):
                break
            found = ends if size >= self.min_ngram else found
        if not len(found):
            return tokens[:0]
        # The newest, but for one that leaves fewer drafts than an older one would.
        whole = found[found + self.max_draft_tokens <= length]
        start = int(whole[-1] if len(whole) else found[0])
        return tokens[start : start + self.max_draft_tokens].copy()


def set_drafts(
    drafter: Drafter, requests: Sequence[Request], vocab_size: int, *, draws: bool
) -> list[tuple[Request, Exception]]:
    """Give requests the drafts of a drafter on the host.

    Args:
        draws: True = drafts of sampled requests are drawn, with ``drafter.sample``.

    Returns:
        (request, exception) of each request for which the drafter failed.
    """
    try:
        if draws:
            drafts = drafter.sample(requests)
        else:
            drafts = [(ids, None) for ids in drafter.propose(requests)]
        for request, (ids, probs) in zip(requests, drafts, strict=True):
            if len(ids) and not 0 <= min(ids) <= max(ids) < vocab_size:
                raise ValueError(f"drafts: expected ids in 0..{vocab_size - 1}, got {shown(ids)}")
            request.set_drafts(ids, probs)
    except Exception as error:
        if len(requests) == 1:
            return [(requests[0], error)]
        failed = [set_drafts(drafter, [one], vocab_size, draws=draws) for one in requests]
        return [pair for found in failed for pair in found]
    return []
