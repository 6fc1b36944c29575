"""A stand-in engine: it writes the identity of every row into its page and checks every row it would read.

The identity of a row is a chain over all tokens it depends on, so that a page which holds the rows of another
prefix, stale rows, or rows that were never written is noticed at the first read. A state page holds the rows
of its last tokens by position, as a compressor state does.
"""

from __future__ import annotations

import numpy as np

from quire.kvcore import GroupSpec, KVCache, OutOfPages, StepPlan

POISON = -1
INEXACT = -2
STATE_ROWS = 64  # rows of a state page, addressed by position
STATE_READS = 4  # how many of them the next token reads


def groups(*specs: tuple[int, int | None] | GroupSpec) -> list[GroupSpec]:
    """Groups from (block_size, window or None) pairs or specs, named g0, g1, ..."""
    return [
        s
        if isinstance(s, GroupSpec)
        else GroupSpec(f"g{i}", "dense" if s[1] is None else "window", s[0], 4096, s[1])
        for i, s in enumerate(specs)
    ]


class RowIds:
    """Identities of the rows of one sequence, each token hashed once however often it is asked for.

    Tokens may be appended, taken back and replaced: what follows the first change is hashed again.
    """

    def __init__(self, salt: bytes, lookahead: int = 0) -> None:
        self._lookahead = lookahead
        self._tokens: list[int] = []
        self._chain = [hash(("salt", salt))]  # before each token, and after the last
        self._ids = np.empty(64, dtype=np.int64)  # of which the first are known
        self._num_ids = 0

    def of(self, tokens: list[int]) -> np.ndarray:
        """Identity of the row of each token that has `lookahead` tokens after it."""
        known, more = self._tokens, self._lookahead
        same = min(len(known), len(tokens))
        if known[:same] != tokens[:same]:
            same = next(i for i in range(same) if known[i] != tokens[i])
            del known[same:], self._chain[same + 1 :]
            self._num_ids = min(self._num_ids, max(0, same - more))
            self._ids = self._ids.copy()  # somebody may look at the old ones
        for token in tokens[len(known) :]:
            self._chain.append(hash((self._chain[-1], token)))
            known.append(token)
        count = max(0, len(tokens) - more)
        if count > len(self._ids):
            self._ids = np.resize(self._ids, 2 * count)
        for i in range(self._num_ids, count):
            ahead = known[i + 1 : i + 1 + more]
            self._ids[i] = hash((self._chain[i + 1], *ahead)) & 0x7FFFFFFFFFFFFFFF
        self._num_ids = max(self._num_ids, count)
        ids = self._ids[:count]
        ids.flags.writeable = False
        return ids


def row_ids(tokens: list[int], salt: bytes, lookahead: int = 0) -> np.ndarray:
    """Identity of the row of each token that has `lookahead` tokens after it."""
    return RowIds(salt, lookahead).of(tokens)


class Engine:
    """Drives a `KVCache` as a runner would; every read is checked, every write recorded."""

    def __init__(self, specs: list[GroupSpec], **options) -> None:
        self.kv = kv = KVCache(specs, **({"debug": True} | options))
        self.specs = kv.layout.groups
        sizes = [STATE_ROWS if g.kind == "state" else g.block_size for g in self.specs]
        self.rows = [np.full((kv.num_pages, size), POISON) for size in sizes]
        self.tables = [kv.table(g) for g in range(len(self.specs))]
        self.tokens: dict[object, list[int]] = {}
        self.salts: dict[object, bytes] = {}
        self.slots: dict[object, int] = {}
        self.replays: dict[object, tuple[int, int]] = {}
        self._ids: dict[tuple[object, int], RowIds] = {}
        self._poisoned = np.ones(kv.num_pages, dtype=bool)  # what holds nothing else

    def identity(self, rid, lookahead: int, end: int | None = None) -> np.ndarray:
        """`row_ids` of the first ``end`` tokens of a request; all by default."""
        if (rid, lookahead) not in self._ids:
            self._ids[rid, lookahead] = RowIds(self.salts[rid], lookahead)
        return self._ids[rid, lookahead].of(self.tokens[rid][:end])

    def computed(self, rid) -> int:
        return int(self.kv.num_computed[self.slots[rid]])

    def admit(self, rid, tokens: list[int], salt: bytes = b""):
        match = self.kv.match(tokens, salt=salt)
        self.slots[rid] = self.kv.admit(rid, match)
        self.tokens[rid], self.salts[rid] = list(tokens), salt
        assert self.computed(rid) == match.num_saved_tokens < len(tokens)
        self.replays[rid] = (match.replay_from or 0, match.replay_to or 0)
        return match

    def _written_ids(self, rid, identity: np.ndarray, spec: GroupSpec) -> np.ndarray:
        """Identities of the rows that the model writes: in a replay, a window is exact only at its end."""
        first, to = self.replays[rid]
        if spec.kind == "window" and to:
            identity = identity.copy()
            identity[first : to - spec.sliding_window + 1] = INEXACT
        return identity

    def _planned(self, slots: list[int], counts: list[int], how: str):
        """A plan of the whole batch, or one whose pages are reserved one by one (of some twice); and how it is committed."""
        kv = self.kv
        if how == "plan":
            plan = kv.plan(slots, counts)
            return plan, lambda *args: kv.commit(plan, *args)
        starts = kv.num_computed[slots].tolist()
        ends = [start + n for start, n in zip(starts, counts, strict=True)]
        for slot, start in [*zip(slots, starts, strict=True)][len(slots) // 2 :] * (len(slots) % 2):
            if start + 1 <= kv.max_model_len:
                kv.reserve(slot, start + 1)
        for slot, end in zip(slots, ends, strict=True):
            given = kv.reserve(slot, end)
            if isinstance(given, OutOfPages):
                kv.advance(slots, starts)  # none of them goes on: what is reserved comes back
                return given, None

        def commit(ids: list[int], taken: list[int] | None):
            stays = [start + n for start, n in zip(starts, taken or counts, strict=True)]
            copies = kv.advance(slots, stays)
            if how == "late":
                kv.check_invariants()
            which = np.arange(max(counts)) < np.array(taken or counts)[:, None]
            there = np.arange(max(counts)) < np.array(counts)[:, None]
            kv.publish(slots, stays, np.array(ids)[which[there]])
            return copies

        return kv.arrays(slots, starts, ends), commit

    def step(
        self,
        counts: dict[object, int],
        accepted: dict[object, int] | None = None,
        how: str = "plan",
    ):
        """Compute `counts[rid]` tokens of each request; returns the plan or OutOfPages.

        Args:
            how: "plan" for the whole batch, "add" one by one, or "late": with checks before the tokens are known.
        """
        order = list(counts)
        slots = [self.slots[r] for r in order]
        plan, commit = self._planned(slots, [counts[r] for r in order], how)
        if not isinstance(plan, StepPlan):
            return plan
        self._poison_free_pages()
        self._copy(plan.copies)
        ids: list[int] = []
        for i, rid in enumerate(order):
            c, n = self.computed(rid), counts[rid]
            assert len(self.tokens[rid]) >= c + n
            live = plan.state_pages[:, i] if len(plan.state_pages) else None
            self._check_reads(rid, live)
            a, b = plan.cu_seqlens_q[i : i + 2]
            assert plan.positions[a:b].tolist() == list(range(c, c + n))
            assert plan.seq_lens[i] == c + n
            ids += self.tokens[rid][c : c + n]
            for t, (rows, spec) in enumerate(zip(self.rows, self.specs, strict=True)):
                identity = self.identity(rid, spec.lookahead)
                self._check_replay(plan, t, identity, a, c, n, self.replays[rid][1])
                identity = self._written_ids(rid, identity, spec)
                written = plan.slot_mapping[t, a:b]
                if spec.kind == "state":
                    assert (written == -1).all() and live[t] > 0
                    positions = np.arange(c, c + n)
                    rows[live[t], positions % STATE_ROWS] = identity[positions]
                    self._poisoned[live[t]] = False
                    continue
                self._poisoned[written[written >= 0] // spec.block_size] = False
                for position, slot in zip(range(c, c + n), written.tolist(), strict=True):
                    if slot >= 0:
                        size = rows.shape[1]
                        assert slot >= size and slot % size == position % size
                        known = position < len(
                            identity
                        )  # else a drafter's row, to be written later
                        rows[slot // size, slot % size] = identity[position] if known else POISON
        taken = None if accepted is None else [accepted[r] for r in order]
        before = {r: self.computed(r) for r in order}
        for rid, m in zip(order, taken or counts.values(), strict=True):
            self._write_waiting_rows(rid, before[rid] + m)
        held = self.kv.pool.holds > 0
        copies = commit(ids, taken)
        assert not held[copies[:, 1]].any(), "a snapshot that a resume point holds is written over"
        self._copy(copies)
        if taken:  # rejected tokens never happened
            for rid, m in zip(order, taken, strict=True):
                if m < counts[rid]:
                    del self.tokens[rid][self.computed(rid) :]
        for rid in order:
            self._write_drafter_rows(rid, before[rid])
        return plan

    def _check_replay(self, plan, t, identity, offset, start, count, to) -> None:
        """Dense rows that are computed again are not written, and the plan says where they are."""
        again = range(start, min(start + count, to))
        if self.specs[t].kind != "dense" or not again:
            return
        at = np.searchsorted(plan.replay_rows, offset)
        assert plan.replay_rows[at : at + len(again)].tolist() == [
            offset + p - start for p in again
        ]
        assert (plan.slot_mapping[t, offset : offset + len(again)] == -1).all()
        slots = plan.replay_slots[t, at : at + len(again)]
        assert (self.rows[t].reshape(-1)[slots] == identity[list(again)]).all()

    def _copy(self, pages: np.ndarray) -> None:
        if not len(pages):
            return
        assert (pages[:, 1] > 0).all(), "page 0 is the initial state of every request"
        for rows in self.rows:
            rows[pages[:, 1]] = rows[pages[:, 0]]
        self._poisoned[pages[:, 1]] = False

    def _write_waiting_rows(self, rid, end: int) -> None:
        """Rows before a step that waited for its tokens up to `end`: a commit may take their pages out of the ring."""
        start = self.computed(rid)
        for t, (rows, spec) in enumerate(zip(self.rows, self.specs, strict=True)):
            if spec.lookahead and spec.kind != "state":
                identity = self.identity(rid, spec.lookahead, end)
                table = self.tables[t][self.slots[rid]]
                for position in range(max(0, start - spec.lookahead), min(len(identity), start)):
                    page = table[position // spec.block_size % len(table)]
                    if page:
                        rows[page, position % spec.block_size] = identity[position]
                        self._poisoned[page] = False

    def _write_drafter_rows(self, rid, before: int) -> None:
        """Rows of the step that waited for the tokens after them, or were made with tokens that were rejected."""
        for t, (rows, spec) in enumerate(zip(self.rows, self.specs, strict=True)):
            if spec.lookahead and spec.kind != "state":
                identity = self.identity(rid, spec.lookahead)
                last = min(len(identity), self.computed(rid))
                table = self.tables[t][self.slots[rid]]
                for position in range(max(0, before - spec.lookahead), last):
                    page = table[position // spec.block_size % len(table)]
                    if page:
                        rows[page, position % spec.block_size] = identity[position]
                        self._poisoned[page] = False

    def finish_prompt(self, rid, chunk: int = 64) -> None:
        """Compute the rest of the known tokens in chunks."""
        while self.computed(rid) < len(self.tokens[rid]):
            left = min(chunk, len(self.tokens[rid]) - self.computed(rid))
            (count,) = self.kv.cut([self.slots[rid]], [left]).tolist()
            plan = self.step({rid: count})
            assert isinstance(plan, StepPlan), plan

    def decode(self, rid, tokens: list[int]) -> None:
        for t in tokens:
            self.tokens[rid].append(t)
            assert isinstance(self.step({rid: 1}), StepPlan)

    def release(self, rid) -> list[int]:
        """End a request; returns the tokens that were computed."""
        n = self.computed(rid)
        self.kv.release(rid)
        del self.slots[rid], self.salts[rid], self.replays[rid]
        for key in [key for key in self._ids if key[0] == rid]:
            del self._ids[key]
        return self.tokens.pop(rid)[:n]

    def run(
        self, rid, tokens: list[int], answer: list[int] = (), chunk: int = 64, salt: bytes = b""
    ):
        """A whole request; returns its match."""
        match = self.admit(rid, tokens, salt)
        self.finish_prompt(rid, chunk)
        self.decode(rid, list(answer))
        self.release(rid)
        return match

    def check(self) -> None:
        """Invariants, and that the next step of every request could read what it needs."""
        self.kv.check_invariants()
        self._poison_free_pages()
        for rid in self.slots:
            self._check_reads(rid)

    def _check_reads(self, rid, live: np.ndarray | None = None) -> None:
        slot, computed = self.slots[rid], self.computed(rid)
        for t, spec in enumerate(self.specs):
            identity = self.identity(rid, spec.lookahead)
            table = self.tables[t][slot]
            # A drafter's row is written once the tokens it depends on were inputs, or are in the prompt.
            known = max(computed, int(self.kv.sequences.prompt_len[slot]))
            last = min(computed, known - spec.lookahead)
            if spec.kind == "state":
                page = table[0] if live is None else live[t]
                page = page or table[1]  # a hit that has not started: the snapshot
                positions = np.arange(max(0, last - STATE_READS), last)
                found = self.rows[t][page, positions % STATE_ROWS]
            else:
                window = spec.sliding_window or computed + 1
                first, to = self.replays[rid] if spec.kind == "window" else (0, 0)
                if computed < to:
                    continue  # what these rows see is not exact, and nobody else sees them
                positions = np.arange(max(first, computed - window + 1), last)
                pages = table[positions // spec.block_size % len(table)]
                assert (pages != 0).all(), f"{spec.name}: a visible block has no page"
                found = self.rows[t][pages, positions % spec.block_size]
            assert (found == identity[positions]).all(), (
                f"{spec.name}: a visible row holds something else"
            )

    def _poison_free_pages(self) -> None:
        free = self.kv.pool.free_pages()
        new = free[~self._poisoned[free]]
        if len(new):
            for rows in self.rows:
                rows[new] = POISON
        self._poisoned[new] = True
