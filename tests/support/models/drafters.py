"""Drafters that are right now and then: random ones hardly ever are."""

import torch


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
