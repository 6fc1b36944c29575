"""Random traffic through a cache with a host tier: copies at any later time, failures, and a check of every row.

    python -m tests.kvcore.tier.traffic --steps 200000 --seed 0

goes on where the tests stop. The engine checks every row that a request can see; what a match promises is compared with
sets of keys; a reader of the events must know what is in each place; and after each step all pages of both places are
counted anew.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

import numpy as np

from quire.kvcore import LRU, Adaptive, EventLog
from quire.kvcore.tier import Job, TierMatch, Tiers
from tests.kvcore.traffic import MAX_LEN, Dice, Traffic
from tests.support.kvcore.tiers import Contents, EventReader, Memory

SLOW = 1e-6  # tokens a second: everything is worth a load


class TieredTraffic(Traffic):
    """`Traffic` with a host tier behind it.

    Args:
        draw: of all choices.
    """

    def __init__(self, draw) -> None:
        log = draw.one([None, EventLog()])
        super().__init__(draw, events=log)
        kv = self.e.kv
        self.reader = None if log is None else EventReader(log)
        self.checked = Counter()
        policy = draw.one([None, LRU, Adaptive])
        self.tiers = Tiers(
            kv,
            num_pages=draw.one([30, 80, 400]),
            bytes_per_second=1e9,
            policy=None if policy is None else policy(),
            prefill_tokens_per_second=SLOW,
            watermark=draw.one([None, kv.num_pages // 2, *[kv.num_pages] * 4]),
        )
        self.memory = Memory(self.e, self.tiers)
        self.copied: dict[Job, bool] = {}
        self.cleared = False
        self.promised: dict[Job, tuple[TierMatch, list[int], bytes]] = {}

    def steps(self) -> list[str]:
        names = [*super().steps(), *["stores"] * 6, *["look"] * 6, "evict", "forget", "rarely"]
        if "admit" in names:
            names += [*["serve"] * 5, *["bounce"] * 2]
        if len(self.e.slots) > 1:
            names += ["release"] * 6
        if self.tiers.jobs:
            names += [*["end_job"] * 5, "copy", "cancel" if self.draw.number(0, 3) == 0 else "copy"]
        return names

    def _evicted(self) -> int:
        return super()._evicted() + self.cleared

    def serve(self):
        """A request, most of it or all of it."""
        rid = self.next_id
        self.admit()
        for _ in range(8):
            c, known = self.e.computed(rid), len(self.e.tokens[rid])
            if c == known:
                if known >= MAX_LEN - 1 or self.draw.one([False, False, True]):
                    break
                self.e.tokens[rid] += self.draw.bits(1, 1)
                known += 1
            (count,) = self.e.kv.cut([self.e.slots[rid]], [known - c]).tolist()
            self._advance({rid: count})
            if self.e.computed(rid) == c:
                break  # out of pages
        if self.draw.number(0, 5):
            tokens = list(self.e.tokens[rid])
            done = self.e.release(rid)
            self.model.end(self.running.pop(rid), tokens)
            self.history.append(done)
            del self.history[:-40]

    def bounce(self):
        """What is due is stored, everything leaves the device, and somebody comes back."""
        for _ in range(4):
            self.stores()
            while self.tiers.jobs and self.draw.number(0, 7):
                self.end_job()
        self.e.kv.evict(1000)
        self.look()

    # Look-ups and loads.

    def _contents(self) -> list[Contents]:
        return [Contents(self.e.kv.index), Contents(self.tiers.index)]

    def look(self):
        """A match of both places, checked; perhaps a load."""
        salt = self.draw.one([b"", b"", b"t"])
        base = self.draw.one([*self.history, *self.e.tokens.values()])
        cut = self.draw.one([len(base), len(base), self.draw.number(0, len(base))])
        prompt = (base[:cut] + self.draw.bits(1, 3))[: MAX_LEN - 10]
        max_tokens = self.draw.one([None, None, None, self.draw.number(0, MAX_LEN)])
        match = self._match(prompt, salt, max_tokens)
        if not self.draw.one([True, True, False]):
            return
        before = self._numbers()
        job = self.tiers.load(match)
        if job is None:
            after = self._numbers()
            if match.num_bytes:  # the host may have made a resume point of its neighbours
                before[0]["tier_points/host"] = after[0]["tier_points/host"]
                self.checked["no room"] += 1
            assert before == after
        else:
            assert 0 < job.num_bytes <= match.num_bytes
            assert job.num_tokens == match.num_saved_tokens
            self.promised[job] = match, prompt, salt
            self._began(job)
            self.checked["loads"] += 1

    def _match(self, prompt, salt, max_tokens=None):
        kv, tiers = self.e.kv, self.tiers
        before = self._numbers()
        match = tiers.match(prompt, salt=salt, max_tokens=max_tokens)
        assert before == self._numbers(), "a look-up changes nothing"
        assert match.device == kv.match(match.prompt, max_tokens=max_tokens)
        assert match.explain()
        p, a = match.prompt, kv.alignment
        keys = [p.keys[i : i + 32] for i in range(0, len(p.keys), 32)]
        most = min((len(prompt) - 1) // a, p.num_segments)
        most = most if max_tokens is None else min(most, max_tokens // a)
        hit = Contents(tiers.index).longest(keys, most, kv.index.span, kv.hybrid) * a
        here = match.device.num_saved_tokens
        assert match.num_saved_tokens == max(hit, here) <= self.model.dense_hit(prompt, salt)
        assert (match.num_bytes > 0) == (hit > here)
        self.checked["matches"] += hit > here
        return match

    def _numbers(self):
        return [self.e.kv.stats(), self.tiers.index.num_evictable]

    # Jobs.

    def stores(self):
        for job in self.tiers.stores(self.draw.one([1, 4096 * 4, 4096 * 64, 1 << 30])):
            self._began(job)
            self.checked["stores"] += 1

    def _began(self, job):
        self.copied[job] = False
        if self.draw.one([False, True]):
            self._copy(job)

    def _copy(self, job):
        if not self.copied[job]:
            self.memory.poison_free_pages()
            self.memory.copy(job)
            self.copied[job] = True

    def copy(self):
        self._copy(self.draw.one(list(self.tiers.jobs)))

    def end_job(self):
        """A job is done; one in eight failed after some of its pages."""
        job = self.draw.one(list(self.tiers.jobs))
        failed = not self.copied[job] and self.draw.number(0, 3) == 0
        if failed:
            self.memory.copy(job, self.draw.number(0, len(job.sources) - 1))
        else:
            self._copy(job)
        known, is_void = self._contents(), job.transfer.is_void
        assert self.tiers.done(job, failed=failed) == (not (failed or is_void))
        del self.copied[job]
        self.checked["failed" if failed else "done"] += 1
        self._check_adopted(job, known, failed, is_void)

    def _check_adopted(self, job, known, failed, is_void):
        """What came is there, what was there still is (but sources that failed), and nothing else is."""
        promised = self.promised.pop(job, None)
        transfer, target, now = job.transfer, int(job.kind == "store"), self._contents()
        keys = {transfer.keys[i : i + 32] for i in range(0, len(transfer.keys), 32)}
        for i, (old, new) in enumerate(zip(known, now, strict=True)):
            if i == target and not failed:
                assert old.segments <= new.segments <= old.segments | keys
                assert old.points.keys() <= new.points.keys() <= old.points.keys() | keys
            elif i == 1 and failed and job.kind == "load":
                assert new.segments <= old.segments and new.points.keys() <= old.points.keys()
            else:
                assert new.segments == old.segments and new.points.keys() == old.points.keys()
        if failed or is_void:
            return
        assert keys <= now[target].segments
        self.checked["several points"] += len(transfer.depths) > 1
        for depth in transfer.depths:
            assert transfer.keys[32 * (depth - 1) : 32 * depth] in now[target].points
            self.checked[f"{job.kind} of a point"] += 1
        if promised is not None:
            match, prompt, salt = promised
            got = self.e.kv.match(match.prompt, max_tokens=match.device.max_tokens)
            assert got.num_saved_tokens >= match.num_saved_tokens
            self.checked["kept promises"] += 1
            self._use(prompt, salt, match.device.max_tokens)

    def _use(self, prompt, salt, max_tokens):
        """A request starts with what came, and every row that it sees is checked."""
        if not self.e.kv.num_free_slots or max_tokens is not None:
            return
        rid, self.next_id = self.next_id, self.next_id + 1
        match = self.e.admit(rid, prompt, salt)
        self.running[rid] = self.model.admit(
            prompt, salt, match.num_tokens, match.dense_tokens, match.replay_to
        )
        self.e.check()
        self.checked["used"] += 1
        if self.draw.number(0, 3):
            self.model.end(self.running.pop(rid), list(prompt))
            self.e.release(rid)

    def cancel(self):
        job = self.draw.one(list(self.tiers.jobs))
        known = self._contents()
        self.tiers.cancel(job)
        del self.copied[job]
        self.promised.pop(job, None)
        for old, new in zip(known, self._contents(), strict=True):
            assert old.segments == new.segments and old.points.keys() == new.points.keys()
        self.checked["cancelled"] += 1

    # Orders of other calls.

    def evict(self):
        self.e.kv.evict(self.draw.number(1, self.draw.one([4, 40, 1000])))

    def forget(self):
        """Rows of some pages turned out wrong, whatever is open: the host has them no more, nor will it."""
        kv, draw = self.e.kv, self.draw
        if draw.number(0, 1):
            return
        pages = [draw.number(1, kv.num_pages - 1)]
        for run in kv.index.runs():
            pages += run.look().ravel().tolist()
            pages += [p for q in run.points.values() for p in q.pages.tolist() if p]
        wrong = [draw.one(pages) for _ in range(3)]
        before = self.memory.pages_with(wrong)
        kv.evict_pages(np.array(wrong))
        assert all(job.transfer.is_void for job in self.tiers.jobs)
        # A page that a request alone has names no entry; one with a lookahead may be in several.
        if not kv.layout.lookahead and set(wrong) <= {*pages[1:]}:
            assert not self.memory.pages_with(wrong), "wrong rows are kept"
            self.checked["copies of wrong rows"] += before

    def rarely(self):
        draw, kv = self.draw, self.e.kv
        what = draw.number(0, 9)
        if what == 9 and self.reader is not None:
            kv.announce()
        if what == 0 and draw.number(0, 3) == 0:
            kv.clear()
            self.cleared = True
            assert not self.tiers.index.num_points
        elif what == 4 and not self.e.slots:
            if self.tiers.jobs:
                try:
                    kv.reset()
                except ValueError as error:
                    assert "jobs" in str(error)
                    return
                raise AssertionError("a reset with open jobs")
            kv.reset()
            self.cleared = True

    def check(self):
        super().check()
        self.memory.check()
        if self.reader is not None:
            media = dict(zip(["GPU", "CPU"], self._contents(), strict=True))
            self.reader.check(media, any(g.kind == "dense" for g in self.e.kv.layout.groups))
        if self.draw.number(0, 3) == 0:
            self.memory.poison_free_pages()

    def finish_life(self):
        while self.tiers.jobs:
            self.end_job()
        self.finish()
        host = self.tiers.index
        assert host.pool.num_free == host.pool.num_pages - 1
        assert not host.holdings


def live(seed: int, steps: int) -> TieredTraffic:
    """One cache with a host tier, for a number of steps."""
    traffic = TieredTraffic(Dice(seed))
    for _ in range(steps):
        getattr(traffic, traffic.draw.one(traffic.steps()))()
        traffic.check()
    traffic.finish_life()
    return traffic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    checked, left, seed, start = Counter(), args.steps, args.seed, time.time()
    while left > 0:
        steps = min(left, random.Random(seed).choice([100, 300, 1000]))
        try:
            checked += live(seed, steps).checked
        except BaseException:
            print(f"seed {seed}, {steps} steps")
            raise
        left -= steps
        seed += 1
    print(f"{args.steps} steps, {seed - args.seed} lives, {time.time() - start:.0f} s")
    print(dict(checked))


if __name__ == "__main__":
    main()
