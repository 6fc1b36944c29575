"""Retention, survivors-only pages, eviction and explained hits, case by case."""

import numpy as np
import pytest

from quire.kvcore import GroupSpec, OutOfPages, StepPlan
from tests.kvcore.engine import Engine, groups
from tests.kvcore.expected import digest

GEMMA = ((32, None), (16, 64), (16, 64))  # alignment 32, tail 4 blocks
V4 = ((256, None), (64, 128), (64, 128))  # alignment 256, wider than the window
DENSE = GroupSpec("dense", "dense", 32, 4096)
STATE = GroupSpec("state", "state", 32, 4096)


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, n).tolist()


def engine(specs=GEMMA, **options) -> Engine:
    base = {"num_pages": 2000, "max_requests": 8, "max_model_len": 4096, "debug": False}
    return Engine(groups(*specs), **(base | options))


@pytest.mark.parametrize(
    ("specs", "interval"),
    [
        ((*V4, (256, 5)), 8192),
        (((32, None), *[(16, 1024)] * 5), 65536),
        (((64, None), (64, 128)), 1024),
        (((16, None), (16, 2)), 128),
        ((*[(16, None)] * 16, (16, 17)), 16),
        (((16, None), (32, None)), 0),
        (((16, 64),), 0),
    ],
)
def test_auto_retention_spends_up_to_a_quarter_of_the_dense_pages_on_resume_points(specs, interval):
    kv = engine(specs, retention="auto").kv
    assert kv.interval == engine(specs).kv.interval == interval
    layout = kv.layout
    if interval > kv.alignment:
        share = layout.pages_per_point / (layout.pages_per_segment * interval / kv.alignment)
        assert 1 / 8 <= share < 1 / 4
    elif interval:
        assert 8 * layout.pages_per_point < 2 * layout.pages_per_segment


def test_only_survivors_get_pages():
    e = engine(max_model_len=1 << 16, num_pages=4000, retention="latest")
    e.admit("a", tokens(40000))
    plan = e.step({"a": 8192})
    written = (plan.slot_mapping >= 0).sum(axis=1)
    assert written[0] == 8192
    assert written[1] == written[2] == 64  # the last 63 tokens, in whole blocks
    assert e.kv.stats()["pages_in_use"] == 8192 // 32 + 2 * 4
    e.check()


FAR = (GroupSpec("dense", "dense", 512, 4096), (16, 32))  # a ring has room for 34 blocks


@pytest.mark.parametrize("specs", [V4, FAR], ids=["v4", "far-boundaries"])
def test_a_ring_holds_the_window_and_the_tail_of_the_last_boundary(specs):
    e = engine(specs, num_pages=400)
    e.admit("a", tokens(e.kv.alignment))
    e.step({"a": e.kv.alignment})
    held = []
    for t in range(1024):
        e.decode("a", [t])
        held.append(int((e.kv.table(1)[e.slots["a"]] != 0).sum()))
    e.check()
    assert max(held) == 5 and min(held) >= 2, "2 blocks of the tail, and 3 of the window"


def test_out_of_pages_is_a_value_and_changes_nothing():
    e = engine(num_pages=40)
    e.admit("a", tokens(400))
    assert isinstance(e.step({"a": 200}), StepPlan)
    e.admit("b", tokens(2000, 1))
    before = digest(e.kv)
    out = e.step({"b": 2000})
    assert isinstance(out, OutOfPages)
    # Dense blocks; of each window the next query's rows and the tail of boundary 1536.
    assert out.needed == 63 + 2 * (5 + 4) and out.free == e.kv.num_free_pages and out.evictable == 0
    assert out.group == "g0" and out.per_group == {"g0": 63, "g1": 9, "g2": 9}
    assert "81" in str(out) and "g0" in str(out)
    assert digest(e.kv) == before
    e.check()


def test_describe_tells_what_can_hit():
    text = engine(retention=64).kv.describe()
    for part in ("pages of 0.00391 MiB", "multiples of 32", "at least 33", "every 64 tokens", "8 pages each", "window 64"):  # fmt: skip
        assert part in text
    assert "ahead" not in text
    short = GroupSpec("state", "state", 16, 4096)
    assert "snapshots at multiples of 32" in engine((DENSE, short)).kv.describe()


def test_cut_ends_chunks_where_a_point_is_due():
    e = engine((DENSE, STATE), retention=64)
    e.admit("a", tokens(200))
    slot = e.slots["a"]
    counts = []
    while e.computed("a") < 200:
        (n,) = e.kv.cut([slot], [min(150, 200 - e.computed("a"))]).tolist()
        counts.append(n)
        e.step({"a": n})
    assert counts == [64, 64, 64, 8]
    plain = engine((DENSE,))
    plain.admit("a", tokens(200))
    assert plain.kv.cut([plain.slots["a"]], [150]).tolist() == [150]
