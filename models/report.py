"""What an engine says of its steps: one in numbers, and sums over them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.models.request import OutputDelta, RequestOutput


@dataclass(frozen=True)
class StepReport:
    """One step in numbers; times in seconds.

    q_lens, seq_lens: per sequence [num_seqs], its new tokens and its KV tokens including them (and drafts that were rejected).
    num_tokens: new tokens computed. num_decodes, num_prefills: sequences with one new token, and with more.
    num_generated, num_drafts, num_accepted: tokens of output; drafts verified, and those of them that stayed.
    allocator, model, total: time in kvcore; in the forward pass and sampling up to the ids on the host; in the whole step.
    finished: requests that ended in it. deltas: what it added to requests that are streamed.
    """

    q_lens: np.ndarray
    seq_lens: np.ndarray
    num_tokens: int
    num_decodes: int
    num_prefills: int
    num_preempted: int
    num_generated: int
    num_drafts: int
    num_accepted: int
    allocator: float
    model: float
    total: float
    finished: list[RequestOutput]
    deltas: list[OutputDelta]


@dataclass
class EngineTotals:
    """Sums over all steps since the start or since somebody replaced the object; times in seconds.

    hashing: time in which `Engine.add_request` hashed prompts and looked them up, outside of steps.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_generated_tokens: int = 0
    num_preempted: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    allocator: float = 0.0
    model: float = 0.0
    total: float = 0.0
    hashing: float = 0.0

    @property
    def rest(self) -> float:
        """Seconds neither in the allocator nor in the model: scheduling, tensors, bookkeeping."""
        return self.total - self.allocator - self.model

    def add(self, report: StepReport) -> None:
        """Adds one step."""
        self.num_steps += 1
        self.num_tokens += report.num_tokens
        self.num_generated_tokens += report.num_generated
        self.num_preempted += report.num_preempted
        self.num_drafts += report.num_drafts
        self.num_accepted += report.num_accepted
        self.allocator += report.allocator
        self.model += report.model
        self.total += report.total
