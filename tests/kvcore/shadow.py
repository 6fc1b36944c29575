"""Random traffic through kvcore, with a shadow of every row that it gives out.

    python -m tests.kvcore.shadow --calls 300000 --seed 0

A *life* is one cache with random groups, retention, policy and sizes, and the calls that one seed
draws. A stand-in engine keeps its own token lists, writes rows into fake memory (`engine.Device`),
and overwrites the arrays that it passed as soon as a call returns. Hits are what events tell, and
at least what the documents promise (`expected`); every row behind a hit is compared.
"""

import argparse
import itertools
import random
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from quire.kvcore import LRU, Adaptive, EventLog, GroupSpec, KVCache, OutOfPages, Ranked, StepPlan
from quire.kvcore.events import split_keys
from quire.kvcore.invariants import check_index
from quire.kvcore.tier import Job, TierMatch, Tiers
from tests.kvcore.engine import POISON, Device, Request, Text
from tests.kvcore.expected import Promises, Reader, contents, interval_of

MAX_REQUESTS = 5
SALTS = (b"", b"", b"", b"tenant", b"adapter 1")
EXTRA_KEYS = (b"image 1", b"image 2", b"adapter")


class Fault(Exception):
    """Raised by a user's policy or log."""


def failing(name: str):
    """A method of `Moody` that may raise."""

    def method(self, *args):
        if self.fails == name:
            raise Fault(name)
        return getattr(Ranked, name)(self, *args)

    return method


class Moody(Ranked):
    """A user's policy: any order, and the method named by `fails` raises."""

    add, discard, pop, asked = map(failing, ("add", "discard", "pop", "asked"))

    def __init__(self) -> None:
        self.fails = ""

    def rank(self, entry) -> float:
        return hash((entry.depth, entry.num_uses, entry.last_used)) % 7


class MoodyLog(EventLog):
    """A user's log that sometimes raises: the event is lost, and a reader sees a gap."""

    fails = False

    def append(self, event) -> None:
        if self.fails and random.Random(self.next_number).random() < 0.3:
            raise Fault("append")
        super().append(event)


@dataclass
class Launch:
    """A step planned ahead, with its requests as of then."""

    plan: StepPlan
    accepted: dict[Request, int]
    then: dict[Request, int]
    copies: np.ndarray


def random_groups(rng: random.Random) -> list[GroupSpec]:
    """Up to four groups whose segments have at most 32 tokens, some with a drafter's lookahead."""
    if rng.random() < 0.2:  # a replay is shorter than most prompts
        specs = [GroupSpec(f"g{i}", "window", 4, 4096, rng.randint(2, 6)) for i in range(2)]
        return [GroupSpec("dense", "dense", rng.choice((4, 8)), 4096), *specs]
    base, specs = rng.choice((1, 2, 3, 4, 4, 8)), []
    kinds = rng.choices(("dense", "window", "state"), (4, 4, 2), k=rng.choice((1, 2, 2, 3, 3, 4)))
    if rng.random() < 0.1:  # a hybrid model with a drafter
        specs, base = [GroupSpec("draft", "dense", 4, 4096, lookahead=rng.randint(1, 3))], 4
        kinds[0] = "state"
    for i, kind in enumerate(kinds):
        size = base * rng.choice((1, 1, 2, 4))
        window = None
        if kind == "window":
            window = rng.choice((1, 2, size, size + 1, rng.randint(1, 40)))
        ahead = rng.choice((1, 1, 2, 3)) if kind != "state" and rng.random() < 0.25 else 0
        specs.append(GroupSpec(f"g{i}", kind, size, 4096, window, min(ahead, base)))
    return specs


def random_options(rng: random.Random, specs: list[GroupSpec]) -> dict:
    max_len = rng.choice((40, 150, 150, 150, 700))
    drafts = rng.choice((0, 1, 3, 6))
    need = 0  # pages of the longest request
    for g in specs:
        blocks = {"dense": max_len, "window": (g.sliding_window or 0) + drafts + 64, "state": 0}
        need += blocks[g.kind] // g.block_size + 2
    replays = None
    if not any(g.kind == "state" for g in specs) and rng.random() < 0.7:
        reach = sum((g.sliding_window or 1) - 1 for g in specs)
        replays = max(1, reach * rng.choice((1, 3)))
    return {
        "num_pages": 2 + int(need * rng.choice((1.1, 1.5, 3, 12))),
        "max_requests": MAX_REQUESTS,
        "max_model_len": max_len,
        "retention": interval_of(specs, rng.choice(("auto", "latest", "dense", 2, 3))),
        "hash_seed": rng.choice((b"", b"seed")),
        "enable_caching": rng.random() > 0.08,
        "max_draft_tokens": drafts,
        "replay_tokens": replays,
        "max_pinned_pages": rng.choice((None, 0, 20)),
        "reads": rng.choice(("step", "step", "pages")),
        "adopt": rng.random() > 0.2,
        "track_deltas": True,
    }


class Life:
    """A cache and its engine; each method named in `weights` is one step.

    Attributes:
        intact: nothing was evicted, so all promised prefixes must be found.
        pinned: keys of a pinned prefix -> (expiry, a prompt, tokens); cleared where a pin ends
            early.
        copied: open tier job -> whether its pages were copied. promised: open load -> its match.
    """

    weights: ClassVar = {
        "admit": 5, "abort": 0.7, "evict_pages": 0.4, "reset": 0.05, "look": 2, "step": 14, "decode": 2,
        "rollback": 3, "release": 3, "preempt": 1, "pin": 1, "expire_pins": 0.5,
        "evict": 0.7, "clear": 0.05, "ahead": 2, "store": 2, "load": 2, "bounce": 1.5, "end_job": 4, "replay": 2,
    }  # fmt: skip

    def __init__(self, seed: int, calls: Counter) -> None:
        self.rng, self.calls = random.Random(f"{seed}"), calls
        self.capacity = self.rng.choice((None, None, 40, 100_000))  # of events
        self.policy = self.rng.choice((Adaptive, LRU, Moody))()
        self.specs, options = self.draw(self.rng)
        self.now, self.lent, self.names = 0.0, [], itertools.count()
        self.history: list[Text] = []
        self.requests: list[Request] = []
        self.intact, self.num_demoted = True, 0
        self.pinned: dict[bytes, tuple] = {}
        has_host, identities = self.rng.random() < 0.4, self.rng.random() < 0.5
        self.log = None if self.capacity is None else MoodyLog(self.capacity, identities=identities)
        self.kv = KVCache(self.specs, **options, events=self.log, policy=self.policy)
        self.device = Device(self.kv)
        self.promises, self.reader = Promises(self.kv), Reader(self.kv, identities)
        self.tiers, self.copied, self.promised = None, dict[Job, bool](), dict[Job, TierMatch]()
        if has_host and self.kv.enable_caching:
            self.add_host()

    def draw(self, rng: random.Random) -> tuple[list[GroupSpec], dict]:
        specs = random_groups(rng)
        return specs, random_options(rng, specs)

    def add_host(self) -> None:
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

    # Calls.

    def call(self, name: str, *args, **kwargs):
        self.calls[name] += 1
        try:
            return getattr(self.kv, name)(*args, **kwargs)
        finally:
            for array in self.lent:  # the caller's arrays are the caller's
                array[:] = self.rng.randrange(MAX_REQUESTS)
            self.lent.clear()

    def try_call(self, name: str, *args, **kwargs):
        """`call`; None if the user's policy raised."""
        try:
            return self.call(name, *args, **kwargs)
        except Fault:
            assert self.may_fail()
            return None

    def may_fail(self) -> bool:
        """True if the policy is a user's, and in a mood to raise."""
        return bool(getattr(self.policy, "fails", False))

    def lend(self, values):
        """`values` as a list, or as an array that is overwritten once the next call returned."""
        kind = self.rng.choice((None, np.int32, np.int64, np.int64))
        if kind is None:
            return list(values)
        self.lent.append(np.array(list(values), dtype=kind))
        return self.lent[-1]

    def bits(self, low: int, high: int) -> list[int]:
        return self.rng.choices((0, 1), k=self.rng.randint(low, high))

    def number(self, low: int, high: int, start: int) -> int:
        """A number of tokens after position `start`, often up to a boundary or beside it."""
        a = self.kv.alignment
        near = (start + high) // a * a - start + self.rng.choice((-1, 0, 0, 0, 1))
        if low <= near <= high and self.rng.random() < 0.4:
            return near
        return self.rng.randint(low, high)

    def shuffled(self, requests: list[Request]) -> list[Request]:
        return self.rng.sample(requests, len(requests))

    # Prompts and hits.

    def new_text(self) -> Text:
        """A prompt that starts like a known text, or like none."""
        rng, most = self.rng, self.kv.max_model_len - 4
        known = [r.text for r in self.requests] + self.history
        tokens, salt, extra = [], rng.choice(SALTS), []
        if known and rng.random() < 0.9:
            base = rng.choice(known[-4:] if rng.random() < 0.5 else known)
            tokens = base.tokens[: rng.choice((len(base), rng.randint(0, len(base))))]
            salt = base.salt if rng.random() < 0.9 else salt
            extra = list(base.extra_keys) if rng.random() < 0.9 else []
        tokens = (tokens + self.bits(1, rng.choice((2, 40, most))))[:most]
        if rng.random() < 0.15:
            start, key = rng.randrange(len(tokens)), rng.choice(EXTRA_KEYS)
            stop = rng.choice((None, rng.randint(start + 1, len(tokens))))
            extra = [e for e in extra if (e[0], e[2]) != (start, key)] + [(start, stop, key)]
        return Text(tokens, salt, extra)

    def max_tokens(self) -> int | None:
        return self.rng.choice((None, None, None, None, 0, self.rng.randint(0, 200)))

    def look_up(self, text: Text, kwargs: dict):
        if text.extra_keys:
            kwargs["extra_keys"] = self.shuffled(text.extra_keys)
        return self.call("match", self.lend(text.tokens), salt=text.salt, **kwargs)

    def match(self, text: Text, max_tokens: int | None = None):
        """Look a prompt up: the hit is at least what is promised, and what events tell."""
        match = self.look_up(text, {} if max_tokens is None else {"max_tokens": max_tokens})
        kv, promises = self.kv, self.promises
        most = promises.most(text, max_tokens)
        assert match.num_tokens % kv.alignment == 0 and match.num_saved_tokens <= most
        if match.limited_by == "max-tokens":
            assert match.num_tokens == most < min(match.dense_tokens, promises.usable(len(text)))
        assert kv.enable_caching or not match.num_saved_tokens
        self.look_for_evictions()
        if self.intact:
            assert match.dense_tokens >= promises.dense(text), "a promised segment is missing"
            assert match.num_tokens >= promises.hit(text, max_tokens), "a promised hit is missing"
        if self.log is not None:
            read = self.reader.read(self.log)
            if self.reader.lost and read < self.capacity:
                self.call("announce")
                self.reader.read(self.log)
            if not self.reader.lost:
                told = self.reader.hit(text, most)
                if self.reader.dense:
                    assert told == match.num_tokens, "events tell another hit"
                else:  # parents of boundaries are not told
                    assert told <= match.num_tokens, "events tell a longer hit"
        to = min(match.dense_tokens, most)
        first = max(0, to - (kv.replay_tokens or to)) // kv.alignment * kv.alignment
        offered = kv.replay_tokens is not None and kv.hybrid and first > match.num_tokens
        assert (match.replay_from, match.replay_to) == ((first, to) if offered else (None, None))
        return match

    def look(self) -> None:
        text, max_tokens = self.new_text(), self.max_tokens()
        match = self.match(text, max_tokens)
        assert self.call("match", match.prompt, max_tokens=max_tokens) == match

    def admit(self) -> None:
        if len(self.requests) == MAX_REQUESTS:
            self.look()
        else:
            self.admit_text(self.new_text(), changes=True)

    def admit_text(self, text: Text, changes: bool = False) -> None:
        """Admit a request; the cache may change after the look-up, which then counts no more."""
        max_tokens = self.max_tokens()
        match = self.match(text, max_tokens)
        if changes and self.rng.random() < 0.3:
            step = "look" if self.kv.append_only else "step"  # its steps may admit requests
            getattr(self, self.rng.choice(("evict", "evict_pages", "release", "clear", step)))()
        rid = self.rng.choice((next(self.names), f"r{next(self.names)}", ("r", next(self.names))))
        if isinstance(self.policy, Moody) and self.rng.random() < 0.2:
            before, mood = contents(self.kv), self.policy.fails
            self.policy.fails = "asked"
            assert self.try_call("admit", rid, match) is None
            self.policy.fails = mood
            assert contents(self.kv) == before, "a refused admission left traces"
        slot = self.call("admit", rid, match, resumed=self.rng.random() < 0.2)
        assert self.kv.slot_of(rid) == slot
        match = self.call("match", match.prompt, max_tokens=max_tokens)
        assert self.kv.num_computed[slot] == match.num_saved_tokens, "an outdated hit"
        self.calls["replays"] += match.replay_from is not None
        self.requests.append(request := Request(rid, slot, text, match))
        self.begin(request)

    def begin(self, request: Request) -> None:
        self.promises.admit(request, request.match)
        self.device.wipe_free_pages()
        self.device.check(request)

    # Steps.

    def step(self) -> None:
        """Some requests compute a chunk, a token, or drafts, some of which are rejected."""
        counts, accepted = self.choose()
        self.take_step(counts, accepted)

    def choose(self) -> tuple[dict[Request, int], dict[Request, int]]:
        """Tokens that requests compute in a step, and how many of them stay."""
        rng, counts, accepted = self.rng, {}, {}
        drafts = self.kv.max_draft_tokens
        for r in self.shuffled(self.requests):
            left, room = len(r.text) - r.computed, self.kv.max_model_len - len(r.text)
            if rng.random() < 0.4:
                continue
            if left:
                counts[r] = self.number(1, min(left, rng.choice((1, 8, 64, left))), r.computed)
            elif room:
                r.text.extend(self.bits(1, min(room, rng.choice((1, drafts + 1, 3 * drafts + 1)))))
                counts[r] = len(r.text) - r.computed
        if counts and rng.random() < 0.4:
            slots = self.lend([r.slot for r in counts])
            cut = self.call("cut", slots, self.lend(counts.values())).tolist()
            assert all(1 <= c <= n for c, n in zip(cut, counts.values(), strict=True))
            counts = dict(zip(counts, cut, strict=True))
        for r, n in counts.items():
            given = r.computed + n <= r.text.num_given and rng.random() < 0.8
            accepted[r] = n if given else self.number(max(1, n - drafts), n, r.computed)
        return counts, accepted

    def decode(self) -> None:
        """The same requests compute a token or drafts each, again and again."""
        most, drafts = self.kv.max_model_len, self.kv.max_draft_tokens
        size = self.rng.choice((1, 1 + self.rng.randint(0, drafts)))
        batch = [r for r in self.shuffled(self.requests) if r.computed == len(r.text)]
        for _ in range(self.rng.randint(1, 32)):
            batch = [r for r in batch if len(r.text) + size <= most]
            for r in batch:
                r.text.extend(self.bits(size, size))
            accepted = {r: self.number(max(1, size - drafts), size, r.computed) for r in batch}
            if not self.take_step(dict.fromkeys(batch, size), accepted):
                break
            self.check()

    def take_step(self, counts: dict[Request, int], accepted: dict[Request, int]) -> bool:
        """Plan a step, run it, commit it; False if it does not fit or the engine gives it up."""
        rng, kv, device = self.rng, self.kv, self.device
        if not counts:
            return False
        plan = self.fits("plan", self.lend([r.slot for r in counts]), self.lend(counts.values()))
        if plan is None or rng.random() < 0.05:
            for r in counts:
                r.text.cut(r.computed)
            return False
        rejects = counts != accepted or rng.random() < 0.3
        self.calls["with drafts"] += rejects
        arrays = self.arrays_of(plan)
        device.wipe_free_pages()
        ids = device.run(plan, accepted)
        held = kv.pool.holds > 0
        taken = self.lend(accepted.values()) if rejects else None
        copies = self.call("commit", plan, self.lend(ids), taken)
        assert not held[copies[:, 1]].any(), "a snapshot that a resume point holds is written over"
        device.copy(copies)
        assert self.arrays_of(plan) == arrays, "the arrays of a plan changed"
        for request, n in accepted.items():
            request.computed += n
            if rejects:
                request.text.cut(request.computed)
            self.promises.advance(request)
        if single := [r for r, n in counts.items() if n == 1]:
            device.check_formats(single, back=1)
        return True

    def fits(self, *args, **kwargs):
        """Result of a call that takes pages; None if they do not suffice, or the policy raises."""
        stock = self.kv.num_free_pages + self.kv.num_evictable_pages
        plan = self.try_call(*args, **kwargs)
        if plan is None or not isinstance(plan, OutOfPages):
            return plan
        self.calls["out of pages"] += 1
        assert plan.needed > plan.free + plan.evictable == stock
        assert sum(plan.per_group.values()) == plan.needed
        return None

    def reserve(self, counts: dict[Request, int]):
        """Reserve one by one, some requests twice, or all at once; returns the step's arrays."""
        rng, order, most = self.rng, list(counts), self.kv.max_model_len
        twice = [r for r in order if rng.random() < 0.1]
        for r in twice:  # for one token, or too many: the end falls then
            end = r.computed + rng.choice((1, counts[r], counts[r] + 9))
            self.fits("reserve", r.slot, min(end, most))
        for r in self.shuffled(twice) if rng.random() < 0.5 else ():
            self.call("advance", r.slot, r.computed)
        slots, ends = [r.slot for r in order], [r.computed + n for r, n in counts.items()]
        if rng.random() < 0.3:
            if self.fits("reserve", self.lend(slots), self.lend(ends)) is None:
                return None
        else:
            for slot, end in zip(slots, ends, strict=True):
                room = self.call("room", slot)
                free = self.kv.num_free_pages
                if end <= room and rng.random() < 0.5 and not self.kv._reserved.until[slot]:
                    continue
                given = self.fits("reserve", slot, end)
                if given is None:
                    return None
                assert end > room or (not any(given) and self.kv.num_free_pages == free)
        starts = [r.computed for r in order]
        return self.call("arrays", self.lend(slots), self.lend(starts), self.lend(ends))

    @staticmethod
    def arrays_of(plan) -> list[bytes]:
        arrays = (getattr(plan, name) for name in dir(plan) if name[0] != "_")
        return [a.tobytes() for a in arrays if isinstance(a, np.ndarray)]

    def ahead(self) -> None:
        """Steps are reserved and advanced one by one, and their tokens are known last.

        They run as soon as they are reserved, or late: after all of them.
        """
        queue: list[Launch] = []
        late = self.rng.random() < 0.5
        for _ in range(self.rng.choice((1, 1, 2, 3, 4))):
            launch = self.launch(*self.choose(), late)
            if launch is None:
                break
            queue.append(launch)
            if self.rng.random() < 0.3:  # calls of others do steps in flight no harm
                self.evict()
                self.match(self.new_text())
        for launch in queue if late else ():
            self.device.run(launch.plan, launch.then)
            self.device.copy(launch.copies)
        if self.rng.random() < 0.2 and len(self.requests) < MAX_REQUESTS:
            self.admit_text(self.new_text())
        last = {r: r.computed for launch in queue for r in launch.accepted}
        for launch in queue:
            starts = [r.computed for r in launch.then]
            for (r, n), start in zip(launch.accepted.items(), starts, strict=True):
                r.computed = start + n
            self.publish(list(launch.accepted), starts)
            for r in launch.accepted:
                self.promises.advance(r)
        for r, computed in last.items():
            r.computed = computed

    def publish(self, order: list[Request], starts: list[int]) -> None:
        """Publish the tokens of a step, request by request or all at once."""
        texts = [r.text.tokens[a : r.computed] for r, a in zip(order, starts, strict=True)]
        slots, ends = [r.slot for r in order], [r.computed for r in order]
        if self.rng.random() < 0.5:
            tokens = self.lend(itertools.chain(*texts))
            self.call("publish", self.lend(slots), self.lend(ends), tokens)
            return
        for slot, end, text in zip(slots, ends, texts, strict=True):
            self.call("publish", slot, end, self.lend(text))

    def launch(
        self, counts: dict[Request, int], accepted: dict[Request, int], late: bool
    ) -> Launch | None:
        """Reserve a step, run it unless it is `late`, and advance it.

        Returns:
            None if the step does not fit or the engine gives it up.
        """
        if not counts:
            return None
        device, slots = self.device, [r.slot for r in counts]
        plan = self.reserve(counts)
        if plan is None or self.rng.random() < 0.05:
            free, taken = self.kv.num_free_pages, sum(map(len, self.kv._reserved.pages.values()))
            self.call("advance", self.lend(slots), self.lend([r.computed for r in counts]))
            assert self.kv.num_free_pages == free + taken
            for r in counts:
                r.text.cut(r.computed)
            return None
        then = {r.at_launch(device.rows_of_tables(r)): n for r, n in accepted.items()}
        if not late:
            device.wipe_free_pages()
            device.run(plan, accepted)
        held = self.kv.pool.holds > 0
        for r, n in accepted.items():
            r.computed += n
            r.text.cut(r.computed)
        copies = self.call("advance", self.lend(slots), self.lend([r.computed for r in counts]))
        assert not held[copies[:, 1]].any(), "a snapshot that a resume point holds is written over"
        if not late:
            device.copy(copies)
        self.calls["ahead"] += 1
        return Launch(plan, accepted, then, copies)

    def rollback(self) -> None:
        for r in self.shuffled(self.requests):
            low = self.kv._lowest(r.slot)
            assert low <= r.computed
            if low < r.computed:
                left = self.rng.choice((low, self.rng.randint(low, r.computed - 1)))
                self.call("rollback", r.slot, r.computed - left)
                r.computed = left
                r.text.cut(left)
                self.promises.rollback(r)
                return

    # Ends of requests, and of what is cached.

    def pop_request(self) -> Request:
        return self.requests.pop(self.rng.randrange(len(self.requests)))

    def remember(self, text: Text) -> None:
        self.history.append(text)
        del self.history[:-64]

    def release(self, preempt: bool = False) -> None:
        if not self.requests:
            return
        r = self.pop_request()
        self.call("release", r.rid)
        self.promises.end(r)
        tokens = r.text.tokens if preempt else r.text.tokens[: r.computed] or [0]
        done = Text(tokens, r.text.salt, r.text.extra_keys)
        self.remember(done)
        if preempt:
            self.admit_text(done)

    def preempt(self) -> None:
        """A request is released, and comes back with all its tokens as its prompt."""
        self.release(preempt=True)

    def abort(self) -> None:
        """A discarded request leaves no more behind than its commits did."""
        if not self.requests:
            return
        r = self.pop_request()
        text = Text(r.text.tokens[: r.computed] or [0], r.text.salt, r.text.extra_keys)
        before = self.match(text)
        self.call("release", r.rid, discard=True)
        assert self.match(text).num_tokens <= before.num_tokens, "what was discarded is findable"
        self.remember(text)

    def pin(self) -> None:
        match = self.match(self.new_text())
        ttl = self.rng.choice((1.0, 50.0))
        pinned = self.call("pin", match, now=self.now, ttl=ttl)
        assert pinned in (0, match.num_tokens)
        assert self.kv.stats()["pinned_pages"] <= self.kv.max_pinned_pages
        self.look_for_evictions()
        keys = match.prompt.keys[: pinned // self.kv.alignment * 32]
        if pinned:
            self.pinned[keys] = self.now + ttl, match.prompt, pinned
        if self.rng.random() < 0.3:
            assert self.call("unpin", match) or not pinned
            self.pinned.pop(keys, None)

    def expire_pins(self) -> None:
        self.now += self.rng.choice((0.5, 10.0))
        stay = {keys: pin for keys, pin in self.pinned.items() if pin[0] > self.now}
        assert self.call("expire_pins", self.now) >= len(self.pinned) - len(stay)
        assert self.kv.stats()["pins"] >= len(stay)
        self.pinned = stay

    def evict(self) -> None:
        n = self.rng.choice((0, 1, 5, self.kv.num_pages))
        most = self.kv.num_evictable_pages
        freed = self.try_call("evict", n)
        assert self.may_fail() if freed is None else min(n, most) <= freed <= most

    def evict_pages(self) -> None:
        """Certain pages become free, except those that running requests and open jobs have."""
        kv, rng = self.kv, self.rng
        pages = rng.choices(range(1, kv.num_pages), k=rng.choice((0, 1, 1, 4, kv.num_pages)))
        self.evict_these(pages)

    def evict_these(self, pages: list[int]) -> None:
        kv, before = self.kv, self.kv.num_free_pages
        self.pinned.clear()
        stayed = self.try_call("evict_pages", self.lend(pages))
        if stayed is None:
            assert self.may_fail()
            return
        used = [row for r in self.requests for row in self.device.rows_of_tables(r)]
        # Of a segment that two requests computed the index has one page, and the table the other.
        used += [run.look().ravel() for run in kv.index.runs() if run.locks]
        for job in () if self.tiers is None else self.tiers.jobs:
            used.append(job.targets if job.kind == "load" else job.sources)
        used = {*np.concatenate([*used, [0]]).tolist()}
        stayed, free = {*stayed.tolist()}, {*kv.pool.free_pages().tolist()}
        assert stayed <= {*pages} & used and kv.num_free_pages >= before
        assert free >= {*pages} - stayed and not free & stayed

    def replay(self) -> None:
        """Without resume points, a prompt that goes on with a running request's text replays."""
        self.evict_these([p for p in self.kv.pool.holds.nonzero()[0].tolist() if p])
        if self.requests and len(self.requests) < MAX_REQUESTS:
            base = max((r.text for r in self.requests), key=len)
            tokens = (base.tokens + self.bits(1, 8))[: self.kv.max_model_len - 4]
            self.admit_text(Text(tokens, base.salt, list(base.extra_keys)))

    def clear(self) -> None:
        self.intact = False
        self.pinned.clear()
        self.call("clear")
        assert self.kv.num_evictable_pages == 0

    def reset(self) -> None:
        """All is forgotten, and running requests end."""
        self.end_jobs()
        assert self.call("reset", end_requests=True) == [r.rid for r in self.requests]
        for r in self.requests:
            self.remember(Text(r.text.tokens, r.text.salt, r.text.extra_keys))
        self.requests.clear()
        assert self.kv.num_free_pages == self.kv.num_pages - 1
        self.promises = Promises(self.kv)
        self.pinned.clear()
        for text in self.history[-8:]:
            assert self.match(text).dense_tokens == 0

    # The host tier.

    def store(self) -> None:
        if self.tiers is not None:
            for job in self.tiers.stores(self.rng.choice((1, 4096 * 4, 1 << 30))):
                self.begin_job(job)
                self.calls["stores"] += 1

    def load(self) -> None:
        """Load a prompt that the host may have; the look-up changes nothing."""
        if self.tiers is None:
            return
        text, kv = self.new_text(), self.kv
        if self.history and self.rng.random() < 0.7:
            text = self.rng.choice(self.history[-16:])
        before = self.host_numbers()
        match = self.tiers.match(text.tokens, salt=text.salt, extra_keys=text.extra_keys)
        assert self.host_numbers() == before and match.explain()
        assert match.device == kv.match(match.prompt)
        assert match.num_saved_tokens >= match.device.num_saved_tokens
        assert match.num_saved_tokens <= self.promises.usable(len(text))
        assert (match.num_bytes > 0) == (match.num_saved_tokens > match.device.num_saved_tokens)
        job = self.tiers.load(match)
        if job is None:
            assert kv.num_free_pages == before["free_pages"]
        else:
            assert 0 < job.num_bytes <= match.num_bytes
            assert job.num_tokens == match.num_saved_tokens
            self.promised[job] = match
            self.calls["loads"] += 1
            self.begin_job(job)

    def bounce(self) -> None:
        """All that is due is stored, everything leaves the device, and prompts come back."""
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

    def host_numbers(self) -> dict[str, int]:
        return self.kv.stats() | {"host_evictable": self.tiers.index.num_evictable}

    def begin_job(self, job: Job) -> None:
        self.copied[job] = False
        if self.rng.random() < 0.5:
            self.copy(job)

    def copy(self, job: Job, num_pages: int | None = None) -> None:
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
        """A job is done, fails after some of its pages, or is cancelled."""
        if not self.copied:
            return
        job = self.rng.choice(list(self.copied))
        way = self.rng.choice(("done", "done", "done", "done", "cancel", "failed"))
        if self.copied[job]:
            way = "done"
        kv, match = self.kv, self.promised.pop(job, None)
        is_void = job.is_void
        segments = kv.index.num_segments, self.tiers.index.num_segments
        if way == "cancel":
            self.tiers.cancel(job)
        elif way == "failed":
            self.copy(job, self.rng.randrange(len(job.sources) or 1))
            assert not self.tiers.done(job, failed=True)
        else:
            self.copy(job)
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

    def check_host(self) -> None:
        """The host is sound, and its events name what it has."""
        index, reader = self.tiers.index, self.reader
        check_index(index, [], [], [], Counter())
        self.host[index.pool.free_pages()] = POISON
        if self.log is None or reader.lost:
            return
        reader.read(self.log)
        if reader.lost:
            return
        runs = list(index.runs())
        points, chains = set(), {id(index.root): ()}
        for run in runs:
            chain = chains[id(run)] = chains[id(run.parent)] + split_keys(run.keys)
            points |= {chain[depth - 1] for depth in run.points}
        for group in reader.dense[:1]:
            keys = {key for run in runs for key in split_keys(run.keys)}
            assert reader.host[group].keys() == keys, "segments of the host by its events"
        for group in reader.others:
            stored = {event.block_hashes[-1] for event in reader.host[group].values()}
            assert stored == points, "resume points of the host by its events"

    # After each step.

    def look_for_evictions(self) -> None:
        stats = self.kv.stats()
        if stats["evicted_resume_points"] or stats["evicted_segments"]:
            self.intact = False
        if stats["demoted_pins"] > self.num_demoted:
            self.num_demoted = stats["demoted_pins"]
            self.pinned.clear()

    def check(self) -> None:
        """Check invariants, and the rows of each request's next query in all table formats."""
        kv = self.kv
        self.look_for_evictions()
        for r in self.requests if not kv.append_only else ():
            assert kv.num_computed[r.slot] == r.computed
        if self.rng.random() < 0.3:
            kv.check_invariants()
            for _, prompt, num_tokens in self.pinned.values():
                assert kv.match(prompt).num_tokens >= num_tokens, "a pinned prefix is gone"
            self.device.wipe_free_pages()
            for r in self.requests:
                self.device.check(r)
            if not kv.append_only:
                if self.requests:
                    self.device.check_formats(self.requests)
                self.device.check_deltas(self.requests)
            if self.tiers is not None:
                self.check_host()

    def take(self, name: str) -> None:
        """One step; in some, the user's policy and log fail."""
        risky = ("step", "decode", "release", "rollback", "evict", "evict_pages")
        if name in risky and self.rng.random() < 0.1:
            if isinstance(self.policy, Moody):
                self.policy.fails = self.rng.choice(("add", "discard", "pop"))
            if self.log is not None:
                self.log.fails = True
        getattr(self, name)()
        if isinstance(self.policy, Moody):
            self.policy.fails = ""
        if self.log is not None:
            self.log.fails = False
        self.check()

    def finish(self) -> None:
        """Release and clear everything: all pages come back."""
        self.end_jobs()
        while self.requests:
            self.release()
        self.call("clear")
        self.kv.check_invariants()
        assert self.kv.num_free_pages == self.kv.num_pages - 1


class ListLife(Life):
    """A life of an append-only cache: workers append new pages, and write before they read."""

    weights: ClassVar = {
        "admit": 3, "look": 2, "step": 14, "release": 2, "preempt": 1, "abort": 0.7, "pin": 1,
        "expire_pins": 0.5, "evict": 0.7, "store": 2, "load": 2, "bounce": 1.5, "end_job": 4, "clear": 0.05, "reset": 0.05,
    }  # fmt: skip

    def draw(self, rng: random.Random) -> tuple[list[GroupSpec], dict]:
        specs, options = super().draw(rng)
        specs = [
            GroupSpec(g.name, g.kind, g.block_size, 4096, g.sliding_window)
            for g in specs
            if g.kind != "state"
        ] or [GroupSpec("g0", "dense", 4, 4096)]
        options |= {"retention": rng.choice(("auto", "latest", "dense"))}
        options |= {"max_draft_tokens": 0, "replay_tokens": None, "track_deltas": False}
        options |= {"reads": "pages", "adopt": False, "append_only": True}
        self.capacity = None
        self.keyed = rng.random() < 0.5  # the engine brings keys of its own
        return specs, options

    def look_up(self, text: Text, kwargs: dict):
        if not self.keyed:
            return super().look_up(text, kwargs)
        keys = b"".join(self.reader.keys(text))
        return self.call("match", keys=keys, num_tokens=len(text), **kwargs)

    def begin(self, request: Request) -> None:
        request.own = [list(pages) for pages in self.kv.pages_of(request.slot)]
        super().begin(request)

    def step(self) -> None:
        """All writes of a step, then all reads; new requests may hit rows that it writes."""
        rng, kv, batch = self.rng, self.kv, []
        for r in self.shuffled(self.requests):
            if rng.random() < 0.3 or r not in self.requests:
                continue
            left, room = len(r.text) - r.computed, kv.max_model_len - len(r.text)
            drafts = 0 if left > 1 else max(0, min(rng.choice((0, 0, 1, 5)), room - 1))
            if left == 0:
                if room < 1:
                    continue
                r.text.extend(self.bits(1, 1))
                left = 1
            n = left if left == 1 else rng.randint(1, left)
            keeps = rng.random() < 0.95
            self.intact &= keeps
            oldest = max(0, r.computed - rng.choice((0, 0, 5)))  # of a step in flight
            self.call("advance", r.slot, r.computed, oldest, keep_tails=keeps)
            if self.schedule(r, n, drafts):
                batch.append((r, n, drafts))
        if rng.random() < 0.4 and len(self.requests) < MAX_REQUESTS:
            self.admit_text(self.new_text())
            r = self.requests[-1]
            n = rng.randint(1, len(r.text) - r.computed)
            if self.schedule(r, n, 0):
                batch.append((r, n, 0))
        for r, n, drafts in batch:
            self.device.check_span(r, r.computed + n + drafts)
            r.computed += n + rng.randint(0, drafts)
            r.text.cut(r.computed if drafts else len(r.text))

    def schedule(self, r: Request, n: int, drafts: int) -> bool:
        """Reserve `n` tokens and `drafts`, publish the tokens, write all; False: no pages."""
        start, end = r.computed, r.computed + n + drafts
        quiet = end <= self.call("room", r.slot)
        given = self.fits("reserve", r.slot, end)
        if given is None:
            return False
        assert not (quiet and any(given))
        for own, new in zip(r.own, given, strict=True):
            own += new
        upto, known = start + n, r.published
        if self.keyed:
            keys = self.reader.keys(Text(r.text.tokens[:upto], r.text.salt, r.text.extra_keys))
            self.call("publish", r.slot, upto, keys=b"".join(keys[known // self.kv.alignment :]))
        else:
            self.call("publish", r.slot, upto, self.lend(r.text.tokens[r.published : upto]))
        r.published = r.computed = upto
        self.promises.advance(r)
        r.computed = start
        r.text.extend(self.bits(drafts, drafts))
        self.device.write_span(r, end)
        return True


# Running lives.


def run(seed: int, num_steps: int, calls: Counter) -> Life:
    """Live through random steps; a failure names its seed and step."""
    rng, step = random.Random(f"{seed} steps"), "build"
    try:
        life = (ListLife if seed % 5 == 3 else Life)(seed, calls)
        names = rng.choices(list(life.weights), list(life.weights.values()), k=num_steps)
        for number, name in enumerate(names):
            step = f"step {number} ({name})"
            life.rng = random.Random(f"{seed}/{number}")
            life.take(name)
        step = "finish"
        life.finish()
    except Exception as error:
        error.add_note(f"seed {seed}, {step}")
        raise
    return life


def main() -> None:
    parser = argparse.ArgumentParser(description="Random traffic through kvcore.")
    parser.add_argument("--calls", type=int, default=20_000, help="calls to make, at least")
    parser.add_argument("--seed", type=int, default=0, help="of the first life; the next follow")
    args = parser.parse_args()
    calls, checked, seed = Counter(), 0, args.seed
    while calls.total() < args.calls:
        checked += run(seed, 200, calls).device.rows_checked
        seed += 1
    print(f"{calls.total()} calls, {seed - args.seed} lives, {checked} rows checked")
    print(", ".join(f"{name} {n}" for name, n in sorted(calls.items())))


if __name__ == "__main__":
    main()
