"""Tables for other kernels hold the pages that our own tables name, block by block."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kvcore import GroupSpec, linear_table, paged_rows
from tests.support.kvcore.engine import Engine, groups

GROUPS = groups((8, None), (4, 10), (8, 20))


def engine() -> Engine:
    e = Engine(GROUPS, num_pages=300, max_requests=4, max_model_len=128)
    for rid, n in (("a", 1), ("b", 37), ("c", 64)):
        e.admit(rid, list(range(n)))
        e.finish_prompt(rid, chunk=16)
    e.decode("c", [5] * 30)
    e.admit("new", [9, 9])
    return e


@pytest.mark.parametrize("group", [0, 1, 2])
def test_both_forms_name_the_pages_of_every_visible_block(group):
    e = engine()
    spec, order = e.kv.layout.groups[group], ["c", "new", "a", "b"]
    slots = [e.slots[r] for r in order]
    table = e.kv.table(group)
    rows = paged_rows(e.kv, group, slots)
    linear = linear_table(e.kv, group, slots)
    assert linear.shape == (4, -(-94 // spec.block_size)) and linear.dtype == np.int32
    for i, (rid, slot) in enumerate(zip(order, slots, strict=True)):
        n = e.computed(rid)
        # The newest token's window; the row that the next one does not see may have no page (see `test_exports_attention`).
        seen = range(max(0, n - spec.sliding_window) if spec.sliding_window else 0, n)
        blocks = sorted({p // spec.block_size for p in seen})
        blocks = [b for b in blocks if table[slot, b % table.shape[1]]]
        assert set(blocks) >= {p // spec.block_size for p in seen[1:]}
        pages = [int(table[slot, b % table.shape[1]]) for b in blocks]
        assert rows.indices[rows.indptr[i] : rows.indptr[i + 1]].tolist() == pages
        assert rows.first_tokens[i] == (blocks[0] * spec.block_size if blocks else 0)
        if n:
            assert (
                rows.first_tokens[i] + (len(blocks) - 1) * spec.block_size + rows.last_page_len[i]
                == n
            )
        else:
            assert rows.last_page_len[i] == 0
        assert {b: p for b, p in enumerate(linear[i].tolist()) if p} == dict(
            zip(blocks, pages, strict=True)
        )


def test_no_slots_and_wrong_groups():
    e = Engine(
        groups((8, None), GroupSpec("state", "state", 8, 4096)),
        num_pages=20, max_requests=2, max_model_len=32,
    )  # fmt: skip
    assert paged_rows(e.kv, 0, []).indptr.tolist() == [0]
    assert linear_table(e.kv, 0, []).shape == (0, 0)
    with pytest.raises(
        ValueError, match="group: expected a dense or window group, got state group"
    ):
        paged_rows(e.kv, 1, [])
    with pytest.raises(ValueError, match="slots: expected slots of admitted requests"):
        linear_table(e.kv, 0, [1])
    for slots, got in (([0.5], "float64"), (["a"], "<U1")):
        with pytest.raises(ValueError, match=f"slots: expected ints, got {got}"):
            linear_table(e.kv, 0, slots)
