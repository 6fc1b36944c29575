"""Speculative decoding: a drafter guesses the next tokens, one step of the model verifies them all.

A request with drafts d_1..d_k computes k + 1 rows. Row i says which token a_i comes after d_1..d_i.
The drafts before the first a_i != d_(i+1) stay, a_i follows them, and `KVCache.commit(accepted=)`
takes the other rows back. Greedy, a_i is the largest logit. Sampled, there are two ways to a_i
(`quire.models.engine.sampler.REJECTION_SAMPLE_METHODS`); both give the target distribution p
exactly, whatever is drafted:

- "strict": a_i is the draw that belongs to this request and position
  (`quire.models.engine.distributions.uniform`), drafts or not. So the output is, token by token,
  what it would be without speculation. A draft x is accepted with probability p(x).
- "standard": rejection sampling. A draft x that was drawn from q is accepted with probability
  min(1, p(x) / q(x)), else a_i is drawn from what is left, max(p - q, 0). Drafts are accepted with
  probability sum_x min(p(x), q(x)), which is more than p of the likeliest token where p is flat,
  but which tokens come out depends on the drafts. A draft that was not drawn has q(x) = 1, and
  stays as often as under "strict".

The default is "strict": a seed then means the same output with and without drafts, in any batch,
after any preemption.

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
from .sampler import NewTokens, Sampled

if TYPE_CHECKING:
    from quire.kvcore.device import Batch, BatchBuilder

    from .graphs import Capture
    from .scheduler import ScheduledStep


class Drafter(Protocol):
    """Guesses what comes next.

    Attributes:
        max_draft_tokens: of one request in one step; sizes the allocator.
    """

    max_draft_tokens: int

    def propose(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """Drafts for each of ``requests``, which all wait for their next token.

        Returns:
            For each request [0..max_draft_tokens] int32 token ids that may follow `Request.tokens`;
            more than it has room for are ignored.
        """


@runtime_checkable
class SamplingDrafter(Drafter, Protocol):
    """A drafter that can draw, for "standard" rejection sampling."""

    def sample(self, requests: Sequence[Request]) -> list[tuple[np.ndarray, Tensor | None]]:
        """As `propose`, but drafts of sampled requests (temperature above 0) are drawn.

        Returns:
            For each request token ids, and probs [num_drafts, vocab_size] fp32 on the model's
            device, from whose rows they were drawn with numbers of
            `quire.models.engine.distributions.DRAFT`; None where they were not drawn.
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
        """Called once, by the engine that it drafts for.

        Args:
            pool: pages of all layers.
            builder: whose tables are the allocator's.
            max_requests: slots.
            impl: of the kernels.
        """

    def capture(self, sizes: Sequence[int], max_seq_len: int, capture: Capture) -> None:
        """Called once after `attach` where decode steps are captured.

        Args:
            sizes: batches that `propose` is to go through graphs with, ascending.
            max_seq_len: the longest sequence.
            capture: makes graphs, in the memory of the engine's own.
        """

    def observe(
        self,
        batch: Batch,
        hidden: Tensor,
        next_ids: np.ndarray,
        last_rows: np.ndarray,
        slots: np.ndarray,
    ) -> None:
        """Called in each step when its tokens are sampled, before the commit.

        The time to write the rows of the layers.

        Args:
            batch: the step.
            hidden: of its rows, as the model returns them with ``return_hidden=True``.
            next_ids: [num_tokens] int64, the token that follows each row's, wherever the row stays.
            last_rows: [num_seqs] int64, each sequence's last row that stays.
            slots: [num_seqs] int64.
        """


class NGramDrafter:
    """Prompt lookup: what followed the last time that the sequence's last tokens stood in it.

    Args:
        max_draft_tokens: drafts at most.
        max_ngram, min_ngram: tokens that have to agree; longer ones are tried first.

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
        """What followed the newest earlier match of the longest end of ``tokens``."""
        length = len(tokens)
        ends = (
            np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
        )  # positions behind the last token's twins
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
    """Asks a drafter what may follow, and gives each request its drafts.

    Args:
        drafter: any; what a `ModelDrafter` raises is raised here, as any other failure of the
            model.
        requests: all wait for their next token.
        draws: whether drafts of sampled requests are to be drawn, by a `SamplingDrafter`.
        vocab_size: drafts are below it.
        sampled: where drafts of a `ModelDrafter` go (`BatchBuilder.sampled`).

    Returns:
        The requests in which another drafter failed, and how.
    """
    if not requests:
        return []
    if isinstance(drafter, ModelDrafter):
        _set_placeholders(drafter, requests, draws, sampled)
        return []
    try:
        _set_drafts(drafter, requests, draws, vocab_size)
    except Exception:
        failed = []
        for request in requests:  # whose failure it was, each alone tells
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


def _set_placeholders(
    drafter: ModelDrafter, requests: Sequence[Request], draws: bool, sampled: Tensor
) -> None:
    """Gives requests placeholders for drafts, which the host does not wait for."""
    if draws:
        ids, probs = drafter.sample(requests)
    else:
        ids, probs = drafter.propose(requests), [None] * len(requests)
    count = ids.shape[1]
    sampled[: ids.numel()] = ids.flatten()
    for i, request in enumerate(requests):
        request.set_drafts(-1 - np.arange(i * count, (i + 1) * count), probs[i])


def rows_with_drafts(step: ScheduledStep, ready: list[int]) -> np.ndarray:
    """[num_rows] int64: rows of the last known token and of the drafts of the sequences ``ready``."""
    last = step.last_rows(ready)
    return np.concatenate(
        [np.arange(row - step.num_drafts[i], row + 1) for i, row in zip(ready, last, strict=True)]
    )


def verify(
    step: ScheduledStep, ready: list[int], sampled: Sampled
) -> tuple[list[NewTokens], np.ndarray]:
    """New tokens of the sequences in ``ready``, and how many computed tokens of each stay.

    Returns:
        (new tokens, [num_seqs] int64 computed tokens that stay).
    """
    accepted = np.array(step.num_new_tokens)
    new, row = [], 0
    for i in ready:
        request, num_drafts, stay = step.requests[i], step.num_drafts[i], 0
        if num_drafts:
            ids = sampled.ids[row : row + num_drafts + 1]
            stay = count_accepted(request.drafts[:num_drafts].tolist(), ids)
            accepted[i] -= num_drafts - stay
            request.num_drafts += num_drafts
            request.num_accepted += stay
        rows = slice(row, row + stay + 1)
        logprobs = None if sampled.logprobs is None else sampled.logprobs[rows]
        new.append(NewTokens(request, sampled.ids[rows], logprobs))
        row += num_drafts + 1
    return new, accepted


def count_accepted(drafts: Sequence[int], ids: Sequence[int]) -> int:
    """How many drafts stay: those before the first that is not what the model put there.

    Args:
        drafts: [k] token ids.
        ids: [k + 1], the model's own token at each row.
    """
    return next((i for i, draft in enumerate(drafts) if draft != ids[i]), len(drafts))


def show_step(
    drafter: ModelDrafter,
    step: ScheduledStep,
    batch: Batch,
    hidden: Tensor,
    sampled: Sampled,
    accepted: np.ndarray | None,
) -> None:
    """Calls `ModelDrafter.observe`.

    Args:
        batch, hidden: as there.
        sampled: the tokens of the step's rows, with drafts if it has any.
        accepted: [num_seqs] computed tokens that stay; None = all.
    """
    plan, (input_ids, ready) = step.plan, step.inputs()
    rows = step.last_rows(ready) if accepted is None else rows_with_drafts(step, ready)
    stay = plan.num_new_tokens if accepted is None else accepted
    after = _tokens_after(step, input_ids, rows, sampled)
    drafter.observe(batch, hidden, after, plan.cu_seqlens_q[:-1] + stay - 1, plan.slots)


def _tokens_after(
    step: ScheduledStep, input_ids: np.ndarray, rows: np.ndarray, sampled: Sampled
) -> np.ndarray:
    """[num_tokens] int64: the token after each row's, as far as the row stays.

    Args:
        rows: [num_rows] int64, those whose tokens were sampled. A sequence's other rows are
            followed by what it has.
    """
    ids = np.empty(len(input_ids), dtype=np.int64)
    ids[:-1] = input_ids[1:]
    for request, row, end in zip(
        step.requests, step.plan.cu_seqlens_q[1:], step.plan.seq_lens, strict=True
    ):
        if end < request.num_tokens:
            ids[row - 1] = request.tokens[end]
    ids[rows] = np.maximum(sampled.ids, 0)  # also of a row that gives none, whose request ends
    return ids
