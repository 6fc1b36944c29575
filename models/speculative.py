"""Speculative decoding: a drafter guesses the next tokens, one step of the model verifies them all.

A request with drafts d_1..d_k computes k + 1 rows. Row i says which token a_i the model itself puts after d_1..d_i: the largest logit,
or a draw with the number that belongs to this position (`quire.models.sampling.uniform`). The drafts before the first a_i != d_(i+1)
stay, a_i follows them, and `KVCache.commit(accepted=)` takes the other rows back.

So the output is, token by token, what it would be without speculation, greedy or sampled. A draft is accepted with the probability p(d)
that the model gives it, as rejection sampling does with a drafter that offers one token. A drafter that draws from a distribution q of its
own does better with `rejection_sample`: its drafts are accepted with probability sum_x min(p(x), q(x)).

Source: Leviathan et al. (arXiv 2211.17192) for rejection sampling; prompt lookup decoding (Saxena 2023) for `NGramDrafter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from quire.models.request import Request
from quire.models.sampling import draw

if TYPE_CHECKING:
    from quire.models.batch import Batch, BatchBuilder


class Drafter(Protocol):
    """Guesses what comes next.

    max_draft_tokens: of one request in one step; sizes the allocator.
    """

    max_draft_tokens: int

    def propose(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """Drafts for each of ``requests``, which all wait for their next token.

        Returns: for each request [0..max_draft_tokens] int32 token ids that may follow `Request.tokens`; more than it has room for
            are ignored.
        """


@runtime_checkable
class ModelDrafter(Drafter, Protocol):
    """A drafter that is a part of the model: it reads the model's hidden states and has layers, and so pages, of its own."""

    def attach(
        self, pool: Any, builder: BatchBuilder, *, max_requests: int, impl: str | None
    ) -> None:
        """Called once, by the engine that it drafts for.

        pool: pages of all layers. builder: whose tables are the allocator's. max_requests: slots. impl: of the kernels.
        """

    def observe(
        self, batch: Batch, hidden: Tensor, next_ids: np.ndarray, last_rows: np.ndarray, slots: np.ndarray
    ) -> None:  # fmt: skip
        """Called in each step when its tokens are sampled, before the commit: the time to write the rows of the layers.

        batch: the step. hidden: of its rows, as the model returns them with ``return_hidden=True``.
        next_ids: [num_tokens] int64, the token that follows each row's, wherever the row stays.
        last_rows: [num_seqs] int64, each sequence's last row that stays. slots: [num_seqs] int64.
        """


class NGramDrafter:
    """Prompt lookup: what followed the last time that the sequence's last tokens stood in it.

    max_draft_tokens: drafts at most. max_ngram, min_ngram: tokens that have to agree; longer ones are tried first.

    Raises: ValueError unless 1 <= min_ngram <= max_ngram and max_draft_tokens >= 1.
    """

    def __init__(
        self, max_draft_tokens: int = 4, *, max_ngram: int = 4, min_ngram: int = 2
    ) -> None:
        if max_draft_tokens < 1:
            raise ValueError(f"max_draft_tokens: expected >= 1, got {max_draft_tokens}")
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"min_ngram, max_ngram: expected 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}"
            )
        self.max_draft_tokens = max_draft_tokens
        self.max_ngram, self.min_ngram = max_ngram, min_ngram

    def propose(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """As `Drafter.propose`."""
        return [self._continuation(request.tokens) for request in requests]

    def _continuation(self, tokens: np.ndarray) -> np.ndarray:
        """The tokens after the newest earlier place whose last tokens agree with the longest end of ``tokens``."""
        length = len(tokens)
        ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1  # places behind the last token's twins
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


def count_accepted(drafts: Sequence[int], ids: Sequence[int]) -> int:
    """How many drafts stay: those before the first that is not what the model put there.

    drafts: [k] token ids. ids: [k + 1], the model's own token at each row.
    """
    return next((i for i, draft in enumerate(drafts) if draft != ids[i]), len(drafts))


def rejection_sample(
    target: Tensor, draft: Tensor, drafts: Tensor, u_accept: Tensor, u_draw: Tensor
) -> tuple[Tensor, Tensor]:
    """Accepts drafts that were drawn from distributions of a drafter, or replaces them, so that the target's distribution comes out.

    Draft x of row i is accepted if u_accept < p(x) / q(x); else the row's token is drawn from max(p - q, 0), normalised.

    target: [num_rows, vocab_size], p of each row. draft: the same shape, q that each draft was drawn from (one-hot for a drafter that
        does not draw). drafts: [num_rows] int64. u_accept, u_draw: [num_rows] float64 in [0, 1), independent.

    Returns: (accepted [num_rows] bool, ids [num_rows] int64: the draft where it is accepted, else its replacement).
    """
    p = target.gather(1, drafts[:, None]).squeeze(1).double()
    q = draft.gather(1, drafts[:, None]).squeeze(1).double()
    accepted = u_accept * q < p
    rest = (target - draft).clamp_min(0)
    # Where p = q nothing is left over, and nothing is rejected but by rounding: then p itself is right.
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target)
    return accepted, torch.where(accepted, drafts, draw(rest, u_draw))
