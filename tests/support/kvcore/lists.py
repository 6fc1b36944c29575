"""A life of an append-only cache: workers append the pages that they are told, and write before they read."""

from __future__ import annotations

import random
from typing import ClassVar

from quire.kvcore import GroupSpec
from tests.support.kvcore.device import Request, Text


class Lists:
    """What `shadow.ListLife` does in another way than `shadow.Life`."""

    weights: ClassVar = {
        "admit": 3, "look": 2, "step": 14, "release": 2, "preempt": 1, "abort": 0.7, "pin": 1, "pin_request": 0.5,
        "expire_pins": 0.5, "evict": 0.7, "store": 2, "load": 2, "bounce": 1.5, "end_job": 4, "clear": 0.05, "reset": 0.05,
    }  # fmt: skip

    def draw(self, rng: random.Random) -> tuple[list[GroupSpec], dict]:
        """Groups and arguments of the cache."""
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
        """All writes of a step, then all reads; requests that come in it may hit what others of it write."""
        rng, kv, batch = self.rng, self.kv, []
        for r in self.order(self.requests):
            if rng.random() < 0.3 or r not in self.requests:
                continue
            left, room = len(r.text) - r.computed, kv.max_model_len - len(r.text)
            drafts = 0 if left > 1 else min(rng.choice((0, 0, 1, 5)), room - 1)
            if left == 0:
                if room < 1:
                    continue
                r.text.extend(self.bits(1, 1))
                left = 1
            n = left if left == 1 else rng.randint(1, left)
            drafts = max(0, drafts)
            keeps = rng.random() < 0.95
            self.intact &= keeps
            oldest = max(0, r.computed - rng.choice((0, 0, 5)))  # of a step in flight
            self.call("advance", r.slot, r.computed, oldest, keep_tails=keeps)
            if self._scheduled(r, n, drafts):
                batch.append((r, n, drafts))
        if rng.random() < 0.4:
            known = len(self.requests)
            self.admit()
            for r in self.requests[known:]:
                n = rng.randint(1, len(r.text) - r.computed)
                if self._scheduled(r, n, 0):
                    batch.append((r, n, 0))
        for r, n, drafts in batch:
            self.device.check_span(r, r.computed + n + drafts)
            r.computed += n + rng.randint(0, drafts)
            r.text.cut(r.computed if drafts else len(r.text))

    def _scheduled(self, r: Request, n: int, drafts: int) -> bool:
        """Pages for `n` tokens and `drafts`; the tokens are known at once, the drafts are not."""
        end = r.computed + n + drafts
        quiet = end <= self.call("room", r.slot)
        given = self._fits("reserve", r.slot, end)
        if given is None:
            return False
        assert not (quiet and any(given))
        for own, new in zip(r.own, given, strict=True):
            own += new
        self.publish_upto(r, r.computed + n)
        r.text.extend(self.bits(drafts, drafts))
        self.device.write_span(r, end)
        return True

    def publish_upto(self, r: Request, end: int) -> None:
        known, start = self.call("num_published", r.slot), r.computed
        if self.keyed:
            keys = self.reader.keys(Text(r.text.tokens[:end], r.text.salt, r.text.extra_keys))
            self.call("publish", r.slot, end, keys=b"".join(keys[known // self.kv.alignment :]))
        else:
            self.call("publish", r.slot, end, self.lend(r.text.tokens[r.told : end]))
        r.told, r.computed = end, end
        self.promises.advance(r)
        r.computed = start
