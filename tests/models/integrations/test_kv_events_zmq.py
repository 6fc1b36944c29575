"""Messages of events in the wire schema, and the publisher over loopback."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

msgspec = pytest.importorskip("msgspec", reason="needs the extra events")
zmq = pytest.importorskip("zmq", reason="needs the extra events")

from quire.kvcore import AllBlocksCleared, BlockRemoved, BlockStored, EventLog  # noqa: E402
from quire.models.integrations import kv_events_zmq  # noqa: E402
from quire.models.integrations.kv_events import encode_batch, lora_key  # noqa: E402
from quire.models.integrations.kv_events_zmq import END, Publisher  # noqa: E402

HASHES = [bytes([i]) * 32 for i in range(5)]
STORED = BlockStored(
    "window", (1, 2), ("w.0", "w.1"), (HASHES[1], HASHES[2]), HASHES[3], 12, (7, 8, 300, 9), 2, 10,
    "GPU",
)  # fmt: skip
REMOVED = BlockRemoved("dense", (0,), ("full",), (HASHES[4],), "GPU")
NUMBER = functools.partial(int.to_bytes, length=8, byteorder="big")
LOCAL = "tcp://127.0.0.1:0"


def decoded(*events, **options):
    """The events of a batch; ``bytes`` where the message has binary data."""
    batch = msgspec.msgpack.decode(encode_batch(events, ts=1.5, data_parallel_rank=3, **options))
    assert batch[::2] == [1.5, 3]
    return batch[1]


@pytest.mark.parametrize("int_hashes", [False, True])
def test_events_are_maps_with_the_published_names(int_hashes):
    one, two, three, four = (int.from_bytes(h[:8], "big") if int_hashes else h for h in HASHES[1:])
    stored = {
        "type": "BlockStored", "block_hashes": [one, two], "parent_block_hash": three,
        "token_ids": [7, 8, 300, 9], "block_size": 2, "lora_id": None, "medium": "GPU",
        "lora_name": None, "group_idx": 1, "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 10, "token_start": 12, "group_name": "w.0",
    }  # fmt: skip
    removed = {"type": "BlockRemoved", "block_hashes": [four], "medium": "GPU", "group_idx": 0}
    assert decoded(STORED, REMOVED, AllBlocksCleared(), int_hashes=int_hashes) == [
        stored,
        stored | {"group_idx": 2, "group_name": "w.1"},
        removed,
        {"type": "AllBlocksCleared"},
    ]


DIGEST = b"0123456789abcdef" + b"5" * 48
ADAPTED = BlockStored(
    "dense", (0,), ("full",), (HASHES[1], HASHES[2], HASHES[3]), HASHES[4], 4, tuple(range(6)), 2,
    None, "GPU", b"tenant",
    ((), ((5, 8, lora_key("sql")), (3, 7, DIGEST)), ((5, 9, lora_key("sql")), (7, 9, DIGEST))), "r1",
)  # fmt: skip


def test_stored_blocks_name_adapter_images_salt_and_session():
    """An adapter that starts within the event parts it in two, the second behind the first."""
    common = {
        "type": "BlockStored", "block_size": 2, "medium": "GPU", "session_id": "s7", "group_idx": 0,
        "kv_cache_spec_kind": "full_attention", "group_name": "full", "cache_salt": "tenant",
    }  # fmt: skip
    plain = common | {
        "block_hashes": [HASHES[1]], "parent_block_hash": HASHES[4], "token_ids": [0, 1],
        "token_start": 4, "lora_id": None, "lora_name": None,
    }  # fmt: skip
    named = common | {
        "block_hashes": [HASHES[2], HASHES[3]], "parent_block_hash": HASHES[1],
        "token_ids": [2, 3, 4, 5], "token_start": 6, "lora_id": None, "lora_name": "sql",
        "extra_keys": [["sql", [DIGEST.decode(), -3]], ["sql", [DIGEST.decode(), -1]]],
    }  # fmt: skip
    assert decoded(ADAPTED, session_of={"r1": "s7"}.get) == [plain, named]
    # The first block names the salt, as in vLLM; a salt that is no text is told in digits.
    first = replace(ADAPTED, start=0, extra_keys=())
    got, other = decoded(first, replace(first, salt=b"\xff"))
    assert got["extra_keys"] == [["tenant"], None, None] and "session_id" not in got
    assert other["cache_salt"] == "ff"


@pytest.fixture
def context():
    with zmq.Context() as made:
        made.linger = 0  # of its sockets
        yield made


@pytest.fixture
def publisher():
    made = Publisher(LOCAL, LOCAL, topic="kv@test", num_kept=4)
    yield made
    made.close()


def receive(socket) -> list[bytes]:
    assert socket.poll(5000), "no message within 5 s"
    return socket.recv_multipart()


def test_live_batches_and_a_replay(context, publisher, monkeypatch):
    monkeypatch.setattr(kv_events_zmq, "MOST_EVENTS", 2)
    live, replay, log = context.socket(zmq.SUB), context.socket(zmq.DEALER), EventLog(capacity=5)
    live.subscribe(b"kv@")
    live.connect(publisher.endpoint)
    for _ in range(500):  # until the subscription is there
        log.append(AllBlocksCleared())
        publisher.publish(log, ts=0.0)
        if live.poll(10):
            break
    while live.poll(50):
        last = int.from_bytes(live.recv_multipart()[1], "big")
    assert last == publisher.next_number - 1
    # In three batches; nothing; and the last five of seven, for the log holds no more.
    for new, sent in ((5, 5), (0, 0), (7, 5)):
        for _ in range(new):
            log.append(REMOVED)
        assert publisher.publish(log, ts=2.0) == sent
    batches = [receive(live) for _ in range(6)]
    # Lost events leave a gap that no replay fills.
    assert [b[1] for b in batches] == [NUMBER(last + i) for i in (1, 2, 3, 5, 6, 7)]
    assert {b[0] for b in batches} == {b"kv@test"}
    assert batches[0][2] == encode_batch([REMOVED] * 2, ts=2.0)

    replay.connect(publisher.replay_endpoint)
    replay.send_multipart([b"", NUMBER(last + 1)])
    answers = [receive(replay) for _ in range(5)]
    # Four batches are kept; the reader sees that the first two are beyond recall.
    assert [a[1:] for a in answers[:4]] == batches[2:]
    assert answers[4] == [b"", b"", END, b""]


def refused():
    """(call, arguments, words of the message)."""
    for name in ("num_kept", "queue_size"):
        for value in (None, -1, 2**31, 1.5, True, "9"):
            message = rf"{name}: expected an int in 0\.\.2147483647, got"
            yield Publisher, {"endpoint": LOCAL, name: value}, message
    for endpoint in (None, 5, "", "nonsense", "tcp://\ud800:5", "tcp://203.0.113.9:5", "taken"):
        message = "endpoint: expected one that can be bound, got"
        yield Publisher, {"endpoint": endpoint}, message
        if endpoint is not None:
            yield Publisher, {"endpoint": LOCAL, "replay_endpoint": endpoint}, message
    for text in (None, 5, "\ud800"):
        yield Publisher, {"endpoint": LOCAL, "topic": text}, "topic: expected a text, got"
        yield lora_key, {"name": text}, "name: expected a text"


@pytest.mark.parametrize(("call", "arguments", "message"), [*refused()])
def test_wrong_arguments_are_named(call, arguments, message, publisher):
    taken = {key: publisher.endpoint for key, value in arguments.items() if value == "taken"}
    with pytest.raises(ValueError, match=f"^{message}"):
        call(**arguments | taken)


def test_readers_that_ask_without_end_and_never_read(context):
    """Another reader gets all that was kept, and the publisher closes while they wait."""
    publisher = Publisher(LOCAL, LOCAL, topic="kv", num_kept=400)
    log, large = EventLog(), replace(STORED, token_ids=(1,) * 50_000)
    for _ in range(400):  # more than all buffers between two sockets hold
        log.append(large)
        publisher.publish(log, ts=0.0)
    everything = [b"", bytes(8)]
    *hostile, honest = (context.socket(zmq.DEALER) for _ in range(4))
    for socket in (*hostile, honest):
        socket.sndhwm = 10_000
        socket.rcvhwm = 1000 if socket is honest else 1
        socket.connect(publisher.replay_endpoint)
        for _ in range(1 if socket is honest else 3000):
            socket.send_multipart(everything)
    answers = []
    while not answers or answers[-1][2] != END:
        for socket in hostile:
            socket.send_multipart(everything, zmq.NOBLOCK)
        log.append(REMOVED)
        publisher.publish(log, ts=1.0)
        answers.append(receive(honest))
    numbers = [int.from_bytes(a[2], "big") for a in answers[:-1]]
    assert numbers == [*range(numbers[0], numbers[0] + 400)]
    publisher.close()
    assert not publisher._replays.is_alive()
