"""Behaviour of `KVCache`, case by case; every read is checked by the stand-in engine."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kvcore import LRU, GroupSpec, KVCache, OutOfPages, StepPlan
from quire.kvcore.pages import PagePool
from tests.support.kvcore.engine import Engine, groups

GEMMA = ((32, None), (16, 64), (16, 64))  # alignment 32, tail 4 blocks
V4 = ((256, None), (64, 128), (64, 128))  # alignment 256, wider than the window


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, n).tolist()


def engine(specs=GEMMA, **options) -> Engine:
    base = {"num_pages": 2000, "max_requests": 8, "max_model_len": 4096}
    return Engine(groups(*specs), **(base | options))


def test_latest_keeps_no_boundary_inside_the_prompt():
    e = engine(retention="latest")
    prompt = tokens(320)
    e.run("a", prompt)
    match = e.kv.match(prompt[:200] + tokens(50, 1))
    assert (match.num_tokens, match.dense_tokens) == (0, 192)
    assert match.limited_by == "resume-point"
    assert "no resume point" in match.explain()
    assert match.per_group == {"g0": 192, "g1": 0, "g2": 0}


def test_a_junction_is_kept_when_traffic_diverges():
    e = engine()
    system = tokens(200)
    e.run("a", system + tokens(100, 1))
    assert e.run("b", system + tokens(100, 2)).num_tokens == 0
    assert e.run("c", system + tokens(100, 3)).num_tokens == 192
    e.check()


@pytest.mark.parametrize("retention", ["dense", 64, 128])
def test_interval_retention(retention):
    e = engine(retention=retention)
    prompt = tokens(500)
    e.run("a", prompt, tokens(100, 1), chunk=90)
    step = (
        128 if retention == 128 else 32
    )  # points that are a tail of 64 tokens apart hold all between them
    for cut in (40, 100, 257, 470):
        match = e.kv.match(prompt[:cut] + [1001] * 40)
        assert match.num_tokens == cut // step * step
    # and along the answer, where the last two points are at 512 and 576
    match = e.kv.match(prompt + tokens(100, 1)[:60] + [1001] * 40)
    assert match.num_tokens == 544


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


@pytest.mark.parametrize(
    ("retention", "interval"),
    [({"g1": 64, "g2": 96}, 192), ({"g1": 64}, 64), ({"g1": "dense", "g2": "latest"}, 0)],
)
def test_intervals_of_several_groups_meet(retention, interval):
    e = engine(retention=retention)
    e.run("a", tokens(500), chunk=90)
    match = e.kv.match([*tokens(500)[:450], 1001])
    assert match.num_tokens == (450 // interval * interval if interval else 0)


def test_dense_models_need_no_resume_points():
    e = engine(((16, None),))
    prompt = tokens(300)
    e.run("a", prompt)
    assert e.kv.match([*prompt[:200], 5]).num_tokens == 192
    assert e.kv.stats()["resume_points"] == 0


def test_concurrent_requests_with_one_prefix_keep_one_copy():
    e = engine()
    prompt = tokens(256)
    for rid in range(4):
        e.admit(rid, prompt + tokens(40, rid + 1))
    for _ in range(5):
        e.step(dict.fromkeys(range(4), 59))
        e.check()
    segments = 256 // 32 + 4 * (295 // 32 - 256 // 32)
    assert e.kv.stats()["cached_segments"] == segments
    for rid in range(4):
        e.release(rid)
        e.check()


def test_disabled_caching_never_hits_and_frees_everything():
    e = engine(enable_caching=False)
    prompt = tokens(300)
    e.run("a", prompt, tokens(50, 1))
    match = e.kv.match(prompt)
    assert (match.num_tokens, match.limited_by) == (0, "caching-disabled")
    assert e.kv.num_free_pages == e.kv.num_pages - 1
    e.check()


def test_only_survivors_get_pages():
    e = engine(max_model_len=1 << 16, num_pages=4000, retention="latest")
    e.admit("a", tokens(40000))
    plan = e.step({"a": 8192})
    written = (plan.slot_mapping >= 0).sum(axis=1)
    assert written[0] == 8192
    assert written[1] == written[2] == 64  # the last 63 tokens, in whole blocks
    assert e.kv.stats()["pages_in_use"] == 8192 // 32 + 2 * 4
    e.check()


def test_window_pages_do_not_grow_with_the_context():
    e = engine(max_model_len=1 << 16, num_pages=4000)
    e.admit("a", tokens(40000))
    for _ in range(4):
        e.step({"a": 8192})
        assert e.kv.stats()["pages_in_use"] == e.computed("a") // 32 + 2 * 4
    e.decode("a", [])
    e.release("a")
    e.check()


def decode_pages(groups, num_tokens):
    """Pages in the window table of a request after each decode step, and table changes of each step."""
    e = engine(groups, num_pages=400)
    e.admit("a", tokens(e.kv.alignment))
    e.step({"a": e.kv.alignment})
    held, changed = [], []
    for t in range(num_tokens):
        before = e.kv.table(1).copy()
        e.decode("a", [t])
        e.check()
        held.append(int((e.kv.table(1)[e.slots["a"]] != 0).sum()))
        changed.append(int((e.kv.table(1) != before).sum()))
    return held, changed


def test_a_ring_holds_the_window_and_the_tail_of_the_last_boundary():
    held, _ = decode_pages(V4, 1024)
    assert max(held) == 5, "2 blocks of the tail, and 3 of the window"


def test_a_ring_that_is_long_only_for_far_boundaries_gives_pages_back():
    far = [GroupSpec("dense", "dense", 512, 1), GroupSpec("window", "window", 16, 1, 32)]
    held, _ = decode_pages(far, 1024)
    # 2 blocks of the last boundary's tail, and 3 of the window; a ring has room for 34.
    assert max(held) == 5 and min(held) >= 2


def test_out_of_pages_is_a_value_and_changes_nothing():
    e = engine(num_pages=40)
    e.admit("a", tokens(400))
    assert isinstance(e.step({"a": 200}), StepPlan)
    e.admit("b", tokens(2000, 1))
    before = (e.kv.tables.copy(), e.kv.stats(), e.kv.pool.free_pages().tolist())
    out = e.step({"b": 2000})
    assert isinstance(out, OutOfPages)
    # Dense blocks; and of each window what the next query sees, and the tail of the boundary at 1536.
    assert out.needed == 63 + 2 * (5 + 4) and out.free == e.kv.num_free_pages and out.evictable == 0
    assert out.group == "g0" and out.per_group == {"g0": 63, "g1": 9, "g2": 9}
    assert "81" in str(out) and "g0" in str(out)
    assert (before[0] == e.kv.tables).all()
    assert before[1:] == (e.kv.stats(), e.kv.pool.free_pages().tolist())
    e.check()


def test_eviction_takes_whole_resume_points_least_recently_used_first():
    # A run of 320 tokens leaves 10 dense pages and points at 288 and 320: blocks 14..19 of two groups.
    e = engine(num_pages=1 + 3 * (10 + 2 * 6) + 10)
    prompts = [tokens(320, seed) for seed in range(4)]
    for i in range(3):
        e.run(i, prompts[i])
    assert e.kv.stats()["evicted_resume_points"] == 0
    assert e.run("again", prompts[0]).num_tokens == 288
    e.run("new", prompts[3])
    hits = [e.kv.match(p).num_tokens for p in prompts]
    assert hits[0] == hits[3] == 288, "used lately"
    assert hits[1] == 0, "the oldest went"
    e.check()
    for run in e.kv.index.runs():
        for point in run.points.values():
            assert (e.kv.pool.holds[point.pages] > 0).all(), "a point is whole or gone"


def test_pages_of_many_points_are_counted_like_those_of_few():
    """Together they are close enough to be counted in one go, in tens they are not."""
    pages = np.random.default_rng(0).integers(1, 200, 900, dtype=np.int32)
    pages = pages[pages != 77]
    together, alone = PagePool(400), PagePool(400)
    for pool in (together, alone):
        pool.use_new(pages[:20].tolist())  # pages that a request reads are not held only
    together.hold(pages)
    for some in np.split(pages, np.arange(10, len(pages), 10)):
        alone.hold(some)
    assert (together.counts == alone.counts).all()
    held = set(pages.tolist()) - set(pages[:20].tolist())
    assert together.num_held_only == alone.num_held_only == len(held)


def test_evict_frees_what_is_asked_or_all_that_nobody_needs():
    e = engine()
    for seed in range(5):
        e.run(seed, tokens(200, seed))
    e.admit("a", [*tokens(200, 4), 1])
    free = e.kv.num_free_pages
    assert e.kv.evict(7) >= 7
    e.check()
    e.kv.evict(10**6)
    assert e.kv.num_evictable_pages == 0
    assert e.kv.num_free_pages == e.kv.num_pages - 1 - e.kv.stats()["pages_in_use"] > free
    e.check()
    e.finish_prompt("a")


def test_dense_past_the_last_resume_point_goes_first():
    e = engine(num_pages=200)
    e.run("a", tokens(320))
    e.run("b", tokens(320, 1))
    index = e.kv.index
    run = next(r for r in index.runs() if r.points)
    for depth in list(run.depths):
        index.drop_point(run.points[depth])
    points = index.num_points
    index.evict(5)
    assert index.num_points == points and index.num_segments == 15
    e.check()


def test_rejected_tokens_are_not_findable():
    e = engine(max_draft_tokens=4)
    e.admit("a", tokens(60))
    e.finish_prompt("a")
    e.tokens["a"] += [1, 2, 3, 4, 5]
    e.step({"a": 5}, {"a": 2})  # 62 computed: the segment [32, 64) stays open
    assert e.kv.match([*tokens(60), 1, 2, 3, 4, 5]).dense_tokens == 32
    e.decode("a", [7, 8])
    assert e.kv.match([*tokens(60), 1, 2, 7, 8, 9]).dense_tokens == 64
    assert e.kv.match([*tokens(60), 1, 2, 3, 4, 9]).dense_tokens == 32


def test_rollback_without_caching_stops_where_windows_do():
    e = engine(max_draft_tokens=4, enable_caching=False)
    e.admit("a", tokens(300))
    e.finish_prompt("a")
    slot = e.slots["a"]
    with pytest.raises(ValueError, match=r"num_tokens: expected 1\.\.4 .*got 5"):
        e.kv.rollback(slot, 5)
    e.kv.rollback(slot, 4)
    e.kv.check_invariants()


def test_rollback_refuses_what_it_cannot_restore():
    e = engine(max_draft_tokens=4)
    e.admit("a", tokens(66))
    e.finish_prompt("a")
    slot = e.slots["a"]
    with pytest.raises(
        ValueError, match=r"num_tokens: expected 1\.\.2 .*got 3; to go back further, release the"
    ):
        e.kv.rollback(slot, 3)  # 64 is cached
    e.kv.rollback(slot, 2)
    with pytest.raises(ValueError, match=r"num_tokens: expected none to be taken back .*got 1"):
        e.kv.rollback(slot, 1)


def test_describe_tells_what_can_hit():
    text = engine(retention=64).kv.describe()
    for part in ("multiples of 32", "at least 33", "every 64 tokens", "8 pages each", "window 64"):
        assert part in text


def make(**change):
    base = {"groups": groups(*GEMMA), "num_pages": 50, "max_requests": 2, "max_model_len": 100}
    options = base | change
    return KVCache(options.pop("groups"), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": []}, "groups: expected at least one"),
        ({"groups": groups((16, None)) * 2}, "groups: expected unique names"),
        (
            {"groups": [*groups((16, None)), GroupSpec("x", "window", 16, 8192, 64)]},
            r"groups: expected one page size.*'g0': 4096, 'x': 8192",
        ),
        ({"retention": 48}, "retention: expected a positive multiple of the alignment 32, got 48"),
        (
            {"retention": "some"},
            "retention: expected 'auto', 'dense', 'latest' or an int, got 'some'",
        ),
        ({"retention": {"g1": 64, "other": 64}}, r"retention: expected groups out of .*'other'"),
        ({"retention": {"g1": 40}}, "retention: expected a positive multiple of the alignment 32"),
        ({"groups": ["g"]}, "groups: expected GroupSpecs, got 'g'"),
        ({"num_pages": 10.5}, "num_pages: expected an int >= 2, got 10.5"),
        ({"enable_caching": "no"}, "enable_caching: expected True or False, got 'no'"),
        ({"policy": "lru"}, "policy: expected an eviction policy, such as LRU\\(\\), got 'lru'"),
        ({"policy": LRU}, "policy: expected an eviction policy, .*got <class"),
        ({"events": True}, "events: expected an EventLog or None, got True"),
    ],
)
def test_bad_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        make(**change)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "token_ids: expected at least one token"),
        ([1, -5], r"token_ids: expected ids in \[0, 2\*\*31\), got -5"),
        ([2**31], r"got 2147483648"),
        ([0.5], "token_ids: expected a 1-D sequence of ints, got float64"),
        ([[1, 2]], "token_ids: expected a 1-D"),
        ([1] * 101, "token_ids: expected at most max_model_len = 100 tokens, got 101"),
    ],
)
def test_bad_prompts_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        make().match(bad)


def test_bad_calls_are_named_and_change_nothing():
    kv = make()
    match = kv.match([1] * 60)
    slot = kv.admit("a", match)
    with pytest.raises(ValueError, match="request_id: expected a new id, got 'a'"):
        kv.admit("a", match)
    kv.admit("b", match)
    with pytest.raises(ValueError, match="all max_requests = 2 slots are taken"):
        kv.admit("c", match)
    kv.release("b")
    with pytest.raises(ValueError, match="request_id: expected an admitted request, got 'b'"):
        kv.release("b")
    plan = kv.plan([slot], [3])
    for call in (lambda: kv.admit("c", [1]), lambda: kv.pin([1], now=0, ttl=1)):
        with pytest.raises(ValueError, match=r"match: expected what `match` returned, got \[1\]"):
            call()
    kv.commit(plan, [1, 1, 1])
    kv.check_invariants()
    assert kv.num_computed[slot] == 3


def test_the_chain_of_a_running_request_is_not_the_policys_to_evict():
    """Where hits need no resume point, the end of a chain is what the policy ranks; not while it runs."""
    e = Engine(groups((4, None)), num_pages=40, max_requests=2, max_model_len=64, policy=LRU())
    first, second = list(range(33)), list(range(100, 133))
    for name, tokens in (("a", first), ("b", second)):
        e.run(name, tokens, [], 64)
    e.admit("c", [*first, 7])  # the older chain
    e.kv.evict(40)
    e.check()
    assert (e.kv.match(first).dense_tokens, e.kv.match(second).dense_tokens) == (32, 0)
