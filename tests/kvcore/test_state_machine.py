"""Random traffic against a model of a few lines: two sets of token prefixes, no pages, no arrays.

The model knows which prefixes were computed and at which boundaries a resume point is due. While nothing
was evicted the cache must hit exactly what the model hits; afterwards never more. The stand-in engine
checks that every row behind a hit is the right one.
"""

from __future__ import annotations

import math
import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.kvcore import LRU, S3FIFO, Adaptive, CostAware, GroupSpec, OutOfPages

from .engine import Engine, groups

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
    (GroupSpec("state", "state", 8, 4096, pages_per_block=2), (4, 9), (8, None)),
    (STATE,),
    (GroupSpec("wide", "dense", 8, 4096, pages_per_block=3), (4, 6)),
    ((8, None), (4, 10), GroupSpec("draft", "window", 4, 4096, 10, lookahead=1)),
    (GroupSpec("draft", "dense", 4, 4096, lookahead=3), (2, 6), STATE),
    (GroupSpec("draft", "window", 4, 4096, 7, 2, lookahead=2),),
]


def replay_tokens(specs, layers: int | None) -> int | None:
    """What a model with `layers` layers in each window group needs; None where a state rules replays out."""
    if layers is None or any(g.kind == "state" for g in specs):
        return None
    return max(1, layers * sum((g.sliding_window or 1) - 1 for g in specs))


class Naive:
    """What should hit: prefixes as tuples, with the lookahead of drafters in the key."""

    def __init__(self, layout, interval: int) -> None:
        self.a, self.hybrid, self.interval = layout.alignment, layout.hybrid, interval
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
        while n and self.hybrid and self.key(prompt, salt, n) not in self.points:
            n -= self.a
        return n

    def admit(self, prompt, salt, hit: int, dense: int, replay_to: int | None) -> dict:
        """State of a running request."""
        p = len(prompt)
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


class Traffic(RuleBasedStateMachine):
    @initialize(
        mix=st.sampled_from(MIXES),
        pages=st.sampled_from([60, 120, 700]),
        retention=st.sampled_from(["latest", "dense", 2, 3]),
        drafts=st.sampled_from([0, 3]),
        policy=st.sampled_from([Adaptive, LRU, CostAware, S3FIFO]),
        replay=st.sampled_from([None, 1, 3]),
    )
    def build(self, mix, pages, retention, drafts, policy, replay):
        specs = groups(*mix)
        a = math.lcm(*(g.block_size for g in specs))
        if isinstance(retention, int):
            retention *= a
        self.e = Engine(
            specs, num_pages=pages, max_requests=4, max_model_len=160, retention=retention,
            max_draft_tokens=drafts, policy=policy(), max_pinned_pages=20,
            replay_tokens=replay_tokens(specs, replay),
        )  # fmt: skip
        interval = {"latest": 0, "dense": a}.get(retention, retention)
        self.model = Naive(self.e.kv.layout, interval)
        self.history: list[list[int]] = [[]]
        self.running: dict[int, dict] = {}
        self.next_id = 0

    @precondition(lambda self: len(self.e.slots) < 4)
    @rule(data=st.data(), salt=st.sampled_from([b"", b"", b"", b"t"]))
    def admit(self, data, salt):
        base = data.draw(st.sampled_from(self.history))
        cut = data.draw(st.integers(0, len(base)))
        fresh = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=40))
        prompt = (base[:cut] + fresh)[:150]
        expected = self.model.hit(prompt, salt)
        match = self.e.admit(self.next_id, prompt, salt)
        self._check_replay(match)
        index = self.e.kv.index
        if index.num_evicted_points + index.num_evicted_segments == 0:
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
        index = self.e.kv.index
        evicted = index.num_evicted_points + index.num_evicted_segments
        plan = self.e.step(counts, accepted)
        if isinstance(plan, OutOfPages):
            assert plan.needed > plan.free + plan.evictable
            assert sum(plan.per_group.values()) == plan.needed
            assert evicted == index.num_evicted_points + index.num_evicted_segments
            assert before == {r: self.e.computed(r) for r in counts}
            return
        for r in counts:
            self.model.advance(self.running[r], self.e.tokens[r], self.e.computed(r))

    @precondition(lambda self: self.e.slots)
    @rule(data=st.data())
    def step(self, data):
        counts = {}
        for r in list(self.e.slots):
            c, known = self.e.computed(r), len(self.e.tokens[r])
            if data.draw(st.booleans()) and c < 159:
                if c < known:
                    counts[r] = data.draw(st.integers(1, known - c))
                else:
                    self.e.tokens[r].append(data.draw(st.integers(0, 1)))
                    counts[r] = 1
        if counts and data.draw(st.booleans()):
            order = list(counts)
            slots = [self.e.slots[r] for r in order]
            cut = self.e.kv.cut(slots, list(counts.values())).tolist()
            counts = dict(zip(order, cut, strict=True))
        if counts:
            self._advance(counts)

    @precondition(lambda self: self.e.slots and self.e.kv.max_draft_tokens)
    @rule(data=st.data())
    def speculate(self, data):
        r = data.draw(st.sampled_from(sorted(self.e.slots)))
        c = self.e.computed(r)
        if c < len(self.e.tokens[r]) or c > 120:
            return
        n = data.draw(st.one_of(st.integers(1, 4), st.integers(5, 39)))
        self.e.tokens[r] += data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
        self._advance({r: n}, {r: data.draw(st.integers(max(1, n - 3), n))})
        del self.e.tokens[r][max(c, self.e.computed(r)) :]

    @precondition(lambda self: self.e.slots and self.e.kv.max_draft_tokens)
    @rule(data=st.data())
    def rollback(self, data):
        r = data.draw(st.sampled_from(sorted(self.e.slots)))
        slot, kv = self.e.slots[r], self.e.kv
        room = self.e.computed(r) - kv.lowest_rollback(slot)
        # Tokens of the prompt come back as they were: the chain was hashed from them.
        room = min(room, self.e.computed(r) - int(kv.sequences.prompt_len[slot]))
        if room > 0:
            kv.rollback(slot, data.draw(st.integers(1, room)))
            del self.e.tokens[r][self.e.computed(r) :]

    @precondition(lambda self: self.e.slots)
    @rule(data=st.data())
    def release(self, data):
        r = data.draw(st.sampled_from(sorted(self.e.slots)))
        tokens = list(self.e.tokens[r])
        done = self.e.release(r)
        self.model.end(self.running.pop(r), tokens)
        self.history.append(done)

    @rule(data=st.data(), ttl=st.sampled_from([1.0, 100.0]))
    def pin(self, data, ttl):
        base = data.draw(st.sampled_from(self.history))
        prompt = [*base, 1][:150]
        expected = self.model.hit(prompt, b"")
        assert self.e.kv.pin(self.e.kv.match(prompt), now=self.next_id, ttl=ttl) <= expected
        assert self.e.kv.stats()["pinned_pages"] <= 20

    @precondition(lambda self: self.e.slots)
    @rule(data=st.data())
    def pin_request(self, data):
        r = data.draw(st.sampled_from(sorted(self.e.slots)))
        self.e.kv.pin_request(r, now=self.next_id, ttl=5.0)

    @rule(data=st.data())
    def unpin(self, data):
        kv = self.e.kv
        if data.draw(st.booleans()):
            kv.expire_pins(self.next_id)
        else:
            kv.unpin(kv.match([*data.draw(st.sampled_from(self.history)), 1][:150]))

    @invariant()
    def sound(self):
        if hasattr(self, "e"):
            self.e.check()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=int(os.environ.get("QUIRE_STATE_MACHINE_EXAMPLES", "600")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
