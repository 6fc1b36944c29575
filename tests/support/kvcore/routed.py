"""Traffic of a router's workers: prompts with shared beginnings, adapters, images and tenants, in pools that are too small for all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.kvcore import EventLog, GroupSpec, KVCache, OutOfPages
from quire.models.integrations.event_fields import lora_key
from tests.support.kvcore.engine import groups

IMAGE, END = 8, 9  # placeholder of an image; the token behind one
STATE = GroupSpec("state", "state", 4, 4096)
DENSE = [((4, None),), ((8, None), (4, None)), ((4, None), GroupSpec("wide", "dense", 8, 4096))]  # fmt: skip
HYBRID = [((4, None), (4, 10)), ((8, None), (4, 6), (4, 20)), ((4, None), STATE), ((4, None), (2, 5), STATE)]  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """A prompt. extra_keys: as of `KVCache.match`, the adapter's among them."""

    tokens: tuple[int, ...]
    salt: bytes = b""
    extra_keys: tuple[tuple[int, int | None, bytes], ...] = ()

    @property
    def images(self) -> list[tuple[int, int, bytes]]:
        return [part for part in self.extra_keys if part[1] is not None]

    @property
    def keys(self) -> dict:
        return {"salt": self.salt, "extra_keys": self.extra_keys}

    def cut(self, length: int) -> Ask:
        """Its first tokens."""
        kept = [
            (a, b if b is None else min(b, length), key)
            for a, b, key in self.extra_keys
            if a < length
        ]
        return Ask(self.tokens[:length], self.salt, tuple(kept))

    def followed(self, tokens: list[int], images=()) -> Ask:
        """It and more tokens; images (start, stop, key) are counted from there."""
        at = len(self.tokens)
        more = tuple((at + a, at + b, key) for a, b, key in images)
        return Ask((*self.tokens, *tokens), self.salt, self.extra_keys + more)


class Router:
    """Workers and what was ever asked of them."""

    def __init__(self, mix, *, workers: int, num_pages: int, seed: int, **options) -> None:
        self.rng = np.random.default_rng(seed)
        self.logs = [EventLog(identities=True) for _ in range(workers)]
        base = {"num_pages": num_pages, "max_requests": 3, "max_model_len": 400, "debug": True}
        self.workers = [KVCache(groups(*mix), events=log, **(base | options)) for log in self.logs]
        self.running: list[dict[str, Ask]] = [{} for _ in self.workers]
        self.asked: list[Ask] = []
        self.count = 0

    def new(self) -> Ask:
        """A prompt that begins as an earlier one, or as none."""
        rng = self.rng
        if self.asked and rng.random() < 0.8:
            ask = self.asked[rng.integers(len(self.asked))]
            ask = ask.cut(int(rng.integers(1, len(ask.tokens) + 1)))
            if ask.tokens and ask.tokens[-1] == IMAGE:
                ask = ask.followed([END])
            if rng.random() < 0.35:  # another adapter or tenant for the same tokens
                ask = self._of(ask.tokens, ask.images)
            if rng.random() < 0.35:  # other images
                loras = [part for part in ask.extra_keys if part[1] is None]
                images = [(a, b, self._image()) for a, b, _ in ask.images]
                ask = Ask(ask.tokens, ask.salt, (*loras, *images))
        else:
            ask = self._of((), [])
        for _ in range(int(rng.integers(1, 4))):
            ask = ask.followed(rng.integers(0, 2, int(rng.integers(1, 14))).tolist())
            if rng.random() < 0.3:
                long = int(rng.integers(1, 11))
                ask = ask.followed([IMAGE] * long + [END], [(0, long, self._image())])
        return ask.cut(150).followed([1])

    def _image(self) -> bytes:
        return [b"cat", b"dog", b"\xff\x00", b"a" * 64][self.rng.integers(4)]

    def _of(self, tokens, images) -> Ask:
        name = [None, None, None, "sql", "chat"][self.rng.integers(5)]
        salt = [b"", b"", b"tenant"][self.rng.integers(3)]
        loras = [] if name is None else [(0, None, lora_key(name))]
        return Ask(tuple(tokens), salt, (*loras, *images))

    def turn(self) -> None:
        """A worker gets a prompt or computes some of those that it has; one may end."""
        w = int(self.rng.integers(len(self.workers)))
        kv, running = self.workers[w], self.running[w]
        if len(running) < 3 and self.rng.random() < 0.6:
            ask = self.new()
            self.asked.append(ask)
            self.count += 1
            kv.admit(f"r{self.count}", kv.match(ask.tokens, **ask.keys))
            running[f"r{self.count}"] = ask
        for rid in list(running):
            if self._step(kv, rid, running[rid]) or self.rng.random() < 0.1:
                kv.release(rid)
                del running[rid]
        if self.rng.random() < 0.01:
            kv.clear()

    def _step(self, kv: KVCache, rid: str, ask: Ask) -> bool:
        """Compute some tokens of a request; whether it has all, or no room for more."""
        slot = kv.slot_of(rid)
        at = int(kv.num_computed[slot])
        left = len(ask.tokens) - at
        if left <= 0:
            ask = ask.followed(self.rng.integers(0, 2, 1).tolist())
            self.asked.append(ask)
            return True
        (n,) = kv.cut([slot], [min(left, int(self.rng.integers(1, 60)))]).tolist()
        plan = kv.plan([slot], [n])
        if isinstance(plan, OutOfPages):
            return True
        kv.commit(plan, ask.tokens[at : at + n])
        return at + n >= len(ask.tokens) and self.rng.random() < 0.7
