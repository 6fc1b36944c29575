"""`DiskStore`: pages and records against a dict, with the store opened anew in between; bad arguments; bad files; other processes."""

from __future__ import annotations

import gc
import os
import random
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numpy as np
import pytest

from quire.kvcore.tier import TierSpec
from quire.kvcore.tier import disk as disk_module
from quire.kvcore.tier.disk import DiskStore, StoreInUse
from quire.kvcore.tier.journal import DamagedDatabase, LayoutMismatch, Row
from quire.kvcore.tier.pagejobs import DamagedPages
from quire.kvcore.tier.records import Record
from tests.kvcore.tier.disk_model import (
    LAYOUT,
    PAGE_BYTES,
    Traffic,
    check_order,
    content,
    contents,
    files,
    ids,
    lay_out,
    open_store,
    wrong_in,
)


def key(name: str) -> bytes:
    return name.encode().ljust(32, b".")


def segment(name: str, parent: str = "", depth: int = 1, pages=()) -> Record:
    return Record("segment", key(name), key(parent) if parent else b"", depth, tuple(pages))


def point(name: str, parent: str = "", depth: int = 1, pages=()) -> Record:
    return Record("point", key(name), key(parent) if parent else b"", depth, tuple(pages))


CHAIN = [
    segment("a", pages=[1, 2]),
    segment("b", "a", 2, [3, 9]),
    point("b", "a", 2, [0, 5]),
    segment("c", "b", 3, [4]),
]


def add(store, records):
    pages = {page: data for r in records for page, data in contents(r).items()}
    store.write(list(pages), list(pages.values())).result(30)
    store.added(records)


@pytest.mark.parametrize("direct", [True, False])
def test_random_traffic_with_restarts(folder, direct):
    kept, dice = {}, random.Random(direct)
    for life in range(25):
        with open_store(folder, direct=direct) as store:
            assert store.num_dropped == 0
            traffic = Traffic(store, life, kept.values())
            traffic.check()
            for _ in range(dice.randint(0, 20)):
                traffic.step()
            traffic.check()
        kept = traffic.kept
    assert len(kept) > 5


@pytest.mark.parametrize("page_bytes", [1, 511, 512, 4096, 5000, 70000])
@pytest.mark.parametrize("direct", [True, False])
def test_any_page_size_and_any_memory(tmp_path, page_bytes, direct):
    """Pages in any order; rows of aligned arrays, arrays that are not aligned, bytes. On a disk, which is stricter about `O_DIRECT`."""
    dice = np.random.default_rng(page_bytes)
    layout = LAYOUT
    with DiskStore(
        tmp_path / "store", page_bytes=page_bytes, capacity=1 << 23, layout=layout, direct=direct
    ) as store:
        n = min(100, store.num_pages - 1)
        data = dice.integers(0, 256, (n, page_bytes), dtype=np.uint8)
        pages = dice.permutation(store.num_pages - 1)[:n] + 1
        own = store.buffers(n)
        assert own.shape == data.shape and not own.any()
        own[:] = data
        unaligned = np.empty(n * page_bytes + 1, np.uint8)[1:].reshape(n, page_bytes)
        store.write(pages[::2], own[::2]).result(30)
        store.write(pages[1::2], [row.tobytes() for row in data[1::2]]).result(30)
        for buffers in (unaligned, store.buffers(n), [bytearray(page_bytes) for _ in range(n)]):
            order = dice.permutation(n)
            store.read(pages[order], [buffers[i] for i in order]).result(30)
            assert [bytes(b) for b in buffers] == [row.tobytes() for row in data]
        assert ("O_DIRECT;" in store.describe()) <= direct


def test_neighbours_go_in_one_call(folder, monkeypatch):
    from quire.kvcore.tier import pagefile

    calls = []
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        monkeypatch.setattr(
            pagefile.os, name, lambda *a, real=real, name=name: (calls.append(name), real(*a))[1]
        )
    with open_store(folder) as store:
        calls.clear()
        pages = [7, 3, 5, 20, 4, 6, 21]
        store.write(pages, [bytes(PAGE_BYTES)] * 7).result(30)
        store.read(pages, np.zeros((7, PAGE_BYTES), np.uint8)).result(30)
    assert sorted(calls) == ["preadv"] * 2 + ["pwritev"] * 2


def test_waste_of_the_layout_on_the_disk_is_small():
    from quire.kvcore.tier.pagefile import stride_of

    for page_bytes in (64 * 584, 64 << 10, 1 << 20, 70000, 123456, 838_000_000):
        assert page_bytes <= stride_of(page_bytes, 512) <= page_bytes * 1.05
        assert stride_of(page_bytes, 512) % 512 == 0
        assert stride_of(page_bytes, 4096) % 4096 == 0


def test_points_may_share_pages(folder):
    a, pa = segment("a"), point("a", pages=[3, 4])
    b, pb = segment("b", "a", 2), point("b", "a", 2, [4, 0, 5])
    with open_store(folder) as store:
        store.write([3, 4, 5], [bytes([i]) * PAGE_BYTES for i in (3, 4, 5)]).result(30)
        store.added([a, pa, b, pb])
    with open_store(folder) as store:
        assert ids(store.records()) == ids([a, pa, b, pb])
        store.removed([pa])
        store.write([3], [bytes(PAGE_BYTES)]).result(30)
        with pytest.raises(ValueError, match=r"pages: expected pages that no record names, got 4"):
            store.write([4], [bytes(PAGE_BYTES)])
        buffers = np.zeros((2, PAGE_BYTES), np.uint8)
        store.read([4, 5], buffers).result(30)
        assert buffers[:, 0].tolist() == [4, 5]
        store.removed([pb])
        store.write([4], [bytes(PAGE_BYTES)]).result(30)


def test_records_that_contradict_each_other(folder):
    """Of two that say other checksums of a page only one can be right."""
    with open_store(folder) as store:
        add(store, CHAIN)
        wrong = Row.of(segment("x", pages=[4]), b"\4\0\0\0", b"oops")
        store._records.add([wrong, Row.of(segment("y", "x", 2), b"", b"")])
    with open_store(folder) as store:
        assert store.num_dropped == 2 and "; 2 records dropped" in store.describe()
        assert ids(store.records()) == ids(CHAIN) and wrong_in(store, CHAIN) == []
    with open_store(folder) as store:
        assert store.num_dropped == 0


def test_each_flipped_bit_of_a_page_is_found(folder):
    with open_store(folder) as store:
        add(store, CHAIN)
        page, buffers = 3, np.zeros((2, PAGE_BYTES), np.uint8)
        with open(os.path.join(folder, "pages"), "r+b", buffering=0) as file:
            at = (page - 1) * 512
            sound = os.pread(file.fileno(), PAGE_BYTES, at)
            for bit in range(PAGE_BYTES * 8):
                damaged = bytearray(sound)
                damaged[bit // 8] ^= 1 << bit % 8
                os.pwrite(file.fileno(), damaged, at)
                with pytest.raises(DamagedPages, match=r"page 3: expected CRC-32") as error:
                    store.read([2, page], buffers).result(30)
                assert error.value.pages == (3,)
                assert buffers[0].tobytes() == content(CHAIN[0], 1)
            os.pwrite(file.fileno(), sound, at)
            assert wrong_in(store, CHAIN) == []
            # A write that never came, one that went elsewhere, and the end cut off.
            for wrong in (bytes(PAGE_BYTES), content(CHAIN[0], 0)):
                os.pwrite(file.fileno(), wrong, at)
                with pytest.raises(DamagedPages, match="page 3"):
                    store.read([page], buffers[:1]).result(30)
            os.ftruncate(file.fileno(), 3 * 512)
            with pytest.raises(DamagedPages, match=r"page 4: the file ends.*page 9: ") as error:
                store.read([9, 1, 4], np.zeros((3, PAGE_BYTES), np.uint8)).result(30)
            assert error.value.pages == (4, 9)
    with open_store(folder) as store:  # what is cut off is not there any more
        assert ids(store.records()) == ids(CHAIN[:1]) and store.num_dropped == 3


def test_flipped_bits_of_the_database_make_no_wrong_record(folder):
    with open_store(folder) as store:
        traffic = Traffic(store, 1)
        while len(traffic.kept) < 12:
            traffic.step()
    sound, dice = files(folder), random.Random(0)
    outcomes = []
    data = sound["records.sqlite"]
    # Most of the file is nothing: where something is.
    used = [i for i in range(len(data)) if data[i]]
    for at in [*range(100), *dice.sample(used, 200)]:
        damaged = bytearray(data)
        damaged[at] ^= 1 << dice.randrange(8)
        lay_out(folder, sound | {"records.sqlite": bytes(damaged)})
        try:
            with open_store(folder) as store:
                found = list(store.records())
                check_order(found)
                assert set(found) <= set(traffic.kept.values())
                assert wrong_in(store, found) == []
                for record in reversed(found):
                    store.removed([record])
                assert list(store.records()) == []
            outcomes.append(len(found))
        except (DamagedDatabase, LayoutMismatch):
            outcomes.append(None)
    assert {None, len(traffic.kept)} < set(outcomes)  # some lose a part only


def test_a_damaged_index_of_the_database_is_made_anew(folder):
    """A key stands in the table and in its index. Damage in one costs the record, in the other nothing."""
    with open_store(folder) as store:
        add(store, CHAIN)
    sound, outcomes, at = files(folder), [], 0
    while (at := sound["records.sqlite"].find(CHAIN[-1].key, at + 1)) >= 0:
        damaged = bytearray(sound["records.sqlite"])
        damaged[at + 9] ^= 1
        lay_out(folder, sound | {"records.sqlite": bytes(damaged)})
        with open_store(folder) as store:
            outcomes.append(len(list(store.records())))
            assert wrong_in(store, store.records()) == []
            store.removed(CHAIN[::-1])
            assert list(store.records()) == []
            add(store, CHAIN)
    assert sorted(outcomes) == [3, 4]


@pytest.mark.parametrize("pages", [40, 12, 7, 4, 2])
def test_capacity_changes(folder, pages):
    """Smaller: what lies beyond goes, with all that needs it. Larger: all stays."""
    with open_store(folder) as store:
        traffic = Traffic(store, pages)
        while len(store._pages.file.buffers(1)) and len(traffic.free()) > 8:
            traffic.step()
    expected = {}
    for name, record in sorted(
        traffic.kept.items(), key=lambda item: (item[1].depth, item[0][0] == "point")
    ):
        needs = ("segment", record.key if record.kind == "point" else record.parent)
        if max(record.pages, default=0) < pages and (needs in expected or needs[1] == b""):
            expected[name] = record
    assert pages == 40 or len(expected) < len(traffic.kept)
    with open_store(folder, pages) as store:
        traffic.kept = expected
        traffic.check(store)
        assert store.num_pages == pages
        assert os.path.getsize(os.path.join(folder, "pages")) <= (pages - 1) * 512
    with open_store(folder, 100) as store:
        traffic.check(store)
        traffic = Traffic(store, 5, expected.values())
        for _ in range(20):
            traffic.step()
        traffic.check()


def test_another_layout_is_refused_by_name_or_cleared(folder):
    with open_store(folder) as store:
        add(store, CHAIN)
    other = {"model": "other", "hash_seed": b"t", "dtype": "fp8"}
    with pytest.raises(LayoutMismatch) as error:
        open_store(folder, layout=other)
    assert error.value.names == ("dtype", "hash_seed", "model")
    text = str(error.value)
    assert "expected that of" in text and "model m" in text and "dtype not set" in text
    assert "got dtype fp8, hash_seed BLAKE2b " in text and "model other" in text
    with pytest.raises(LayoutMismatch) as error:
        open_store(folder, page_bytes=PAGE_BYTES + 1)
    assert error.value.names == ("page_bytes",)
    for data in files(folder).values():
        assert b"hash_seed" not in data or b"BLAKE2b" in data
    with open_store(folder, on_mismatch="clear") as store:  # the same: nothing to clear
        assert ids(store.records()) == ids(CHAIN)
    with open_store(folder, layout=other, on_mismatch="clear") as store:
        assert list(store.records()) == []
        assert os.path.getsize(os.path.join(folder, "pages")) == 0
        add(store, CHAIN)
    with open_store(folder, layout=other) as store:
        assert wrong_in(store, store.records()) == []


@pytest.mark.parametrize("damage", ["text", "header", "another program", "no table", "empty"])
def test_a_damaged_database_is_refused_or_cleared(folder, damage):
    with open_store(folder) as store:
        add(store, CHAIN)
    path = os.path.join(folder, "records.sqlite")
    if damage == "text":
        with open(path, "wb") as file:
            file.write(b"these are no records" * 400)
    elif damage == "header":
        with open(path, "r+b") as file:
            file.write(bytes(16))
    elif damage == "another program":
        os.unlink(path)
        sqlite3.connect(path).execute("CREATE TABLE mine (x)").connection.close()
    elif damage == "no table":
        db = sqlite3.connect(path)
        db.execute("DROP TABLE records")
        db.close()
    else:
        open(path, "wb").close()  # as new: what the pages are nobody knows
        with open_store(folder) as store:
            assert list(store.records()) == []
            assert os.path.getsize(os.path.join(folder, "pages")) == 0
        return
    before = files(folder)
    with pytest.raises(DamagedDatabase, match=r'on_mismatch="clear"'):
        open_store(folder)
    assert files(folder) == before
    with open_store(folder, on_mismatch="clear") as store:
        assert list(store.records()) == []
        add(store, CHAIN)


def test_refused_arguments_change_nothing(folder):
    bad = [
        ("page_bytes", dict(page_bytes=0)),
        ("page_bytes", dict(page_bytes=1.5)),
        ("workers", dict(workers=0)),
        ("on_mismatch", dict(on_mismatch="ask")),
        ("layout", dict(layout={"a": 1.5})),
        ("layout", dict(layout={"page_bytes": 3})),
        ("capacity", dict(num_pages=1)),
    ]
    for name, options in bad:
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            open_store(folder, **options)
    with open_store(folder) as store:
        add(store, CHAIN[:3])
        row, new = bytes(PAGE_BYTES), np.zeros((1, PAGE_BYTES), np.uint8)
        refused = [
            (r"pages: expected pages in 1\.\.39, got 0", lambda: store.write([0], [row])),
            (r"pages: expected pages in 0\.\.39, got 40", lambda: store.write([40], [row])),
            (r"pages: expected pages in 0\.\.39, got -1", lambda: store.read([-1], new)),
            (r"pages: expected each once, got \[7, 7\]", lambda: store.write([7, 7], [row, row])),
            (r"pages: expected ints", lambda: store.write([7.5], [row])),
            (r"pages: expected a vector", lambda: store.write([[7]], [row])),
            (r"pages: expected pages that no record names, got 2", lambda: store.write([2], [row])),
            (r"pages: expected pages that are written, got 8", lambda: store.read([8], new)),
            (r"buffers: expected 2, one a page, got 1", lambda: store.write([7, 8], [row])),
            (r"buffers: expected 96 bytes at 0, got 95", lambda: store.write([7], [row[:95]])),
            (r"buffers: expected 96 writable bytes at 0, got 96 that are", lambda: store.read([1], [row])),
            (r"buffers: expected contiguous memory at 0, got int", lambda: store.write([7], [3])),
            (r"buffers: expected contiguous", lambda: store.write([7], [np.zeros(192, np.uint8)[::2]])),
            (r"records: expected records that are not kept yet, got segment 61", lambda: store.added(CHAIN[:1])),
            (r"records: expected records that are not kept yet", lambda: store.added([segment("x"), segment("x")])),
            (r"records: expected segments before .* got segment 79", lambda: store.added([segment("y", "x", 2)])),
            (r"records: expected segments before .* got point 78", lambda: store.added([point("x")])),
            (r"records: expected depth 3 of segment", lambda: store.added([segment("x", "b", 2)])),
            (r"records: expected depth 2 of point", lambda: store.added([point("b", "a", 3)])),
            (r"records: expected a segment or point", lambda: store.added([Record("state", key("x"), b"", 1, ())])),
            (r"records: expected .* keys of 32 bytes", lambda: store.added([Record("segment", b"x", b"", 1, ())])),
            (r"pages: expected pages that are written, got 8", lambda: store.added([segment("x", pages=[1, 8])])),
            (r"pages: expected pages in 0\.\.39, got 40", lambda: store.added([segment("x", pages=[40])])),
        ]  # fmt: skip
        before = files(folder)
        for text, call in refused:
            with pytest.raises(ValueError, match=text):
                call()
        # A batch with one that is refused leaves none, and no page taken.
        store.write([20], [row]).result(30)
        with pytest.raises(ValueError, match="not kept yet"):
            store.added([segment("x", pages=[20]), CHAIN[0]])
        store.write([20], [row]).result(30)
        assert ids(store.records()) == ids(CHAIN[:3])
        assert files(folder)["records.sqlite"] == before["records.sqlite"]
        store.removed([segment("never")])
        store.write([], []).result(30)
        store.added([])


def test_jobs_that_would_meet_are_refused(folder, monkeypatch):
    from quire.kvcore.tier import pagefile

    go, real = threading.Event(), os.pwritev
    row = [bytes(PAGE_BYTES)]
    with open_store(folder) as store:
        store.write([1], row).result(30)
        monkeypatch.setattr(pagefile.os, "pwritev", lambda *a: (go.wait(3), real(*a))[1])
        job = store.write([1], row)
        with pytest.raises(ValueError, match="that no other job reads or writes, got 1"):
            store.write([1], row)
        with pytest.raises(ValueError, match="that are written, got 1"):
            store.read([1], [bytearray(PAGE_BYTES)])
        with pytest.raises(ValueError, match="that are written, got 1"):
            store.added([segment("a", pages=[1])])
        go.set()
        job.result(30)
        store.added([segment("a", pages=[1])])


def test_errors_of_the_system_have_their_names(folder, tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(NotADirectoryError, match="file"):
        open_store(path)
    with pytest.raises(FileNotFoundError, match="missing"):
        open_store(tmp_path / "missing" / "store")
    if os.geteuid():  # root may do all
        shut = tmp_path / "shut"
        shut.mkdir(0o500)
        with pytest.raises(PermissionError, match="shut"):
            open_store(shut)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "pages").mkdir()
    for _ in range(2):  # which leaves no lock behind
        with pytest.raises(IsADirectoryError, match="odd/pages"):
            open_store(tmp_path / "odd")


@pytest.mark.filterwarnings("error")
def test_close_ends_threads_and_handles(folder):
    def threads():
        return {t for t in threading.enumerate() if t.name.startswith("quire-disk")}

    handles, before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc") else 0, threads()
    for _ in range(3):
        with open_store(folder) as store:
            done = store.write([5], [bytes(PAGE_BYTES)])
        assert done.done() and done.exception() is None
        store.close()
        with pytest.raises(ValueError, match="expected an open store"):
            store.read([5], [bytearray(PAGE_BYTES)])
        for call in (
            lambda: store.write([6], [bytes(PAGE_BYTES)]),
            lambda: store.added([segment("a")]),
            lambda: store.removed([segment("a")]),
            lambda: list(store.records()),
        ):
            with pytest.raises(ValueError, match="expected an open store"):
                call()
    assert threads() == before
    if handles:
        assert len(os.listdir("/proc/self/fd")) == handles
    assert sorted(os.listdir(folder)) == ["lock", "pages", "records.sqlite"]
    if os.name == "posix":
        for name in os.listdir(folder):
            assert os.stat(os.path.join(folder, name)).st_mode & 0o77 == 0


def test_the_log_is_flushed_at_each_commit(folder):
    with open_store(folder) as store:
        db = store._records._db
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def run_python(code: str, *arguments: str) -> str:
    """Output of a fresh interpreter, which knows `quire` and these tests."""
    root = os.path.dirname(os.path.abspath(__file__ + "/../../.."))
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); import bench\n" + textwrap.dedent(code), *arguments],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_store_is_refused_by_the_name_of_the_first(folder):
    with open_store(folder) as store:
        add(store, CHAIN)
        with pytest.raises(StoreInUse, match=f"process {os.getpid()} on "):
            open_store(folder)
        text = run_python(
            """
            from tests.kvcore.tier.disk_model import open_store
            try:
                open_store(sys.argv[1])
            except OSError as error:
                print(type(error).__name__, error)
            """,
            folder,
        )
        assert text.startswith("StoreInUse") and f"process {os.getpid()} on " in text
        assert wrong_in(store, CHAIN) == []
        store.removed(CHAIN[::-1])
    with open_store(folder) as store:
        assert list(store.records()) == []


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_store_that_nobody_has_is_closed(folder):
    """What it wrote is there, and no thread of it is left; also where one of them lets go last."""
    num_threads = threading.active_count()
    store = open_store(folder)
    add(store, CHAIN)
    del store
    gc.collect()
    assert threading.active_count() == num_threads
    store = open_store(folder)
    assert len([*store.records()]) == len(CHAIN)
    last = [store]
    wait, gone = threading.Event(), weakref.ref(store)
    store._pages._queue.put(lambda: (wait.wait(30), last.clear()))
    del store
    wait.set()
    for _ in range(1000):
        if gone() is None and threading.active_count() == num_threads:
            break
        time.sleep(0.01)
    open_store(folder).close()


def test_more_pages_than_ids_are_not_offered(folder, monkeypatch):
    """A tier of a store's pages is one that there may be."""
    assert TierSpec(disk_module.MOST_PAGES, 1.0).num_pages == 2**31 - 1
    with pytest.raises(ValueError, match=r"^num_pages: expected"):
        TierSpec(disk_module.MOST_PAGES + 1, 1.0)
    monkeypatch.setattr(disk_module, "MOST_PAGES", 9)
    with open_store(folder) as store:
        assert store.num_pages == 9


def test_a_forked_process_must_not_use_it(folder):
    """It is refused, does no harm when it ends, and does not keep the lock."""
    text = run_python(
        """
        import gc, os, time, warnings
        warnings.simplefilter("ignore")  # of fork and threads
        from tests.kvcore.tier.disk_model import Traffic, open_store
        store = open_store(sys.argv[1])
        traffic = Traffic(store, 3)
        for _ in range(10): traffic.step()
        child = os.fork()
        if not child:
            for call in (store.records, lambda: store.added([]), lambda: store.removed([]), lambda: store.read([1], []), lambda: store.write([1], [])):
                try:
                    call()
                except RuntimeError as error:
                    print("refused", error, flush=True)
            store.close()
            del traffic, store, call
            gc.collect()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        traffic.check()
        for _ in range(10): traffic.step()
        ready = os.pipe()
        sleeper = os.fork()
        if not sleeper:
            os.write(ready[1], b".")
            time.sleep(5)
            os._exit(0)
        os.read(ready[0], 1)
        store.close()
        with open_store(sys.argv[1]) as store: traffic.check(store)
        store = open_store(sys.argv[1])
        owner, heir = os.getpid(), os.fork()
        if heir: os._exit(0)  # the owner dies, its children live
        while os.getppid() == owner: time.sleep(0.01)
        with open_store(sys.argv[1]) as other: traffic.check(other)
        os.kill(sleeper, 9)
        print("sound", flush=True)
        os._exit(0)
        """,
        folder,
    )
    assert text.count("refused") == 5 and "expected process" in text and text.endswith("sound\n")
