"""Random traffic against a model of a few lines: two sets of token prefixes, no pages, no arrays.

The model knows which prefixes were computed and at which boundaries a resume point is due. While nothing
was evicted the cache must hit exactly what the model hits; afterwards never more. The stand-in engine
checks that every row behind a hit is the right one.

    python -m tests.kvcore.traffic --steps 2000000 --seed 1

takes the same steps as the tests with plain random numbers: no examples are shrunk, but a step costs a third,
and a cache lives for up to thousands of them. What fails is told with the seed that repeats it.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import Counter

from tqdm import tqdm

from quire.kvcore import LRU, Adaptive, GroupSpec, OutOfPages
from tests.support.kvcore.engine import Engine, groups

MAX_LEN = 160
MAX_REQUESTS = 4
MAX_PINNED = 20
HISTORY = 256  # prompts that new ones may start with
STATE = GroupSpec("state", "state", 4, 4096)
MIXES = [
    ((8, None),),
    ((8, None), (4, 10), (4, 10)),
    ((16, None), (4, 8)),
    ((4, None), (8, 20), (4, 1)),
    ((4, 9),),
    ((4, None), (8, None), (8, 17), (2, 5)),
    ((6, None), (4, 7)),
    ((4, None), (4, 5)),
    ((4, None), STATE),
    (GroupSpec("state", "state", 8, 4096), (4, 9), (8, None)),
    (STATE,),
    (GroupSpec("wide", "dense", 8, 4096), (4, 6)),
    ((8, None), (4, 10), GroupSpec("draft", "window", 4, 4096, 10, lookahead=1)),
    (GroupSpec("draft", "dense", 4, 4096, lookahead=3), (2, 6), STATE),
    (GroupSpec("draft", "window", 4, 4096, 7, lookahead=2),),
]


def replay_tokens(specs, layers: int | None) -> int | None:
    """What a model with `layers` layers in each window group needs; None where a state rules replays out."""
    if layers is None or any(g.kind == "state" for g in specs):
        return None
    return max(1, layers * sum((g.sliding_window or 1) - 1 for g in specs))


class Naive:
    """What should hit: prefixes as tuples, with the lookahead of drafters in the key."""

    def __init__(self, layout, interval: int, replays: bool) -> None:
        self.a, self.hybrid, self.interval = layout.alignment, layout.hybrid, interval
        # Two boundaries no further apart hold the tails of those between them.
        windows = [g for g in layout.groups if g.kind == "window" and g.sliding_window > 1]
        size = [1 if replays else g.block_size for g in windows]
        reach = [-(-(g.sliding_window - 1) // n) * n for g, n in zip(windows, size, strict=True)]
        self.span = min(reach, default=MAX_LEN)
        self.ahead = max(g.lookahead for g in layout.groups)
        self.stateful = any(g.kind == "state" for g in layout.groups)
        self.dense: set[tuple] = set()
        self.points: set[tuple] = set()

    def key(self, tokens, salt, b: int) -> tuple:
        return (b, salt, *tokens[: b + self.ahead])

    def dense_hit(self, prompt: list[int], salt: bytes) -> int:
        n = max(0, len(prompt) - self.ahead) // self.a * self.a
        while n and self.key(prompt, salt, n) not in self.dense:
            n -= self.a
        return n

    def hit(self, prompt: list[int], salt: bytes) -> int:
        n = min(self.dense_hit(prompt, salt), (len(prompt) - 1) // self.a * self.a)
        while n and self.hybrid and not self.resumable(prompt, salt, n):
            n -= self.a
        return n

    def resumable(self, prompt: list[int], salt: bytes, n: int) -> bool:
        key = self.key(prompt, salt, n)
        if key in self.points or self.stateful:
            return key in self.points
        before = max(
            b for b in range(0, n, self.a) if not b or self.key(prompt, salt, b) in self.points
        )
        return any(
            n < b <= before + self.span and s == salt and tuple(rest[: n + self.ahead]) == key[2:]
            for b, s, *rest in self.points
        )

    def admit(self, prompt, salt, hit: int, dense: int, replay_to: int | None) -> dict:
        """State of a running request."""
        p = len(prompt)
        if hit and replay_to is None and self.hybrid:
            self.points.add(self.key(prompt, salt, hit))
        keep = {(p - 1) // self.a * self.a, p // self.a * self.a, dense}
        cached = replay_to or hit
        return {
            "prompt": p, "salt": salt, "cached": cached, "snapshot": hit, "keep": keep, "replay": replay_to or 0,
        }  # fmt: skip

    def advance(self, request: dict, tokens, end: int) -> None:
        if end % self.a == 0:
            request["snapshot"] = end
        if end >= request["replay"] > 0:
            self._point(request, tokens, request["replay"])
            request["replay"] = 0
        known = max(end, request["prompt"])
        while (b := request["cached"] + self.a) <= end and b + self.ahead <= known:
            request["cached"] = b
            self.dense.add(self.key(tokens, request["salt"], b))
            if b in request["keep"] or (self.interval and b % self.interval == 0):
                self._point(request, tokens, b)

    def end(self, request: dict, tokens) -> None:
        if request["cached"] and not request["replay"]:
            self._point(request, tokens, request["cached"])

    def _point(self, request: dict, tokens, b: int) -> None:
        if not self.stateful or request["snapshot"] == b:
            self.points.add(self.key(tokens, request["salt"], b))


class Dice:
    """Choices of plain random numbers; hypothesis has the same three (`test_state_machine`)."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def one(self, options):
        return self._random.choice(options)

    def number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def bits(self, low: int, high: int) -> list[int]:
        """Between `low` and `high` tokens."""
        return self._random.choices((0, 1), k=self._random.randint(low, high))


class Traffic:
    """A cache, its engine and its model; each method but `check` is one step."""

    def __init__(self, draw, **options) -> None:
        self.draw = draw
        specs = groups(*draw.one(MIXES))
        a = math.lcm(*(g.block_size for g in specs))
        retention = draw.one(["auto", "latest", "dense", 2, 3])
        if isinstance(retention, int):
            retention *= a
        policy = draw.one([Adaptive, LRU])
        self.e = Engine(
            specs, num_pages=draw.one([60, 120, 700]), max_requests=MAX_REQUESTS, max_model_len=MAX_LEN,
            retention=retention, max_draft_tokens=draw.one([0, 3]), policy=policy(), max_pinned_pages=MAX_PINNED,
            replay_tokens=replay_tokens(specs, draw.one([None, 1, 3])), **options,
        )  # fmt: skip
        self.model = Naive(
            self.e.kv.layout, self.e.kv.interval, self.e.kv.replay_tokens is not None
        )
        self.history: list[list[int]] = [[]]
        self.running: dict[int, dict] = {}
        self.next_id = 0

    def steps(self) -> list[str]:
        """Names of the steps that can be taken now."""
        names = ["pin", "unpin"]
        if len(self.e.slots) < MAX_REQUESTS:
            names.append("admit")
        if self.e.slots:
            names += ["step", "decode", "release", "pin_request"]
            if self.e.kv.max_draft_tokens:
                names += ["speculate", "rollback"]
        return names

    def _request(self) -> int:
        return self.draw.one(sorted(self.e.slots))

    def _prompt(self) -> list[int]:
        known = [*self.history, *self.e.tokens.values()]
        return [*self.draw.one(known), 1][: MAX_LEN - 10]

    def _evicted(self) -> int:
        return self.e.kv.index.num_evicted_points + self.e.kv.index.num_evicted_segments

    def admit(self):
        salt = self.draw.one([b"", b"", b"", b"t"])
        base = self.draw.one(self.history)
        prompt = (base[: self.draw.number(0, len(base))] + self.draw.bits(1, 40))[: MAX_LEN - 10]
        expected = self.model.hit(prompt, salt)
        match = self.e.admit(self.next_id, prompt, salt)
        self._check_replay(match)
        if self._evicted() == 0:
            assert match.num_tokens == expected
            assert match.dense_tokens == self.model.dense_hit(prompt, salt)
        else:
            assert match.num_tokens <= expected
        self.running[self.next_id] = self.model.admit(
            prompt, salt, match.num_tokens, match.dense_tokens, match.replay_to
        )
        self.next_id += 1

    def _check_replay(self, match):
        kv = self.e.kv
        to = min(match.dense_tokens, (match.prompt.num_tokens - 1) // kv.alignment * kv.alignment)
        first = max(0, to - (kv.replay_tokens or to)) // kv.alignment * kv.alignment
        offered = kv.replay_tokens is not None and kv.hybrid and first > match.num_tokens
        assert (match.replay_from, match.replay_to) == ((first, to) if offered else (None, None))

    def _advance(self, counts, accepted=None):
        before = {r: self.e.computed(r) for r in counts}
        evicted = self._evicted()
        how = self.draw.one(["plan", "add", "add" if accepted else "late"])
        plan = self.e.step(counts, accepted, how)
        if isinstance(plan, OutOfPages):
            assert plan.needed > plan.free + plan.evictable
            assert sum(plan.per_group.values()) == plan.needed
            assert evicted == self._evicted() or how != "plan"  # those added before may evict
            assert before == {r: self.e.computed(r) for r in counts}
            return
        for r in counts:
            self.model.advance(self.running[r], self.e.tokens[r], self.e.computed(r))

    def step(self):
        draw, counts = self.draw, {}
        for r in list(self.e.slots):
            c, known = self.e.computed(r), len(self.e.tokens[r])
            if draw.one([False, True]) and c < MAX_LEN - 1:
                if c < known:
                    counts[r] = draw.number(1, known - c)
                else:
                    self.e.tokens[r] += draw.bits(1, 1)
                    counts[r] = 1
        if counts and draw.one([False, True]):
            order = list(counts)
            slots = [self.e.slots[r] for r in order]
            cut = self.e.kv.cut(slots, list(counts.values())).tolist()
            counts = dict(zip(order, cut, strict=True))
        if counts:
            self._advance(counts)

    def decode(self):
        """The same requests compute a token each, several times over, alone or beside chunks."""
        e = self.e
        batch = [r for r in e.slots if e.computed(r) == len(e.tokens[r]) < MAX_LEN - 1]
        steps = min((MAX_LEN - 1 - e.computed(r) for r in batch), default=0)
        for _ in range(min(steps, self.draw.number(1, 32))):
            for r in batch:
                e.tokens[r] += self.draw.bits(1, 1)
            counts = dict.fromkeys(batch, 1)
            waiting = [r for r in e.slots if e.computed(r) < len(e.tokens[r]) and r not in counts]
            if waiting and self.draw.one([False, True]):
                r = self.draw.one(waiting)
                counts[r] = self.draw.number(1, len(e.tokens[r]) - e.computed(r))
            self._advance(counts)
            if e.computed(batch[0]) < len(e.tokens[batch[0]]):
                break  # out of pages
            self.check()

    def speculate(self):
        r = self._request()
        c = self.e.computed(r)
        if c < len(self.e.tokens[r]) or c > MAX_LEN - 40:
            return
        drafts = self.draw.bits(1, self.draw.one([4, 39]))
        n = len(drafts)
        self.e.tokens[r] += drafts
        self._advance({r: n}, {r: self.draw.number(max(1, n - 3), n)})
        del self.e.tokens[r][max(c, self.e.computed(r)) :]

    def rollback(self):
        r = self._request()
        slot, kv = self.e.slots[r], self.e.kv
        room = self.e.computed(r) - kv.lowest_rollback(slot)
        # Tokens of the prompt come back as they were: the chain was hashed from them.
        room = min(room, self.e.computed(r) - int(kv.sequences.prompt_len[slot]))
        if room > 0:
            kv.rollback(slot, self.draw.number(1, room))
            del self.e.tokens[r][self.e.computed(r) :]
            if self.running[r]["snapshot"] > self.e.computed(r):
                self.running[r]["snapshot"] = 0

    def release(self):
        r = self._request()
        tokens = list(self.e.tokens[r])
        done = self.e.release(r)
        self.model.end(self.running.pop(r), tokens)
        self.history.append(done)
        del self.history[:-HISTORY]

    def pin(self):
        prompt, ttl = self._prompt(), self.draw.one([1.0, 100.0])
        expected = self.model.hit(prompt, b"")
        pinned = self.e.kv.pin(self.e.kv.match(prompt), now=self.next_id, ttl=ttl)
        assert pinned <= expected
        if (n := self.e.kv.match(prompt).num_tokens) and self.model.hybrid:
            self.model.points.add(self.model.key(prompt, b"", n))
        assert self.e.kv.stats()["pinned_pages"] <= MAX_PINNED

    def pin_request(self):
        self.e.kv.pin_request(self._request(), now=self.next_id, ttl=5.0)

    def unpin(self):
        if self.draw.one([False, True]):
            self.e.kv.expire_pins(self.next_id)
        else:
            self.e.kv.unpin(self.e.kv.match(self._prompt()))

    def check(self):
        self.e.check()

    def finish(self):
        """Release and clear everything: all pages come back."""
        while self.e.slots:
            self.release()
        kv = self.e.kv
        kv.clear()
        self.check()
        assert kv.num_free_pages == kv.num_pages - 1


# How often the long mode takes each step, relative to the others.
WEIGHTS = {
    "admit": 4, "step": 12, "decode": 2, "speculate": 3, "rollback": 2, "release": 2, "pin": 1, "pin_request": 1, "unpin": 1,
}  # fmt: skip


def run(seed: int, num_steps: int, taken: Counter) -> int:
    """Take `num_steps` steps with one cache; returns how many entries were evicted.

    Raises:
        AssertionError: cache and model disagree, or an invariant does not hold.
    """
    draw, choose = Dice(seed), random.Random(-seed)
    traffic = Traffic(draw)
    for _ in range(num_steps):
        names = traffic.steps()
        name = choose.choices(names, [WEIGHTS[n] for n in names])[0]
        getattr(traffic, name)()
        traffic.check()
        taken[name] += 1
    evicted = traffic._evicted()
    traffic.finish()
    return evicted


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Random traffic through kvcore, checked against a naive model after every step."
    )
    parser.add_argument(
        "--steps", type=int, default=20_000, help="steps to take, all caches together"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first cache; the next ones follow"
    )
    parser.add_argument(
        "--life", type=int, default=400, help="most steps of one cache; 40 for half of them"
    )
    args = parser.parse_args()
    taken: Counter = Counter()
    seed, evicted, start = args.seed, 0, time.monotonic()
    with tqdm(total=args.steps, unit="step", mininterval=1) as progress:
        while progress.n < args.steps:
            life = min(40 if seed % 2 else args.life, args.steps - progress.n)
            try:
                evicted += run(seed, life, taken)
            except Exception as error:
                command = f"--seed {seed} --steps {life} --life {life}"
                raise RuntimeError(f"failed, repeat with {command}: {error!r}") from error
            progress.update(life)
            seed += 1
    seconds = time.monotonic() - start
    print(
        f"{args.steps} steps, {seed - args.seed} caches, {evicted} entries evicted, {seconds:.0f} s"
    )
    print(", ".join(f"{n} {taken[n]}" for n in WEIGHTS))


if __name__ == "__main__":
    main()
