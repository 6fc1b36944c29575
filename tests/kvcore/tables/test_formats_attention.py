"""Attention over the pages that `linear_table` and `paged_rows` name is attention over all visible keys, in float64.

What a query sees is said once, here, by token positions; nothing of the tables' arithmetic is repeated.
"""

from __future__ import annotations

import numpy as np
import pytest

from quire.kvcore import GroupSpec, KVCache, linear_table, paged_rows

DIM = 3
# (block size, W or None, drafts)
CASES = {
    "128-16": (16, 128, 0), "128-16-drafts": (16, 128, 3), "dense": (16, None, 0), "17-8": (8, 17, 0), "10-4": (4, 10, 0), "16-16": (16, 16, 0),
    "9-8": (8, 9, 0), "one": (4, 1, 0), "rows": (1, 5, 0), "longer": (8, 500, 0), "two-parts": (4, 10, 0),
}  # fmt: skip


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Softmax attention of one query."""
    if not len(keys):
        return np.zeros(DIM)
    logits = keys @ q
    weights = np.exp(logits - logits.max())
    return weights @ values / weights.sum()


class Paged:
    """A request's own keys and values, all of them, beside the rows that were written into pages by slot mappings."""

    def __init__(self, case: str, **options) -> None:
        size, self.window, drafts = CASES[case]
        parts = 2 if case == "two-parts" else 1
        kind = "dense" if self.window is None else "window"
        groups = [
            GroupSpec("dense", "dense", 16, 1),
            GroupSpec("g", kind, size, 1, self.window, pages_per_block=parts),
        ]
        base = {"num_pages": 600, "max_requests": 3, "max_model_len": 512}
        self.kv = KVCache(groups, max_draft_tokens=drafts, **(base | options))
        self.part, self.size = parts - 1, size
        self.rng = np.random.default_rng(0)
        self.pages = np.full((2, self.kv.num_pages, size, DIM), np.nan)
        self.rows: dict[str, np.ndarray] = {}  # [2, tokens, DIM] keys and values of every token

    def admit(self, rid: str, tokens: list[int]) -> int:
        match = self.kv.match(tokens)
        slot = self.kv.admit(rid, match)
        # Rows are functions of the prefix: equal tokens have equal rows.
        self.rows[rid] = np.array([[self._row(t, i) for t in tokens] for i in range(2)])
        return slot

    @staticmethod
    def _row(token: int, which: int) -> np.ndarray:
        return np.random.default_rng([token, which]).normal(size=DIM)

    def step(self, rid: str, tokens: list[int]) -> None:
        """Write first, then commit."""
        slot = self.kv.slot_of(rid)
        start = int(self.kv.num_computed[slot])
        plan = self.kv.plan([slot], [len(tokens)])
        more = np.array([[self._row(t, i) for t in tokens] for i in range(2)])
        self.rows[rid] = np.concatenate([self.rows[rid][:, :start], more], axis=1)
        where = plan.slot_mapping[self.kv.table_index(1, self.part)]
        for i, at in enumerate(where.tolist()):
            if at >= 0:
                self.pages[:, at // self.size, at % self.size] = more[:, i]
        self.kv.commit(plan, tokens)

    def expected(self, rid: str, q: np.ndarray, position: int) -> np.ndarray:
        """Of a query at `position`: over all of its keys."""
        keys, values = self.rows[rid]
        visible = [j for j in range(len(keys)) if 0 <= position - j < (self.window or 1 << 40)]
        return attend(q, keys[visible], values[visible])

    def paged(self, rid: str, form: str) -> dict[int, np.ndarray]:
        """Rows [2, DIM] by position that the tables name, of computed tokens."""
        slot = self.kv.slot_of(rid)
        n = int(self.kv.num_computed[slot])
        found = {}
        if form == "linear":
            table = linear_table(self.kv, 1, [slot], self.part)[0]
            for block, page in enumerate(table.tolist()):
                for row in range(self.size):
                    if page and block * self.size + row < n:
                        found[block * self.size + row] = self.pages[:, page, row]
            return found
        rows = paged_rows(self.kv, 1, [slot], self.part)
        assert rows.indptr.tolist() == [0, len(rows.indices)]
        first, last = int(rows.first_tokens[0]), len(rows.indices) - 1
        assert (rows.last_page_len[0] == 0) == (last < 0)
        for i, page in enumerate(rows.indices.tolist()):
            assert page
            for row in range(int(rows.last_page_len[0]) if i == last else self.size):
                found[first + i * self.size + row] = self.pages[:, page, row]
        return found

    def check_newest(self, rid: str, form: str) -> None:
        """The query of the newest token takes all from the pages."""
        position = int(self.kv.num_computed[self.kv.slot_of(rid)]) - 1
        q, paged = self.rng.normal(size=DIM), self.paged(rid, form)
        visible = [j for j in sorted(paged) if position - j < (self.window or 1 << 40)]
        keys, values = np.array([paged[j] for j in visible]).reshape(-1, 2, DIM).swapaxes(0, 1)
        expected = self.expected(rid, q, position)
        np.testing.assert_allclose(
            attend(q, keys, values), expected, rtol=1e-9, err_msg=f"{position + 1} tokens"
        )

    def check_next(self, rid: str, form: str, count: int) -> None:
        """The queries of a step that is still to be committed take the context from the pages, and the step's rows from itself."""
        n = int(self.kv.num_computed[self.kv.slot_of(rid)])
        paged, own = self.paged(rid, form), self.rng.normal(size=(2, count, DIM))
        everything = np.concatenate([self.rows[rid][:, :n], own], axis=1)
        for position in range(n, n + count):
            reach = range(max(0, position - (self.window or 1 << 40) + 1), position + 1)
            seen = [own[:, j - n] if j >= n else paged[j] for j in reach]
            keys, values = np.array(seen).swapaxes(0, 1)
            q = self.rng.normal(size=DIM)
            expected = attend(q, everything[0, list(reach)], everything[1, list(reach)])
            np.testing.assert_allclose(attend(q, keys, values), expected, rtol=1e-9)

    def check_reach(self, rid: str, form: str) -> None:
        """No page is named that is out of sight of the newest token."""
        n = int(self.kv.num_computed[self.kv.slot_of(rid)])
        for block in {j // self.size for j in self.paged(rid, form)}:
            assert self.window is None or (block + 1) * self.size > n - self.window


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("prompt", "form"), [(1, "linear"), (77, "rows")])
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
                    p.kv.rollback(slot, min(2, room))
                n = int(p.kv.num_computed[slot])
            p.step("a", tokens[n : n + 1])
            p.check_newest("a", form)
            p.check_next("a", form, 2)
        p.kv.release("a")
    assert start > 0, "there was a hit"
