"""A stand-in engine: it writes the identity of every row into its page and checks every row it would read.

The identity of a row is a chain over all tokens up to it, so that a page which holds the rows of another
prefix, stale rows, or rows that were never written is noticed at the first read.
"""

from __future__ import annotations

import numpy as np

from quire.kvcore import GroupSpec, KVCache, StepPlan

POISON = -1


def groups(*specs: tuple[int, int | None]) -> list[GroupSpec]:
    """Groups from (block_size, window or None) pairs, named g0, g1, ..."""
    return [
        GroupSpec(f"g{i}", "dense" if w is None else "window", size, 4096, w)
        for i, (size, w) in enumerate(specs)
    ]


def row_ids(tokens: list[int], salt: bytes) -> list[int]:
    """Identity of the row of each token."""
    ids, last = [], hash(("salt", salt))
    for t in tokens:
        last = hash((last, t))
        ids.append(last & 0x7FFFFFFFFFFFFFFF)
    return ids


class Engine:
    """Drives a `KVCache` as a runner would; every read is checked, every write recorded."""

    def __init__(self, specs: list[GroupSpec], **options) -> None:
        self.kv = KVCache(specs, **options)
        self.rows = [np.full((self.kv.num_pages, g.block_size), POISON) for g in specs]
        self.tokens: dict[object, list[int]] = {}
        self.salts: dict[object, bytes] = {}
        self.slots: dict[object, int] = {}

    def computed(self, rid) -> int:
        return int(self.kv.num_computed[self.slots[rid]])

    def admit(self, rid, tokens: list[int], salt: bytes = b""):
        match = self.kv.match(tokens, salt=salt)
        self.slots[rid] = self.kv.admit(rid, match)
        self.tokens[rid], self.salts[rid] = list(tokens), salt
        assert self.computed(rid) == match.num_tokens < len(tokens)
        return match

    def step(self, counts: dict[object, int], accepted: dict[object, int] | None = None):
        """Compute `counts[rid]` tokens of each request; returns the plan or OutOfPages."""
        order = list(counts)
        slots = [self.slots[r] for r in order]
        plan = self.kv.plan(slots, [counts[r] for r in order])
        if not isinstance(plan, StepPlan):
            return plan
        self._poison_free_pages()
        ids = []
        for i, rid in enumerate(order):
            c, n = self.computed(rid), counts[rid]
            known = self.tokens[rid]
            known += [0] * (c + n - len(known))
            identity = row_ids(known, self.salts[rid])
            self._check_reads(self.slots[rid], c, identity)
            a, b = plan.cu_seqlens_q[i : i + 2]
            assert plan.positions[a:b].tolist() == list(range(c, c + n))
            assert plan.seq_lens[i] == c + n
            ids += known[c : c + n]
            for g, rows in enumerate(self.rows):
                size = rows.shape[1]
                for position, slot in zip(range(c, c + n), plan.slot_mapping[g, a:b], strict=True):
                    if slot >= 0:
                        assert slot >= size and slot % size == position % size
                        rows[slot // size, slot % size] = identity[position]
        taken = None if accepted is None else [accepted[r] for r in order]
        self.kv.commit(plan, ids, taken)
        if taken:  # rejected tokens never happened
            for rid, m in zip(order, taken, strict=True):
                if m < counts[rid]:
                    del self.tokens[rid][self.computed(rid) :]
        return plan

    def finish_prompt(self, rid, chunk: int = 64) -> None:
        """Compute the rest of the known tokens in chunks."""
        while self.computed(rid) < len(self.tokens[rid]):
            left = len(self.tokens[rid]) - self.computed(rid)
            plan = self.step({rid: min(chunk, left)})
            assert isinstance(plan, StepPlan), plan

    def decode(self, rid, tokens: list[int]) -> None:
        for t in tokens:
            self.tokens[rid].append(t)
            assert isinstance(self.step({rid: 1}), StepPlan)

    def release(self, rid) -> list[int]:
        """End a request; returns the tokens that were computed."""
        n = self.computed(rid)
        self.kv.release(rid)
        del self.slots[rid], self.salts[rid]
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
        for rid, slot in self.slots.items():
            identity = row_ids(self.tokens[rid], self.salts[rid])
            self._check_reads(slot, self.computed(rid), identity)

    def _check_reads(self, slot: int, computed: int, identity: list[int]) -> None:
        for g, spec in enumerate(self.kv.layout.groups):
            window = spec.sliding_window or computed + 1
            positions = np.arange(max(0, computed - window + 1), computed)
            table = self.kv.table(g)[slot]
            pages = table[positions // spec.block_size % len(table)]
            assert (pages != 0).all(), f"{spec.name}: a visible block has no page"
            found = self.rows[g][pages, positions % spec.block_size]
            expected = np.array(identity, dtype=np.int64)[positions]
            assert (found == expected).all(), f"{spec.name}: a visible row holds something else"

    def _poison_free_pages(self) -> None:
        free = self.kv.pool.free_pages()
        for rows in self.rows:
            rows[free] = POISON
