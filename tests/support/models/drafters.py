"""Drafters that are right now and then: random ones hardly ever are."""

import numpy as np
import torch


class Oracle:
    """Drafts what will come, what will not, and nothing, in turns.

    Args:
        outputs: {request id: its tokens}, the truth.
    """

    def __init__(self, outputs, max_draft_tokens):
        self.outputs, self.max_draft_tokens, self.turn = outputs, max_draft_tokens, 0

    def propose(self, requests):
        drafts = []
        for request in requests:
            self.turn += 1
            known = np.array(self.outputs.get(request.request_id, ()), dtype=np.int32)
            ids = known[request.num_output :][: self.max_draft_tokens * (self.turn % 3 > 0)]
            drafts.append(abs(ids - (self.turn % 3 == 2)))
        return drafts


class Watched:
    """Before a drafter of a model: keeps what it drafts for each sequence, then drafts the truth up to a wrong token.

    Attributes:
        outputs: {request id: its tokens}, the truth.
        seen: [(tokens of a sequence, its drafts)].
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.outputs, self.seen = {}, []

    def propose(self, requests):
        drafts = super().propose(requests)
        for request, own in zip(requests, drafts, strict=True):
            self.seen.append((request.tokens.tolist(), own.tolist()))
            known = self.outputs.get(request.request_id, ())[request.num_output :]
            known = known[: min(len(own), len(self.seen) % (self.max_draft_tokens + 1))]
            own[: len(known)] = torch.tensor(known, dtype=own.dtype)
        return drafts
