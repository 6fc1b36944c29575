"""Running requests: which slot each has, how far it is, and its chain of segment keys.

Tokens reach the chain when their rows are computed. With a drafter (lookahead k > 0) the key of a
segment that ends at boundary B covers the tokens up to B + k, because the drafter's last rows
depend on them: then equal keys mean equal rows in every group, and nothing need be dropped at a
hit.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from ..arrays import ONE, Int32, Int64, ragged_arange
from ..spec import as_int
from ..tables.decode import NOBODY, Ending
from ..tables.drafts import DraftBatch
from .keys import KEY_BYTES, Prompt, next_key


class Sequences:
    """Slots and token chains of running requests.

    Attributes:
        active: [max_requests] bool.
        num_computed: [max_requests] int64 tokens whose rows are valid. lengths: the same,
            read-only.
        prompt_len: [max_requests] int64.
    """

    def __init__(self, max_requests: int, alignment: int, lookahead: int, drafts: int = 0) -> None:
        self.max_requests = max_requests
        self.alignment = alignment
        self.lookahead = lookahead
        self.active = np.zeros(max_requests, dtype=bool)
        self.num_computed: Int64 = np.zeros(max_requests, dtype=np.int64)
        self.lengths: Int64 = self.num_computed.view()
        self.lengths.flags.writeable = False
        self.prompt_len: Int64 = np.zeros(max_requests, dtype=np.int64)
        # Tokens since the last whole segment; the first segment is longer by the lookahead. A step
        # with drafts may write past it.
        width = alignment + lookahead + drafts
        self._open: Int32 = np.zeros((max_requests, width), dtype=np.int32)
        self._width: Int64 = np.array(width)
        self._flat = self._open.reshape(-1)
        self._bytes = self._flat.data.cast("B")
        self._prompt_keys: list[bytes] = [b""] * max_requests
        self._more_keys: list[bytearray] = [bytearray()] * max_requests
        self._last_key: list[bytes] = [b""] * max_requests
        self._slots: dict[Hashable, int] = {}
        self._free = list(range(max_requests - 1, -1, -1))
        self._fed: Int64 | None = None  # slots of the batch that `_indices` is about
        # Where the next tokens of its requests go, in all of `_open`.
        self._indices: Int64 = np.empty(0, dtype=np.int64)
        self._stops: Int64 = self._indices  # where their segments end
        self._mark: Int64 = np.zeros(max_requests, dtype=np.int64)
        self._limit = np.array(max_requests, dtype=np.uint64)
        self._checked: bytes | None = None  # slots that `check` found valid and distinct

    @property
    def num_free(self) -> int:
        """Slots without a request."""
        return len(self._free)

    @property
    def ids(self) -> list[Hashable]:
        """Running requests, the one admitted first first."""
        return list(self._slots)

    def __contains__(self, request_id: Hashable) -> bool:
        try:
            return request_id in self._slots
        except TypeError:
            raise ValueError(f"request_id: expected a hashable id, got {request_id!r}") from None

    def slot_of(self, request_id: Hashable) -> int:
        """Slot of a running request.

        Raises:
            ValueError: the id is unknown.
        """
        if request_id not in self:
            raise ValueError(f"request_id: expected an admitted request, got {request_id!r}")
        return self._slots[request_id]

    def add(self, request_id: Hashable, prompt: Prompt, computed: int) -> int:
        """Give a request a free slot; `computed` of its tokens are valid already."""
        slot = self._slots[request_id] = self._free[-1]
        del self._free[-1]
        self._checked = None
        self.active[slot] = True
        self.num_computed[slot] = computed
        self.prompt_len[slot] = prompt.num_tokens
        self._open[slot, : len(prompt.tail)] = prompt.tail
        self._prompt_keys[slot], self._more_keys[slot] = prompt.keys, bytearray()
        self._last_key[slot] = prompt.last_key
        return slot

    def remove(self, request_id: Hashable) -> None:
        """Free the slot of a request."""
        slot = self._slots.pop(request_id)
        self._checked = None
        self.active[slot] = False
        self.num_computed[slot] = 0
        self._prompt_keys[slot], self._more_keys[slot] = b"", bytearray()
        self._free.append(slot)

    def check(self, slots: Int64) -> None:
        """Raise ValueError unless `slots` are distinct slots of running requests."""
        if slots.tobytes() == self._checked:
            return
        if np.count_nonzero(slots.view(np.uint64) >= self._limit):  # negative ones are large then
            raise ValueError(f"slots: expected 0..{self.max_requests - 1}, got {slots.tolist()}")
        if np.count_nonzero(self.active[slots]) < len(slots):
            bad = slots[~self.active[slots]].tolist()
            raise ValueError(f"slots: expected slots of admitted requests, got {bad}")
        every = np.arange(len(slots))
        self._mark[slots] = every
        if self._mark[slots].tobytes() != every.tobytes():
            raise ValueError(f"slots: expected distinct slots, got {slots.tolist()}")
        self._checked = slots.tobytes()

    def checked(self, slot: int) -> int:
        """`slot` as an int.

        Raises:
            ValueError: it is not the slot of a running request.
        """
        slot = as_int("slot", slot, 0)
        if not (slot < self.max_requests and self.active[slot]):
            raise ValueError(f"slot: expected the slot of an admitted request, got {slot}")
        return slot

    def num_keys(self, slot: int) -> int:
        """Segments of a request whose keys are known."""
        return (len(self._prompt_keys[slot]) + len(self._more_keys[slot])) // KEY_BYTES

    def keys(self, slot: int, first: int, last: int) -> bytes:
        """Keys of segments [first, last) of a request, (last - first) * 32 bytes."""
        prompt = self._prompt_keys[slot]
        split = len(prompt) // KEY_BYTES
        if last <= split:
            return prompt[first * KEY_BYTES : last * KEY_BYTES]
        more = self._more_keys[slot]
        start = max(0, first - split)
        return prompt[first * KEY_BYTES :] + bytes(
            more[start * KEY_BYTES : (last - split) * KEY_BYTES]
        )

    def newest_key(self, slot: int, segment: int) -> bytes:
        """Key of one segment of a request."""
        if self._more_keys[slot] and segment + 1 == self.num_keys(slot):
            return self._last_key[slot]  # that of a prompt may have marks besides
        return self.keys(slot, segment, segment + 1)

    def feed_next(
        self, slots: Int64, start: Int64, end: Int64, tokens: Int32, ending: Ending | None
    ) -> list[bytes] | None:
        """The next token of each request of a batch [n]; those of prompts are known.

        Args:
            slots, start, end: of the batch, before and after the step; it may have moved on since.
            ending: who completes a segment, if that is known.

        Returns:
            Keys of the segments that end here; None where prompts or a lookahead make it less
            simple.
        """
        a, k = self.alignment, self.lookahead
        if slots is not self._fed and not self._locate(slots, start):
            for i in range(len(tokens)):
                self.feed(int(slots[i]), int(start[i]), tokens[i : i + 1])
            return None
        self._flat[self._indices] = tokens
        self._indices += ONE
        if k or ending is None:
            rows = ((end >= a + k) & ((end - k) % a == 0)).nonzero()[0]
            slots = slots[rows]
            slot_list = slots.tolist()
        else:
            rows, slots, slot_list, _ = ending
        if not slot_list:
            return None if k else []
        self._indices[rows] = first = slots * self._width
        if k:
            self._stops[rows] = first + a
        made = self._make_keys(slot_list)
        return None if k else made

    def feed_drafts(
        self, batch: DraftBatch, tokens: Int32, end: Int64
    ) -> tuple[list[bytes] | None, Ending | None]:
        """The tokens of a step with drafts, `batch.size` of each request [n * size], of which those
        before `end` [n] stay.

        Returns:
            Keys of the segments that end here, and whose they are; None where prompts or a
            lookahead make it less simple.
        """
        if batch.slots is not self._fed and not self._locate(batch.slots, batch.start):
            self.feed_several(batch.slots, batch.start, end, tokens, batch.cu[:-1])
            return None, None
        # Rejected ones are written over; those behind the end of a segment are the first of the
        # next.
        self._flat[self._indices.take(batch.row_of) + batch.steps - ONE] = tokens
        self._indices += end - batch.start
        rows = (self._indices >= self._stops).nonzero()[0]
        if not rows.size:
            return (None, None) if self.lookahead else ([], NOBODY)
        slots = batch.slots[rows]
        first, stops = slots * self._width, self._stops[rows]
        rest = self._indices[rows] - stops
        self._indices[rows], self._stops[rows] = first + rest, first + self.alignment
        slot_list = slots.tolist()
        made = self._make_keys(slot_list)
        for at, stop, n in zip(first.tolist(), stops.tolist(), rest.tolist(), strict=True):
            if n:
                self._flat[at : at + n] = self._flat[stop : stop + n]
        if self.lookahead:
            return None, None
        return made, Ending(rows, slots, slot_list, end[rows] - rest)

    def forget_batch(self) -> None:
        """Tokens come that the newest batch did not feed: find anew where its next ones go."""
        self._fed = None

    def _locate(self, slots: Int64, start: Int64) -> bool:
        """Find where the next tokens of a batch go, in this step and those after it.

        False, and nothing is found, if some are of prompts, whose keys are known: the requests are
        then fed one by one.
        """
        a, k = self.alignment, self.lookahead
        if np.count_nonzero(start < self.prompt_len[slots]):
            return False
        self._fed, first = slots, slots * self._width
        self._indices, self._stops = first + start % a, first + a
        if k:  # the first segment is longer
            is_first = start < a + k
            self._indices = first + np.where(is_first, start, (start - k) % a)
            self._stops += k * is_first
        return True

    def _make_keys(self, slots: list[int]) -> list[bytes]:
        """Make the keys of the segments that the newest tokens of requests complete."""
        data, last, size, made = self._bytes, self._last_key, self._open.strides[0], []
        for slot in slots:
            more, at = self._more_keys[slot], size * slot
            tokens = self.alignment
            if not (more or self._prompt_keys[slot]):
                tokens += self.lookahead
            last[slot] = key = next_key(last[slot], data[at : at + 4 * tokens])
            more += key
            made.append(key)
        return made

    def feed_several(
        self, slots: Int64, start: Int64, end: Int64, tokens: Int32, first: Int32
    ) -> None:
        """Tokens [start, end) [n] of each request, which begin at index `first` [n] of `tokens`;
        those of prompts are known."""
        a, k = self.alignment, self.lookahead
        begin = np.maximum(start, self.prompt_len[slots])
        if not np.count_nonzero(begin < end):
            return
        counts = np.maximum(end - begin, 0)
        is_first = begin < a + k
        columns = np.where(is_first, begin, (begin - k) % a)
        stop = np.where(is_first, a + k, a)
        source = first + (begin - start)
        ending = columns + counts >= stop  # these make keys, one by one
        for i in ending.nonzero()[0].tolist():
            at = int(source[i])
            self.feed(int(slots[i]), int(begin[i]), tokens[at : at + int(counts[i])])
        counts[ending] = 0
        indices = slots * self._width + columns
        rows, indices_of = ragged_arange(indices, counts)
        self._flat[indices_of] = tokens[indices_of + (source - indices)[rows]]

    def feed(self, slot: int, start: int, tokens: Int32) -> None:
        """Several tokens of one request, from position `start` on; those of its prompt are
        known."""
        skip = max(0, int(self.prompt_len[slot]) - start)
        start, tokens = start + skip, tokens[skip:]
        a, k = self.alignment, self.lookahead
        while len(tokens):
            first = start < a + k
            column, stop = (start, a + k) if first else ((start - k) % a, a)
            part, tokens = tokens[: stop - column], tokens[stop - column :]
            self._open[slot, column : column + len(part)] = part
            start += len(part)
            if column + len(part) == stop:
                key = next_key(self._last_key[slot], self._open[slot, :stop].tobytes())
                self._last_key[slot] = key
                self._more_keys[slot] += key
