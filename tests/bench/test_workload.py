"""Workloads are the same every time, and share the prefixes they say they share."""

from itertools import takewhile

import numpy as np
import pytest

from quire.bench.common.workload import NUM_TURNS, chat_workload, expand, trace_workload
from quire.models.tokenizer import ByteTokenizer

ENCODE = ByteTokenizer().encode
LINE = '{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": %s}\n'


def tokens(workload):
    return [[turn.token_ids.tolist() for turn in session] for session in workload.sessions]


def shared(a, b):
    """Length of the common prefix of two lists."""
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_chats_share_system_prompts_and_nothing_else():
    sessions = tokens(chat_workload(ENCODE, bos_token_id=2))
    assert sessions == tokens(chat_workload(ENCODE, bos_token_id=2))
    assert sessions != tokens(chat_workload(ENCODE, bos_token_id=2, seed=1))
    assert all(len(session) == NUM_TURNS for session in sessions)
    first_turns = [session[0] for session in sessions]
    assert all(prompt[0] == 2 and 2 not in prompt[1:] for prompt in first_turns)
    assert shared(first_turns[0], first_turns[3]) >= 448  # the same system prompt
    assert shared(first_turns[0], first_turns[1]) < 100
    assert len({tuple(turn) for session in sessions for turn in session}) == 8 * NUM_TURNS


def test_expansion_is_fixed_and_fewer_tokens_are_a_prefix():
    whole = expand(41, 512, low=3, high=259)
    assert whole.dtype == np.int32 and whole.min() >= 3 and whole.max() < 259
    assert expand(41, 30, low=3, high=259).tolist() == whole[:30].tolist()
    assert expand(41, 4, low=3, high=259).tolist() == [153, 197, 212, 214]  # on every machine
    assert expand(42, 30, low=3, high=259).tolist() != whole[:30].tolist()
    assert expand(41, 30, low=3, high=259, seed=1).tolist() != whole[:30].tolist()


@pytest.mark.parametrize("scale", [1.0, 0.3, 0.05, 0.001])
def test_scaled_traces_share_the_same_blocks(tmp_path, scale):
    path = tmp_path / "t.jsonl"
    rows = [(9, 1300, 40, [1, 2, 3]), (2, 1200, 40, [1, 2, 4]), (5, 600, 40, [5, 2])]
    path.write_text("".join(LINE % row for row in rows))
    workload = trace_workload(path, vocab_size=50_000, scale=scale)
    early, middle, late = (session[0].token_ids.tolist() for session in workload.sessions)
    block = max(1, round(512 * scale))  # timestamps give the order: 2, 5, 9
    assert shared(early, late) == 2 * block and shared(early, middle) == 0
    assert len(late) == 2 * block + max(1, round(276 * block / 512))
    assert middle[block:] == early[block : block + len(middle) - block]  # an id alone decides
    assert workload.sessions[0][0].max_tokens == max(1, round(40 * scale))
    assert [session[0].group for session in workload.sessions] == [1, 2, 4]
    with pytest.raises(ValueError, match="scale: expected at most 1 with a trace, got 2"):
        trace_workload(path, vocab_size=259, scale=2)
