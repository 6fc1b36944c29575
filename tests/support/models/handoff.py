"""Two caches over fake memory, whose rows are hashes of all that they depend on, and a store between them."""

from __future__ import annotations

from collections import Counter

import numpy as np

from quire.kvcore import GroupSpec, KVCache, OutOfPages
from quire.models.transfer.handoff import PrefixTransfer
from quire.models.transfer.pages import ArrayPages
from tests.support.kvcore.device import Device, Request, Text

GROUPS = {
    "dense": [GroupSpec("full", "dense", 4, 8)],
    "window": [GroupSpec("full", "dense", 4, 8), GroupSpec("local", "window", 4, 8, 10)],
    "windows alone": [GroupSpec("near", "window", 4, 8, 6), GroupSpec("far", "window", 8, 8, 20)],
    "state": [GroupSpec("full", "dense", 8, 8), GroupSpec("state", "state", 8, 8)],
    "all": [
        GroupSpec("full", "dense", 4, 8, pages_per_block=2),
        GroupSpec("local", "window", 4, 8, 10, lookahead=1),
        GroupSpec("state", "state", 8, 8),
    ],
}


class NoPages(Exception):
    """A prompt does not fit beside what others hold."""


class End:
    """An engine at one end of a hand-off, which checks every row that it reads.

    Args:
        name: of `GROUPS`.
        layout: besides that name.
        options: of `KVCache`.

    Attributes:
        kv, device: pages and rows.
        transfer: sends and receives.
    """

    def __init__(self, name="window", layout=None, **options) -> None:
        options = {"num_pages": 200, "max_requests": 4, "max_model_len": 512} | options
        self.kv = KVCache(GROUPS[name], debug=True, **options)
        self.device = Device(self.kv, Counter())
        pages = ArrayPages(self.device.memory.view(np.uint8))
        self.transfer = PrefixTransfer(
            self.kv, pages, {"groups": name} | (layout or {}), staging_bytes=8 * pages.page_bytes
        )

    def serve(self, tokens, salt=b"", chunk=24) -> int:
        """Compute a prompt; returns the tokens that were found."""
        match = self.kv.match(tokens, salt=salt)
        request = Request("r", self.kv.admit("r", match), Text(list(tokens), salt), match)
        slot = [request.slot]
        while (left := len(tokens) - request.computed) > 0:
            (count,) = self.kv.cut(slot, [min(chunk, left)]).tolist()
            plan = self.kv.plan(slot, [count])
            if isinstance(plan, OutOfPages):
                self.kv.release("r")
                raise NoPages(str(plan))
            self.device.wipe_free_pages()
            self.device.copy(plan.copies)
            self.device.check(request, plan.state_pages[:, 0] if len(plan.state_pages) else None)
            self.device.write(plan, [request])
            self.device.write_waiting(request, request.computed + count)
            ids = tokens[request.computed : request.computed + count]
            self.device.copy(self.kv.commit(plan, ids))
            request.computed += count
        self.kv.release("r")
        self.kv.check_invariants()
        return match.num_saved_tokens

    def sent(self, tokens, store, **options):
        """As `PrefixTransfer.send`; nothing is kept behind."""
        try:
            return self.transfer.send(tokens, store, **options)
        finally:
            self.expect_closed()

    def received(self, tokens, store, **options):
        """As `PrefixTransfer.receive`; nothing is kept behind."""
        try:
            return self.transfer.receive(tokens, store, **options)
        finally:
            self.expect_closed()

    def expect_closed(self) -> None:
        """Every page is accounted for, and no hand-off is open."""
        self.kv.check_invariants()
        assert not self.kv.handoffs and not self.kv.index.holdings
        self.device.wipe_free_pages()


def text(seed: int, n: int) -> list[int]:
    """Tokens of a prompt."""
    return np.random.default_rng(seed).integers(0, 1000, n).tolist()
