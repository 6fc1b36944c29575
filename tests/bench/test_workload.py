"""Workloads are the same every time, and share the prefixes they say they share."""

import lzma

import numpy as np
import pytest

from quire.bench.common.traces import expand, read_trace, trace_workload
from quire.bench.common.workload import NUM_TURNS, chat_workload
from quire.models.tokenizer import ByteTokenizer

ENCODE = ByteTokenizer().encode
LINE = '{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": %s}'


def tokens(workload):
    return [[turn.token_ids.tolist() for turn in session] for session in workload.sessions]


def shared(a, b):
    """Length of the common prefix of two lists."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def write(path, *lines):
    data = "\n".join(lines).encode()
    path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    return path


def test_chats_are_deterministic_and_follow_the_seed():
    first = chat_workload(ENCODE, bos_token_id=2, seed=1)
    assert tokens(first) == tokens(chat_workload(ENCODE, bos_token_id=2, seed=1))
    assert tokens(first) != tokens(chat_workload(ENCODE, bos_token_id=2, seed=2))


def test_chats_share_system_prompts_and_nothing_else():
    sessions = tokens(chat_workload(ENCODE, bos_token_id=2))
    assert all(len(session) == NUM_TURNS for session in sessions)
    first_turns = [session[0] for session in sessions]
    assert all(prompt[0] == 2 and 2 not in prompt[1:] for prompt in first_turns)
    assert shared(first_turns[0], first_turns[3]) >= 448  # the same system prompt
    assert shared(first_turns[0], first_turns[1]) < 100
    assert len({tuple(turn) for session in sessions for turn in session}) == 8 * NUM_TURNS


def test_limit_and_scale_of_chats():
    small = chat_workload(ENCODE, limit=2, scale=0.25)
    assert len(small.sessions) == 2 and small.num_requests == 2 * NUM_TURNS
    assert small.longest < chat_workload(ENCODE, limit=2).longest / 2
    for bad in ({"limit": 0}, {"scale": 0.0}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}: expected"):
            chat_workload(ENCODE, **bad)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.xz"])
def test_trace_files(tmp_path, name):
    path = write(tmp_path / name, LINE % (5, 513, 9, [7, 8]), "", LINE % (6, 1, 1, [7]))
    first, second = read_trace(path)
    assert (first.timestamp, first.input_length, first.output_length) == (5, 513, 9)
    assert first.hash_ids == (7, 8) and second.hash_ids == (7,)
    assert read_trace(path, limit=1) == [first]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: expected a JSON object, got b'\{'"),
        ('{"timestamp": 1, "hash_ids": []}', "line 2: input_length: expected int >= 1, got None"),
        (LINE % (1, 0, 1, []), r"line 2: input_length: expected int >= 1, got 0"),
        (LINE % (1, 513, 1, [1]), r"line 2: hash_ids: expected 2 ints >= 0 for 513 tokens, got \[1\]"),
        (LINE % (1, 5, 1, '["a"]'), r"line 2: hash_ids: expected 1 ints >= 0"),
        (LINE % (1, 5, 1, "3"), r"line 2: hash_ids: expected list, got 3"),
    ],
)  # fmt: skip
def test_bad_lines_are_named(tmp_path, line, message):
    path = write(tmp_path / "t.jsonl", LINE % (5, 5, 9, [7]), line)
    with pytest.raises(ValueError, match=r"trace: t\.jsonl, " + message):
        read_trace(path)


def test_expansion_is_fixed_and_fewer_tokens_are_a_prefix():
    whole = expand(41, 512, low=3, high=259)
    assert whole.dtype == np.int32 and whole.min() >= 3 and whole.max() < 259
    assert expand(41, 30, low=3, high=259).tolist() == whole[:30].tolist()
    assert expand(41, 4, low=3, high=259).tolist() == [153, 197, 212, 214]  # on every machine
    assert expand(42, 30, low=3, high=259).tolist() != whole[:30].tolist()
    assert expand(41, 30, low=3, high=259, seed=1).tolist() != whole[:30].tolist()


@pytest.mark.parametrize("scale", [1.0, 0.3, 0.05, 0.001])
def test_scaled_traces_share_the_same_blocks(tmp_path, scale):
    path = write(
        tmp_path / "t.jsonl",
        LINE % (9, 1300, 40, [1, 2, 3]),
        LINE % (2, 1200, 40, [1, 2, 4]),
        LINE % (5, 600, 40, [5, 2]),
    )
    workload = trace_workload(path, vocab_size=50_000, scale=scale)
    early, middle, late = (session[0].token_ids.tolist() for session in workload.sessions)
    block = max(1, round(512 * scale))  # timestamps give the order: 2, 5, 9
    assert shared(early, late) == 2 * block and shared(early, middle) == 0
    assert len(late) == 2 * block + max(1, round(276 * block / 512))
    assert middle[block:] == early[block : block + len(middle) - block]  # an id alone decides
    assert workload.sessions[0][0].max_tokens == max(1, round(40 * scale))
    assert [session[0].group for session in workload.sessions] == [1, 2, 4]


def test_a_trace_cannot_be_stretched(tmp_path):
    path = write(tmp_path / "t.jsonl", LINE % (0, 5, 9, [7]))
    with pytest.raises(ValueError, match="scale: expected at most 1 with a trace, got 2"):
        trace_workload(path, vocab_size=259, scale=2)
