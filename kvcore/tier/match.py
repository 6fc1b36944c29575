"""Result of a look-up in both places."""

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
_EXPLANATIONS: dict[Limit, str] = {
    **dict(EXPLANATIONS.items()),
    **LOAD_EXPLANATIONS,
    "not-cached": "nothing of this prompt is in the cache or the host",
    "diverged": "behind them the chain in cache and host ends, or differs from the prompt",
}


@dataclass(frozen=True)
class TierMatch:
    """Cached prefix of a prompt on the device and in the host.

    Attributes:
        device: match on the device alone, from `KVCache.match`.
        num_saved_tokens: tokens saved after the load.
        num_bytes: upper bound of the bytes to load; 0: no load.
        seconds: estimated time of the load, earlier loads included.
        limited_by: reason for the length of the hit; ``"no-room"`` is set by callers of `load`.
        dense_tokens: tokens with cached dense blocks, on the device or in the host.
        pending: longest open load of a prefix of this prompt, if any: waiting may be enough.
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
        """One sentence: length of the hit, its origin and its limit."""
        saved, here = self.num_saved_tokens, self.device.num_saved_tokens
        text = f"{saved} of {self.prompt.num_tokens} tokens, {here} of them on the device"
        if self.num_bytes:
            text += f", {self.num_bytes / 2**20:.3g} MiB to load ({self.seconds * 1e3:.3g} ms)"
        return f"{text}: {_EXPLANATIONS[self.limited_by].format(dense=self.dense_tokens)}"
