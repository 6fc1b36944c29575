"""bench.replay: traces, the engine against a one-dict model, bounds, rows of the command."""

import json
import lzma
import sys
from itertools import combinations, takewhile

import numpy as np
import pytest

from quire.bench.common.traces import (
    ANSWER_TOKENS,
    LOADERS,
    Numbering,
    TraceRequest,
    load_mooncake,
)
from quire.bench.replay.__main__ import main, make_workload
from quire.bench.replay.bounds import clairvoyant_hits, dense_working_set, segment_uses
from quire.bench.replay.experiment import EVICTIONS, empty_cache, pool_pages, run_grid
from quire.bench.replay.generators import GENERATORS
from quire.bench.replay.host import HostMemory
from quire.bench.replay.presets import PRESETS
from quire.bench.replay.simulate import SimulatedTiming, TraceWorkload, replay
from quire.kvcore import LRU, GroupSpec


def write(path, *rows):
    data = "\n".join(json.dumps(r) if r != "" else "" for r in rows).encode()
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    return path


def mooncake(**fields):
    return {"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [1]} | fields


def bailian(chat, parent, **fields):
    row = {"chat_id": chat, "parent_chat_id": parent, "timestamp": chat / 2, "turn": 1}
    row |= {"input_length": 40, "output_length": 5, "type": "text", "hash_ids": [10**18, 2, 3]}
    return row | fields


def call(time, size, ids, out=10):
    return {"t": time, "type": "n", "model": "m", "in": size, "out": out, "hash_ids": ids}


def session(name, *requests, **fields):
    row = {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": list(requests)}
    return row | fields


def shared(a, b):
    """Tokens that the prompts of two requests have in common at the start."""
    pairs = zip(a.tokens(0)[: a.input], b.tokens(1)[: b.input], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.xz"])
def test_requests_of_a_file(tmp_path, name):
    """The second shares two blocks with the first, and an empty answer is no look-up."""
    rows = [
        mooncake(timestamp=1500, input_length=1030, output_length=9, hash_ids=[7, 8, 9]),
        "",
        mooncake(timestamp=2000, input_length=1100, output_length=0, hash_ids=[7, 8, 5]),
    ]
    path = write(tmp_path / name, *rows)
    first, second = load_mooncake(path)
    assert (first.arrival, first.input, first.output, first.ids_block_size) == (1.5, 1030, 9, 512)
    assert second.output == 1 and len(load_mooncake(path, 1)) == 1
    assert shared(first, second) == 1024


def test_bailian(tmp_path):
    rows = [bailian(5, -1), bailian(6, -1, hash_ids=[4, 5, 6])]
    rows += [bailian(9, 5, input_length=64, hash_ids=[10**18, 2, 8, 9]), bailian(11, 9)]
    a, b, c, d = LOADERS["bailian"](write(tmp_path / "qwen.jsonl", *rows), None)
    assert a.arrival == 2.5 and a.ids_block_size == 16
    assert shared(a, c) == 32 and shared(a, b) == 0 and shared(a, d) == 40


def test_weka_sessions_subagents_and_scopes(tmp_path):
    sub = {"t": 2.0, "type": "subagent", "agent_id": "x", "requests": [call(2.5, 128, [1, 9])]}
    one = session("one", call(0.0, 128, [1, 2]), sub, call(3.0, 150, [1, 2]))
    two = session("two", call(1.0, 128, [1, 2]))
    a, b, c, d = LOADERS["weka"](write(tmp_path / "weka.jsonl", one, two), None)
    assert [r.arrival for r in (a, b, c, d)] == [0.0, 1.0, 2.5, 3.0]
    assert a.scope == c.scope != b.scope
    assert shared(a, c) == 64 and shared(a, d) == 128 and d.input == 150
    folder = tmp_path / "folder"
    folder.mkdir()
    for trace in (one, two):
        write(folder / f"{trace['id']}.json", trace | {"hash_id_scope": "global"})
    everywhere = LOADERS["weka"](folder, None)
    assert {r.scope for r in everywhere} == {""} and len(everywhere) == 4
    assert len(LOADERS["weka"](folder, 3)) == 3


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("mooncake", [1], "expected a JSON object"),
        ("mooncake", mooncake(timestamp=None), "timestamp: expected int or float, got None"),
        ("mooncake", mooncake(timestamp=float("nan")), "expected a finite time, got nan"),
        ("mooncake", mooncake(timestamp=10**400), "int too large"),
        ("mooncake", mooncake(input_length=True), "input_length: expected int, got True"),
        ("mooncake", mooncake(input_length=0), "expected input >= 1 and output >= 0, got 0"),
        ("mooncake", mooncake(output_length=-1), "expected input >= 1 and output >= 0, got 5"),
        ("mooncake", mooncake(output_length=10**12), "expected at most 67108864 tokens"),
        ("mooncake", mooncake(hash_ids=3), "hash_ids: expected list, got 3"),
        ("mooncake", mooncake(input_length=513), "hash_ids: expected 2 ids for 513 tokens, got 1"),
        ("mooncake", mooncake(hash_ids=[{}]), "unhashable"),
        ("weka", session("a", 3), "requests: expected objects, got 3"),
        ("weka", session("a", call(0, 640, [1])), "hash_ids: expected 10 ids for 640 tokens"),
        ("weka", session("a", hash_id_scope="odd"), "expected 'local' or 'global', got 'odd'"),
        ("weka", session("a", block_size=0), "block_size: expected 1..65536, got 0"),
        ("weka", session("a", block_size=2**40), "block_size: expected 1..65536, got"),
    ],
)
def test_bad_lines_are_named(name, row, message, tmp_path):
    with pytest.raises(ValueError, match=f"trace: t.jsonl, line 1: .*{message}"):
        LOADERS[name](write(tmp_path / "t.jsonl", row), None)


LINES = "\n".join([json.dumps(mooncake())] * 500).encode()
PACKED = lzma.compress(LINES)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        *[
            ("t.jsonl.xz", damaged, r"cannot read '.*t\.jsonl\.xz': ")
            for damaged in (PACKED[:-20], PACKED[:7], b"", LINES, PACKED[:-1] + b"\0")
        ],
        ("t.jsonl", LINES[:-10], r"t\.jsonl, line 500: expected a JSON object"),
        ("t.jsonl", b"[" * 100_000, r"t\.jsonl, line 1: expected a JSON object"),
        ("t.jsonl", b"\n \n", r"expected at least one request in t\.jsonl"),
        ("t.jsonl", None, "cannot read .*: No such file"),
        (".", None, "cannot read .*: Is a directory"),
    ],
)
def test_damaged_files_are_named(name, data, message, tmp_path):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"trace: {message}"):
        load_mooncake(tmp_path / name)


def test_tokens_of_a_request():
    known = TraceRequest(0.0, 40, 20, np.array([3, 1, 2, 7]), 16)
    assert known.tokens(0).tolist() == [*range(48, 64), *range(16, 48), *range(112, 124)]
    unknown = TraceRequest(0.0, 40, 20, np.array([3, 1, 2]), 16)
    first, second = unknown.tokens(0), unknown.tokens(1)
    assert first[:40].tolist() == second[:40].tolist() == known.tokens(0)[:40].tolist()
    assert len(first) == 60 and (first[40:] >= ANSWER_TOKENS).all()
    assert not set(first[40:].tolist()) & set(second[40:].tolist())


def test_too_many_ids_for_31_bits():
    number = Numbering(1 << 28)
    assert number(["a", "b", "a"]).tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="at most 4 distinct"):
        number(range(5))


HYBRID = [GroupSpec("d", "dense", 32, 100), GroupSpec("w", "window", 16, 100, 64)]
DENSE = [GroupSpec("d", "dense", 32, 100)]
ONE_BY_ONE = SimulatedTiming(prefill_rate=1000.0, decode_rate=100.0, chunk=4096, max_requests=1)


def random_requests(seed, lookups=0.0):
    """Prompts that share prefixes in a random tree; a part of them are look-ups."""
    rng = np.random.default_rng(seed)
    prompts, requests, fresh = [[]], [], iter(range(10**6))
    for i in range(60):
        base = prompts[rng.integers(len(prompts))]
        ids = base[: rng.integers(len(base) + 1)]
        ids = ids + [next(fresh) for _ in range(rng.integers(1, 12))]
        prompts.append(ids)
        size = len(ids) * 16 - int(rng.integers(16))
        output = 0 if rng.random() < lookups else int(rng.integers(1, 20))
        requests.append(TraceRequest(float(i), size, output, np.array(ids), 16))
    return TraceWorkload("random", requests)


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


def test_vllm_in_an_infinite_pool_hits_as_a_dict_of_prefixes():
    pytest.importorskip("vllm")
    from quire.bench.replay.vllm import VLLMReplay

    workload = random_requests(0, lookups=0.1)
    empty = empty_cache(PRESETS["llama-like"], workload)
    in_chunks = SimulatedTiming(chunk=32, max_requests=1)
    run = VLLMReplay(workload, empty, "llama-like", in_chunks, 5000, None)
    run.run(lambda n: None)
    assert run.hits.tolist() == prefix_hits(workload.requests, 16)


@pytest.mark.parametrize("seed", range(2))
def test_an_infinite_pool_hits_as_a_dict_of_prefixes(seed):
    workload = random_requests(seed, lookups=0.1)
    dense = replay(workload, DENSE, num_pages=5000, timing=ONE_BY_ONE)
    assert dense.hits.tolist() == prefix_hits(workload.requests, 32) and dense.hits.sum() > 0
    hybrid = replay(workload, HYBRID, num_pages=20000, timing=ONE_BY_ONE, retention="dense")
    assert hybrid.hits.tolist() == dense.hits.tolist()  # every boundary is resumable


@pytest.mark.parametrize(("replay_tokens", "hit"), [(None, 0), (1024, 1984 - 1024)])
def test_a_prefix_without_resume_point_is_replayed(replay_tokens, hit):
    """The second prompt is the first 2000 tokens of the first one: 1984 are whole segments."""
    lengths = (3000, 2000)
    requests = [TraceRequest(100.0 * i, n, 10, np.arange(200), 16) for i, n in enumerate(lengths)]
    workload = TraceWorkload("shorter", requests)
    rows = run_grid(
        workload, "gpt-oss-like", ["300%"], ["latest"], ["lru"], ONE_BY_ONE,
        replay_tokens=replay_tokens, progress=False,
    )  # fmt: skip
    replayed, bounds = rows[:2], rows[2:]
    assert [row["hit_tokens"] for row in replayed] == [hit, hit]
    assert [row.get("replay_tokens") for row in replayed] == [replay_tokens, replay_tokens]
    assert all(row["hit_tokens"] == 1984 and "replay_tokens" not in row for row in bounds)


def test_the_clock():
    """Two prompts and their answers, by hand: prefill 1000 tokens/s, decode 100 tokens/s."""
    ids = np.arange(100)
    first = TraceRequest(2.0, 500, 100, ids, 16)
    second = TraceRequest(2.1, 300, 50, ids + 1000, 16)
    together = SimulatedTiming(prefill_rate=1000.0, decode_rate=100.0, chunk=64, max_requests=2)
    both = replay(TraceWorkload("two", [second, first]), DENSE, num_pages=200, timing=together)
    assert both.ttft == pytest.approx([0.5, 0.4 + 0.3])  # the second waits for the first prompt
    assert both.makespan == pytest.approx(1.5)  # the first answer ends at 3.5
    serial = replay(TraceWorkload("two", [second, first]), DENSE, num_pages=200, timing=ONE_BY_ONE)
    assert serial.ttft == pytest.approx([0.5, 1.4 + 0.3])  # and here for the first answer
    repeated = TraceWorkload("again", [first, TraceRequest(9.0, 500, 1, ids, 16)])
    again = replay(repeated, DENSE, num_pages=200, timing=ONE_BY_ONE)
    assert again.hits.tolist() == [0, 480] and again.ttft[1] == pytest.approx(0.02)


def test_a_request_waits_for_pages():
    ids = np.arange(100)
    requests = [TraceRequest(0.0, 320, 64, ids + first, 16) for first in (0, 1000)]
    workload = TraceWorkload("w", requests)
    timing = SimulatedTiming(prefill_rate=1000.0, decode_rate=100.0, max_requests=8)
    roomy = replay(workload, DENSE, num_pages=1 + 24, timing=timing)
    tight = replay(workload, DENSE, num_pages=1 + 23, timing=timing)
    assert roomy.ttft == pytest.approx([0.32, 0.64])
    assert tight.ttft[0] == pytest.approx(0.32)
    assert tight.makespan > roomy.makespan
    with pytest.raises(ValueError, match="pool: expected room for request 0 of 384 tokens"):
        replay(workload, DENSE, num_pages=1 + 11, timing=timing)


def over_host(workload, pages, groups=DENSE, *, host=20_000, link=1e15, policy=LRU, **options):
    """Replay over host memory that stores at once; host None: without any."""

    def behind(cache):
        return HostMemory(
            cache, num_pages=host, link=link, prefill_rate=ONE_BY_ONE.prefill_rate,
            chunk=ONE_BY_ONE.chunk, policy=policy(), watermark=cache.num_pages,
        )  # fmt: skip

    return replay(
        workload, groups, num_pages=1 + pages, timing=ONE_BY_ONE, policy=policy(),
        behind=None if host is None else behind, **options,
    )  # fmt: skip


def test_a_load_takes_the_time_of_its_bytes():
    """A, then B that evicts it, then A: 9 of 10 pages come back at 10,000 bytes a second."""
    starts = ((0, 0), (1, 100), (10, 0))
    requests = [TraceRequest(t, 320, 1, np.arange(10) + first, 32) for t, first in starts]
    tiers = over_host(TraceWorkload("w", requests), 11, link=10_000.0)
    assert tiers.hits.tolist() == [0, 0, 288] and tiers.from_device.tolist() == [0, 0, 0]
    assert tiers.ttft == pytest.approx([0.32, 0.32, 9 * 100 / 10_000 + 0.032])
    assert tiers.loading == pytest.approx(0.09) and tiers.host.loaded == 900


@pytest.mark.parametrize("groups", [DENSE, HYBRID], ids=["dense", "hybrid"])
@pytest.mark.parametrize("seed", range(2))
def test_an_infinite_host_is_an_infinite_pool(groups, seed):
    workload, pages = random_requests(seed), 40 if groups is DENSE else 120
    infinite = replay(workload, groups, num_pages=20_000, timing=ONE_BY_ONE, retention="dense")
    tiers = over_host(workload, pages, groups, retention="dense")
    assert tiers.hits.tolist() == infinite.hits.tolist()
    assert tiers.from_device.sum() < tiers.hits.sum()


def best_by_search(uses, capacity):
    """Most hits of any schedule, by trying every set of kept segments after each request."""
    states = {frozenset(): 0}
    for usable, keys in uses:
        after = {}
        for kept, hits in states.items():
            gained = hits + next((n for n, k in enumerate(keys) if k not in kept or n == usable))
            have = kept | set(keys)
            for size in range(min(capacity, len(have)) + 1):
                for choice in map(frozenset, combinations(sorted(have), size)):
                    after[choice] = max(after.get(choice, -1), gained)
        states = after
    return max(states.values())


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_the_clairvoyant_bound_is_at_most_a_segment_over_the_optimum(capacity):
    chains = [[1, 2], [1, 3], [4], [5, 6, 7], [1, 2, 8]]
    for seed in range(4):
        rng = np.random.default_rng(seed)
        prompts = [chains[rng.integers(len(chains))] for _ in range(9)]
        workload = TraceWorkload(
            "tiny",
            [TraceRequest(i, len(p) * 32, 1, np.array(p), 32) for i, p in enumerate(prompts)],
        )
        empty = empty_cache(DENSE, workload)
        best = best_by_search([(len(ids) - 1, ids) for ids in prompts], capacity)
        bound = clairvoyant_hits(segment_uses(workload, empty), empty, capacity)
        assert best <= bound <= best + 1


@pytest.mark.parametrize("name", EVICTIONS)
@pytest.mark.parametrize(("groups", "retention"), [(DENSE, "latest"), (HYBRID, "dense")])
def test_no_policy_beats_the_bounds(name, groups, retention):
    workload, policy, pages = random_requests(5), EVICTIONS[name], 40 if groups is DENSE else 80
    empty = empty_cache(groups, workload)
    uses = segment_uses(workload, empty)
    infinite = 32 * clairvoyant_hits(uses, empty, None)
    assert infinite == sum(prefix_hits(workload.requests, 32))
    options = {"policy": policy, "retention": retention}
    alone, tiers = (
        over_host(workload, pages, groups, host=host, **options).hits.sum() for host in (None, 60)
    )
    assert 0 < alone <= 32 * clairvoyant_hits(uses, empty, pages) <= infinite
    assert groups is HYBRID or alone < tiers
    assert tiers <= 32 * clairvoyant_hits(uses, empty, pages + 60) <= infinite


SMALL = {
    "round-robin": "sessions=3,turns=3,first=512,user=64,answer=32",
    "agent-tree": "trees=2,depth=2,root=512,step=64,answer=32",
    "agent-pauses": "agents=3,steps=4,root=512,step=64,answer=32",
    "coding-agents": "agents=2,turns=2,calls=3,system=256,message=32,output=64,answer=32,delegate=0.5",
    "pr43447": "prompts=2,tokens=5120",
    "pr40676": "prefixes=2,requests=8,prefix=512,user=64,answer=16",
}


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_share_prefixes(name):
    requests, same, other = (
        make_workload(f"{name}:{SMALL[name]}", None, seed).requests for seed in (0, 0, 1)
    )
    one, two, three = (
        [(r.arrival, r.input, r.ids.tolist()) for r in drawn] for drawn in (requests, same, other)
    )
    assert one == two and (one == three) == (name in ("round-robin", "pr43447"))
    assert one == sorted(one, key=lambda request: request[0])
    hits = prefix_hits(requests, 32)
    assert 0.3 < sum(hits) / sum(r.input for r in requests) < 0.95
    if name == "round-robin":  # a turn repeats all before it, answers included
        assert hits[:3] == [0, 0, 0]
        assert all(h >= r.input - 64 - 32 for h, r in zip(hits[3:], requests[3:], strict=True))


def test_pool_sizes():
    workload = make_workload("round-robin:sessions=2,turns=2,first=512,user=64,answer=32", None, 0)
    groups = PRESETS["gemma-4-31b"]
    distinct = 2 * (512 + 32 + 64 + 32) // 32
    assert dense_working_set(workload, empty_cache(groups, workload)) == distinct
    assert pool_pages("100%", groups, workload) == distinct
    assert pool_pages("1GiB", groups, workload) == 2**30 // 2_621_440
    assert pool_pages("7pages", groups, workload) == 7
    for bad in ("12", "-1GiB", "0%", "x", "", "pages", "nan", "5%%", "9" * 400 + "%"):
        with pytest.raises(ValueError, match="host: expected"):
            pool_pages(bad, groups, workload, "host")


CHATS = "round-robin:sessions=3,turns=2,first=512,user=64,answer=32"
AGENTS = "agent-pauses:agents=4,steps=4,root=1024,rate=1.0"


@pytest.fixture
def replayed(tmp_path):
    """(rows of --json, or what is in the file) of a replay on pages of llama-like."""

    def replayed(*arguments, pool="50%"):
        file = tmp_path / "rows.json"
        options = ["--model", "llama-like", "--pool", pool, "--json", str(file)]
        assert main(["--workload", *arguments, *options]) == 0
        return json.loads(file.read_text())

    return replayed


def test_rows_and_picture(replayed, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plot.svg"
    rows = replayed(CHATS, "--eviction", "lru", "adaptive", "--plot", str(picture))
    bound = {"workload", "preset", "retention", "eviction", "pool", "pool_bytes"}
    bound |= {"hit_rate", "hit_tokens"}
    more = {"mean_hit", "ttft_p50", "ttft_p99", "tokens_per_s", "recomputed_tokens"}
    more |= {"evicted_resume_points", "evicted_segments"}
    for row in rows:
        assert row.keys() == (bound if row["retention"] == "any" else bound | more)
        assert 0 <= row["hit_rate"] <= 1
    assert picture.read_text().startswith("<?xml")
    printed = capsys.readouterr()
    assert "clairvoyant" in printed.out and printed.err == ""  # no bar, as this is no terminal


def test_a_policy_of_ones_own_and_a_bar_at_a_terminal(replayed, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text("from quire.kvcore import LRU\n\nclass Own(LRU):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    rows = replayed(CHATS, "--eviction", "lru", "mine:Own")
    lru, own = ([r for r in rows if r["eviction"] == name] for name in ("lru", "mine:Own"))
    assert own == [row | {"eviction": "mine:Own"} for row in lru] != []
    assert "request" in capsys.readouterr().err


def test_hosts(replayed, capsys):
    hosts = ["--host", "30%", "0.5GiB", "--link", "40", "--eviction", "lru"]
    rows = [r for r in replayed(AGENTS, *hosts, "--quiet", pool="80%") if "host" in r]
    assert {r["host"] for r in rows} == {"30%", "0.5GiB"} and all(r["link"] == 40e9 for r in rows)
    assert all(0 < r["device_tokens"] <= r["hit_tokens"] for r in rows)
    assert "to host" in capsys.readouterr().out


def test_rows_are_written_before_a_later_error(tmp_path, capsys):
    out = tmp_path / "rows.json"
    longer = "round-robin:sessions=2,turns=2,first=131072"  # more than the pool
    arguments = ["--workload", CHATS, longer, "--model", "v4-flash", "--pool", "300pages"]
    assert main([*arguments, "--eviction", "lru", "--quiet", "--json", str(out)]) == 2
    assert "error: pool: expected room for request 0" in capsys.readouterr().err
    assert {r["workload"] for r in json.loads(out.read_text())} == {CHATS}


@pytest.mark.parametrize(
    "arguments",
    [
        "--workload round-robin nonsense", "--workload round-robin:sessions=-1",
        "--workload round-robin:sessions=1e3", "--workload round-robin:sessions=__import__('os')",
        "--workload round-robin:gap=nan", "--workload round-robin:gap",
        "--workload pr40676:rate=0", "--workload round-robin:sessions=2000000000",
        "--workload pr43447:tokens=2000000000", "--workload mooncake:",
        "--workload mooncake:/nowhere", "--workload weka:/", "--pool 25% 25", "--pool nan%",
        "--eviction lru nope", "--eviction quire.kvcore:Ranked", "--eviction nope:X",
        "--eviction math:pi", "--retention auto 33", "--retention 0", "--limit -3", "--chunk 0",
        "--max-requests 0",
        "--prefill-rate nan", "--plot rows.txt", "--host x", "--host 1% 2%%",
        "--vllm x", "--vllm -1", "--replay-tokens 0", "--host 1% --link 0", "--host 1% --plot a.svg",
    ],
)  # fmt: skip
def test_errors_are_one_line_before_any_replay(arguments, capsys):
    assert main([*arguments.split(), "--quiet"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    assert "expected" in captured.err or "cannot read" in captured.err
