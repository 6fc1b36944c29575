"""Where a prompt is, and whether to load more of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..prefix.keys import Prompt
from ..prefix.lookup import EXPLANATIONS, Match, Reason

if TYPE_CHECKING:
    from .jobs import Job

Limit = Reason | Literal["slower", "no-room"]

LOAD_EXPLANATIONS: dict[Limit, str] = {
    "slower": "loading more would take longer than computing it",
    "no-room": "the pool had no room to load more",
}
_EXPLANATIONS: dict[Limit, str] = dict(EXPLANATIONS.items()) | LOAD_EXPLANATIONS
_EXPLANATIONS["not-cached"] = "nothing of this prompt is kept anywhere"
_EXPLANATIONS["diverged"] = "the chain that is kept ends, or differs from the prompt, there"


@dataclass(frozen=True)
class TierMatch:
    """Result of a look-up on the device and in the host.

    Attributes:
        device: the match on the device alone, as of `KVCache.match`.
        num_saved_tokens: tokens that the request will not compute once everything is loaded.
        num_bytes: to load, at most; 0: nothing is to be loaded.
        seconds: that the load takes, with those before it.
        limited_by: why the hit is not longer; "no-room" is for whoever asked for a load to say.
        dense_tokens: tokens whose dense blocks are kept somewhere.
        pending: an open load of this prompt, if there is one: to wait for it may be enough.
    """

    device: Match
    num_saved_tokens: int
    num_bytes: int
    seconds: float
    limited_by: Limit
    dense_tokens: int
    pending: Job | None = field(default=None, repr=False)

    @property
    def prompt(self) -> Prompt:
        """The hashed prompt."""
        return self.device.prompt

    def explain(self) -> str:
        """One sentence: hit length, what comes from where, and what limited it."""
        saved, here = self.num_saved_tokens, self.device.num_saved_tokens
        text = f"{saved} of {self.prompt.num_tokens} tokens, {here} of them on the device"
        if self.num_bytes:
            text += f", {self.num_bytes / 2**20:.3g} MiB to load ({self.seconds * 1e3:.3g} ms)"
        return f"{text}: {_EXPLANATIONS[self.limited_by].format(dense=self.dense_tokens)}"
