"""Traces of three formats become the same kind of request, and bad lines are named."""

import json
import lzma
from itertools import takewhile

import numpy as np
import pytest

from quire.bench.common.traces import ANSWER_TOKENS, LOADERS, Numbering, TraceRequest


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
    first, second = LOADERS["mooncake"](path, None)
    assert (first.arrival, first.input, first.output, first.ids_block_size) == (1.5, 1030, 9, 512)
    assert shared(first, second) == 1024
    assert len(LOADERS["mooncake"](path, 1)) == 1


def test_an_empty_answer_is_no_look_up(tmp_path):
    (request,) = LOADERS["mooncake"](write(tmp_path / "t.jsonl", mooncake(output_length=0)), None)
    assert request.output == 1


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


BAD_LINES = [
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
    ("weka", session("a", call(0, 640, [1])), "hash_ids: expected 10 ids for 640 tokens, got 1"),
    ("weka", session("a", hash_id_scope="odd"), "expected 'local' or 'global', got 'odd'"),
    ("weka", session("a", block_size=0), "block_size: expected 1..65536, got 0"),
    ("weka", session("a", block_size=2**40), "block_size: expected 1..65536, got"),
]


@pytest.mark.parametrize(("name", "row", "message"), BAD_LINES)
def test_bad_lines_are_named(name, row, message, tmp_path):
    with pytest.raises(ValueError, match=f"trace: t.jsonl, line 1: .*{message}"):
        LOADERS[name](write(tmp_path / "t.jsonl", row), None)


def test_damaged_files_are_named(tmp_path):
    load, lines = LOADERS["mooncake"], "\n".join([json.dumps(mooncake())] * 500).encode()
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
    for place, reason in ((tmp_path / "nowhere", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ValueError, match=f"trace: cannot read .*: {reason}"):
            load(place)


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
