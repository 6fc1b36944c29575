"""Replay: the simulator agrees with a one-dict model, no policy beats the bounds, and the command line works."""

import json
from pathlib import Path

import numpy as np
import pytest

from quire.bench.replay.__main__ import main, make_workload
from quire.bench.replay.bounds import clairvoyant_hits, dense_working_set, infinite_hits
from quire.bench.replay.experiment import EVICTIONS, empty_cache, pool_pages, run_grid
from quire.bench.replay.generators import GENERATORS, million_token_prompts
from quire.bench.replay.loaders import load_mooncake
from quire.bench.replay.presets import PRESETS
from quire.bench.replay.requests import Request
from quire.bench.replay.simulate import Timing, Workload, replay
from quire.kvcore import LRU, Adaptive, GroupSpec

TRACE = Path(__file__).resolve().parents[3].parent / "shared/traces/mooncake_conversation.jsonl.xz"
HYBRID = [GroupSpec("d", "dense", 32, 1), GroupSpec("w", "window", 16, 1, 64)]
DENSE = [GroupSpec("d", "dense", 32, 1)]
ONE_BY_ONE = Timing(prefill_rate=1000.0, decode_rate=100.0, chunk=4096, max_requests=1)


def random_requests(seed, n=60, output=20):
    """Prompts that share prefixes in a random tree; some are look-ups."""
    rng = np.random.default_rng(seed)
    prompts, requests, fresh = [[]], [], iter(range(10**6))
    for i in range(n):
        base = prompts[rng.integers(len(prompts))]
        ids = base[: rng.integers(len(base) + 1)] + [
            next(fresh) for _ in range(rng.integers(1, 12))
        ]
        prompts.append(ids)
        size = len(ids) * 16 - int(rng.integers(16))
        out = 0 if rng.random() < 0.1 else int(rng.integers(1, output))
        requests.append(Request(float(i), i, size, out, np.array(ids), 16))
    return requests


def prefix_hits(requests, alignment):
    """Hits of an infinite cache of dense segments, in one dict, token by token."""
    seen, hits = set(), []
    for number, r in enumerate(requests):
        tokens = r.tokens(number).tolist()
        usable = (r.input - 1) // alignment * alignment
        hit = 0
        while hit < usable and tuple(tokens[: hit + alignment]) in seen:
            hit += alignment
        hits.append(hit)
        if r.output:
            whole = range(alignment, r.input + r.output + 1, alignment)
            seen.update(tuple(tokens[:b]) for b in whole)
    return hits


@pytest.mark.parametrize("seed", range(3))
def test_an_infinite_pool_hits_as_a_dict_of_prefixes(seed):
    requests = random_requests(seed)
    workload = Workload("random", requests)
    outcome = replay(workload, DENSE, num_pages=5000, timing=ONE_BY_ONE)
    assert outcome.hits.tolist() == prefix_hits(requests, 32)
    assert outcome.hits.sum() > 0
    hybrid = replay(workload, HYBRID, num_pages=20000, timing=ONE_BY_ONE, retention="dense")
    assert hybrid.hits.tolist() == outcome.hits.tolist()  # every boundary is resumable


def test_the_clock():
    """Two prompts and their answers, by hand: prefill 1000 tokens/s, decode 100 tokens/s."""
    ids = np.arange(100)
    first = Request(2.0, 0, 500, 100, ids, 16)
    second = Request(2.1, 1, 300, 50, ids + 1000, 16)
    both = replay(
        Workload("two", [second, first]), DENSE, num_pages=200,
        timing=Timing(prefill_rate=1000.0, decode_rate=100.0, chunk=64, max_requests=2),
    )  # fmt: skip
    assert both.ttft == pytest.approx([0.5, 0.4 + 0.3])  # the second waits for the first prompt
    assert both.makespan == pytest.approx(1.5)  # the first answer ends at 3.5
    serial = replay(Workload("two", [second, first]), DENSE, num_pages=200, timing=ONE_BY_ONE)
    assert serial.ttft == pytest.approx([0.5, 1.4 + 0.3])  # and here for the first answer
    again = replay(Workload("again", [first, Request(9.0, 0, 500, 1, ids, 16)]), DENSE, num_pages=200, timing=ONE_BY_ONE)  # fmt: skip
    assert again.hits.tolist() == [0, 480] and again.ttft[1] == pytest.approx(0.02)


def test_a_request_waits_for_pages():
    ids = np.arange(100)
    requests = [Request(0.0, 0, 320, 64, ids, 16), Request(0.0, 1, 320, 64, ids + 1000, 16)]
    timing = Timing(prefill_rate=1000.0, decode_rate=100.0, max_requests=8)
    roomy = replay(Workload("w", list(requests)), DENSE, num_pages=1 + 24, timing=timing)
    tight = replay(Workload("w", list(requests)), DENSE, num_pages=1 + 23, timing=timing)
    assert roomy.ttft == pytest.approx([0.32, 0.64])
    assert tight.ttft[0] == pytest.approx(0.32)
    assert tight.makespan > roomy.makespan
    with pytest.raises(ValueError, match="pool: expected room for request 0 of 384 tokens"):
        replay(Workload("w", list(requests)), DENSE, num_pages=1 + 11, timing=timing)


def best_by_search(uses, capacity):
    """Most hits of any schedule, by trying every set of kept segments after each request."""
    from itertools import combinations

    states = {frozenset(): 0}
    for usable, keys in uses:
        after = {}
        for kept, hits in states.items():
            gained = hits + sum(k in kept for k in keys[:usable])
            have = kept | set(keys)
            for size in range(min(capacity, len(have)) + 1):
                for choice in combinations(sorted(have), size):
                    choice = frozenset(choice)
                    after[choice] = max(after.get(choice, -1), gained)
        states = after
    return max(states.values())


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_the_clairvoyant_bound_is_the_optimum(capacity):
    from quire.bench.replay.bounds import _uses

    for seed in range(4):
        rng = np.random.default_rng(seed)
        chains = [[1, 2], [1, 3], [4], [5, 6, 7], [1, 2, 8]]
        requests = []
        for i in range(9):
            ids = chains[rng.integers(len(chains))]
            requests.append(Request(float(i), i, len(ids) * 32, 1, np.array(ids), 32))
        workload = Workload("tiny", requests)
        cache = empty_cache(DENSE, workload)
        expected = best_by_search(_uses(workload, cache), capacity)
        assert clairvoyant_hits(workload, cache, capacity) == 32 * expected


@pytest.mark.parametrize("name", EVICTIONS)
def test_no_policy_beats_the_bounds(name):
    for seed, groups, retention in (
        (5, DENSE, "latest"),
        (6, HYBRID, "latest"),
        (7, HYBRID, "dense"),
    ):
        requests = [r for r in random_requests(seed, n=60) if r.output]
        workload = Workload("random", requests)
        cache = empty_cache(groups, workload)
        for pages in (80, 120):
            outcome = replay(
                workload, groups, num_pages=pages + 1, timing=ONE_BY_ONE, retention=retention, policy=EVICTIONS[name]()
            )  # fmt: skip
            assert outcome.stats["evicted_segments"] > 0
            bound = clairvoyant_hits(workload, cache, pages)
            assert outcome.hits.sum() <= bound <= infinite_hits(workload, cache)
        assert bound > 0


def test_bounds_by_hand():
    a, b, c = ([i] for i in (1, 2, 3))
    order = (a, b, a, c, b, a)
    requests = [Request(float(i), i, 33, 1, np.array(x * 3), 16) for i, x in enumerate(order)]
    workload = Workload("abc", requests)
    cache = empty_cache(DENSE, workload)
    # One segment fits: keep a over b, then b over c or a. Two fit: all three reuses.
    assert clairvoyant_hits(workload, cache, 0) == 0
    assert clairvoyant_hits(workload, cache, 1) == 64
    assert clairvoyant_hits(workload, cache, 2) == 96 == infinite_hits(workload, cache)
    assert dense_working_set(workload, cache) == 2  # three ids of 16 tokens: 48 tokens


def test_everything_is_deterministic():
    def rows():
        workload = make_workload("agent-tree:trees=3,depth=2,root=1024,step=128,answer=32", None, 7)
        return run_grid(workload, "gpt-oss-like", ["40%"], ["latest"], ["adaptive", "lru"], Timing(), progress=False)  # fmt: skip

    assert rows() == rows()
    other = make_workload("agent-tree:trees=3,depth=2,root=1024,step=128,answer=32", None, 8)
    first = make_workload("agent-tree:trees=3,depth=2,root=1024,step=128,answer=32", None, 7)
    assert [r.input for r in other.requests] != [r.input for r in first.requests]


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_share_what_they_say(name):
    small = {
        "round-robin": "sessions=3,turns=3,first=512,user=64,answer=32",
        "system-prompt": "requests=12,prompts=2,system=512,user=128,answer=32",
        "agent-tree": "trees=2,depth=2,root=512,step=64,answer=32",
        "agent-pauses": "agents=3,steps=4,root=512,step=64,answer=32",
        "pr43447": "prompts=2,tokens=5120",
        "pr40676": "prefixes=2,requests=8,prefix=512,user=64,answer=16",
    }
    workload = make_workload(f"{name}:{small[name]}", None, 0)
    arrivals = [r.arrival for r in workload.requests]
    assert arrivals == sorted(arrivals)
    hits = prefix_hits(workload.requests, 32)
    share = sum(hits) / sum(r.input for r in workload.requests)
    assert 0.3 < share < 0.95
    if name == "round-robin":  # a turn repeats all before it, answers included
        assert hits[:3] == [0, 0, 0] and all(h >= r.input - 64 - 32 for h, r in zip(hits[3:], workload.requests[3:], strict=True))  # fmt: skip


def test_million_token_experiment_in_small():
    """PR 43447's shape at 1/64 of its length: with a point every 512 tokens all look-ups hit to within 512 tokens."""
    workload = Workload("small", million_token_prompts(prompts=14, tokens=16384))
    [row] = [
        r for r in run_grid(workload, "v4-flash", ["4000pages"], [512], ["lru"], ONE_BY_ONE, progress=False)
        if r["eviction"] == "lru"
    ]  # fmt: skip
    lengths = [16384 * tenth // 10 for tenth in range(1, 11)]
    ceiling = np.mean([(n - 1) // 512 * 512 / n for n in lengths])
    assert row["mean_hit"] >= ceiling and row["evicted_segments"] == 0
    flood = run_grid(workload, "v4-flash", ["300pages"], [512], ["lru"], ONE_BY_ONE, progress=False)
    assert flood[1]["mean_hit"] < 0.5


def test_pool_sizes():
    workload = make_workload("round-robin:sessions=2,turns=2,first=512,user=64,answer=32", None, 0)
    groups = PRESETS["gemma-4-31b"]
    distinct = 2 * (512 + 32 + 64 + 32) // 32
    assert pool_pages("100%", groups, workload) == distinct
    assert pool_pages("1GiB", groups, workload) == 2**30 // 2_621_440
    assert pool_pages("7pages", groups, workload) == 7
    mean = (512 + 32 + 512 + 32 + 64 + 32) / 2
    longest = 512 + 32 + 64 + 32  # shorter than the window: all of it is a tail
    tail = -(-(longest - 1) // 16)
    assert pool_pages("2requests", groups, workload) == 2 * (-(-mean // 32) + 5 * tail)
    for bad in ("12", "-1GiB", "0%", "x"):
        with pytest.raises(ValueError, match="pool: expected"):
            pool_pages(bad, groups, workload)


def test_command_line(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "rows.json", tmp_path / "plot.svg"
    main(
        ["--workload", "round-robin:sessions=3,turns=2,first=512,user=64,answer=32", "--preset", "v4-flash", "llama-like",
         "--pool", "3000pages", "60requests", "--eviction", "lru", "adaptive", "--quiet",
         "--json", str(out), "--plot", str(picture)]
    )  # fmt: skip
    rows = json.loads(out.read_text())
    assert {r["preset"] for r in rows} == {"v4-flash", "llama-like"}
    assert {"workload", "preset", "retention", "eviction", "pool_bytes", "hit_rate"} <= rows[
        0
    ].keys()
    assert all(0 <= r["hit_rate"] <= 1 for r in rows)
    assert picture.read_text().startswith("<?xml")
    assert "clairvoyant" in capsys.readouterr().out
    assert main(["--workload", "nonsense", "--quiet"]) == 2
    assert "workload: expected one of" in capsys.readouterr().err


def test_rows_that_were_measured_are_written_before_a_grid_that_cannot_be(tmp_path, capsys):
    out = tmp_path / "rows.json"
    first = "round-robin:sessions=2,turns=2,first=512,user=64,answer=32"
    longer = "round-robin:sessions=2,turns=2,first=131072"  # which the pool has no room for
    common = ["--preset", "v4-flash", "--pool", "300pages", "--eviction", "lru", "--quiet"]
    assert main(["--workload", first, longer, *common, "--json", str(out)]) == 2
    assert "error: pool: expected room for request 0" in capsys.readouterr().err
    assert {r["workload"] for r in json.loads(out.read_text())} == {first}


def test_what_is_wrong_with_a_workload_is_said_before_another_is_replayed(capsys):
    for wrong in (
        ["--workload", "round-robin", "nonsense"],
        ["--pool", "25%", "25"],
        ["--retention", "auto", "33"],
    ):
        assert main([*wrong, "--quiet"]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith(f"error: {wrong[0][2:]}: expected")


@pytest.mark.skipif(not TRACE.exists(), reason="the conversation trace is not here (shared/traces)")
def test_conversation_trace_against_its_bounds():
    workload = Workload("conversation", load_mooncake(TRACE, limit=150))
    groups = PRESETS["v4-flash"]
    cache = empty_cache(groups, workload)
    pages = pool_pages("30%", groups, workload)
    outcome = replay(
        workload, groups, num_pages=pages + 1, timing=Timing(max_requests=1), policy=LRU()
    )
    assert 0 < outcome.hits.sum() <= clairvoyant_hits(workload, cache, pages)


def hit_rate(workload, groups, pool, policy):
    """Share of the prompt tokens, one request after another."""
    pages = pool_pages(pool, groups, workload)
    outcome = replay(
        workload, groups, num_pages=pages + 1, timing=Timing(max_requests=1), policy=policy
    )
    return outcome.hits.sum() / sum(r.input for r in workload.requests)


def test_chats_that_take_turns_keep_a_point_each():
    """Gemma-4-31B: dense pages and one resume point a session take about 175 %; LRU keeps old turns' points as well."""
    workload, groups = make_workload("round-robin", None, 0), PRESETS["gemma-4-31b"]
    infinite = infinite_hits(workload, empty_cache(groups, workload))
    best = infinite / sum(r.input for r in workload.requests)
    assert hit_rate(workload, groups, "200%", Adaptive()) >= best - 0.02
    assert hit_rate(workload, groups, "200%", LRU()) < best - 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "preset", "pool"),
    [
        ("system-prompt:requests=200", "v4-flash", "10%"),
        ("pr40676:requests=100", "v4-flash", "30%"),
    ],
)
def test_the_default_is_not_worse_than_lru(name, preset, pool):
    workload, groups = make_workload(name, None, 0), PRESETS[preset]
    assert hit_rate(workload, groups, pool, Adaptive()) >= 0.98 * hit_rate(
        workload, groups, pool, LRU()
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workload", "round-robin:sessions=-1"], ["--workload", "round-robin:sessions=1e3"],
        ["--workload", "round-robin:sessions=__import__('os')"], ["--workload", "round-robin:gap=nan"],
        ["--workload", "round-robin:gap"], ["--workload", "system-prompt:rate=0"], ["--workload", "round-robin:sessions=2000000000"],
        ["--workload", "pr43447:tokens=2000000000"], ["--workload", "mooncake:"], ["--workload", "mooncake:/nowhere"],
        ["--workload", "weka:."], ["--pool", "9" * 400 + "%"], ["--pool", "nan%"], ["--retention", "0"],
        ["--limit", "-3"], ["--chunk", "0"], ["--max-requests", "0"], ["--prefill-rate", "nan"], ["--plot", "rows.txt"],
    ],
)  # fmt: skip
def test_what_cannot_be_replayed_is_said_in_one_line(arguments, capsys):
    assert main([*arguments, "--quiet"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert (captured.err.startswith("error: ") and "expected" in captured.err) or "cannot read" in captured.err  # fmt: skip
