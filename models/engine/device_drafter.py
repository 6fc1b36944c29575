"""Drafters that are a part of the model: they read its hidden states, and have layers and pages.

Their drafts stay on the device, greedy or drawn, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels import sample_tokens
from quire.kvcore.device import Batch, BatchBuilder, Staging

from .request import Request
from .sampler import DRAFT, draw_columns, uniform

if TYPE_CHECKING:
    from ..parallel.steps import StepSender
    from .scheduler import Step


class DeviceDrafter:
    """Base of these drafters. A subclass gives `observe` and `_drafts`.

    Args:
        model: the engine's model.
        max_draft_tokens: drafts of a request in a step.

    Raises:
        ValueError: max_draft_tokens below 1.
    """

    def __init__(self, model: Any, max_draft_tokens: int) -> None:
        if max_draft_tokens < 1:
            raise ValueError(f"max_draft_tokens: expected >= 1, got {max_draft_tokens}")
        self.model, self.max_draft_tokens = model, max_draft_tokens
        # Rank 0 of several makes the others draft too.
        self.sender: StepSender | None = None

    def attach(
        self, pool: Any, builder: BatchBuilder, *, max_requests: int, impl: str | None
    ) -> None:
        """Called once, by the engine with these pages and tables."""
        self._pool, self._builder, self._impl = pool, builder, impl
        self._staging = Staging(self.model.device)
        # By slot: the newest token, which has no row yet.
        self._newest = torch.zeros(max_requests, dtype=torch.int64, device=self.model.device)

    def _receive(
        self, next_ids: np.ndarray, last_rows: np.ndarray, slots: np.ndarray
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of `observe` on the device; keeps the newest tokens."""
        ids, rows, request_slots = self._staging.send([next_ids, last_rows, slots])
        self._newest[request_slots] = ids[rows]
        return ids, rows, request_slots

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
        raise NotImplementedError

    def _drafts(
        self,
        request_slots: Tensor,
        seq_lens: Tensor,
        block_tables: tuple[Tensor, ...],
        *,
        num_drafts: int,
        max_seq_len: int,
        choose: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Drafts [num_seqs, num_drafts] int64 of every sequence.

        Args:
            request_slots: [num_seqs] int64.
            seq_lens: [num_seqs] int32, computed tokens; the token at seq_lens is known.
            block_tables: per group [num_seqs, width] int32, after the commit of the step.
            max_seq_len: host int, upper bound of seq_lens.
            choose: [num_seqs, vocab_size] fp32 logits -> ids [num_seqs] int64, to be called once
                for each draft in turn.
        """
        raise NotImplementedError

    def observe_step(self, step: Step) -> None:
        """Call `observe`, on all ranks, for a step whose drafts were verified."""
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
        arrays = next_ids, plan.cu_seqlens_q[:-1] + stay - 1, plan.slots
        if self.sender is not None:
            self.sender.observe(*arrays)
        self.observe(step.batch, step.hidden, *arrays)

    def set_drafts(self, requests: Sequence[Request], sampled: Tensor, *, draws: bool) -> None:
        """Give requests placeholders of their drafts, which stay in ``sampled`` [n] int64.

        draws: True = drafts of sampled requests are drawn.
        """
        ids, probs = self.sample(requests) if draws else (self.propose(requests), None)
        count = ids.shape[1]
        sampled[: ids.numel()] = ids.flatten()
        for i, request in enumerate(requests):
            placeholders = -1 - np.arange(i * count, (i + 1) * count)
            request.set_drafts(placeholders, None if probs is None else probs[i])

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request]) -> Tensor:
        """Greedy drafts [num_requests, num_drafts] int64, on the device."""
        return self._chain(requests, greedy)

    @torch.inference_mode()
    def sample(self, requests: Sequence[Request]) -> tuple[Tensor, list[Tensor | None]]:
        """Drafts, drawn under the temperature and filters of the request, and their probs.

        Returns:
            (ids as of `propose`, probs [num_drafts, vocab_size] fp32 of each request; None = not
            drawn).
        """
        params = [request.params for request in requests]
        if not any(p.temperature > 0 for p in params):
            return self.propose(requests), [None] * len(requests)
        seeds, first = [r.seed for r in requests], np.array([r.num_output for r in requests])
        u = [uniform(seeds, first + i, DRAFT) for i in range(self.max_draft_tokens)]
        draws = draw_columns(params, u, self._staging)
        masses: list[Tensor] = []

        def choose(logits: Tensor) -> Tensor:
            mass = torch.empty_like(logits)
            ids = sample_tokens(logits, **draws[len(masses)], probs=mass, impl=self._impl)
            # NaN fails every comparison: a row without a draw is replaced from the target itself.
            mass[:, 0].masked_fill_(ids < 0, torch.nan)
            masses.append(mass)
            return self._of_rank_0(ids.clamp_min(0))

        ids, probs = self._chain(requests, choose), torch.stack(masses, dim=1)
        return ids, [p if r.temperature > 0 else None for p, r in zip(probs, params, strict=True)]

    @torch.inference_mode()
    def follow(self, slots: np.ndarray, seq_lens: np.ndarray, is_greedy: bool) -> Tensor:
        """The drafts of rank 0 on another rank; drawn ones come from rank 0."""

        def choose(logits: Tensor) -> Tensor:
            return self._of_rank_0(logits.new_empty(len(logits), dtype=torch.int64))

        return self._run_chain(slots, seq_lens, greedy if is_greedy else choose)

    def _chain(self, requests: Sequence[Request], choose: Callable[[Tensor], Tensor]) -> Tensor:
        """[num_requests, num_drafts] int64."""
        slots = np.array([request.slot for request in requests], dtype=np.int64)
        # The newest token of each is not computed yet.
        seq_lens = np.array([request.num_tokens - 1 for request in requests], dtype=np.int32)
        if self.sender is not None:
            self.sender.draft(slots, seq_lens, choose is greedy)
        return self._run_chain(slots, seq_lens, choose)

    def _run_chain(
        self, slots: np.ndarray, seq_lens: np.ndarray, choose: Callable[[Tensor], Tensor]
    ) -> Tensor:
        longest = int(seq_lens.max())
        self._builder.update_tables()
        positions_left = self.model.config.max_position_embeddings - longest
        request_slots, lengths = self._staging.send([slots, seq_lens])
        drafts = self._drafts(
            request_slots,
            lengths,
            self._builder.gather(request_slots, longest + self.max_draft_tokens),
            num_drafts=max(1, min(self.max_draft_tokens, positions_left)),
            max_seq_len=longest,
            choose=choose,
        )
        return self._of_rank_0(drafts)

    def _of_rank_0(self, drafts: Tensor) -> Tensor:
        group = self.model.group
        return drafts if group is None else group.from_first(drafts.contiguous())


def greedy(logits: Tensor) -> Tensor:
    """Ids [num_rows] int64 of the largest logits of [num_rows, vocab_size]."""
    return logits.argmax(dim=-1)
