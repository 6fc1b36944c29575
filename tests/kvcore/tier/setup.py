"""An engine of one cache, with a host tier behind it and the memory of both."""

from collections import Counter

import numpy as np

from quire.kvcore import LRU, GroupSpec
from quire.kvcore.events import split_keys
from quire.kvcore.invariants import check_index
from quire.kvcore.tier import Job, TierMatch, Tiers
from tests.kvcore.engine import POISON, Engine, groups

HYBRID = groups((8, None), (4, 10))
DENSE = groups((8, None))
STATE = groups((4, None), GroupSpec("state", "state", 4, 4096))
PAGE = 4096
PROMPT = list(range(1, 101))
LONGER = [*PROMPT, 1]  # 96 tokens of it are whole segments of 8


class Setup:
    """A cache whose every entry is due for the host, and to which every load is worth its time.

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
        self.rows = np.full((host, self.e.device.memory.shape[1]), POISON)
        self.ids = 0

    def serve(self, tokens, answer=(), salt=b"") -> int:
        """Run a whole request, comparing every row; returns the tokens of its hit."""
        self.ids += 1
        return self.e.run(self.ids, list(tokens), list(answer), 64, salt).num_tokens

    def copy(self, job: Job, num_pages: int | None = None) -> None:
        """Run the copies of a job, or the first `num_pages` of them."""
        sources, targets = job.sources[:num_pages], job.targets[:num_pages]
        if job.kind == "store":
            self.rows[targets] = self.e.device.memory[sources]
        else:
            self.e.device.memory[targets] = self.rows[sources]

    def end(self, *jobs: Job) -> None:
        """Copy the pages of jobs and report them done."""
        for job in jobs:
            self.copy(job)
            self.tiers.done(job)
            self.check()

    def store(self, max_bytes=1 << 30) -> list[Job]:
        """Store what is due, until nothing is."""
        done = []
        while jobs := self.tiers.stores(max_bytes):
            self.end(*jobs)
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
        check_index(self.tiers.index, [], [], [], Counter())
        self.rows[self.tiers.index.pool.free_pages()] = POISON

    def segments(self) -> set[bytes]:
        """Keys of the host's segments."""
        return {key for run in self.tiers.index.runs() for key in split_keys(run.keys)}

    def points(self) -> set[int]:
        """Boundaries, in segments, of the host's resume points."""
        return {depth for run in self.tiers.index.runs() for depth in run.points}
