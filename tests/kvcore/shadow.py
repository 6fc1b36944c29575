"""Random traffic through kvcore, with a shadow of every row that it gives out.

    python -m tests.kvcore.shadow --calls 300000 --seed 0

A *life* is one cache with random groups, retention, policy and sizes, and the calls that one seed draws. An engine as a
stranger writes it runs along: it keeps its own token lists, writes rows into fake memory (`device`), overwrites the
arrays that it passed as soon as a call returns, and misuses the cache now and then (`misuse`). Hits lie between what
the documents promise and what is possible at all (`promises`). What fails is told with its seed; ``--shrink`` finds a shorter
list of steps that fails alike, and prints the calls that they make.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
import traceback
from collections import Counter
from typing import ClassVar

import numpy as np
from tqdm import tqdm

from quire.kvcore import (
    LRU,
    Adaptive,
    EventLog,
    GroupSpec,
    KVCache,
    OutOfPages,
    Ranked,
)
from tests.support.kvcore.ahead import Ahead
from tests.support.kvcore.device import Device, Request, Text
from tests.support.kvcore.digest import digest
from tests.support.kvcore.hosted import Hosted
from tests.support.kvcore.lists import Lists
from tests.support.kvcore.misuse import Misuse
from tests.support.kvcore.promises import Promises, Reader, interval_of, possible
from tests.support.kvcore.taken_away import TakenAway

MAX_REQUESTS = 5
SALTS = (b"", b"", b"", b"tenant", b"adapter 1")


class Fault(Exception):
    """Raised by a user's policy."""


class Moody(Ranked):
    """A user's policy: any order, and the methods named in `fails` raise."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: set[str] = set()

    def _maybe(self, name: str) -> None:
        if name in self.fails:
            raise Fault(name)

    def rank(self, entry) -> float:
        return hash((entry.depth, entry.num_uses, entry.last_used)) % 7

    def add(self, entry) -> None:
        self._maybe("add")
        super().add(entry)

    def discard(self, entry) -> None:
        self._maybe("discard")
        super().discard(entry)

    def pop(self):
        self._maybe("pop")
        return super().pop()

    def asked(self, keys, hit, kept=()) -> None:
        self._maybe("asked")


class MoodyLog(EventLog):
    """A user's log that now and then raises: the event is lost, and a reader sees a gap."""

    fails = False

    def append(self, event) -> None:
        if self.fails and random.Random(self.next_number).random() < 0.3:
            raise Fault("append")
        super().append(event)


POLICIES = (Adaptive, LRU, Moody)


def random_groups(rng: random.Random) -> list[GroupSpec]:
    """A mix of groups whose segments have at most 32 tokens, some of them without a dense group, some with drafters' rows."""
    base, specs = rng.choice((1, 2, 3, 4, 4, 8)), []
    kinds = rng.choices(("dense", "window", "state"), (4, 4, 2), k=rng.choice((1, 2, 2, 3, 3, 4)))
    if rng.random() < 0.1:  # what a hybrid model with a drafter has
        specs, base = [GroupSpec("draft", "dense", 4, 4096, lookahead=rng.randint(1, 3))], 4
        kinds[0] = "state"
    for i, kind in enumerate(kinds):
        size = base * rng.choice((1, 1, 2, 4))
        window = (
            rng.choice((1, 2, size, size + 1, rng.randint(1, 40))) if kind == "window" else None
        )
        ahead = rng.choice((1, 1, 2, 3)) if kind != "state" and rng.random() < 0.25 else 0
        specs.append(GroupSpec(f"g{i}", kind, size, 4096, window, min(ahead, base)))
    return specs


def options_of(rng: random.Random, specs: list[GroupSpec]) -> dict:
    """Arguments of a cache of these groups."""
    max_len = rng.choice((40, 150, 150, 150, 700))
    drafts = rng.choice((0, 1, 3, 6))
    need = 0  # pages of the longest request
    for g in specs:
        blocks = {"dense": max_len, "window": (g.sliding_window or 0) + drafts + 64, "state": 0}
        need += blocks[g.kind] // g.block_size + 2
    replays = None
    if not any(g.kind == "state" for g in specs) and rng.random() < 0.4:
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
    }


class Life(Misuse, TakenAway, Ahead, Hosted):
    """A cache, its engine, and what it owes; each method named in `weights` is one step.

    Args:
        seed: of everything.
        calls: counts each call of kvcore by its name.
        trace: source lines of the calls; None keeps none.
    """

    weights: ClassVar = {
        "admit": 5, "abort": 0.7, "evict_pages": 0.4, "reset": 0.05, "look": 2, "step": 14, "decode": 2, "drop_plan": 1, "rollback": 3, "release": 3, "preempt": 1, "pin": 1,
        "pin_request": 0.5, "expire_pins": 0.5, "evict": 0.7, "clear": 0.05, "stale_plan": 0.7, "foreign_plan": 0.2,
        "wrong_arguments": 0.7, "ahead": 2, "store": 2, "load": 2, "bounce": 1.5, "end_job": 4,
    }  # fmt: skip

    def __init__(self, seed: int, calls: Counter, trace: list[str] | None = None) -> None:
        self.rng, self.calls, self.trace = random.Random(f"{seed}"), calls, trace
        self.capacity = self.rng.choice((None, None, 40, 100_000))  # of events
        self.make_policy = self.rng.choice(POLICIES)
        self.specs, self.options = self.draw(self.rng)
        self.results: list[
            tuple[str, object]
        ] = []  # of calls, with the names that they have in `trace`
        self.now, self.lent, self.missed, self.names = 0.0, [], Counter(), itertools.count()
        self.history: list[Text] = []
        self.requests: list[Request] = []
        self.intact = True  # nothing was evicted
        self.has_host = self.rng.random() < 0.4
        self.identities = self.rng.random() < 0.5
        self.start(self.new_cache())

    def draw(self, rng: random.Random) -> tuple[list[GroupSpec], dict]:
        """Groups and arguments of the cache."""
        specs = random_groups(rng)
        return specs, options_of(rng, specs)

    def new_cache(self) -> KVCache:
        log = None if self.capacity is None else MoodyLog(self.capacity, identities=self.identities)
        options = {
            "track_deltas": True,
            **self.options,
            "events": log,
            "policy": self.make_policy(),
        }
        if self.trace is not None:
            plain = {k: v for k, v in options.items() if k not in ("events", "policy")}
            policy = f"policy={self.make_policy.__name__}(), events={log and f'MoodyLog({self.capacity})'}"
            self.trace.append(f"kv = KVCache({self.specs}, {policy}, **{plain})")
        self.log = log
        return KVCache(self.specs, **options)

    def start(self, kv: KVCache, memory: np.ndarray | None = None) -> None:
        self.kv, self.policy = kv, kv.index.policy
        self.device = Device(kv, self.calls, memory)
        self.promises = Promises(kv)
        self.reader = Reader(kv, self.identities)
        self.add_host()

    # How calls are made.

    def call(self, name: str, *args, **kwargs):
        """A call of the cache."""
        self.calls[name] += 1
        if self.trace is not None:
            shown = [*map(self._shown, args), *(f"{k}={v!r}" for k, v in kwargs.items())]
            self.trace.append(f"x{len(self.trace)} = kv.{name}({', '.join(shown)})")
        try:
            result = getattr(self.kv, name)(*args, **kwargs)
            if self.trace is not None:
                self.results.append((f"x{len(self.trace) - 1}", result))
            return result
        finally:
            for array in self.lent:  # the caller's arrays are the caller's
                array[:] = self.rng.randrange(MAX_REQUESTS)
            self.lent.clear()

    @property
    def fails_now(self) -> bool:
        """Whether the user's policy may raise."""
        return bool(getattr(self.policy, "fails", ()))

    def try_call(self, name: str, *args, **kwargs):
        """`call`; None if the user's policy raised."""
        try:
            return self.call(name, *args, **kwargs)
        except Fault:
            assert self.policy.fails
            return None

    def _shown(self, value) -> str:
        """Source text of an argument: the result of an earlier call, or a part of one, by its name."""
        for name, known in self.results:
            if value is known:
                return name
            if value is getattr(known, "prompt", known):
                return f"{name}.prompt"
        return repr(value.tolist() if isinstance(value, np.ndarray) else value)

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
        """A number of tokens from position `start` on, often one that ends at a boundary or beside it."""
        a = self.kv.alignment
        near = (start + high) // a * a - start + self.rng.choice((-1, 0, 0, 0, 1))
        if low <= near <= high and self.rng.random() < 0.4:
            return near
        return self.rng.randint(low, high)

    def order(self, requests: list[Request]) -> list[Request]:
        return self.rng.sample(requests, len(requests))

    # Prompts and hits.

    def new_text(self) -> Text:
        """A prompt that starts like something known, or like nothing."""
        rng, most = self.rng, self.kv.max_model_len - 4
        known = [r.text for r in self.requests] + self.history
        tokens, salt, base = [], rng.choice(SALTS), None
        if known and rng.random() < 0.9:
            base = rng.choice(known[-4:] if rng.random() < 0.5 else known)
            size = rng.choice((len(base), rng.randint(0, len(base))))
            tokens = base.tokens[:size]
            salt = base.salt if rng.random() < 0.9 else salt
        tokens = tokens + self.bits(1, rng.choice((2, 40, most)))
        tokens = tokens[:most]
        return Text(tokens, salt, self.new_extra_keys(base, len(tokens)))

    def match(self, text: Text, max_tokens: int | None = None):
        """Look a prompt up: hits are at least what is promised, and what a reader of the events would say."""
        kwargs = {} if max_tokens is None else {"max_tokens": max_tokens}
        match = self.look_up(text, kwargs)
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
                assert told <= match.num_tokens, "events tell a longer hit"
                # Between two points whose windows overlap there may be hits that a reader need not see.
                kinds = {g.kind for g in kv.layout.groups}
                between = "window" in kinds and "state" not in kinds
                assert told == match.num_tokens or between, "events tell a shorter hit"
        self._check_replay(match, most)
        return match

    def look_up(self, text: Text, kwargs: dict):
        if text.extra_keys:
            kwargs["extra_keys"] = self.order(text.extra_keys)
        return self.call("match", self.lend(text.tokens), salt=text.salt, **kwargs)

    def _check_replay(self, match, most: int) -> None:
        kv = self.kv
        to = min(match.dense_tokens, most)
        first = max(0, to - (kv.replay_tokens or to)) // kv.alignment * kv.alignment
        offered = kv.replay_tokens is not None and kv.hybrid and first > match.num_tokens
        assert (match.replay_from, match.replay_to) == ((first, to) if offered else (None, None))

    def look(self) -> None:
        """Look a prompt up, and count how much longer the hit could be."""
        text, max_tokens = self.new_text(), self.max_tokens()
        match, most = self.match(text, max_tokens), possible(self.device, text, max_tokens)
        if self.kv.enable_caching:
            assert match.num_tokens <= most, "a hit on rows that are gone"
            self.missed[(most - match.num_tokens) // self.kv.alignment] += 1
        assert self.call("match", match.prompt, max_tokens=max_tokens) == match

    def max_tokens(self) -> int | None:
        """The longest hit that the engine wants."""
        return self.rng.choice((None, None, None, None, 0, self.rng.randint(0, 200)))

    def admit(self) -> None:
        if len(self.requests) == MAX_REQUESTS:
            return self.look()
        self.admit_text(self.new_text())

    def admit_text(self, text: Text) -> None:
        match = self.match(text, self.max_tokens())
        rid = self.rng.choice((next(self.names), f"r{next(self.names)}", ("r", next(self.names))))
        if isinstance(self.policy, Moody) and self.rng.random() < 0.2:
            self.policy.fails = {"asked"}
            before = digest(self.kv)
            self.fails("admit", rid, match, error=Fault)
            assert digest(self.kv) == before, "a failed admit left traces"
            self.policy.fails = set()
        slot = self.call("admit", rid, match, resumed=self.rng.random() < 0.2)
        assert self.kv.slot_of(rid) == slot
        self.requests.append(request := Request(rid, slot, text, match))
        self.begin(request)

    def begin(self, request: Request) -> None:
        """The first query of a request that was admitted finds its rows."""
        self.promises.admit(request, request.match)
        self.device.wipe_free_pages()
        self.device.check(request)

    # Steps.

    def advance(
        self, counts: dict[Request, int], accepted: dict[Request, int] | None = None
    ) -> bool:
        """Plan a step, run it on the device, commit it; False if it does not fit."""
        rng, order = self.rng, list(counts)
        slots, is_open = [r.slot for r in order], rng.random() < 0.5
        if is_open:
            plan = self._reserved(counts)
        else:
            asked = self.call("needed", self.lend(slots), self.lend(counts.values()))
            plan = self._fits("plan", self.lend(slots), self.lend(counts.values()))
            assert asked.fits == (plan is not None) or self.fails_now
            assert asked.needed == sum(asked.per_group.values())
            assert plan is None or asked.needed == plan.changes.num_new
        if plan is None or rng.random() < 0.05:  # the engine changed its mind
            if is_open:
                free, taken = self.kv.num_free_pages, self.held_back()
                self.call("advance", self.lend(slots), self.lend([r.computed for r in order]))
                assert self.kv.num_free_pages == free + taken
                self.device.wipe_free_pages()
            return False
        self.finish_step(plan, counts, accepted, is_open)
        return True

    def held_back(self) -> int:
        """Pages that are reserved."""
        return sum(map(len, self.kv._reserved.pages.values()))

    def _fits(self, *args, **kwargs):
        """What a call gives that plans something; None where pages do not suffice, or the policy raises."""
        stock = self.kv.num_free_pages + self.kv.num_evictable_pages
        plan = self.try_call(*args, **kwargs)
        if plan is None or not isinstance(plan, OutOfPages):
            return plan
        self.calls["out of pages"] += 1
        assert plan.needed > plan.free + plan.evictable == stock
        assert sum(plan.per_group.values()) == plan.needed
        return None

    def _reserved(self, counts: dict[Request, int]):
        """The arrays of a step for which requests reserve one by one, some of them twice, or all at once."""
        rng, order, most = self.rng, list(counts), self.kv.max_model_len
        twice = [r for r in order if rng.random() < 0.1]
        for r in twice:  # for one token, or too many: the end falls then
            end = r.computed + self.rng.choice((1, counts[r], counts[r] + 9))
            self._fits("reserve", r.slot, min(end, most))
        for r in self.order(twice) if rng.random() < 0.5 else ():
            self.call("advance", r.slot, r.computed)
        slots, ends = [r.slot for r in order], [r.computed + n for r, n in counts.items()]
        if rng.random() < 0.3:
            if self._fits("reserve", self.lend(slots), self.lend(ends)) is None:
                return None
        else:
            for slot, end in zip(slots, ends, strict=True):
                room = self.call("room", slot)
                free = self.kv.num_free_pages
                if end <= room and rng.random() < 0.5 and not self.kv._reserved.until[slot]:
                    continue
                given = self._fits("reserve", slot, end)
                if given is None:
                    return None
                assert end > room or (not any(given) and self.kv.num_free_pages == free)
        starts = [r.computed for r in order]
        return self.call("arrays", self.lend(slots), self.lend(starts), self.lend(ends))

    def finish_step(
        self, plan, counts: dict[Request, int], accepted: dict[Request, int] | None, is_open=False
    ) -> None:
        """Run a planned step on the device and commit it; `is_open`: its pages were reserved."""
        kv, device, rng = self.kv, self.device, self.rng
        if rng.random() < 0.2:  # calls that change nothing may come between
            self.call("match", self.new_text().tokens)
            self.call("cut", [r.slot for r in self.requests], [1] * len(self.requests))
            for r in self.requests:
                room = kv.max_model_len - r.computed
                if room:
                    self.call("needed", [r.slot], [rng.randint(1, room)])
            self.call("stats")
        if is_open and rng.random() < 0.2:  # and to an open step others do no harm
            self.admit()
            self.evict()
            self.device.wipe_free_pages()
        self.calls["with drafts"] += accepted is not None
        arrays = self._arrays(plan)
        ids = self._run(plan, counts, accepted or counts)
        held = kv.pool.holds > 0
        if not is_open:
            taken = None if accepted is None else self.lend(accepted.values())
            copies = self.call("commit", plan, self.lend(ids), taken)
        else:
            slots = [r.slot for r in counts]
            ends = [r.computed + n for r, n in (accepted or counts).items()]
            copies = self.call("advance", self.lend(slots), self.lend(ends))
            if rng.random() < 0.2:
                self.look()
                self.device.wipe_free_pages()
            texts = [r.text.tokens[r.computed : end] for r, end in zip(counts, ends, strict=True)]
            if rng.random() < 0.5:
                tokens = [t for text in texts for t in text]
                self.call("publish", self.lend(slots), self.lend(ends), self.lend(tokens))
            else:
                for slot, end, text in zip(slots, ends, texts, strict=True):
                    self.call("publish", slot, end, self.lend(text))
        assert not held[copies[:, 1]].any(), "a snapshot that a resume point holds is written over"
        device.copy(copies)
        assert self._arrays(plan) == arrays, "the arrays of a plan changed"
        for request, n in (accepted or counts).items():
            request.computed += n
            if accepted is not None:
                request.text.cut(request.computed)
            self.promises.advance(request)
        single = [r for r, n in counts.items() if n == 1]
        if single:
            device.check_formats(single, reach=1)

    @staticmethod
    def _arrays(plan) -> list[bytes]:
        names = (
            "slots", "num_new_tokens", "cu_seqlens_q", "seq_lens", "positions", "slot_mapping", "replay_rows",
            "replay_slots", "copies", "state_pages",
        )  # fmt: skip
        return [getattr(plan, name).tobytes() for name in names]

    def _run(self, plan, counts: dict[Request, int], accepted: dict[Request, int]) -> list[int]:
        """What the device does between plan and commit; returns the tokens of the step."""
        device, ids = self.device, []
        device.wipe_free_pages()
        device.copy(plan.copies)
        assert plan.slots.tolist() == [r.slot for r in counts]
        for i, (request, n) in enumerate(counts.items()):
            device.check(request, plan.state_pages[:, i] if len(plan.state_pages) else None)
            start, (a, b) = request.computed, plan.cu_seqlens_q[i : i + 2].tolist()
            assert plan.positions[a:b].tolist() == list(range(start, start + n))
            assert plan.seq_lens[i] == start + n and plan.num_new_tokens[i] == n
            ids += request.text.tokens[start : start + n]
        device.write(plan, list(counts))
        for request, n in accepted.items():
            device.write_waiting(request, request.computed + n)
        return ids

    def step(self) -> None:
        """Some requests compute a chunk, a token, or drafts, of which some are rejected."""
        counts, accepted = self.choose()
        rejects = counts != accepted or self.rng.random() < 0.3
        self._settle(counts, accepted if rejects else None)

    def choose(self) -> tuple[dict[Request, int], dict[Request, int]]:
        """Tokens that requests compute in a step, and those of them that stay."""
        rng, counts, accepted = self.rng, {}, {}
        drafts = self.kv.max_draft_tokens
        for r in self.order(self.requests):
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

    def _settle(self, counts, accepted=None) -> bool:
        """`advance`; a step that was not taken leaves texts as they were."""
        if not counts:
            return False
        done = self.advance(counts, accepted)
        if not done:
            for r in counts:
                r.text.cut(r.computed)
        return done

    def decode(self) -> None:
        """The same requests compute a token each, over and over, alone or beside a chunk.

        In some steps each computes drafts too, as many as the others, of which some are rejected.
        """
        rng, most, drafts = self.rng, self.kv.max_model_len, self.kv.max_draft_tokens
        size, change = rng.choice((1, 1 + rng.randint(0, drafts))), rng.choice((0, 0.1, 0.5))
        batch = [r for r in self.order(self.requests) if r.computed == len(r.text) < most]
        for _ in range(self.rng.randint(1, 32)):
            if rng.random() < change:
                size = rng.choice((1, 1 + rng.randint(0, drafts)))
            batch = [r for r in batch if len(r.text) + size <= most]
            for r in batch:
                r.text.extend(self.bits(size, size))
            counts = dict.fromkeys(batch, size)
            accepted = {r: self.number(max(1, size - drafts), size, r.computed) for r in batch}
            waiting = [r for r in self.requests if r.computed < len(r.text) and r not in counts]
            if waiting and self.rng.random() < 0.3:
                r = self.rng.choice(waiting)
                accepted[r] = counts[r] = self.rng.randint(1, len(r.text) - r.computed)
            if not self._settle(counts, accepted if counts != accepted else None):
                break
            self.check()

    def drop_plan(self) -> None:
        """A plan that is never committed."""
        if self.requests:
            r = self.rng.choice(self.requests)
            n = self.kv.max_model_len - r.computed
            if n:
                self.call("plan", [r.slot], [self.rng.randint(1, n)])

    def rollback(self) -> None:
        for r in self.order(self.requests):
            low = self.call("lowest_rollback", r.slot)
            assert low <= r.computed
            if low < r.computed:
                left = self.rng.choice((low, self.rng.randint(low, r.computed - 1)))
                self.call("rollback", r.slot, r.computed - left)
                r.computed = left
                r.text.cut(left)
                self.promises.rollback(r)
                return

    # Ends.

    def release(self, preempt: bool = False) -> None:
        if not self.requests:
            return
        r = self.requests.pop(self.rng.randrange(len(self.requests)))
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

    def pin(self) -> None:
        text, budget = self.new_text(), self.kv.max_pinned_pages
        match = self.match(text)
        pinned = self.call("pin", match, now=self.now, ttl=self.rng.choice((1.0, 50.0)))
        assert pinned in (0, match.num_tokens)
        assert self.kv.stats()["pinned_pages"] <= budget
        if self.rng.random() < 0.3:
            self.call("unpin", match)

    def pin_request(self) -> None:
        if self.requests:
            r = self.rng.choice(self.requests)
            self.call("pin_request", r.rid, now=self.now, ttl=5.0)

    def expire_pins(self) -> None:
        self.now += self.rng.choice((0.5, 10.0))
        assert self.call("expire_pins", self.now) <= self.kv.num_pages

    def evict(self) -> None:
        n = self.rng.choice((0, 1, 5, self.kv.num_pages))
        most = self.kv.num_evictable_pages
        try:
            freed = self.call("evict", n)
        except Fault:
            assert self.policy.fails
            return
        assert min(n, most) <= freed <= most

    def clear(self) -> None:
        self.intact = False
        self.call("clear")
        assert self.kv.num_evictable_pages == 0

    # After each step.

    def look_for_evictions(self) -> None:
        """What is promised is owed until something was evicted."""
        stats = self.kv.stats()
        if stats["evicted_resume_points"] or stats["evicted_segments"]:
            self.intact = False

    def check(self, share: float = 0.3) -> None:
        """Invariants; and the next query of each request finds its rows, in the tables and all their formats.

        Args:
            share: of the calls of this that look at everything.
        """
        kv = self.kv
        self.look_for_evictions()
        for r in self.requests if not kv.append_only else ():
            assert kv.num_computed[r.slot] == r.computed
        if self.rng.random() < share:
            kv.check_invariants()
            self.device.wipe_free_pages()
            for r in self.requests:
                self.device.check(r)
            if not kv.append_only:
                if self.requests:
                    self.device.check_formats(self.requests, reach=0)
                self.device.check_deltas(self.requests)
            self.check_host()

    def take(self, name: str) -> None:
        """One step. In some, the user's policy and log fail."""
        if (
            name in ("step", "decode", "release", "rollback", "evict", "evict_pages")
            and self.rng.random() < 0.1
        ):
            if isinstance(self.policy, Moody):
                self.policy.fails = {self.rng.choice(("add", "discard", "pop"))}
            if self.log is not None:
                self.log.fails = True
        getattr(self, name)()
        if isinstance(self.policy, Moody):
            self.policy.fails = set()
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


class ListLife(Lists, Life):
    """A life of an append-only cache."""


def kind_of(seed: int) -> type[Life]:
    return ListLife if seed % 5 == 3 else Life


def names_of(seed: int, num_steps: int) -> list[tuple[int, str]]:
    """Numbered steps of a life."""
    rng, weights = random.Random(f"{seed} steps"), kind_of(seed).weights
    return list(enumerate(rng.choices(list(weights), list(weights.values()), k=num_steps)))


class Broken(Exception):
    """A life failed; says at which step and how."""


def run(
    seed: int, steps: list[tuple[int, str]], calls: Counter, trace: list[str] | None = None
) -> Life:
    """Live through `steps` of `seed`. Each step draws from its number alone, so that steps may be left out.

    Raises:
        Broken: the cache and its shadow differ, or a call failed.
    """
    number, name = -1, "build"
    try:
        life = kind_of(seed)(seed, calls, trace)
        for number, name in steps:
            life.rng = random.Random(f"{seed}/{number}")
            if trace is not None:
                trace.append(f"# step {number}: {name}")
            life.take(name)
        number, name = -2, "finish"
        life.finish()
    except Exception as error:
        raise Broken(f"seed {seed}, step {number} ({name}): {error!r} {_place(error)}") from error
    return life


def _place(error: BaseException) -> str:
    """Where an exception was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"in {frame.name}: {frame.line}"


def shrink(seed: int, steps: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """A shorter list of steps that fails in the same place."""

    def failure(some) -> str | None:
        try:
            run(seed, some, Counter())
        except Broken as broken:
            return _place(broken.__cause__)
        return None

    wanted, size = failure(steps), len(steps)
    while size:
        size //= 2
        at = 0
        while size and at < len(steps):
            fewer = steps[:at] + steps[at + size :]
            if failure(fewer) == wanted:
                steps = fewer
            else:
                at += size
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Random traffic through kvcore, with a shadow of every row."
    )
    parser.add_argument(
        "--calls", type=int, default=20_000, help="calls of kvcore to make, at least"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first life; the next ones follow"
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of a life")
    parser.add_argument(
        "--shrink", action="store_true", help="print the calls of a short life that fails alike"
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="tell all failures, not the first alone"
    )
    args = parser.parse_args()
    calls, missed, failures = Counter(), Counter(), []
    checked = written = lives = 0
    start = time.monotonic()
    with tqdm(total=args.calls, unit="call", mininterval=1) as progress:
        for seed in itertools.count(args.seed):
            if calls.total() >= args.calls:
                break
            steps, before = names_of(seed, args.steps), calls.total()
            try:
                life = run(seed, steps, calls)
                checked += life.device.rows_checked
                written += life.device.rows_written
                missed += life.missed
            except Broken as broken:
                failures.append(str(broken))
                print(str(broken))
                if args.shrink:
                    trace: list[str] = []
                    short = shrink(seed, steps)
                    try:
                        run(seed, short, Counter(), trace)
                    except Broken as shorter:
                        print("\n".join([*trace, f"# {shorter}"]))
                if not args.keep_going:
                    raise
            lives += 1
            progress.update(calls.total() - before)
    seconds = time.monotonic() - start
    print(
        f"{calls.total()} calls, {lives} lives, {checked} rows checked, {written} written, {seconds:.0f} s"
    )
    print(", ".join(f"{name} {n}" for name, n in sorted(calls.items())))
    total = max(1, missed.total())
    shares = ", ".join(f"{n} segments {100 * missed[n] / total:.1f} %" for n in sorted(missed)[:8])
    print(
        f"possible hits are longer by: {shares}; mean {sum(n * k for n, k in missed.items()) / total:.2f}"
    )
    if failures:
        raise SystemExit(f"{len(failures)} lives failed")


if __name__ == "__main__":
    main()
