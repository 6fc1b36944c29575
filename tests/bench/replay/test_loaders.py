"""Traces of three formats become the same kind of request, and bad lines are named."""

import json
import lzma
from itertools import takewhile

import numpy as np
import pytest

from quire.bench.replay.loaders import load_bailian, load_mooncake, load_weka
from quire.bench.replay.requests import ANSWER_TOKENS, Numbering, TraceRequest


def write(path, *rows):
    data = "\n".join(json.dumps(r) if r != "" else "" for r in rows).encode()
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    return path


def shared(a, b):
    """Tokens that the prompts of two requests have in common at the start."""
    pairs = zip(a.tokens(0)[: a.input], b.tokens(1)[: b.input], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


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


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.xz"])
def test_mooncake(tmp_path, name):
    first = mooncake(timestamp=1500, input_length=1030, output_length=9, hash_ids=[7, 8, 9])
    second = mooncake(timestamp=2000, input_length=1100, hash_ids=[7, 8, 5])
    path = write(tmp_path / name, first, "", second)
    first, second = load_mooncake(path)
    assert (first.arrival, first.input, first.output, first.ids_block_size) == (1.5, 1030, 9, 512)
    assert shared(first, second) == 1024 and first.session != second.session
    assert len(load_mooncake(path, limit=1)) == 1


def test_bailian(tmp_path):
    rows = [bailian(5, -1), bailian(6, -1, hash_ids=[4, 5, 6])]
    rows += [bailian(9, 5, input_length=64, hash_ids=[10**18, 2, 8, 9]), bailian(11, 9)]
    path = write(tmp_path / "qwen.jsonl", *rows)
    a, b, c, d = load_bailian(path)
    assert a.arrival == 2.5 and a.ids_block_size == 16
    assert a.session == c.session == d.session != b.session
    assert shared(a, c) == 32 and shared(a, b) == 0 and shared(a, d) == 40
    assert len(load_bailian(path, limit=2)) == 2


def test_weka_sessions_subagents_and_scopes(tmp_path):
    sub = {"t": 2.0, "type": "subagent", "agent_id": "x", "requests": [call(2.5, 128, [1, 9])]}
    one = session("one", call(0.0, 128, [1, 2]), sub, call(3.0, 150, [1, 2]))
    two = session("two", call(1.0, 128, [1, 2]))
    a, b, c, d = load_weka(write(tmp_path / "weka.jsonl", one, two))
    assert [r.arrival for r in (a, b, c, d)] == [0.0, 1.0, 2.5, 3.0]
    assert a.session == c.session == d.session != b.session
    assert a.scope == c.scope != b.scope
    assert shared(a, c) == 64 and shared(a, d) == 128 and d.input == 150
    folder = tmp_path / "folder"
    folder.mkdir()
    for trace in (one, two):
        write(folder / f"{trace['id']}.json", trace | {"hash_id_scope": "global"})
    everywhere = load_weka(folder)
    assert {r.scope for r in everywhere} == {""} and len(everywhere) == 4
    assert len(load_weka(folder, limit=3)) == 3


BAD_LINES = [
    (
        load_mooncake,
        {"hash_ids": []},
        r"timestamp: expected int in 0\.\.9007199254740992, got None",
    ),
    (
        load_mooncake,
        mooncake(input_length=0),
        r"input_length: expected int in 1\.\.67108864, got 0",
    ),
    (load_mooncake, mooncake(input_length=513), r"hash_ids: expected 2 ints >= 0 .* got \[1\]"),
    (load_mooncake, mooncake(hash_ids=["a"]), "hash_ids: expected 1 ints >= 0"),
    (load_mooncake, mooncake(hash_ids=3), "hash_ids: expected list, got 3"),
    (load_mooncake, mooncake(output_length=10**12), "output_length: expected int in 1"),
    (load_mooncake, mooncake(timestamp=10**400), "timestamp: expected int in 0"),
    (load_bailian, {"chat_id": 1}, "parent_chat_id: expected int, got None"),
    (load_bailian, bailian(1, -1, hash_ids=[1]), "hash_ids: expected 3 ids for 40 tokens, got 1"),
    (load_bailian, bailian(1, -1, input_length=0), "expected input >= 1 and output >= 0, got 0"),
    (load_bailian, bailian(1, -1, output_length=-1), "expected input >= 1 and output >= 0, got 40"),
    (load_bailian, bailian(1, -1, output_length=10**12), "expected at most 67108864 tokens"),
    (load_bailian, bailian(1, -1, timestamp="now"), "timestamp: expected int or float, got 'now'"),
    (load_bailian, bailian(1, -1, timestamp=float("nan")), "expected a finite time, got nan"),
    (load_bailian, bailian(1, -1, timestamp=10**400), "int too large"),
    (load_bailian, bailian(1, -1, hash_ids=[[], {}, []]), "unhashable"),
    (load_bailian, [1], "expected a JSON object"),
    (load_weka, session("a", 3), "requests: expected objects, got 3"),
    (load_weka, session("a", call(0, 640, [1])), "hash_ids: expected 10 ids for 640 tokens, got 1"),
    (load_weka, session("a", hash_id_scope="odd"), "expected 'local' or 'global', got 'odd'"),
    (load_weka, session("a", block_size=0), "block_size: expected 1..65536, got 0"),
    (load_weka, session("a", block_size=2**40), "block_size: expected 1..65536, got"),
]


@pytest.mark.parametrize(("load", "row", "message"), BAD_LINES)
def test_bad_lines_are_named(load, row, message, tmp_path):
    with pytest.raises(ValueError, match=f"trace: t.jsonl, line 1: .*{message}"):
        load(write(tmp_path / "t.jsonl", row))


FORMATS = {
    "mooncake": (load_mooncake, mooncake()),
    "bailian": (load_bailian, bailian(1, -1)),
    "weka": (load_weka, session("a", call(0, 64, [1]))),
}


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_named(name, tmp_path):
    load, row = FORMATS[name]
    lines = "\n".join(json.dumps(row | {"chat_id": i}) for i in range(500)).encode()
    packed, path, other = lzma.compress(lines), tmp_path / "t.jsonl.xz", tmp_path / "t.jsonl"
    path.write_bytes(packed)
    assert len(load(path)) == 500
    for damaged in (packed[:-20], packed[:7], b"", lines, packed[:-1] + b"\0"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"trace: cannot read '.*t\.jsonl\.xz': "):
            load(path)
    for text, message in (
        (lines[:-10], r"t\.jsonl, line 500: expected a JSON object"),
        (b"[" * 100_000, r"t\.jsonl, line 1: expected a JSON object"),
        (b"\n \n", r"expected at least one request in t\.jsonl"),
    ):
        other.write_bytes(text)
        with pytest.raises(ValueError, match=f"trace: {message}"):
            load(other)
    with pytest.raises(ValueError, match=r"trace: cannot read .*nowhere': No such file"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="limit: expected >= 1, got 0"):
        load(other, 0)
    if name != "weka":
        with pytest.raises(ValueError, match=r"trace: cannot read .*: Is a directory"):
            load(tmp_path)


def test_tokens_of_a_request():
    known = TraceRequest(0.0, 0, 40, 20, np.array([3, 1, 2, 7]), 16)
    assert known.tokens(0).tolist() == [*range(48, 64), *range(16, 48), *range(112, 124)]
    unknown = TraceRequest(0.0, 0, 40, 20, np.array([3, 1, 2]), 16)
    first, second = unknown.tokens(0), unknown.tokens(1)
    assert first[:40].tolist() == second[:40].tolist() == known.tokens(0)[:40].tolist()
    assert len(first) == 60 and (first[40:] >= ANSWER_TOKENS).all()
    assert not set(first[40:].tolist()) & set(second[40:].tolist())


def test_too_many_ids_for_31_bits():
    number = Numbering(1 << 28)
    assert number(["a", "b", "a"]).tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="at most 4 distinct"):
        number(range(5))
