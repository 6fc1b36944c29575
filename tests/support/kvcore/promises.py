"""What a cache owes: hits that its documents promise, hits that are possible at all, and what its events tell."""

from __future__ import annotations

import math
import struct
from hashlib import sha256

import numpy as np

from quire.kvcore import AllBlocksCleared, BlockStored, EventLog, KVCache
from tests.support.kvcore.device import STATE_READS, Device, Request, Text


class Promises:
    """Prefixes that must be findable while nothing was evicted, as hashes of token prefixes.

    Those are all computed segments, and resume points at the boundaries that `policies.retention` names: the replay boundaries of
    a prompt, the junction, the interval, and the last boundary that a request reached; with a state group, only where a step
    ended there and no later step wrote over it.
    """

    def __init__(self, kv: KVCache) -> None:
        layout = kv.layout
        self.a, self.ahead, self.interval = layout.alignment, layout.lookahead, kv.interval
        self.hybrid, self.enabled = layout.hybrid, kv.enable_caching
        self.stateful = any(g.kind == "state" for g in layout.groups)
        self.segments: set[int] = set()
        self.points: set[int] = set()

    def _key(self, text: Text, boundary: int) -> int:
        return text.prefix(boundary + self.ahead)

    def usable(self, n: int) -> int:
        """The longest hit that a prompt of `n` tokens can have."""
        return max(0, min(n - 1, n - self.ahead)) // self.a * self.a

    def dense(self, text: Text) -> int:
        """Tokens of a prompt whose segments are findable."""
        most = max(0, len(text) - self.ahead) // self.a * self.a
        for boundary in range(self.a, most + 1, self.a):
            if self._key(text, boundary) not in self.segments:
                return boundary - self.a
        return most

    def most(self, text: Text, max_tokens: int | None) -> int:
        """The longest hit that `text` can have, if none past `max_tokens` is asked for."""
        usable = self.usable(len(text))
        return usable if max_tokens is None else min(usable, max_tokens // self.a * self.a)

    def hit(self, text: Text, max_tokens: int | None) -> int:
        """The longest boundary of a prompt that must be a hit."""
        n = min(self.dense(text), self.most(text, max_tokens))
        while n and self.hybrid and self._key(text, n) not in self.points:
            n -= self.a
        return n

    def admit(self, request: Request, match) -> None:
        n, hit = len(request.text), match.num_tokens
        junction = match.replay_to or match.dense_tokens
        request.keep = {(n - 1) // self.a * self.a, n // self.a * self.a, junction}
        request.cached, request.snapshot = match.replay_to or hit, hit
        request.waits = match.replay_to or 0

    def advance(self, request: Request) -> None:
        """A step of `request` was committed."""
        if not self.enabled:
            return
        end, text = request.computed, request.text
        if end % self.a == 0:
            request.snapshot = end
        if end >= request.waits > 0:
            self._point(request, request.waits)
            request.waits = 0
        known = max(end, text.num_given)
        while (b := request.cached + self.a) <= end and b + self.ahead <= known:
            request.cached = b
            self.segments.add(self._key(text, b))
            if b in request.keep or (self.interval and b % self.interval == 0):
                self._point(request, b)

    def rollback(self, request: Request) -> None:
        if request.snapshot > request.computed:
            request.snapshot = -1

    def end(self, request: Request) -> None:
        if request.cached and not request.waits and self.enabled:
            self._point(request, request.cached)

    def _point(self, request: Request, boundary: int) -> None:
        if not self.stateful or request.snapshot == boundary:
            self.points.add(self._key(request.text, boundary))


def possible(device: Device, text: Text, max_tokens: int | None) -> int:
    """The longest hit of a prompt that any look-up could find: some page that is not free has each row it needs."""
    layout = device.kv.layout
    held = np.ones(len(device.memory), dtype=bool)
    held[device.kv.pool.free_pages()] = False
    known = np.unique(device.memory[held])
    most = max(0, min(len(text) - 1, len(text) - layout.lookahead)) // layout.alignment
    if max_tokens is not None:
        most = min(most, max_tokens // layout.alignment)
    usable = np.ones(most + 1, dtype=bool)
    boundaries = np.arange(most + 1) * layout.alignment
    for t, spec in enumerate(device.specs):
        missing = ~np.isin(text.rows(device.tags[t], spec.lookahead), known)
        before = np.append(0, np.cumsum(missing))  # missing rows before each position
        reach = {"dense": len(text), "state": STATE_READS}.get(spec.kind) or spec.sliding_window - 1
        usable &= before[boundaries] == before[np.maximum(0, boundaries - reach)]
    return int(boundaries[usable].max())


class Reader:
    """A router: it learns from events alone which keys are stored, and makes the keys of a prompt itself."""

    def __init__(self, kv: KVCache, identities: bool) -> None:
        groups, self.identities = kv.layout.groups, identities
        self.a, self.ahead, self.seed = kv.alignment, kv.layout.lookahead, kv.hash_seed
        self.dense = [i for i, g in enumerate(groups) if g.kind == "dense"]
        self.others = [i for i, g in enumerate(groups) if g.kind != "dense"]
        self.stored: list[dict[bytes, BlockStored]] = [{} for _ in groups]
        self.host: list[dict[bytes, BlockStored]] = [{} for _ in groups]
        self.next_number = 0
        self.lost = False

    def keys(self, text: Text) -> list[bytes]:
        """Keys of a prompt's segments, as `prefix.keys` documents them."""
        key = sha256(
            struct.pack("<QQ", len(self.seed), len(text.salt)) + self.seed + text.salt
        ).digest()
        keys, start = [], 0
        marks = {(a, 0, a, k) for a, _, k in text.extra_keys}
        marks |= {(b, 1, a, k) for a, b, k in text.extra_keys if b is not None}
        for end in range(self.a + self.ahead, len(text) + 1, self.a):
            part = text.tokens[start:end]
            here = [
                struct.pack("<QBQQ", p, ends, a, len(k)) + k
                for p, ends, a, k in sorted(marks)
                if start <= p < end
            ]
            if here:
                key = sha256(key + sha256(b"".join(here)).digest() + b"\0").digest()
            key = sha256(key + struct.pack(f"<{len(part)}i", *part)).digest()
            keys.append(key)
            start = end
        return keys

    def read(self, log: EventLog) -> int:
        """Take all events; returns how many."""
        first, events = log.take()
        gap = first != self.next_number  # somewhere among or before these events
        self.lost |= gap
        self.next_number = first + len(events)
        for event in events:
            if isinstance(event, AllBlocksCleared):
                for stored in (*self.stored, *self.host):
                    stored.clear()
                self.lost = gap
                continue
            place = self.stored if event.medium == log.medium else self.host
            for group in event.groups:
                for block in event.block_hashes:
                    if isinstance(event, BlockStored):
                        assert self.lost or block not in place[group], "stored twice"
                        place[group][block] = event
                    else:
                        known = place[group].pop(block, None)
                        assert self.lost or known, "removed what was not stored"
        return len(events)

    def hit(self, text: Text, most: int) -> int:
        """Tokens of a prompt, at most `most`, that the cache should hit."""
        keys = self.keys(text)
        depth = len(keys)
        for group in self.dense:
            found = [k in self.stored[group] for k in keys[:depth]]
            depth = found.index(False) if False in found else depth
        depth = min(depth, most // self.a)
        while depth and not all(keys[depth - 1] in self.stored[g] for g in self.others):
            depth -= 1
        self._check_tokens(text, keys[:depth])
        return depth * self.a

    def _check_tokens(self, text: Text, keys: list[bytes]) -> None:
        """The events of a hit name the tokens of their blocks."""
        for group in self.dense:
            for i, key in enumerate(keys):
                event = self.stored[group][key]
                at = event.block_hashes.index(key)
                mine = event.token_ids[at * self.a : (at + 1) * self.a]
                assert list(mine) == text.tokens[i * self.a : (i + 1) * self.a]
                self._check_identity(event, at, text, i * self.a)
        for group in self.others if keys else []:
            event = self.stored[group][keys[-1]]
            count = 0 if event.sliding_window == 1 else len(event.block_hashes)
            end = len(keys) * self.a
            assert event.start == end - count * event.block_size
            assert list(event.token_ids) == text.tokens[event.start : end]

    def _check_identity(self, event: BlockStored, at: int, text: Text, start: int) -> None:
        """An event of block `at`, whose first token is `start`, names the salt and the extra keys over it."""
        end = start + self.a
        over = sorted(
            (first, end if stop is None else min(stop, end), key)
            for first, stop, key in text.extra_keys
            if first < end and (stop is None or stop > start)
        )
        if self.identities:
            assert event.salt == text.salt or not event.salt
            assert sorted(event.extra_keys[at] if event.extra_keys else ()) == over
        else:
            assert not event.salt and not event.extra_keys


def interval_of(specs, choice):
    """`choice` as a retention: a number counts segments."""
    if isinstance(choice, int):
        return choice * math.lcm(*(g.block_size for g in specs))
    return choice
