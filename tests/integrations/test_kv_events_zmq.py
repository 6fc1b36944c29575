"""The wire schema of events byte by byte, and the publisher over loopback."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

msgspec = pytest.importorskip("msgspec", reason="needs the extra events")
zmq = pytest.importorskip("zmq", reason="needs the extra events")

from quire.kvcore import AllBlocksCleared, BlockRemoved, BlockStored, EventLog  # noqa: E402
from quire.models.integrations.kv_events_zmq import END, Publisher, encode_batch  # noqa: E402

STORED = BlockStored(
    "window", (1, 2), ("w.0", "w.1"), (b"\x01" * 32, b"\x02" * 32), b"\x03" * 32, 12, (7, 8, 300, 9), 2,
    10, "GPU",
)  # fmt: skip
REMOVED = BlockRemoved("dense", (0,), ("full",), (b"\x04" * 32,), "GPU")


def text(value: str) -> bytes:
    assert len(value) < 32
    return bytes([0xA0 | len(value)]) + value.encode()


def test_the_bytes_of_a_batch():
    """By hand from the MessagePack specification: fixarray 0x9n, fixmap 0x8n, fixstr 0xan, bin8 0xc4, nil 0xc0."""
    got = encode_batch([REMOVED, AllBlocksCleared()], ts=1.5, data_parallel_rank=3)
    removed = (
        b"\x84" + text("type") + text("BlockRemoved")
        + text("block_hashes") + b"\x91\xc4\x20" + b"\x04" * 32
        + text("medium") + text("GPU")
        + text("group_idx") + b"\x00"
    )  # fmt: skip
    cleared = b"\x81" + text("type") + text("AllBlocksCleared")
    assert got == b"\x93\xcb\x3f\xf8" + b"\x00" * 6 + b"\x92" + removed + cleared + b"\x03"


def test_stored_blocks_are_maps_with_the_published_names():
    first, second = msgspec.msgpack.decode(encode_batch([STORED], ts=2.0))[1]
    assert first == {
        "type": "BlockStored",
        "block_hashes": [b"\x01" * 32, b"\x02" * 32],
        "parent_block_hash": b"\x03" * 32,
        "token_ids": [7, 8, 300, 9],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 10,
        "token_start": 12,
        "group_name": "w.0",
    }
    assert second == {**first, "group_idx": 2, "group_name": "w.1"}


class Stored(msgspec.Struct, tag="BlockStored"):
    """What a reader of the published schema declares: the published fields, and no others."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


@pytest.mark.parametrize("int_hashes", [False, True])
def test_a_typed_reader_decodes_a_batch(int_hashes):
    payload = encode_batch([STORED, REMOVED, AllBlocksCleared()], ts=2.0, int_hashes=int_hashes)
    batch = msgspec.msgpack.decode(payload, type=Batch)
    assert (batch.ts, batch.data_parallel_rank, len(batch.events)) == (2.0, None, 4)
    stored, removed = batch.events[0], batch.events[2]
    expected = int.from_bytes(b"\x02" * 8, "big") if int_hashes else b"\x02" * 32
    assert stored.block_hashes[1] == expected and stored.kv_cache_spec_sliding_window == 10
    expected = int.from_bytes(b"\x04" * 8, "big") if int_hashes else b"\x04" * 32
    assert removed.block_hashes == [expected]


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


@pytest.fixture
def publisher():
    made = Publisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", topic="kv@test", num_kept=4)
    yield made
    made.close()


def receive(socket) -> list[bytes]:
    assert socket.poll(5000), "no message within 5 s"
    return socket.recv_multipart()


def subscribe(context, publisher):
    """A SUB socket that surely has its subscription: batches are sent until the first arrives."""
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"kv@")
    socket.connect(publisher.endpoint)
    log = EventLog()
    log.next_number = publisher._next_event
    for _ in range(500):
        log.append(AllBlocksCleared())
        publisher.publish(log, ts=0.0)
        if socket.poll(10):
            while socket.poll(50):
                last = socket.recv_multipart()
            return socket, log, int.from_bytes(last[1], "big")
    raise AssertionError("no subscription within 5 s")


def test_live_batches_and_a_replay(context, publisher):
    live, log, last = subscribe(context, publisher)
    assert last == publisher.next_number - 1
    for i in range(6):
        log.append(REMOVED)
        assert publisher.publish(log, ts=float(i)) == 1
    assert publisher.publish(log, ts=9.0) == 0, "nothing new, nothing sent"
    batches = [receive(live) for _ in range(6)]
    assert [int.from_bytes(b[1], "big") for b in batches] == list(range(last + 1, last + 7))
    assert {b[0] for b in batches} == {b"kv@test"}
    assert batches[2][2] == encode_batch([REMOVED], ts=2.0)

    replay = context.socket(zmq.DEALER)
    replay.connect(publisher.replay_endpoint)
    replay.send_multipart([b"", (last + 1).to_bytes(8, "big")])
    assert publisher.answer(5000) == 1
    answers = [receive(replay) for _ in range(5)]
    # Four batches are kept; the readers sees that the first two are beyond recall.
    assert [a[1:] for a in answers[:4]] == batches[2:]
    assert answers[4] == [b"", b"", END, b""]
    replay.send_multipart([b"", b"what"])  # not a request: ignored
    replay.send_multipart([b"", publisher.next_number.to_bytes(8, "big")])
    assert publisher.answer(5000) + publisher.answer(200) == 1
    assert receive(replay) == [b"", b"", END, b""]
    live.close(0)
    replay.close(0)


def test_lost_events_leave_a_gap_that_no_replay_fills(context, publisher):
    live, log, last = subscribe(context, publisher)
    small = EventLog(capacity=2)
    small.next_number = log.next_number
    for _ in range(5):
        small.append(REMOVED)
    publisher.publish(small, ts=1.0)
    assert int.from_bytes(receive(live)[1], "big") == last + 2
    live.close(0)


def test_a_slow_reader_never_blocks(publisher):
    log = EventLog()
    start = time.monotonic()
    for _ in range(2000):
        log.append(REMOVED)
        publisher.publish(log, ts=0.0)
    assert time.monotonic() - start < 20


def test_a_taken_port_is_an_error_and_leaves_nothing_open(publisher):
    with pytest.raises(zmq.ZMQError):
        Publisher("tcp://127.0.0.1:0", publisher.replay_endpoint)


def test_a_missing_package_is_named(tmp_path):
    code = (
        "import sys\nsys.modules['zmq'] = None\n"
        "try:\n    import quire.models.integrations.kv_events_zmq\n"
        "except ImportError as e:\n    print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert "pip install 'quire[events]'" in done.stdout, done.stderr
