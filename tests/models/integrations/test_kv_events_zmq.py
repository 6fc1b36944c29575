"""The wire schema of events byte by byte, and the publisher over loopback."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

msgspec = pytest.importorskip("msgspec", reason="needs the extra events")
zmq = pytest.importorskip("zmq", reason="needs the extra events")

from quire.kvcore import AllBlocksCleared, BlockRemoved, BlockStored, EventLog  # noqa: E402
from quire.models.integrations import kv_events_zmq  # noqa: E402
from quire.models.integrations.kv_events import encode_batch, lora_key  # noqa: E402
from quire.models.integrations.kv_events_zmq import (  # noqa: E402
    END,
    Publisher,
)

HASHES = [bytes([i]) * 32 for i in range(5)]
STORED = BlockStored(
    "window", (1, 2), ("w.0", "w.1"), (HASHES[1], HASHES[2]), HASHES[3], 12, (7, 8, 300, 9), 2, 10, "GPU",
)  # fmt: skip
REMOVED = BlockRemoved("dense", (0,), ("full",), (HASHES[4],), "GPU")
LOCAL = "tcp://127.0.0.1:0"


def text(value: str) -> bytes:
    assert len(value) < 32
    return bytes([0xA0 | len(value)]) + value.encode()


def number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def decoded(*events, **options):
    return msgspec.msgpack.decode(encode_batch(events, ts=2.0, **options))[1]


def test_the_bytes_of_a_batch():
    """By hand from the MessagePack specification: fixarray 0x9n, fixmap 0x8n, fixstr 0xan, bin8 0xc4, nil 0xc0."""
    got = encode_batch([REMOVED, AllBlocksCleared()], ts=1.5, data_parallel_rank=3)
    removed = (
        b"\x84" + text("type") + text("BlockRemoved")
        + text("block_hashes") + b"\x91\xc4\x20" + HASHES[4]
        + text("medium") + text("GPU")
        + text("group_idx") + b"\x00"
    )  # fmt: skip
    cleared = b"\x81" + text("type") + text("AllBlocksCleared")
    assert got == b"\x93\xcb\x3f\xf8" + b"\x00" * 6 + b"\x92" + removed + cleared + b"\x03"


@pytest.mark.parametrize("int_hashes", [False, True])
def test_stored_blocks_are_maps_with_the_published_names(int_hashes):
    one, two, three, four = (int.from_bytes(h[:8], "big") if int_hashes else h for h in HASHES[1:])
    first, second, removed = decoded(STORED, REMOVED, int_hashes=int_hashes)
    assert first == {
        "type": "BlockStored", "block_hashes": [one, two], "parent_block_hash": three, "token_ids": [7, 8, 300, 9],
        "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 10, "token_start": 12, "group_name": "w.0",
    }  # fmt: skip
    assert second == {**first, "group_idx": 2, "group_name": "w.1"}
    assert removed["block_hashes"] == [four]


DIGEST = b"0123456789abcdef" + b"5" * 48
ADAPTED = BlockStored(
    "dense", (0,), ("full",), (HASHES[1], HASHES[2], HASHES[3]), HASHES[4], 4, tuple(range(6)), 2,
    None, "GPU", b"tenant", ((), ((5, 8, lora_key("sql")), (3, 7, DIGEST)), ((5, 9, lora_key("sql")),)), "r1",
)  # fmt: skip


def test_stored_blocks_name_adapter_images_salt_and_session():
    """An adapter that starts within the event parts it in two, the second behind the first."""
    plain, named = decoded(ADAPTED, session_of={"r1": "s7"}.get)
    common = {
        "type": "BlockStored", "block_size": 2, "medium": "GPU", "session_id": "s7", "group_idx": 0,
        "kv_cache_spec_kind": "full_attention", "group_name": "full", "cache_salt": "tenant",
    }  # fmt: skip
    assert plain == common | {
        "block_hashes": [HASHES[1]], "parent_block_hash": HASHES[4], "token_ids": [0, 1],
        "token_start": 4, "lora_id": None, "lora_name": None,
    }  # fmt: skip
    assert named == common | {
        "block_hashes": [HASHES[2], HASHES[3]], "parent_block_hash": HASHES[1],
        "token_ids": [2, 3, 4, 5], "token_start": 6, "lora_id": None, "lora_name": "sql",
        "extra_keys": [["sql", [DIGEST.decode(), -3]], ["sql"]],
    }  # fmt: skip


def test_the_first_block_names_the_salt_as_vllm_does():
    event = replace(ADAPTED, start=0, extra_keys=())
    (got,) = decoded(event)
    assert got["extra_keys"] == [["tenant"], None, None] and "session_id" not in got
    (got,) = decoded(replace(event, salt=b"\xff"))
    assert got["cache_salt"] == "ff", "no text"


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


@pytest.fixture
def publisher():
    made = Publisher(LOCAL, LOCAL, topic="kv@test", num_kept=4)
    yield made
    made.close()


def receive(socket) -> list[bytes]:
    assert socket.poll(5000), "no message within 5 s"
    return socket.recv_multipart()


def reader_of(context, publisher):
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(publisher.replay_endpoint)
    return socket


def test_live_batches_and_a_replay(context, publisher, monkeypatch):
    monkeypatch.setattr(kv_events_zmq, "MOST_EVENTS", 2)
    live, log = context.socket(zmq.SUB), EventLog(capacity=5)
    live.linger = 0
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
    for _ in range(5):
        log.append(REMOVED)
    assert publisher.publish(log, ts=2.0) == 5, "in three batches"
    assert publisher.publish(log, ts=9.0) == 0, "nothing new, nothing sent"
    for _ in range(7):  # two more than the log holds
        log.append(REMOVED)
    assert publisher.publish(log, ts=3.0) == 5
    batches = [receive(live) for _ in range(6)]
    # Lost events leave a gap that no replay fills.
    assert [b[1] for b in batches] == [number(last + i) for i in (1, 2, 3, 5, 6, 7)]
    assert {b[0] for b in batches} == {b"kv@test"}
    assert batches[0][2] == encode_batch([REMOVED] * 2, ts=2.0)

    replay = reader_of(context, publisher)
    replay.send_multipart([b"", number(last + 1)])
    answers = [receive(replay) for _ in range(5)]
    # Four batches are kept; the reader sees that the first two are beyond recall.
    assert [a[1:] for a in answers[:4]] == batches[2:]
    assert answers[4] == [b"", b"", END, b""]
    live.close()
    replay.close()


@pytest.mark.parametrize("name", ["num_kept", "queue_size"])
@pytest.mark.parametrize("value", [None, -1, 2**31, 1.5, True, "9"])
def test_wrong_numbers_are_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: expected an int in 0\.\.2147483647, got"):
        Publisher(LOCAL, **{name: value})


@pytest.mark.parametrize("endpoint", [None, 5, "", "nonsense", "tcp://\ud800:5", "tcp://203.0.113.9:5", "taken"])  # fmt: skip
def test_an_endpoint_that_cannot_be_bound_is_named_and_leaves_nothing_open(endpoint, publisher):
    endpoint = publisher.replay_endpoint if endpoint == "taken" else endpoint
    for endpoints in ((endpoint, None), (LOCAL, endpoint)):
        if endpoints != (LOCAL, None):
            with pytest.raises(ValueError, match=r"^endpoint: expected one that can be bound, got"):
                Publisher(*endpoints)


@pytest.mark.parametrize("text", [None, 5, "\ud800"])
def test_names_that_are_no_text(text):
    with pytest.raises(ValueError, match=r"^topic: expected a text, got"):
        Publisher(LOCAL, topic=text)
    with pytest.raises(ValueError, match=r"^name: expected a text"):
        lora_key(text)


@pytest.mark.parametrize("package", ["zmq", "msgspec"])
def test_a_missing_package_is_named(tmp_path, package):
    code = f"import sys\nsys.modules['{package}'] = None\nimport quire.models.integrations.kv_events_zmq"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "pip install 'quire-attention[events]'" in done.stderr


def test_readers_that_ask_without_end_and_never_read(context):
    """Another reader gets all that was kept when it was answered, and the publisher closes while they wait."""
    publisher = Publisher(LOCAL, LOCAL, topic="kv", num_kept=400)
    log, large = EventLog(), replace(STORED, token_ids=(1,) * 50_000)
    for _ in range(400):  # more than all buffers between two sockets hold
        log.append(large)
        publisher.publish(log, ts=0.0)
    everything = [b"", bytes(8)]
    hostile = [context.socket(zmq.DEALER) for _ in range(3)]
    for socket in hostile:
        socket.linger, socket.sndhwm, socket.rcvhwm = 0, 10_000, 1
        socket.connect(publisher.replay_endpoint)
        for _ in range(3000):
            socket.send_multipart(everything)
    honest = reader_of(context, publisher)
    honest.send_multipart(everything)
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
    for socket in (*hostile, honest):
        socket.close()
