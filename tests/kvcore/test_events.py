"""Events: what is stored where, told in full, in bounded memory."""

import pytest

from quire.kvcore import AllBlocksCleared, BlockRemoved, EventLog, GroupSpec, tail_hashes
from quire.kvcore.events import split_keys
from tests.kvcore.engine import Runner, Text
from tests.kvcore.expected import Reader


def same_hits(e: Runner, reader: Reader, prompts) -> None:
    """The reader predicts the hits, and compares what the events of these name."""
    for tokens in prompts:
        assert reader.hit(Text(tokens, b""), len(tokens) - 1) == e.kv.match(tokens).num_tokens


def test_the_records_of_a_resume_point_name_exactly_its_blocks():
    log = EventLog(medium="HBM")
    specs = ((8, None), (4, 10), (4, 10), GroupSpec("state", "state", 4, 4096))
    e = Runner(*specs, events=log)
    prompt = list(range(100, 126))
    e.run("a", prompt, [7, 8], chunk=8)
    first, events = log.take()
    key = split_keys(e.kv.match([*prompt, 7, 8, 9]).prompt.keys)
    assert first == 0 and len(events) == log.next_number
    # Of the resume points, one at each chunk's end, that at 24 stays: window blocks from 12 on in
    # both window groups, and a state.
    removed = {h for r in events if isinstance(r, BlockRemoved) for h in r.block_hashes}
    assert {*key[:2]} <= removed and key[2] not in removed
    window, state = [r for r in events if r.kind != "dense" and key[2] in r.block_hashes]
    assert (window.kind, window.groups, window.names) == ("window", (1, 2), ("g1", "g2"))
    assert (window.start, window.block_size, window.sliding_window) == (12, 4, 10)
    assert list(window.token_ids) == prompt[12:24] and window.parent == key[0]
    assert window.block_hashes == tail_hashes(key[2], 3) and window.block_hashes[-1] == key[2]
    assert (state.kind, state.groups, state.start) == ("state", (3,), 20)
    assert list(state.token_ids) == prompt[20:24] and state.block_hashes == (key[2],)
    assert {r.medium for r in events} == {"HBM"}


def test_a_log_is_bounded_in_events_and_in_bytes_and_a_reader_sees_the_gap():
    for limits in {"capacity": 5}, {"max_bytes": 3500}:
        log = EventLog(**limits)
        e = Runner((4, None), events=log)
        reader = Reader(e.kv)
        e.run("a", range(20), chunk=4)
        reader.read(log)
        assert not reader.lost and log.num_dropped == 0
        e.run("b", range(100, 140), chunk=4)
        assert len(log) == log.num_dropped == 5 and log.next_number == 15
        assert 0 < log.num_bytes <= 3500
        reader.read(log)
        assert reader.lost and reader.next_number == 15 and log.num_bytes == len(log) == 0
        e.kv.clear()
        assert log.take() == (15, [AllBlocksCleared()])
    log = EventLog(max_bytes=5000)
    e = Runner((4, None), (4, 9), events=log)
    e.run("a", range(400), chunk=400)  # an event larger than all room
    assert log.num_bytes <= 5000 and log.num_dropped > 0


@pytest.mark.parametrize("most", [1, 3, 1000])
def test_an_announcement_larger_than_the_log_is_read_in_parts(most):
    log = EventLog(capacity=12)
    e = Runner((4, None), (4, 9), events=log, retention="dense")
    prompts = [list(range(1000 * i, 1000 * i + 80)) for i in range(3)]
    for i, prompt in enumerate(prompts):
        e.run(i, prompt)
    reader = Reader(e.kv)
    reader.next_number = log.next_number - len(log)
    e.kv.announce()
    assert len(log) > 12 and log.num_bytes == 0  # announced ones take no room
    longer = [*prompts[0], 1, 2, 3, 4, 5]
    e.run("later", longer)  # told after the announcement, made before it is read
    points = e.kv.stats()["resume_points"]
    e.kv.evict(1)  # a point that was announced, and dense blocks behind it
    assert e.kv.stats()["resume_points"] < points
    while n := reader.read(log, most):
        assert n <= most and not reader.lost
    assert reader.next_number == log.next_number
    same_hits(e, reader, [[*p, 7] for p in prompts] + [[*longer, 6]])


def test_tokens_of_answers_take_room_for_the_newest_only():
    log = EventLog()
    e = Runner((4, None), events=log)
    e.admit("a", [1, 2, 3])
    e.finish_prompt("a")
    size = e.kv._event_writer._answers.size
    for i in range(300):
        e.decode("a", [i])
        assert e.kv._event_writer._answers.size <= 2 * size
    reader = Reader(e.kv)
    reader.read(log)
    same_hits(e, reader, [[*e.tokens["a"], 9]])  # which compares the tokens that events name


def test_without_a_log_no_tokens_are_kept():
    quiet = Runner((4, None), debug=False)  # debug keeps them too
    loud = Runner((4, None), events=EventLog(), debug=False)
    assert quiet.kv.match([1, 2, 3]).prompt.tokens is None
    assert loud.kv.match([1, 2, 3]).prompt.tokens.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="a prompt made by a cache with events"):
        loud.kv.match(quiet.kv.match([1, 2, 3]).prompt)


def test_hashes_of_a_tail_are_keys_of_no_segment():
    keys = split_keys(Runner((1, 3)).kv.match([5, 5, 5, 5, 1, 9]).prompt.keys)
    assert tail_hashes(keys[3], 2)[1] == keys[3]
    assert tail_hashes(keys[3], 2)[0] != keys[4]  # the next token is 1, as is the block's distance


def test_extra_keys_count_towards_the_bytes_of_a_log():
    log = EventLog(identities=True, max_bytes=10_000)
    Runner((8, None), events=log).run("a", range(16), extra_keys=[(0, None, b"k" * 10_000)])
    assert len(log) == 0 < log.num_dropped
