"""The main benchmark on tiny models: it reports when the output is right, and only then."""

import functools
import json
import lzma
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.bench.common import floors
from quire.bench.common.results import write_json
from quire.bench.common.workload import chat_workload
from quire.bench.prefill_decode import __main__ as prefill_decode
from quire.bench.prefill_decode import report, verify
from quire.bench.prefill_decode.build import build_model
from quire.bench.prefill_decode.drive import run_workload
from quire.bench.prefill_decode.verify import check_outputs, sample
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.report import PARTS
from quire.models.layers import attention

# The default pool would take longer to make than the runs take.
SMALL = ["--device", "cpu", "--limit", "2", "--scale", "0.1", "--num-pages", "2000"]
TINY = [*SMALL, "--model", "gemma4-tiny"]
ONE = [*TINY, "--limit", "1"]  # for what takes no more than one session of four turns

rates_of = functools.cache(floors.device_rates)


@pytest.fixture(autouse=True)
def rates_are_measured_once(monkeypatch):
    """For each size of a model: the machine stays the same."""
    monkeypatch.setattr(prefill_decode, "device_rates", rates_of)


@pytest.fixture(scope="module")
def built():
    return build_model("gemma4-tiny", device=torch.device("cpu"))


@pytest.fixture(scope="module")
def run(built):
    engine = Engine(built.model, EngineConfig(num_pages=500))
    workload = chat_workload(built.tokenizer.encode, bos_token_id=2, limit=3, scale=0.2)
    return run_workload(engine, workload, concurrency=2)


def keys(value):
    """All keys of nested dictionaries but those of counters by name and of lists."""
    if not isinstance(value, dict):
        return set()
    fixed = set(value) - {"limited_by", "counters"}
    return set(value).union(*(keys(value[k]) for k in fixed))


@pytest.fixture
def reported(tmp_path, capsys):
    """(dictionary of --json, stdout) of a run; all keys are in the docstring of the report."""

    def reported(*arguments):
        file = tmp_path / "result.json"
        assert prefill_decode.main([*arguments, "--json", str(file)]) == 0
        result = json.loads(file.read_text())
        table = report.__doc__.split("::\n\n")[1].split("\n\nA number")[0]
        assert keys(result) <= set(re.findall(r"\w+", table))
        return result, capsys.readouterr().out

    return reported


def test_a_run_that_is_ended_keeps_what_it_has_measured(tmp_path, monkeypatch):
    file, run = tmp_path / "result.json", prefill_decode._run

    def ended(built, workload, settings, label, *arguments, **named):
        if label == "caching off":
            raise SystemExit(1)
        return run(built, workload, settings, label, *arguments, **named)

    monkeypatch.setattr(prefill_decode, "_run", ended)
    with pytest.raises(SystemExit):
        prefill_decode.main([*ONE, "--json", str(file)])
    result = json.loads(file.read_text())
    assert result["cached"]["decode"]["tokens"] > 0 and result["uncached"] is None
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_is_whole_at_any_moment(tmp_path, monkeypatch):
    file, write_text = tmp_path / "result.json", Path.write_text
    write_json(file, {"rows": [1]})

    def cut_short(path, text, **more):
        write_text(path, text[: len(text) // 2], **more)
        raise SystemExit(1)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", cut_short)
        with pytest.raises(SystemExit):
            write_json(file, {"rows": [1, 2]})
    assert json.loads(file.read_text()) == {"rows": [1]}
    # A pipe gets the final text alone.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json(pipe, 1, final=False)
    write_json(pipe, 2)
    assert os.read(reader, 99) == b"2\n"
    os.close(reader)


def test_json_and_text(reported):
    result, out = reported(*TINY)
    for run in (result["cached"], result["uncached"]):
        phases, pages, rows = (run["prefill"], run["decode"]), run["pages"], run["groups"]
        assert sum(phase["steps"] for phase in phases) == run["steps"]
        assert sum(row["requests"] for row in rows) == 8 and run["idle_us_per_step"] > 0
        assert all(0 <= row["hit_rate"] < 1 for row in rows)
        assert pages["cached"] <= pages["total"] == result["engine"]["num_pages"] - 1
        in_steps = 1e-6 * run["allocator"]["us_per_step"] * run["steps"]
        assert 0 < in_steps < 0.5 * run["seconds"]
    hit, compared, check = result["cached"]["hit"], result["comparison"], result["check"]
    assert 0 < hit["tokens"] < hit["prompt_tokens"] and sum(hit["limited_by"].values()) == 8
    assert result["uncached"]["hit"]["limited_by"] == {"caching-disabled": 8}
    computed = sum(result["cached"][phase]["tokens"] for phase in ("prefill", "decode"))
    answered = result["workload"]["output_tokens"] - 8  # the last token is never computed
    assert computed == hit["prompt_tokens"] - hit["tokens"] + answered
    assert compared["identical_tokens"] == compared["output_tokens"] > 0
    assert compared["identical_requests"] == check["requests"] == 8
    assert check["exact_tokens"] == check["tokens"]
    for text in ("caching on against off", "prefix hit rate", "limited by", "are its argmax"):
        assert text in out


def examples():
    lines = [line.strip() for line in prefill_decode.__doc__.splitlines()]
    return [line for line in lines if line.startswith("python -m bench.prefill_decode")]


@pytest.mark.slow
@pytest.mark.parametrize("line", examples())
def test_examples_of_the_usage_text(line, tmp_path, monkeypatch):
    """Each example runs as written, on a tiny model and with less to do."""
    monkeypatch.chdir(tmp_path)
    row = '{"timestamp": %d, "input_length": 700, "output_length": 40, "hash_ids": [0, %d]}\n'
    data = (row % (1, 1) + row % (2, 2)).encode()
    Path("conversation.jsonl.xz").write_bytes(lzma.compress(data))
    arguments = line.split()[3:]
    if "--plot" in arguments:
        pytest.importorskip("matplotlib", reason="matplotlib draws the picture")
    # Drafts are of this model's own kind; all others may run a smaller one.
    model = ["--model", "deepseek-v4-tiny"] if "--speculate" in arguments else []
    tiny = TINY if "--trace" in arguments else ONE
    assert prefill_decode.main([*arguments, *tiny, *model]) == 0
    for option in ("--json", "--plot"):
        if option in arguments:
            assert Path(arguments[arguments.index(option) + 1]).stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("deepseek-v4-small", "fp8"), ("gemma4-e-tiny", "fp8_per_tensor")]
)
def test_fp8_pages(name, dtype, reported):
    """Most tokens are those of a pass without a cache, and rounding explains the others."""
    result, out = reported(*ONE, "--model", name, "--kv-cache-dtype", dtype)
    assert f"KV cache {dtype}," in out and result["engine"]["kv_cache_dtype"] == dtype
    check = result["check"]
    assert check["requests"] == 4 and 0.7 * check["tokens"] < check["exact_tokens"]
    # What rounding rows to e4m3 does to logits, beside which fp32 counts for nothing.
    assert check["largest_bound"] > 1e-3
    assert result["cached"]["hit"]["tokens"] > 0
    assert result["comparison"]["identical_requests"] > 0


def test_split_of_steps(run, capsys):
    split = report.split(run.steps)
    parts, outside = split["parts"], split["outside_model"]
    assert list(parts) == list(PARTS)
    for key, total in (("cpu_s", split["cpu_s"]), ("share", 1.0)):
        assert sum(part[key] for part in parts.values()) == pytest.approx(total)
    assert split["cpu_s"] == pytest.approx(sum(step.cpu.sum() for step in run.steps))
    inside = sum(parts[name]["share"] for name in ("model", "sample", "wait"))
    assert outside["overall"] == pytest.approx(1 - inside) and inside > 0.5
    assert outside["worst"] >= outside["p95"] > 0
    worst = {name: part["worst_us"] for name, part in parts.items()}
    inside = (worst["model"] + worst["sample"] + worst["wait"]) / sum(worst.values())
    assert outside["worst"] == pytest.approx(1 - inside)
    assert prefill_decode.main([*ONE, "--no-baseline", "--split"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-1 - len(PARTS) : -1]] == list(PARTS)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "capacity"), [("gemma3-tiny", 2), ("gemma4-tiny", 1)])
def test_two_ranks(name, capacity, reported):
    """Each rank has one of two KV heads; that of gemma4-tiny's full layers is on both."""
    arguments = [*ONE, "--no-baseline", "--model", name, "--tensor-parallel-size", "2"]
    result, out = reported(*arguments)
    found = result["ranks"]
    assert found["size"] == 2 and found["capacity"] == pytest.approx(capacity, rel=0.1)
    assert f"holds {capacity:.2f} x the context" in out


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_refuses_when_the_cache_holds_wrong_values(kv_cache_dtype, monkeypatch, capsys, tmp_path):
    write_kv, file = attention.write_kv, tmp_path / "result.json"

    def broken(k, v, *arguments, **options):
        return write_kv(k, v.roll(1, -1), *arguments, **options)

    monkeypatch.setattr(attention, "write_kv", broken)
    arguments = ["--kv-cache-dtype", kv_cache_dtype, "--json", str(file)]
    assert prefill_decode.main([*ONE, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and not file.exists()
    assert "refusing to report" in captured.err and "the full forward says" in captured.err


def test_one_wrong_token_is_named(built, run, monkeypatch):
    assert check_outputs(built.model, run.outputs).problems == ()
    right = run.outputs[1, 2]
    position, wrong = len(right.token_ids) // 2, list(right.token_ids)
    wrong[position] = 3 + (wrong[position] + 1) % 256
    outputs = run.outputs | {(1, 2): replace(right, token_ids=tuple(wrong))}
    [problem] = check_outputs(built.model, outputs).problems
    assert f"request (session 1, turn 3), output token {position}: got {wrong[position]}" in problem
    assert f"says {right.token_ids[position]}," in problem
    monkeypatch.setattr(verify, "MARGIN", 1e7)  # rounding as large as the logits is no success
    problems = check_outputs(built.model, run.outputs).problems
    assert len(problems) == len(run.outputs) and "cannot be checked" in problems[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model gemma5", "model: there is no 'gemma5'"),
        ("--trace absent.jsonl", "absent.jsonl"),
        ("--scale 30", "max_model_len: expected 2..4096"),
        ("--retention 7", "retention"),
        ("--draft-tokens 3", "draft_tokens: expected --speculate with it, got none"),
        ("--host-cache 1 --speculate ngram", "host_cache: expected no --speculate"),
        ("--tensor-parallel-size 2 --speculate ngram", "tensor_parallel_size: expected no"),
        ("--speculate mtp", "model: expected one with MTP layers"),
        ("--plot x.png", "pip install 'quire-attention[plot]'"),
    ],
)
def test_errors_name_the_argument(arguments, message, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert prefill_decode.main([*TINY, *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err


def test_sample_is_fixed_and_has_the_longest_hit(run):
    picked = sample(run.outputs, 4)
    assert picked == sample(run.outputs, 4) and len(set(picked)) == 4
    longest = max(o.num_cached_tokens for o in run.outputs.values())
    assert longest in [run.outputs[key].num_cached_tokens for key in picked]
    assert sample(run.outputs, 1) and sample(run.outputs, 99) == sorted(run.outputs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mtp", "ngram"])
def test_deepseek_v4_with_drafts(kind, reported):
    """Caches of every kind, caching on and off, drafts and none: the same output, and right."""
    drafts = ["--model", "deepseek-v4-tiny", "--speculate", kind, "--draft-tokens", "2"]
    result, out = reported(*ONE, *drafts)
    assert f"drafts ({kind}, 2 a step)" in out
    drafted, check = result["speculation"], result["check"]
    assert (drafted["kind"], drafted["draft_tokens"]) == (kind, 2)
    assert 0 <= drafted["accepted"] <= drafted["drafts"] and drafted["tokens_per_step"] >= 1
    assert drafted["identical_tokens"] == drafted["output_tokens"] > 0
    assert check["exact_tokens"] == check["tokens"] > 0 < result["cached"]["hit"]["tokens"]


def test_tiers_against_none(reported):
    """In a pool that is too small: more hits, the same output."""
    pool = ["--limit", "4", "--num-pages", "60", "--scale", "0.2", "--host-cache", "0.01"]
    result, out = reported(*TINY, *pool, "--no-baseline", "--check", "1")
    tiers, moved = result["tiers"], result["tiers"]["moved"]
    assert tiers["comparison"]["identical_requests"] == result["workload"]["requests"]
    assert tiers["without"]["hit"]["rate"] < result["cached"]["hit"]["rate"]
    assert tiers["counters"]["stored_pages"] and tiers["counters"]["loaded_pages"]
    assert moved["to_host"] and moved["to_device"]
    assert "with host memory against without: hit rate" in out
    assert f"host: {moved['to_host'] / 2**20:.1f} MiB moved there" in out
