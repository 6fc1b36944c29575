"""`python -m bench.replay`: rows, pictures, and input that cannot be replayed."""

import json
import sys

import pytest

from quire.bench.replay.__main__ import main

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
        "--workload mooncake:/nowhere", "--pool 25% 25", "--pool nan%",
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
