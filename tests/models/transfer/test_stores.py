"""What every store promises; those of packages that are not installed are skipped."""

import os
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from quire.bench.handoff.stores import KINDS, lacking, running
from quire.models.transfer.arena import ALIGNMENT, Arena
from quire.models.transfer.files import FileStore
from quire.models.transfer.memory import DictStore
from quire.models.transfer.store import (
    DamagedObject,
    MissingObject,
    StoreFailed,
    StoreKey,
    StoreTimeout,
    ThreadedStore,
)

MIB = 2**20


@contextmanager
def pair(kind):
    """Two clients of a store, as two processes have."""
    if kind == "dict":
        first = DictStore(timeout=10)
        both = [first, DictStore(first.objects, timeout=10)]
        yield both
    else:
        if (why := lacking(kind)) is not None:
            pytest.skip(why)
        more = {"buffer_bytes": 8 * MIB} if kind == "mooncake" else {"buffer_bytes": 3 * MIB + 5}
        more = {} if kind == "files" else more
        with running(kind, gib=1 / 16) as store:
            both = [store.connect(timeout=10, **more) for _ in range(2)]
            yield both
            for one in both:
                one.close()
        return
    for one in both:
        one.close()


@pytest.fixture(scope="module", params=["dict", *KINDS])
def stores(request):
    with pair(request.param) as both:
        yield both


def key(n, kind="segment", layout=b"l" * 16, rank=0):
    return StoreKey(n.to_bytes(32, "big"), kind, layout, rank)


def some_bytes(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


def cut(data, *sizes):
    """Buffers of these sizes, and the rest."""
    return np.split(data, np.cumsum(sizes))


def wait(store, *tickets):
    """All of them have ended; the errors of those that failed."""
    left = list(tickets)
    end = time.monotonic() + 30
    while left and time.monotonic() < end:
        left = [t for t in left if t not in store.poll(left, 5)]
    assert not left
    return [t.error for t in tickets]


def get(store, which, *sizes):
    buffers = [np.full(n, 7, np.uint8) for n in sizes]
    [error] = wait(store, store.get(which, buffers))
    return error, np.concatenate(buffers)


def test_what_is_put_is_got_by_others(stores):
    """In buffers of other sizes; an odd number of bytes too."""
    a, b = stores
    data = some_bytes(10_007)
    assert a.exists([key(1)]) == b.exists([key(1)]) == [None]
    assert wait(a, a.put(key(1), cut(data, 64, 1, 4096))) == [None]
    assert a.exists([key(1), key(2)]) == b.exists([key(1), key(2)]) == [10_007, None]
    for store in stores:
        error, found = get(store, key(1), 5000, 5007)
        assert error is None and np.array_equal(found, data)


def test_what_is_not_there_or_of_another_size_is_an_error_of_its_ticket(stores):
    a, b = stores
    wait(a, a.put(key(10), [some_bytes(100)]))
    error, _ = get(b, key(11), 10)
    assert isinstance(error, MissingObject) and error.keys == (key(11),)
    assert key(11).text in str(error)
    error, _ = get(b, key(10), 60, 41)
    assert isinstance(error, DamagedObject) and error.key == key(10)
    assert "expected 101 bytes, got 100" in str(error)
    assert get(b, key(10), 100)[0] is None


def test_objects_are_those_of_all_parts_of_a_key(stores):
    a, b = stores
    keys = [key(20), key(20, "point"), key(20, "manifest"), key(20, layout=b"m" * 16), key(20, rank=1), key(20, "layout", b"")]  # fmt: skip
    assert len({k.text for k in keys}) == len(keys)
    tickets = [a.put(k, [np.full(10 + i, i, np.uint8)]) for i, k in enumerate(keys)]
    assert wait(a, *tickets) == [None] * len(keys)
    assert b.exists(keys) == [10 + i for i in range(len(keys))]
    for i, k in enumerate(keys):
        assert (get(b, k, 10 + i)[1] == i).all()


def test_who_puts_again_changes_nothing_that_others_see(stores):
    a, b = stores
    data = some_bytes(5000)
    assert wait(a, a.put(key(30), [data]), a.put(key(30), [data])) == [None, None]
    assert wait(b, b.put(key(30), [data])) == [None]
    assert np.array_equal(get(a, key(30), 5000)[1], data)


def test_what_is_removed_is_gone_and_may_come_again(stores):
    a, b = stores
    wait(a, a.put(key(40), [some_bytes(100)]), a.put(key(41), [some_bytes(100)]))
    assert get(a, key(40), 100)[0] is None  # who has read it holds nothing
    b.remove([key(40), key(42)])
    b.remove([])
    assert a.exists([key(40), key(41)]) == [None, 100]
    assert isinstance(get(a, key(40), 100)[0], MissingObject)
    b.remove([key(40)])
    data = some_bytes(70, seed=1)
    assert wait(b, b.put(key(40), [data])) == [None]
    assert np.array_equal(get(a, key(40), 70)[1], data)


def test_many_at_once_and_large_ones(stores):
    """More bytes than a client's own memory in one object, where it moves them in parts."""
    a, b = stores
    size = 7 * MIB + 3
    data = {50 + i: some_bytes(n, seed=i) for i, n in enumerate([size, 1, 100, MIB, *[5000] * 20])}
    tickets = [a.put(key(n), cut(x, 1 + len(x) // 3)) for n, x in data.items()]
    assert wait(a, *tickets) == [None] * len(data)
    assert b.exists([key(n) for n in data]) == [len(x) for x in data.values()]
    buffers = {n: cut(np.zeros(len(x), np.uint8), len(x) // 2) for n, x in data.items()}
    tickets = [b.get(key(n), found) for n, found in buffers.items()]
    assert wait(b, *tickets) == [None] * len(data)
    for n, found in buffers.items():
        assert np.array_equal(np.concatenate(found), data[n])
    a.remove([key(n) for n in data])


def test_poll_says_what_has_ended(stores):
    a, _ = stores
    assert a.poll([]) == a.poll([], 10) == []
    one, other = a.put(key(80), [some_bytes(9)]), a.put(key(81), [some_bytes(9)])
    assert wait(a, one, other) == [None, None]
    assert a.poll([one]) == [one] and a.poll([other, one], 10) == [other, one]
    with pytest.raises(ValueError, match=r"buffers: expected some bytes of quire-.*, got none"):
        a.put(key(82), [np.empty(0, np.uint8)])


def test_two_threads_have_tickets_of_their_own(stores):
    a, _ = stores
    wrong = []

    def use(start):
        for n in range(start, start + 15):
            data = some_bytes(2000, seed=n)
            if wait(a, a.put(key(n), [data])) != [None]:
                wrong.append(n)
            error, found = get(a, key(n), 2000)
            if error is not None or not np.array_equal(found, data):
                wrong.append(n)

    threads = [threading.Thread(target=use, args=(1000 * (1 + i),)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Of one store each.


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mooncake", "nixl"])
def test_a_store_that_was_killed_is_named_in_time(kind):
    if (why := lacking(kind)) is not None:
        pytest.skip(why)
    with running(kind, gib=1 / 64) as store:
        client = store.connect(timeout=8)
        assert wait(client, client.put(key(1), [some_bytes(100)])) == [None]
        store.process.kill()
        store.process.wait()
        start = time.monotonic()
        with pytest.raises(StoreFailed, match=r"127\.0\.0\.1|in 8 s"):
            client.exists([key(1)])
        tickets = [
            client.put(key(2), [some_bytes(100)]),
            client.get(key(1), [np.empty(100, np.uint8)]),
        ]
        for error in wait(client, *tickets):
            assert isinstance(error, StoreFailed) and not isinstance(error, MissingObject)
        assert time.monotonic() - start < 25
        with pytest.raises(StoreFailed):
            store.connect(timeout=3)
        client.timeout = 1.0
        client.close()


def test_a_nixl_server_that_is_full_makes_room_and_one_that_starts_again_is_found():
    if (why := lacking("nixl")) is not None:
        pytest.skip(why)
    from quire.models.transfer.nixl_server import NixlServer
    from quire.models.transfer.nixl_store import NixlStore

    server = NixlServer(num_bytes=4 * ALIGNMENT)
    client = NixlStore(*server.address, buffer_bytes=1000, timeout=10)
    for n in range(4):
        assert wait(client, client.put(key(n), [np.full(3000, n, np.uint8)])) == [None]
    assert get(client, key(0), 3000)[0] is None  # used, so 1 is the oldest
    assert wait(client, client.put(key(4), [np.full(3000, 4, np.uint8)])) == [None]
    assert client.exists([key(n) for n in range(5)]) == [3000, None, 3000, 3000, 3000]
    [error] = wait(client, client.put(key(9), [some_bytes(5 * ALIGNMENT)]))
    assert isinstance(
        error, StoreFailed
    ) and "expected room for 20480 bytes, got a server of 16384" in str(error)
    server.close()
    client._lose()
    with pytest.raises(StoreFailed, match=r"NIXL server at .'127.0.0.1', \d+.: "):
        client.exists([])
    again = NixlServer(port=server.address[1], num_bytes=4 * ALIGNMENT)
    assert client.exists([key(0)]) == [None]
    assert wait(client, client.put(key(0), [some_bytes(9)])) == [None]
    client.close()
    again.close()


def test_places_of_an_arena(monkeypatch):
    """Places do not overlap, those that are read stay, and those that were given up wait."""
    clock = [0.0]
    monkeypatch.setattr("quire.models.transfer.arena.time.monotonic", lambda: clock[0])
    arena = Arena(8 * ALIGNMENT)
    rng, spans, number = np.random.default_rng(0), {}, 0
    read, late = [], []
    for step in range(3000):
        clock[0] = step / 10
        choice = rng.integers(6)
        if choice < 2:
            span = arena.reserve(int(rng.integers(1, 3 * ALIGNMENT)))
            if span is not None:
                number += 1
                if rng.random() < 0.8:
                    arena.commit(str(number), span)
                else:
                    arena.give_up(span)
                    late.append((clock[0], span))
        elif choice < 4 and number:
            name = str(number - int(rng.integers(6)))
            if (span := arena.find(name)) is not None:
                assert span is arena.objects[name]
                read.append(span)
        elif choice == 4 and read:
            arena.release(read.pop(int(rng.integers(len(read)))))
        elif number:
            arena.remove(str(number - int(rng.integers(6))))
        late = [(t, s) for t, s in late if clock[0] - t < 10]
        taken = {id(s): s for s in [*arena.objects.values(), *read, *(s for _, s in late)]}.values()
        pages = [p for s in taken for p in range(s.offset // ALIGNMENT, -(-(s.offset + s.size) // ALIGNMENT))]  # fmt: skip
        assert len(pages) == len(set(pages)) and all(0 <= p < 8 for p in pages)
    for span in read:
        arena.release(span)
    for name in list(arena.objects):
        arena.remove(name)
    clock[0] += 100
    assert arena.reserve(8 * ALIGNMENT) is not None  # nothing leaked
    assert number > 100 and spans == {}


def test_a_folder_shows_no_part_of_a_file(tmp_path, monkeypatch):
    store = FileStore(tmp_path / "new", timeout=5)
    assert os.stat(tmp_path / "new").st_mode & 0o777 == 0o700
    seen, replace = [], os.replace

    def killed(source, target):
        seen.append((os.path.getsize(source), os.path.exists(target)))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", killed)
    [error] = wait(store, store.put(key(1), [some_bytes(1000)]))
    assert isinstance(error, StoreFailed) and "No space left" in str(error)
    assert seen == [(1000, False)] and store.exists([key(1)]) == [None]
    assert not any(path.is_file() for path in (tmp_path / "new").rglob("*"))
    monkeypatch.setattr(os, "replace", replace)
    left = store.path(key(2)).parent / "killed.partial"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"x")
    FileStore(tmp_path / "new").close()
    assert left.exists()  # somebody writes it
    os.utime(left, (0, 0))
    FileStore(tmp_path / "new").close()
    assert not left.exists()
    store.close()


def test_threads_that_are_stuck_are_named_and_hold_nobody_up():
    class Stuck(ThreadedStore):
        def _exists(self, keys):
            let.wait()

        _put = _get = _exists

    let = threading.Event()
    store = Stuck(timeout=0.1)
    start = time.monotonic()
    with pytest.raises(StoreTimeout, match=r"^exists: expected an answer of Stuck in 0\.1 s"):
        store.exists([])
    [error] = wait(store, store.put(key(1), [some_bytes(1)]))
    assert isinstance(error, StoreTimeout) and key(1).text in str(error)
    store.close()
    assert time.monotonic() - start < 5
    with pytest.raises(ValueError, match="expected an open Stuck, got one that is closed"):
        store.exists([])
    for timeout in (0, -1, float("inf"), "1"):
        with pytest.raises(ValueError, match="timeout: expected seconds > 0"):
            Stuck(timeout=timeout)
    let.set()
