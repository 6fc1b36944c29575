"""Steps of a life with a host tier: entries leave the device, come back, or fail to."""

from __future__ import annotations

from collections import Counter

import numpy as np

from quire.kvcore import LRU, Adaptive
from quire.kvcore.events import split_keys
from quire.kvcore.invariants import check_index
from quire.kvcore.tier import Job, TierMatch, Tiers
from tests.support.kvcore.device import POISON


class Hosted:
    """A part of `shadow.Life`.

    Attributes:
        tiers: None for a life without a host.
        host: memory of the host, as the device has it.
        copied: whether the pages of each open job were copied.
        promised: what the match of each open load said.
    """

    def add_host(self) -> None:
        self.tiers, self.copied, self.promised = None, dict[Job, bool](), dict[Job, TierMatch]()
        if not (self.has_host and self.kv.enable_caching):
            return
        kv, rng = self.kv, self.rng
        policy = rng.choice((None, LRU, Adaptive))
        self.tiers = Tiers(
            kv,
            num_pages=rng.choice((30, 80, 400)),
            bytes_per_second=1e9,
            prefill_tokens_per_second=1e-6,  # every load is worth its time
            policy=policy and policy(),
            watermark=rng.choice((None, kv.num_pages // 2, *[kv.num_pages] * 4)),
        )
        shape = self.tiers.index.pool.num_pages, self.device.memory.shape[1]
        self.host = np.full(shape, POISON)

    def store(self) -> None:
        """Entries that eviction would take next begin to go to the host."""
        if self.tiers is not None:
            for job in self.tiers.stores(self.rng.choice((1, 4096 * 4, 1 << 30))):
                self._begin(job)
                self.calls["stores"] += 1

    def load(self) -> None:
        """A prompt of which the host may have more than the device; the look-up changes nothing."""
        if self.tiers is None:
            return
        text, kv = self.new_text(), self.kv
        if self.history and self.rng.random() < 0.7:
            text = self.rng.choice(self.history[-16:])
        before = self._numbers()
        match = self.tiers.match(text.tokens, salt=text.salt, extra_keys=text.extra_keys)
        assert self._numbers() == before and match.explain()
        assert match.device == kv.match(match.prompt)
        assert match.num_saved_tokens >= match.device.num_saved_tokens
        assert match.num_saved_tokens <= self.promises.usable(len(text))
        assert (match.num_bytes > 0) == (match.num_saved_tokens > match.device.num_saved_tokens)
        job = self.tiers.load(match)
        if job is None:
            assert kv.num_free_pages == before["free_pages"]
            self.calls["no room to load"] += match.num_bytes > 0
        else:
            assert 0 < job.num_bytes <= match.num_bytes
            assert job.num_tokens == match.num_saved_tokens
            self.promised[job] = match
            self.calls["loads"] += 1
            self._begin(job)

    def bounce(self) -> None:
        """What is due is stored, everything leaves the device, and prompts come back."""
        if self.tiers is None:
            return
        while self.requests and self.rng.random() < 0.8:
            self.release()
        for _ in range(3):
            self.store()
            while self.copied and self.rng.random() < 0.9:
                self.end_job()
        self.try_call("evict", self.kv.num_pages)
        for _ in range(3):
            self.load()
        if self.rng.random() < 0.7:
            self.end_jobs()
            self.admit()

    def _numbers(self) -> dict[str, int]:
        return self.kv.stats() | {"host_evictable": self.tiers.index.num_evictable}

    def _begin(self, job: Job) -> None:
        self.copied[job] = False
        if self.rng.random() < 0.5:
            self._copy(job)

    def _copy(self, job: Job, num_pages: int | None = None) -> None:
        """Run the copies of a job, or the first `num_pages` of them."""
        if self.copied[job]:
            return
        sources, targets = job.sources[:num_pages], job.targets[:num_pages]
        assert (sources > 0).all() and (targets > 0).all()
        assert len(set(targets.tolist())) == len(targets)
        here, there = self.device.memory, self.host
        if job.kind == "store":
            there[targets] = here[sources]
        else:
            here[targets] = there[sources]
        self.copied[job] = num_pages is None

    def end_job(self) -> None:
        """A job is done, failed after some of its pages, or cancelled."""
        if not self.copied:
            return
        job = self.rng.choice(list(self.copied))
        way = self.rng.choice(("done", "done", "done", "done", "cancel", "failed"))
        if self.copied[job]:
            way = "done"
        kv, match = self.kv, self.promised.pop(job, None)
        is_void = job.transfer.is_void
        segments = kv.index.num_segments, self.tiers.index.num_segments
        if way == "cancel":
            self.tiers.cancel(job)
        elif way == "failed":
            self._copy(job, self.rng.randrange(len(job.sources) or 1))
            assert not self.tiers.done(job, failed=True)
        else:
            self._copy(job)
            assert self.tiers.done(job) == (not is_void)
            if match is not None and not is_void:
                found = kv.match(match.prompt).num_saved_tokens
                assert found >= match.num_saved_tokens, "a loaded prefix is not findable"
                self.calls["kept loads"] += 1
        if way != "done" or is_void:
            assert kv.index.num_segments == segments[0], "a job without its copies left entries"
            assert self.tiers.index.num_segments <= segments[1]
        del self.copied[job]
        self.calls[f"jobs {way}"] += 1

    def end_jobs(self) -> None:
        while self.copied:
            self.end_job()

    def job_pages(self) -> set[int]:
        """Device pages that open jobs read or write."""
        jobs = () if self.tiers is None else self.tiers.jobs
        each = (job.targets if job.kind == "load" else job.sources for job in jobs)
        return {page for pages in each for page in pages.tolist()}

    def check_host(self) -> None:
        """The host is sound, what is free there may be lost, and its events name what it has."""
        if self.tiers is None:
            return
        index = self.tiers.index
        check_index(index, [], [], [], Counter())
        self.host[index.pool.free_pages()] = POISON
        if self.log is not None and not self.reader.lost and self.reader.dense:
            self.reader.read(self.log)
            keys = {key for run in index.runs() for key in split_keys(run.keys)}
            if not self.reader.lost:
                assert self.reader.host[self.reader.dense[0]].keys() == keys, "events of the host"
