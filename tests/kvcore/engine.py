"""Fake device memory with an identity in every row, which compares each row that is read.

All groups share one memory, as they share one pool. The identity of a row is a hash of its table,
its position and all tokens that it depends on, computed here from token lists: rows of another
prefix or group, stale rows and rows never written differ. A state page has the rows of its last
tokens by position, and each row depends on the one before it, back to the initial state in page 0.
"""

import copy
from hashlib import blake2b

import numpy as np

from quire.kvcore import GroupSpec, KVCache, OutOfPages, StepPlan, linear_table, paged_rows

POISON, INITIAL, INEXACT = -1, -2, -3
STATE_ROWS = 64  # of a page; the last one of a state page is also the row before its first token
STATE_READS = 4  # rows of a state that the next token reads


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()


class Text:
    """Tokens under a salt and extra keys, with a hash of each prefix.

    Attributes:
        tokens: ids. num_given: length of the prompt, known before it is computed.
        extra_keys: (start, stop, key) as in `KVCache.match`.
    """

    def __init__(self, tokens: list[int], salt: bytes, extra_keys=()) -> None:
        self.salt, self.tokens, self.num_given = salt, [], len(tokens)
        self.extra_keys = [
            (start, None if stop is None or stop > len(tokens) else stop, key)
            for start, stop, key in extra_keys
            if start < len(tokens)
        ]
        self._hashes = [_hash(salt)]  # of the first 0, 1, 2, ... tokens
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: list[int]) -> None:
        for at, token in enumerate(tokens, len(self)):
            extra = [
                (key, at - start)
                for start, stop, key in self.extra_keys
                if start <= at and (stop is None or at < stop)
            ]
            content = token.to_bytes(4, "little") + repr(sorted(extra)).encode()
            self._hashes.append(_hash(self._hashes[-1] + content))
        self.tokens += tokens

    def cut(self, n: int) -> None:
        """Forget the tokens from position `n` on; never those of the prompt."""
        n = max(n, self.num_given)
        del self.tokens[n:], self._hashes[n + 1 :]

    def copy(self) -> "Text":
        """A text with tokens of its own."""
        other = copy.copy(self)
        other.tokens, other._hashes = self.tokens[:], self._hashes[:]
        return other

    def prefix(self, n: int) -> bytes:
        """Hash of the first `n` tokens."""
        return self._hashes[n]

    def rows(self, tag: int, lookahead: int) -> np.ndarray:
        """[tokens - lookahead] int64 identities >= 0 of the rows of a table."""
        hashes = np.frombuffer(b"".join(self._hashes[1 + lookahead :]), dtype=np.int64)
        return (hashes ^ tag) & np.iinfo(np.int64).max


class Request:
    """A running request: its text, slot, and number of computed tokens.

    Attributes:
        published: tokens that an append-only cache knows.
        own: [tables] pages of an append-only cache, as its worker was told them.
        tables: [tables] rows of the tables as of the launch of a step; None: as of now.
    """

    def __init__(self, rid, slot: int, text: Text, match) -> None:
        self.rid, self.slot, self.text, self.match = rid, slot, text, match
        self.computed = self.published = match.num_saved_tokens
        self.replay_from, self.replay_to = match.replay_from or 0, match.replay_to or 0
        self.own: list[list[int]] = []
        self.tables: list[np.ndarray] | None = None

    def at_launch(self, tables: list[np.ndarray]) -> "Request":
        """The request as it is now, for a step that runs later."""
        other = copy.copy(self)
        other.text, other.tables = self.text.copy(), [row.copy() for row in tables]
        return other


class Device:
    """Memory of a cache's pool, and a copy of its tables that follows the deltas."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv
        self.specs = kv.layout.groups
        hashes = [_hash(f"{g.name}/{t}".encode()) for t, g in enumerate(self.specs)]
        self.tags = np.frombuffer(b"".join(hashes), dtype=np.int64).tolist()
        width = max(STATE_ROWS, *(g.block_size for g in self.specs))
        self.memory = np.full((kv.num_pages, width), POISON)
        self.memory[0] = INITIAL
        self.mirror = None if kv.append_only else np.zeros_like(kv.tables)
        self.rows_checked = 0

    def rows_of_tables(self, request: Request) -> list[np.ndarray]:
        """[tables] pages of a request."""
        if self.kv.append_only:
            return [np.array(pages or [0]) for pages in request.own]
        if request.tables is not None:
            return request.tables
        return [self.kv.table(t)[request.slot] for t in range(len(self.specs))]

    def wipe_free_pages(self) -> None:
        self.memory[self.kv.pool.free_pages()] = POISON

    def copy(self, pages: np.ndarray) -> None:
        """Run page copies [m, 2], (source, target)."""
        source, to = pages.T
        assert (to > 0).all(), "a copy to the null page"
        assert len(set(to.tolist())) == len(to), "two copies to one page"
        self.memory[to] = self.memory[source]

    def visible(self, t: int, request: Request, back: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Positions that a token sees in table `t`, and the identities of their rows.

        Args:
            back: 0: the token is the next one; 1: the newest one.
        """
        spec, n, text = self.specs[t], request.computed, request.text
        # A row that depends on later tokens is written once these are known.
        last = min(n, max(n, text.num_given) - spec.lookahead)
        first = 0
        if spec.kind == "state":
            first = max(0, last - STATE_READS)
        elif spec.kind == "window":
            first = max(request.replay_from, n - back - spec.sliding_window + 1)
            if n - back < request.replay_to:  # inexact, and for no other request
                first = last
        positions = np.arange(first, max(first, last))
        return positions, text.rows(self.tags[t], spec.lookahead)[positions]

    def check(self, request: Request, states: np.ndarray | None = None) -> None:
        """Compare every row that the next token sees.

        Args:
            states: [num_groups] live pages of a planned step; default: those of the tables.
        """
        for t, row in enumerate(self.rows_of_tables(request)):
            positions, expected = self.visible(t, request)
            name = self.specs[t].name
            if self.specs[t].kind == "state":
                page = int(row[0] if states is None else states[t])
                page = page or int(row[1])  # not started: the snapshot, or the initial state
                if request.computed == 0:
                    assert self.memory[page, -1] == INITIAL, f"{name}: not the initial state"
                found = self.memory[page, positions % STATE_ROWS]
            else:
                found = self.memory[self._where(t, row, positions)]
            self._equal(found, expected, f"{name}: row of {request.rid!r}", positions)

    def _where(self, t: int, row: np.ndarray, positions: np.ndarray):
        """Pages and rows of positions by a table's row, a ring."""
        blocks, rows = np.divmod(positions, self.specs[t].block_size)
        pages = row[blocks % len(row)]
        assert (pages > 0).all(), f"{self.specs[t].name}: a block has no page"
        return pages, rows

    def _equal(self, found: np.ndarray, expected: np.ndarray, what: str, positions) -> None:
        self.rows_checked += len(expected)
        wrong = positions[found != expected]
        assert not len(wrong), f"{what}: wrong at positions {wrong.tolist()}"

    def run(self, plan: StepPlan, accepted: dict[Request, int]) -> list[int]:
        """Run a step, of which `accepted` tokens of each request stay; returns its token ids."""
        ids: list[int] = []
        self.copy(plan.copies)
        assert plan.slots.tolist() == [r.slot for r in accepted]
        for i, r in enumerate(accepted):
            self.check(r, plan.state_pages[:, i] if len(plan.state_pages) else None)
            n, (a, b) = int(plan.num_new_tokens[i]), plan.cu_seqlens_q[i : i + 2].tolist()
            assert plan.positions[a:b].tolist() == list(range(r.computed, r.computed + n))
            assert plan.seq_lens[i] == r.computed + n
            ids += r.text.tokens[r.computed :][:n]
        self._write(plan, list(accepted))
        for r, n in accepted.items():
            self._write_waiting(r, r.computed + n)
        return ids

    def _write(self, plan: StepPlan, requests: list[Request]) -> None:
        """Write the rows of a step by its slot mapping, and check the targets."""
        used = np.zeros(self.memory.shape, dtype=bool)
        for i, request in enumerate(requests):
            start, (a, b) = request.computed, plan.cu_seqlens_q[i : i + 2].tolist()
            end = start + b - a
            for t, spec in enumerate(self.specs):
                if spec.kind == "state":
                    page = int(plan.state_pages[t, i])
                    assert page > 0 and (plan.slot_mapping[t, a:b] == -1).all()
                    positions = np.arange(max(start, end - STATE_ROWS), end)
                    where = np.full(len(positions), page), positions % STATE_ROWS
                    assert not used[page].any(), "two writers of one state"
                    used[page] = True
                else:
                    mapping = plan.slot_mapping[t, a:b]
                    on = np.flatnonzero(mapping >= 0)
                    positions = start + on
                    where = np.divmod(mapping[on], spec.block_size)
                    assert (where[0] > 0).all(), f"{spec.name}: a row in the null page"
                    assert (where[1] == positions % spec.block_size).all()
                    assert not used[where].any(), f"{spec.name}: two tokens write one row"
                    used[where] = True
                    if spec.kind == "dense":
                        self._check_replay(plan, t, request, a, on, end)
                self._put(t, request, positions, where)

    def write_span(self, request: Request, end: int) -> None:
        """Write the rows up to `end` of an append-only cache."""
        positions = np.arange(request.computed, end)
        for t, row in enumerate(self.rows_of_tables(request)):
            self._put(t, request, positions, self._where(t, row, positions))

    def check_span(self, request: Request, end: int) -> None:
        """Compare every row that the queries up to `end` see, their own included."""
        for t, row in enumerate(self.rows_of_tables(request)):
            spec = self.specs[t]
            first = max(0, request.computed - (spec.sliding_window or end + 1) + 1)
            positions = np.arange(first, end)
            expected = self._written(t, request)[positions]
            found = self.memory[self._where(t, row, positions)]
            self._equal(found, expected, f"{spec.name}: row of {request.rid!r}", positions)

    def _written(self, t: int, request: Request) -> np.ndarray:
        """Row contents of table `t` by position; windows of a replay are exact only at its end."""
        spec = self.specs[t]
        rows = request.text.rows(self.tags[t], spec.lookahead)
        if spec.kind == "window" and request.replay_to:
            rows[request.replay_from : request.replay_to - spec.sliding_window + 1] = INEXACT
        return rows

    def _put(self, t: int, request: Request, positions: np.ndarray, where) -> None:
        rows = self._written(t, request)
        values = np.full(len(positions), POISON)  # of rows that later tokens complete
        known = positions < len(rows)
        values[known] = rows[positions[known]]
        if request.tables is None and not self.kv.append_only:
            held = self.kv.pool.holds[where[0]] > 0
            is_same = self.memory[where] == values
            assert is_same[held].all(), "a row of a resume point is written over"
        self.memory[where] = values

    def _check_replay(
        self, plan, t: int, request: Request, a: int, on: np.ndarray, end: int
    ) -> None:
        """Every dense row is written, except replayed ones, which the plan locates."""
        start = request.computed
        again = np.arange(start, min(end, max(start, request.replay_to)))
        assert len(on) == end - start - len(again) and (on >= len(again)).all()
        at = np.searchsorted(plan.replay_rows, a)
        assert (plan.replay_rows[at : at + len(again)] == a + again - start).all()
        where = np.divmod(plan.replay_slots[t, at : at + len(again)], self.specs[t].block_size)
        expected = request.text.rows(self.tags[t], self.specs[t].lookahead)[again]
        self._equal(self.memory[where], expected, "a replayed row", again)

    def _write_waiting(self, request: Request, end: int) -> None:
        """Write the lookahead rows before a step that its tokens up to `end` complete."""
        start, known = request.computed, max(end, request.text.num_given)
        for t, row in enumerate(self.rows_of_tables(request)):
            spec = self.specs[t]
            first = max(request.match.num_saved_tokens, start - spec.lookahead)
            positions = np.arange(first, max(first, min(start, known - spec.lookahead)))
            if spec.lookahead and len(positions):
                blocks, rows = np.divmod(positions, spec.block_size)
                pages = row[blocks % len(row)]
                on = pages > 0
                self._put(t, request, positions[on], (pages[on], rows[on]))

    def check_deltas(self, requests: list[Request]) -> None:
        """Compare a copy of the tables made from `take_deltas` wherever a query may read."""
        places, pages = self.kv.take_deltas()
        for place, page in zip(places.tolist(), pages.tolist(), strict=True):  # later ones last
            self.mirror.reshape(-1)[place] = page
        for t, spec in enumerate(self.specs):
            offset, width = self.kv.layout.columns(t)
            for request in requests:
                row = self.kv.table(t)[request.slot]
                if spec.kind == "state":  # no live page before the first step
                    columns = np.arange(row[0] > 0)
                else:
                    columns = self.visible(t, request)[0] // spec.block_size % width
                mine = self.mirror[request.slot, offset + columns]
                assert (mine == row[columns]).all(), f"{spec.name}: deltas"

    def check_formats(self, requests: list[Request], back: int = 0) -> None:
        """Linear and CSR tables name the page of every row that a token sees (see `visible`)."""
        slots = [r.slot for r in requests]
        for t, spec in enumerate(self.specs):
            if spec.kind == "state":
                continue
            linear = linear_table(self.kv, t, slots)
            rows = paged_rows(self.kv, t, slots)
            for i, request in enumerate(requests):
                positions, expected = self.visible(t, request, back)
                blocks, within = np.divmod(positions, spec.block_size)
                what = f"{spec.name}: {request.rid!r} of {request.computed} tokens"
                found = self.memory[linear[i, blocks], within]
                self._equal(found, expected, f"linear {what}", positions)
                pages = rows.indices[rows.indptr[i] : rows.indptr[i + 1]]
                at = blocks - int(rows.first_tokens[i]) // spec.block_size
                assert (at >= 0).all() and (pages[at] == linear[i, blocks]).all(), f"csr {what}"
                tokens = (len(pages) - 1) * spec.block_size + int(rows.last_page_len[i])
                assert not len(pages) or rows.first_tokens[i] + tokens == request.computed, what


def groups(*specs: tuple[int, int | None] | GroupSpec) -> list[GroupSpec]:
    """Groups from (block_size, window or None) pairs or specs, named g0, g1, ..."""
    return [
        s
        if isinstance(s, GroupSpec)
        else GroupSpec(f"g{i}", "dense" if s[1] is None else "window", s[0], 4096, s[1])
        for i, s in enumerate(specs)
    ]


class Runner:
    """A cache, and the tokens of its requests, without a device: rows are compared by `shadow`."""

    def __init__(self, *specs: tuple[int, int | None] | GroupSpec, **options) -> None:
        sizes = {"num_pages": 400, "max_requests": 4, "max_model_len": 600}
        self.kv = KVCache(groups(*specs), **(sizes | options))
        self.tokens: dict[object, list[int]] = {}

    def computed(self, rid) -> int:
        return int(self.kv.num_computed[self.kv.slot_of(rid)])

    def admit(self, rid, tokens, **keys):
        match = self.kv.match(list(tokens), **keys)
        self.kv.admit(rid, match)
        self.tokens[rid] = list(tokens)
        return match

    def step(self, rid, num_tokens: int | None = None) -> StepPlan | OutOfPages:
        """Compute some tokens of a request; by default the rest of them."""
        slot, rest = self.kv.slot_of(rid), self.tokens[rid][self.computed(rid) :]
        rest = rest[:num_tokens]
        plan = self.kv.plan([slot], [len(rest)])
        if isinstance(plan, StepPlan):
            self.kv.commit(plan, rest)
        return plan

    def finish_prompt(self, rid, chunk: int = 64) -> None:
        while left := len(self.tokens[rid]) - self.computed(rid):
            (count,) = self.kv.cut([self.kv.slot_of(rid)], [min(chunk, left)]).tolist()
            assert isinstance(self.step(rid, count), StepPlan)

    def decode(self, rid, tokens) -> None:
        for token in tokens:
            self.tokens[rid].append(token)
            assert isinstance(self.step(rid, 1), StepPlan)

    def run(self, rid, tokens, answer=(), chunk: int = 64, **keys):
        """A whole request; returns its match."""
        match = self.admit(rid, tokens, **keys)
        self.finish_prompt(rid, chunk)
        self.decode(rid, answer)
        self.kv.release(rid)
        return match
