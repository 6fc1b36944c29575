"""Expected hits, from the documents and from events; and all that a cache holds, as bytes."""

import copyreg
import io
import math
import pickle
import struct
from hashlib import sha256
from types import GeneratorType

from quire.kvcore import AllBlocksCleared, BlockStored, EventLog, KVCache, tail_hashes
from tests.kvcore.engine import Request, Text

SCRATCH = {"_mark", "_checked", "_found", "_found_at"}  # attributes that remember nothing


class Promises:
    """Prefixes that must be findable while nothing was evicted, as hashes of token prefixes.

    These are all computed segments, and resume points at the boundaries that `policies.retention`
    names: the resend boundaries of a prompt, the junction, the interval, and the last boundary of a
    request. With a state group, only where a step ended there and no later step wrote over it.
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
        """Longest hit that a prompt of `n` tokens can have."""
        return max(0, min(n - 1, n - self.ahead)) // self.a * self.a

    def most(self, text: Text, max_tokens: int | None) -> int:
        usable = self.usable(len(text))
        return usable if max_tokens is None else min(usable, max_tokens // self.a * self.a)

    def dense(self, text: Text) -> int:
        """Tokens of a prompt whose segments are findable."""
        most = max(0, len(text) - self.ahead) // self.a * self.a
        for boundary in range(self.a, most + 1, self.a):
            if self._key(text, boundary) not in self.segments:
                return boundary - self.a
        return most

    def hit(self, text: Text, max_tokens: int | None) -> int:
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
        """Call after each committed step of `request`."""
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


class Reader:
    """A router: it learns stored keys from events alone, and makes the keys of prompts itself.

    Attributes:
        stored, host: [groups] key of each block -> the event that stored it, by medium.
        lost: whether events were missing.
    """

    def __init__(self, kv: KVCache, identities: bool = False) -> None:
        self.groups, self.identities = kv.layout.groups, identities
        self.a, self.ahead, self.seed = kv.alignment, kv.layout.lookahead, kv.hash_seed
        self.dense = [i for i, g in enumerate(self.groups) if g.kind == "dense"]
        self.others = [i for i, g in enumerate(self.groups) if g.kind != "dense"]
        tails = [
            g.tail_blocks * g.block_size
            for g in self.groups
            if g.kind == "window" and g.tail_blocks
        ]
        has_state = any(g.kind == "state" for g in self.groups)
        self.span = 0 if has_state else min(tails, default=10**9) // self.a
        self.stored: list[dict[bytes, BlockStored]] = [{} for _ in self.groups]
        self.host: list[dict[bytes, BlockStored]] = [{} for _ in self.groups]
        self.next_number = 0
        self.lost = False

    def keys(self, text: Text) -> list[bytes]:
        """Segment keys of a prompt, as `prefix.keys` documents them."""
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

    def read(self, log: EventLog, most: int | None = None) -> int:
        """Take all events, or at most `most`; returns their number."""
        first, events = log.take(*(() if most is None else (most,)))
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
                spec = self.groups[group]
                assert (event.kind, event.names[event.groups.index(group)]) == (
                    spec.kind,
                    spec.name,
                )
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
        held = self._held() if depth and self.others else set(keys)
        while depth and keys[depth - 1] not in held:
            depth -= 1
        self._check_tokens(text, keys[:depth])
        return depth * self.a

    def _held(self) -> set[bytes]:
        """Keys of resume points, and of the boundaries between two that the later tail covers."""
        held = points = set.intersection(*(set(self.stored[g]) for g in self.others))
        for key in points if self.dense and self.span else ():
            above, node = [], self._parent(key)
            while node and node not in points and len(above) < self.span:
                above.append(node)
                node = self._parent(node)
            if len(above) < self.span:
                held = held.union(above)
        return held

    def _parent(self, key: bytes) -> bytes | None:
        event = self.stored[self.dense[0]].get(key)  # None: a block of a tail, or evicted
        if event is None:
            return None
        at = event.block_hashes.index(key)
        return event.block_hashes[at - 1] if at else event.parent

    def _check_tokens(self, text: Text, keys: list[bytes]) -> None:
        """The events of a hit name the tokens, salt and extra keys of their blocks."""
        for group in self.dense:
            for i, key in enumerate(keys):
                event = self.stored[group][key]
                at = event.block_hashes.index(key)
                mine = event.token_ids[at * self.a : (at + 1) * self.a]
                assert list(mine) == text.tokens[i * self.a : (i + 1) * self.a]
                assert self._parent(key) == (keys[i - 1] if i else None)
                self._check_identity(event, at, text, i * self.a)
        for group in self.others if keys else []:
            if event := self.stored[group].get(keys[-1]):
                assert event.sliding_window == self.groups[group].sliding_window
                assert event.block_size == self.groups[group].block_size
                count = 0 if event.sliding_window == 1 else len(event.block_hashes)
                assert event.block_hashes == tail_hashes(keys[-1], count)
                end = len(keys) * self.a
                assert event.start == end - count * event.block_size
                assert list(event.token_ids) == text.tokens[event.start : end]

    def _check_identity(self, event: BlockStored, at: int, text: Text, start: int) -> None:
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


class _Pickler(pickle.Pickler):
    def reducer_override(self, x: object):
        if isinstance(x, GeneratorType):  # of an announcement
            return object, ()
        held = getattr(x, "__dict__", {})
        if SCRATCH.isdisjoint(held):
            return NotImplemented
        return copyreg.__newobj__, (type(x),), {k: v for k, v in held.items() if k not in SCRATCH}


def contents(root: object) -> bytes:
    """All objects reachable from `root`: equal after a call that changed nothing."""
    out = io.BytesIO()
    _Pickler(out).dump(root)
    return out.getvalue()
