"""Traces become requests, and bad lines are named."""

import json
import lzma
from itertools import takewhile

import numpy as np
import pytest

from quire.bench.common.traces import ANSWER_TOKENS, Numbering, TraceRequest, load_mooncake


def write(path, *rows):
    data = "\n".join(json.dumps(r) if r != "" else "" for r in rows).encode()
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    return path


def mooncake(**fields):
    return {"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [1]} | fields


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
    pairs = zip(first.tokens(0)[:1030], second.tokens(1)[:1100], strict=False)
    assert sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) == 1024


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "expected a JSON object"),
        (mooncake(timestamp=None), "timestamp: expected int or float, got None"),
        (mooncake(timestamp=float("nan")), "expected a finite time, got nan"),
        (mooncake(timestamp=10**400), "int too large"),
        (mooncake(input_length=True), "input_length: expected int, got True"),
        (mooncake(input_length=0), "expected input >= 1 and output >= 0, got 0"),
        (mooncake(output_length=-1), "expected input >= 1 and output >= 0, got 5"),
        (mooncake(output_length=10**12), "expected at most 67108864 tokens"),
        (mooncake(hash_ids=3), "hash_ids: expected list, got 3"),
        (mooncake(input_length=513), "hash_ids: expected 2 ids for 513 tokens, got 1"),
        (mooncake(hash_ids=[{}]), "unhashable"),
    ],
)
def test_bad_lines_are_named(row, message, tmp_path):
    with pytest.raises(ValueError, match=f"trace: t.jsonl, line 1: .*{message}"):
        load_mooncake(write(tmp_path / "t.jsonl", row))


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
