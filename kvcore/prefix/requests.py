"""Running requests: which slot each has, how far it is, and its chain of segment keys.

With a drafter (lookahead k > 0) the last rows before a boundary B depend on the tokens up to B + k.
The key of the segment covers these too, so equal keys mean equal rows in every group.
"""

from __future__ import annotations

from collections.abc import Hashable
from hashlib import sha256

import numpy as np

from ..arguments import as_int, refusal
from ..arrays import Int32, Int64, ragged_arange
from .keys import KEY_BYTES, Prompt


class Sequences:
    """Slots and token chains of running requests.

    Attributes:
        active: [max_requests] bool.
        num_computed, lengths: [max_requests] int64 tokens whose rows are valid; one is read-only.
        prompt_len: [max_requests] int64.
        keyed: slots of requests whose keys are the caller's own.
    """

    def __init__(self, max_requests: int, alignment: int, lookahead: int) -> None:
        self.max_requests = max_requests
        self.alignment = alignment
        self.lookahead = lookahead
        self.active = np.zeros(max_requests, dtype=bool)
        self.num_computed: Int64 = np.zeros(max_requests, dtype=np.int64)
        self.lengths: Int64 = self.num_computed.view()
        self.lengths.flags.writeable = False
        self.prompt_len: Int64 = np.zeros(max_requests, dtype=np.int64)
        # Tokens since the last whole segment; the first segment is longer by the lookahead, and
        # the others leave its first columns alone.
        self._a: Int64 = np.array(alignment)
        self._k: Int64 = np.array(lookahead)
        self._width = self._a + self._k
        self._open: Int32 = np.zeros((max_requests, int(self._width)), dtype=np.int32)
        self._flat = self._open.reshape(-1)
        self._keys: list[bytearray] = [bytearray()] * max_requests
        self._last_key: list[bytes] = [b""] * max_requests
        self.keyed: set[int] = set()
        self._slots: dict[Hashable, int] = {}
        self._free = list(range(max_requests - 1, -1, -1))
        self._mark: Int64 = np.zeros(max_requests, dtype=np.int64)
        self._limit = np.array(max_requests, dtype=np.uint64)
        self._checked: bytes | None = None  # slots that `check` found valid and distinct

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def ids(self) -> list[Hashable]:
        """Running requests, the one admitted first first."""
        return list(self._slots)

    def __contains__(self, request_id: Hashable) -> bool:
        try:
            return request_id in self._slots
        except TypeError:
            raise refusal("request_id", "a hashable id", repr(request_id)) from None

    def slot_of(self, request_id: Hashable) -> int:
        if request_id not in self:
            raise refusal("request_id", "an admitted request", repr(request_id))
        return self._slots[request_id]

    def add(self, request_id: Hashable, prompt: Prompt, computed: int, hit: int) -> int:
        """Give a request with `computed` valid and `hit` cached tokens a free slot."""
        slot = self._slots[request_id] = self._free[-1]
        del self._free[-1]
        self.active[slot] = True
        self.num_computed[slot] = computed
        self.prompt_len[slot] = prompt.num_tokens
        self._keys[slot] = bytearray(prompt.keys)
        self._last_key[slot] = prompt.last_key
        if prompt.is_keyed:  # it gives those past its hit again, with all others
            del self._keys[slot][hit // self.alignment * KEY_BYTES :]
            self.keyed.add(slot)
        return slot

    def remove(self, request_id: Hashable) -> None:
        slot = self._slots.pop(request_id)
        self._checked = None
        self.active[slot] = False
        self.num_computed[slot] = 0
        self._keys[slot] = bytearray()
        self.keyed.discard(slot)
        self._free.append(slot)

    def check(self, slots: Int64) -> None:
        if slots.tobytes() == self._checked:
            return
        if np.count_nonzero(slots.view(np.uint64) >= self._limit):  # negative ones are large then
            raise refusal("slots", f"0..{self.max_requests - 1}", slots.tolist())
        if np.count_nonzero(self.active[slots]) < len(slots):
            bad = slots[~self.active[slots]].tolist()
            raise refusal("slots", "slots of admitted requests", bad)
        every = np.arange(len(slots))
        self._mark[slots] = every
        if self._mark[slots].tobytes() != every.tobytes():
            raise refusal("slots", "distinct slots", slots.tolist())
        self._checked = slots.tobytes()

    def checked(self, slot: int) -> int:
        slot = as_int("slot", slot, 0)
        if not (slot < self.max_requests and self.active[slot]):
            raise refusal("slot", "the slot of an admitted request", slot)
        return slot

    def num_keys(self, slot: int) -> int:
        return len(self._keys[slot]) // KEY_BYTES

    def keys(self, slot: int, first: int, last: int) -> bytes:
        return bytes(self._keys[slot][first * KEY_BYTES : last * KEY_BYTES])

    def give_keys(self, slot: int, keys: bytes) -> None:
        self._keys[slot] += keys

    def feed(self, slots: Int64, start: Int64, end: Int64, tokens: Int32, first: Int32) -> None:
        """Add tokens [start, end) [n] of each request, at index `first` [n] of `tokens`, to the
        open segments; those that they complete get keys."""
        # Columns of the open segment: the first one has the tokens below `lookahead`, too.
        counts, columns = end - start, start % self._a
        if self.lookahead:
            columns = np.where(start < self._k, start, (start - self._k) % self._a + self._k)
        ending = (columns + counts >= self._width).nonzero()[0]
        if len(tokens) == len(slots):  # one each
            self._flat[slots * self._width + columns] = tokens
            for slot, stop in zip(slots[ending].tolist(), end[ending].tolist(), strict=True):
                self._add_key(slot, stop)
            return
        for i in ending.tolist():
            at = int(first[i])
            self.feed_one(int(slots[i]), int(start[i]), tokens[at : at + int(counts[i])])
        if len(ending) == len(slots):
            return
        counts[ending] = 0
        which, column = ragged_arange(columns, counts)
        source = tokens[column + (first - columns)[which]]
        self._flat[(slots * self._width)[which] + column] = source

    def feed_one(self, slot: int, start: int, tokens: Int32) -> None:
        a, k, row = self.alignment, self.lookahead, self._open[slot]
        known = self.num_keys(slot)
        if known and start < known * a + k:  # keys cover these
            start, tokens = known * a + k, tokens[known * a + k - start :]
        while len(tokens):
            column = start if start < k else (start - k) % a + k
            part, tokens = tokens[: a + k - column], tokens[a + k - column :]
            row[column : column + len(part)] = part
            start += len(part)
            if column + len(part) == a + k:
                self._add_key(slot, start)

    def _add_key(self, slot: int, stop: int) -> None:
        """Make the key of the open segment, which with its lookahead ends at `stop`, if unknown."""
        a, k, keys = self.alignment, self.lookahead, self._keys[slot]
        if len(keys) * a < (stop - k) * KEY_BYTES:
            segment = self._open[slot] if stop == a + k else self._open[slot, k:]
            key = sha256(self._last_key[slot] + segment.tobytes()).digest()
            self._last_key[slot] = key
            keys += key
