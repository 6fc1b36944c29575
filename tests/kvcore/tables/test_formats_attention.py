"""Attention over the pages that `linear_table` and `paged_rows` name is attention over all visible keys, in float64.

What a query sees is said once, here, by token positions; nothing of the tables' arithmetic is repeated.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from quire.kvcore import GroupSpec, KVCache, linear_table, paged_rows

DIM = 3
# (block size, W or None, drafts)
CASES = {
    "128-16": (16, 128, 0), "128-16-drafts": (16, 128, 3), "dense": (16, None, 0), "17-8": (8, 17, 0), "10-4": (4, 10, 0), "16-16": (16, 16, 0),
    "9-8": (8, 9, 0), "one": (4, 1, 0), "rows": (1, 5, 0), "longer": (8, 500, 0),
}  # fmt: skip


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Softmax attention of one query."""
    if not len(keys):
        return np.zeros(DIM)
    logits = keys @ q
    weights = np.exp(logits - logits.max())
    return weights @ values / weights.sum()


def near(found: np.ndarray, expected: np.ndarray) -> bool:
    """As `np.testing.assert_allclose` has it, of thousands of pairs of a few numbers."""
    return bool((np.abs(found - expected) <= 1e-9 * np.abs(expected)).all())


class Paged:
    """A request's own keys and values, all of them, beside the rows that were written into pages by slot mappings."""

    def __init__(self, case: str, **options) -> None:
        size, self.window, drafts = CASES[case]
        kind = "dense" if self.window is None else "window"
        groups = [
            GroupSpec("dense", "dense", 16, 1),
            GroupSpec("g", kind, size, 1, self.window),
        ]
        base = {"num_pages": 600, "max_requests": 3, "max_model_len": 512}
        self.kv = KVCache(groups, max_draft_tokens=drafts, **(base | options))
        self.size = size
        self.rng = np.random.default_rng(0)
        self.pages = np.full((2, self.kv.num_pages, size, DIM), np.nan)
        self._read: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.rows: dict[str, np.ndarray] = {}  # [2, tokens, DIM] keys and values of every token

    def admit(self, rid: str, tokens: list[int]) -> int:
        match = self.kv.match(tokens)
        slot = self.kv.admit(rid, match)
        self._read.clear()
        # Rows are functions of the prefix: equal tokens have equal rows.
        self.rows[rid] = np.array([[self._row(t, i) for t in tokens] for i in range(2)])
        return slot

    @staticmethod
    @cache
    def _row(token: int, which: int) -> np.ndarray:
        return np.random.default_rng([token, which]).normal(size=DIM)

    def step(self, rid: str, tokens: list[int]) -> None:
        """Write first, then commit."""
        slot = self.kv.slot_of(rid)
        start = int(self.kv.num_computed[slot])
        plan = self.kv.plan([slot], [len(tokens)])
        more = np.array([[self._row(t, i) for t in tokens] for i in range(2)])
        self.rows[rid] = np.concatenate([self.rows[rid][:, :start], more], axis=1)
        where = plan.slot_mapping[1]
        for i, at in enumerate(where.tolist()):
            if at >= 0:
                self.pages[:, at // self.size, at % self.size] = more[:, i]
        self.kv.commit(plan, tokens)
        self._read.clear()

    def rollback(self, rid: str, count: int) -> None:
        self.kv.rollback(self.kv.slot_of(rid), count)
        self._read.clear()

    def lowest(self, position: int) -> int:
        """The first token that a query at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def paged(self, rid: str, form: str) -> tuple[np.ndarray, np.ndarray]:
        """Positions [n] of computed tokens and their rows [2, n, DIM] as the tables name them; read once after each change."""
        if form not in self._read:
            self._read[form] = self._paged(rid, form)
        return self._read[form]

    def _paged(self, rid: str, form: str) -> tuple[np.ndarray, np.ndarray]:
        slot, within = self.kv.slot_of(rid), np.arange(self.size)
        n = int(self.kv.num_computed[slot])
        if form == "linear":
            table = linear_table(self.kv, 1, [slot])[0]
            blocks = np.flatnonzero(table)
            pages, positions = table[blocks], blocks[:, None] * self.size + within
            named = positions < n
        else:
            rows = paged_rows(self.kv, 1, [slot])
            assert rows.indptr.tolist() == [0, len(rows.indices)]
            last = int(rows.last_page_len[0])
            assert (last == 0) == (not len(rows.indices)) and rows.indices.all()
            pages = rows.indices
            positions = int(rows.first_tokens[0]) + np.arange(len(pages))[:, None] * self.size + within  # fmt: skip
            named = np.full(positions.shape, True)
            named[-1:, last:] = False
        return positions[named], self.pages[:, pages][:, named]

    def check_newest(self, rid: str, form: str) -> None:
        """The query of the newest token takes all from the pages."""
        position = int(self.kv.num_computed[self.kv.slot_of(rid)]) - 1
        q, (positions, rows) = self.rng.normal(size=DIM), self.paged(rid, form)
        low = self.lowest(position)
        found = attend(q, *rows[:, positions >= low])
        expected = attend(q, *self.rows[rid][:, low : position + 1])
        assert near(found, expected), f"{position + 1} tokens"

    def check_next(self, rid: str, form: str, count: int) -> None:
        """The queries of a step that is still to be committed take the context from the pages, and the step's rows from itself."""
        n = int(self.kv.num_computed[self.kv.slot_of(rid)])
        (positions, rows), own = self.paged(rid, form), self.rng.normal(size=(2, count, DIM))
        everything = np.concatenate([self.rows[rid][:, :n], own], axis=1)
        for position in range(n, n + count):
            low = self.lowest(position)
            seen = positions >= low
            assert np.array_equal(positions[seen], np.arange(low, n)), (
                f"{position} after {n} tokens"
            )
            mine = np.concatenate(
                [rows[:, seen], own[:, max(0, low - n) : position + 1 - n]], axis=1
            )
            q = self.rng.normal(size=DIM)
            expected = attend(q, *everything[:, low : position + 1])
            assert near(attend(q, *mine), expected), f"{position} after {n} tokens"

    def check_reach(self, rid: str, form: str) -> None:
        """No page is named that is out of sight of the newest token."""
        n = int(self.kv.num_computed[self.kv.slot_of(rid)])
        blocks = self.paged(rid, form)[0] // self.size
        assert self.window is None or ((blocks + 1) * self.size > n - self.window).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("prompt", "form"), [(1, "linear")])
def test_a_decoded_token_sees_all_of_its_keys(case, form, prompt):
    p = Paged(case)
    tokens = [int(t) for t in p.rng.integers(0, 50, 400)]
    p.admit("a", tokens[:prompt])
    p.step("a", tokens[:prompt])
    while (n := int(p.kv.num_computed[p.kv.slot_of("a")])) < 400:
        p.check_next("a", form, 3)
        p.step("a", tokens[n : n + 1])
        p.check_newest("a", form)
        p.check_reach("a", form)


@pytest.mark.parametrize("form", ["linear", "rows"])
@pytest.mark.parametrize("case", CASES)
def test_after_a_hit_and_beside_chunks_and_drafts(case, form):
    p = Paged(case)
    tokens = [int(t) for t in p.rng.integers(0, 50, 400)]
    for end in (145, 176, 299):
        p.admit("a", tokens[:end])
        start = int(p.kv.num_computed[p.kv.slot_of("a")])
        p.check_next("a", form, 3)
        for at in range(start, end, 37):
            p.step("a", tokens[at : min(end, at + 37)])
            p.check_next("a", form, 40)
            p.check_reach("a", form)
        slot = p.kv.slot_of("a")
        while (n := int(p.kv.num_computed[slot])) < end + 40:
            if p.kv.max_draft_tokens and n % 7 == 0:
                p.step("a", tokens[n : n + 3])
                room = n + 3 - p.kv.lowest_rollback(slot)
                if room:
                    p.rollback("a", min(2, room))
                n = int(p.kv.num_computed[slot])
            p.step("a", tokens[n : n + 1])
            p.check_newest("a", form)
            p.check_next("a", form, 2)
        p.kv.release("a")
    assert start > 0, "there was a hit"
