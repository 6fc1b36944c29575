"""Host memory behind the pool of a replay."""

from __future__ import annotations

from typing import Any

from quire.kvcore import KVCache, Prompt
from quire.kvcore.tier import Tiers


class HostMemory:
    """Host memory that keeps the entries chosen by `Tiers`; a copy is there when it is asked for.

    Args:
        cache: an empty one.
        num_pages: size, in pages of the pool.
        link: bytes a second of each direction between device and host.
        prefill_rate: prompt tokens that the engine computes in a second.
        chunk: tokens of a prefill chunk; stores take the link for no longer than one.
        options: arguments of `Tiers` (policy, watermark).

    Attributes:
        stored, loaded: bytes copied to the host, and back.
    """

    def __init__(
        self, cache: KVCache, *, num_pages: int, link: float, prefill_rate: float, chunk: int,
        **options: Any,
    ) -> None:  # fmt: skip
        rates = {"bytes_per_second": link, "prefill_tokens_per_second": prefill_rate}
        self.tiers = Tiers(cache, num_pages=num_pages + 1, **rates, **options)
        self._link, self._most_bytes = link, int(link * chunk / prefill_rate)
        self.stored = self.loaded = 0

    def load(self, prompt: Prompt) -> float | None:
        """Load what the host has of a prompt; returns the seconds, or None for lack of room."""
        match = self.tiers.match(prompt)
        if not match.num_bytes:
            return 0.0
        job = self.tiers.load(match)
        if job is None:
            return None
        self.tiers.done(job)
        self.loaded += job.num_bytes
        return job.num_bytes / self._link

    def store(self) -> None:
        """Store what eviction would take next, as much as the link takes during a chunk."""
        room = self._most_bytes
        while room > 0 and (jobs := self.tiers.stores(room)):
            for job in jobs:
                self.tiers.done(job)
                self.stored += job.num_bytes
                room -= job.num_bytes
