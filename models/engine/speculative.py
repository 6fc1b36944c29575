"""Speculative decoding: a drafter guesses the next tokens, one step of the model verifies them all.

A request with drafts d_1..d_k computes k + 1 rows. Row i gives the token a_i after d_1..d_i. The
drafts before the first a_i != d_(i+1) are accepted, a_i follows them, and
`KVCache.commit(accepted=)` takes the other rows back. Greedy, a_i is the largest logit. Sampled,
`EngineConfig.rejection_sample_method` chooses a_i; both methods give the target distribution p:

- "strict" (default): a_i is the draw of this request and position
  (`quire.models.engine.sampler.uniform`): the output is, token by token, that without drafts. A
  draft x is accepted with probability p(x).
- "standard": rejection sampling. A draft x that was drawn from q is accepted with probability
  min(1, p(x) / q(x)), else a_i is drawn from max(p - q, 0). More drafts are accepted where p is
  flat, but the tokens depend on the drafts. A draft that was not drawn has q(x) = 1.

Source: Leviathan et al. (arXiv 2211.17192) for rejection sampling; prompt lookup decoding (Saxena
    2023) for `NGramDrafter`; vLLM for the names of the methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from ..config.fields import shown
from .request import Request

if TYPE_CHECKING:
    from quire.kvcore.device import Batch, BatchBuilder

    from .scheduler import Step


class Drafter(Protocol):
    """Guesses the next tokens of requests.

    Attributes:
        max_draft_tokens: drafts of one request in one step; sizes the allocator.
    """

    max_draft_tokens: int

    def propose(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """For each request [0..max_draft_tokens] int32 ids that may follow `Request.tokens`."""


@runtime_checkable
class SamplingDrafter(Drafter, Protocol):
    """A drafter that can draw, for "standard" rejection sampling."""

    def sample(self, requests: Sequence[Request]) -> list[tuple[np.ndarray, Tensor | None]]:
        """As `propose`, but draw the drafts of sampled requests (temperature above 0).

        Returns:
            For each request token ids, and the distribution of each draft: [num_drafts, vocab_size]
            fp32 on the model's device; None where they were not drawn. The draws use numbers of
            purpose `quire.models.engine.sampler.DRAFT`.
        """


@runtime_checkable
class ModelDrafter(Drafter, Protocol):
    """A drafter that is a part of the model.

    It reads the model's hidden states and has layers, and so pages, of its own. Its drafts stay on
    the device: `propose` gives [num_requests, num_drafts] int64 there, and `sample` such ids and
    the probs of each request.
    """

    def attach(
        self, pool: Any, builder: BatchBuilder, *, max_requests: int, impl: str | None
    ) -> None:
        """Called once, by the engine with these pages and tables."""

    def observe(
        self,
        batch: Batch,
        hidden: Tensor,
        next_ids: np.ndarray,
        last_rows: np.ndarray,
        slots: np.ndarray,
    ) -> None:
        """Write the rows of its layers; called in each step after sampling, before the commit.

        Args:
            hidden: of the step's rows, as the model returns them with ``return_hidden=True``.
            next_ids: [num_tokens] int64, the token after each row that stays.
            last_rows: [num_seqs] int64, each sequence's last row that stays.
            slots: [num_seqs] int64.
        """


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
    drafter: Drafter,
    requests: Sequence[Request],
    *,
    draws: bool,
    vocab_size: int,
    sampled: Tensor,
) -> list[tuple[Request, Exception]]:
    """Ask a drafter for drafts of requests that wait for their next token.

    Args:
        draws: True if a `SamplingDrafter` is to draw the drafts of sampled requests.
        sampled: place for the drafts of a `ModelDrafter` (`BatchBuilder.sampled`).

    Returns:
        (request, exception) of each request in which another drafter failed.

    Raises:
        Exception: an error of a `ModelDrafter`, as any other failure of the model.
    """
    if not requests:
        return []
    if isinstance(drafter, ModelDrafter):
        ids, probs = drafter.sample(requests) if draws else (drafter.propose(requests), None)
        count = ids.shape[1]
        sampled[: ids.numel()] = ids.flatten()
        for i, request in enumerate(requests):  # the host does not wait for them
            placeholders = -1 - np.arange(i * count, (i + 1) * count)
            request.set_drafts(placeholders, None if probs is None else probs[i])
        return []
    try:
        _set_drafts(drafter, requests, draws, vocab_size)
    except Exception:
        failed = []
        for request in requests:  # one by one, to find the request that failed
            try:
                _set_drafts(drafter, [request], draws, vocab_size)
            except Exception as error:
                failed.append((request, error))
        return failed
    return []


def _set_drafts(
    drafter: Drafter, requests: Sequence[Request], draws: bool, vocab_size: int
) -> None:
    if draws:
        drafts = drafter.sample(requests)
    else:
        drafts = [(ids, None) for ids in drafter.propose(requests)]
    for request, (ids, probs) in zip(requests, drafts, strict=True):
        if len(ids) and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(f"drafts: expected ids in 0..{vocab_size - 1}, got {shown(ids)}")
        request.set_drafts(ids, probs)


def show_step(drafter: ModelDrafter, step: Step) -> None:
    """Call `ModelDrafter.observe` for a step whose drafts were verified."""
    plan = step.plan
    next_ids = np.empty(len(step.input_ids), dtype=np.int64)
    next_ids[:-1] = step.input_ids[1:]
    ends = zip(step.requests, plan.cu_seqlens_q[1:], plan.seq_lens, strict=True)
    for request, row, end in ends:
        if end < request.num_tokens:
            next_ids[row - 1] = request.tokens[end]
    # A request whose row gives no token ends.
    next_ids[step.rows] = np.maximum(step.sampled.ids, 0)
    stay = plan.num_new_tokens if step.accepted is None else step.accepted
    last_rows = plan.cu_seqlens_q[:-1] + stay - 1
    drafter.observe(step.batch, step.hidden, next_ids, last_rows, plan.slots)
