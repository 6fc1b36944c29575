"""A step that the device runs, as the engine keeps it until its tokens are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from quire.kvcore.device import Batch

    from .request import Request
    from .sampler import SampledOnDevice
    from .scheduler import ScheduledStep


@dataclass
class LaunchedStep:
    """A step that the device runs or has run.

    Attributes:
        ready: indices of the requests that it gives tokens.
        input_ids: [num_tokens] int32, as it was given them.
        sampled: its tokens on the device.
        batch, hidden: for a `ModelDrafter`.
        ids: of ``sampled`` on the host, once they were waited for.
        accepted: [num_seqs] computed tokens that stay; None = all.
        taken_back: those of its requests whose tokens are dropped, as they wait again.
    """

    step: ScheduledStep
    ready: list[int]
    input_ids: np.ndarray
    sampled: SampledOnDevice
    batch: Batch | None
    hidden: Tensor | None
    ids: list[int] | None = None
    accepted: np.ndarray | None = None
    taken_back: frozenset[Request] = frozenset()

    @property
    def requests(self) -> list[Request]:
        """Those that get tokens, in the order of these."""
        return [self.step.requests[i] for i in self.ready]

    def learn(self, known: Sequence[int]) -> None:
        """What the placeholders of its input, and of its drafts, stand for."""
        # A row that gave none had some id; what is computed of it is not kept.
        ids = np.maximum(known, 0)
        counts = zip(self.step.requests, self.step.num_drafts, strict=True)
        drafts = [request.drafts[:count] for request, count in counts if count]
        for unknown in (self.input_ids, *drafts):
            where = unknown < 0
            unknown[where] = ids[-1 - unknown[where]]

    def set_placeholders(self) -> None:
        """The next step of its requests begins with its tokens."""
        for row, request in enumerate(self.requests):
            if request.slot >= 0:
                request.set_placeholder(row)
