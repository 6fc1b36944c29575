"""An engine of one cache, with a host tier behind it and its memory."""

from __future__ import annotations

from quire.kvcore import LRU, GroupSpec
from quire.kvcore.tier import Job, TierMatch, Tiers
from tests.support.kvcore.engine import Engine, groups
from tests.support.kvcore.tiers import Contents, Memory

HYBRID = groups((8, None), (4, 10))
DENSE = groups((8, None))
STATE = groups((4, None), GroupSpec("state", "state", 4, 4096))
WINDOWS = groups((4, 10), (4, 20))
PAGE = 4096
PROMPT = list(range(1, 101))
LONGER = [*PROMPT, 1]  # 96 tokens of it are whole segments of 8


class Setup:
    """A cache whose every entry is to have a copy, and to which every load is worth its time.

    Args:
        options: of the `Engine`; policy_of_host, rate, prefill and watermark of the tier.
    """

    def __init__(self, specs=HYBRID, pages=60, host=200, **options):
        policy = options.pop("policy_of_host", LRU())
        rate, prefill = options.pop("rate", 1e9), options.pop("prefill", 1.0)
        watermark = options.pop("watermark", pages)
        cache = {"retention": "latest", "policy": LRU(), "max_requests": 4, "max_model_len": 300}
        self.e = Engine(specs, num_pages=pages, **cache | options)
        self.tiers = Tiers(
            self.e.kv,
            num_pages=host,
            bytes_per_second=rate,
            policy=policy,
            prefill_tokens_per_second=prefill,
            watermark=watermark,
        )
        self.memory = Memory(self.e, self.tiers)
        self.ids = 0

    def serve(self, tokens, answer=(), salt=b""):
        """A whole request, every row of which is checked; returns the tokens of its hit."""
        self.ids += 1
        return self.e.run(self.ids, list(tokens), list(answer), 64, salt).num_tokens

    def end(self, job: Job, **options) -> None:
        """Copy the pages of a job; it is done."""
        self.memory.copy(job)
        self.tiers.done(job, **options)
        self.check()

    def store(self, max_bytes=1 << 30) -> list[Job]:
        """Store what is due, until nothing is."""
        done = []
        while jobs := self.tiers.stores(max_bytes):
            for job in jobs:
                self.end(job)
            done += jobs
        return done

    def load(self, tokens, **options) -> TierMatch:
        """Load what a prompt needs; returns the match before."""
        match = self.tiers.match(tokens, **options)
        self.end(self.tiers.load(match))
        return match

    def behind(self, *prompts) -> None:
        """Have prompts in the host alone."""
        for prompt in prompts:
            self.serve(prompt)
        self.store()
        self.forget()

    def forget(self) -> None:
        """Evict everything that no request needs from the device."""
        self.e.kv.evict(self.e.kv.num_pages)

    def check(self) -> None:
        self.e.check()
        self.memory.check()
        self.memory.poison_free_pages()

    def has(self) -> Contents:
        """What the host holds."""
        return Contents(self.tiers.index)

    def points(self) -> set[int]:
        """Boundaries, in segments, of the host's resume points."""
        return {depth for run in self.tiers.index.runs() for depth in run.points}
