"""An error at every call of the system, and of SQLite: nothing that is kept is lost, nothing false is read, and the store goes on."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import types

import numpy as np
import pytest

from quire.kvcore.tier import disk, journal, pagefile
from quire.kvcore.tier.pagejobs import DamagedPages
from tests.kvcore.tier.disk_model import (
    PAGE_BYTES,
    Traffic,
    check_order,
    content,
    files,
    ids,
    lay_out,
    open_store,
    wrong_in,
)
from tests.kvcore.tier.test_disk import CHAIN, add, point, segment


class Faults:
    """Calls of the page file and of SQLite, counted; the one with number `at` fails.

    Attributes:
        late: fail when it has done its work (or half of it, for what moves bytes), not before.
        log: names of the calls.
    """

    def __init__(self, monkeypatch):
        self.at, self.late, self.log = -1, False, []
        system = types.SimpleNamespace(**vars(os))
        for name in ("pwritev", "preadv", "fdatasync", "posix_fallocate"):
            if hasattr(os, name):
                setattr(system, name, self.wrap(name, getattr(os, name)))
        monkeypatch.setattr(pagefile, "os", system)
        faults = self

        class Connection(sqlite3.Connection):
            def execute(self, sql, *rest):
                run = super().execute
                if sql.split()[0] in ("PRAGMA", "SELECT", "ROLLBACK"):
                    return run(sql, *rest)
                return faults.call(
                    sql.split()[0],
                    lambda: run(sql, *rest),
                    sqlite3.OperationalError("disk I/O error"),
                )

            def executemany(self, sql, rows):
                run = super().executemany
                return faults.call(sql.split()[0], lambda: run(sql, rows), sqlite3.OperationalError("database or disk is full"))  # fmt: skip

        module = types.SimpleNamespace(**vars(sqlite3))
        module.connect = lambda *a, **k: sqlite3.connect(*a, factory=Connection, **k)
        monkeypatch.setattr(journal, "sqlite3", module)

    def wrap(self, name, real):
        def call(handle, *rest):
            half = None
            if name in ("pwritev", "preadv"):
                views, start = rest
                half = lambda: real(handle, views[: max(1, len(views) // 2)], start)  # noqa: E731
            return self.call(
                name, lambda: real(handle, *rest), OSError(errno.ENOSPC, "no space"), half
            )

        return call

    def call(self, name, real, error, half=None):
        self.log.append(name)
        if len(self.log) - 1 != self.at:
            return real()
        if self.late:
            (half or real)()
        raise error


@pytest.fixture
def faults(monkeypatch):
    return Faults(monkeypatch)


def life(store, kept):
    """A few calls; each that fails is undone by its caller and tried again. Returns how many failed."""
    failed = 0

    def must(call, *arguments):
        nonlocal failed
        try:
            return call(*arguments)
        except OSError:
            failed += 1
            return call(*arguments)

    new = [segment("d", "c", 4, [7, 8, 6]), point("d", "c", 4, [0, 12])]
    for batch in (CHAIN, new):
        must(add, store, batch)  # writes again, too: after a failed flush that is needed
        kept.update(ids(batch))
    must(lambda: wrong_in(store, [*CHAIN, *new]))
    gone = [new[1], new[0]]
    before = set(kept)
    kept.difference_update(ids(gone))
    try:
        store.removed(gone)
    except OSError:
        failed += 1
        assert ids(store.records()) in (before, kept)
        store.removed(gone)
    reused = segment("e", "a", 2, [8, 7, 12, 6])
    must(add, store, [reused])
    kept.update(ids([reused]))
    return failed, [*CHAIN, reused]


@pytest.mark.parametrize("late", [False, True])
def test_an_error_at_every_call(folder, faults, late):
    with open_store(folder) as store:
        faults.log.clear()
        life(store, set())
    names = list(faults.log)
    assert {"pwritev", "preadv", "fdatasync", "BEGIN", "INSERT", "DELETE", "COMMIT"} <= set(names)
    faults.late = late
    for n in range(len(names)):
        folder_n = f"{folder}{n}"
        faults.at = -1
        with open_store(folder_n) as store:
            faults.log.clear()
            faults.at = n
            kept = set()
            failed, records = life(store, kept)
            # The store itself tries these once more: less space, page by page.
            assert failed == 1 or names[n] in ("posix_fallocate", "preadv"), (n, names[n])
            assert ids(store.records()) == kept
            assert wrong_in(store, records) == []
        faults.at = -1
        with open_store(folder_n) as store:
            assert store.num_dropped == 0
            found = list(store.records())
            check_order(found)
            assert set(found) == set(records) and wrong_in(store, found) == []


@pytest.mark.parametrize("late", [False, True])
def test_what_a_failed_commit_left_is_gone_before_its_pages_are_written(folder, faults, late):
    """The log may end with a transaction that was reported as failed. Its pages are written only when the log says otherwise: a crash then finds no record of them."""
    a, b = segment("a", pages=[1]), segment("b", pages=[2])
    with open_store(folder) as store:
        add(store, [a])
        store.write([2], [content(b, 0)]).result(30)
        faults.late = late
        faults.log.clear()
        faults.at = 3
        with pytest.raises(OSError, match="I/O error"):
            store.added([b])
        assert faults.log == ["fdatasync", "BEGIN", "INSERT", "COMMIT"]
        size = len(files(folder)["records.sqlite-wal"])
        store.write([2], [bytes(PAGE_BYTES)]).result(30)
        assert faults.log[4:] == ["BEGIN", "DELETE", "UPDATE", "COMMIT", "pwritev"]
        image = files(folder)
        assert (
            late or len(image["records.sqlite-wal"]) > size
        )  # something new at the end of the log
        lay_out(f"{folder}-crashed", image)
        with open_store(f"{folder}-crashed") as crashed:
            assert list(crashed.records()) == [a] and crashed.num_dropped == 0
        # Nor is one lost whose removal failed.
        faults.log.clear()
        faults.at = 2
        with pytest.raises(OSError, match="I/O error"):
            store.removed([a])
        assert faults.log == ["BEGIN", "DELETE", "COMMIT"]
        with pytest.raises(ValueError, match="that no record names, got 1"):
            store.write([1], [bytes(PAGE_BYTES)])
        assert list(store.records()) == [a]
        store.removed([a])
        store.write([1], [bytes(PAGE_BYTES)]).result(30)


def test_a_job_that_cannot_settle_fails_alone(folder, faults):
    with open_store(folder) as store:
        add(store, CHAIN)
        store.write([20], [content(segment("x"), 0)]).result(30)
        faults.log.clear()
        faults.at = 3
        with pytest.raises(OSError):
            store.added([segment("x", pages=[20])])
        faults.at = 4
        job = store.write([21], [bytes(PAGE_BYTES)])
        with pytest.raises(OSError, match="I/O error"):
            job.result(30)
        assert wrong_in(store, CHAIN) == []
        store.added([segment("x", pages=[20])])
    with open_store(folder) as store:
        assert ids(store.records()) == ids([*CHAIN, segment("x")])


def test_a_failed_flush_takes_back_what_was_written_since_the_last(folder, faults):
    with open_store(folder) as store:
        add(store, CHAIN)
        store.write([20, 21], [content(segment("x"), i) for i in (0, 1)]).result(30)
        faults.log.clear()
        faults.at = 0
        with pytest.raises(OSError):
            store.added([segment("x", pages=[20])])
        assert faults.log == ["fdatasync"]
        for page in (20, 21):
            with pytest.raises(ValueError, match=f"that are written, got {page}"):
                store.added([segment("x", pages=[page])])
            with pytest.raises(ValueError, match=f"that are written, got {page}"):
                store.read([page], [bytearray(PAGE_BYTES)])
        assert wrong_in(store, CHAIN) == []
        add(store, [segment("x", pages=[20])])


def test_a_failed_flush_fails_what_is_being_written(folder, faults, monkeypatch):
    """Part of it may have been on its way, and be forgotten like the rest."""
    jobs, go, write = [], threading.Event(), pagefile.os.pwritev
    with open_store(folder) as store:
        store.write([1], [bytes(PAGE_BYTES)]).result(30)

        def flush(handle):
            jobs.append(store.write([2], [bytes(PAGE_BYTES)]))
            raise OSError(errno.EIO, "lost")

        monkeypatch.setattr(pagefile.os, "fdatasync", flush)
        monkeypatch.setattr(pagefile.os, "pwritev", lambda *a: (go.wait(3), write(*a))[1])
        with pytest.raises(OSError, match="lost"):
            store.added([segment("a", pages=[1])])
        go.set()
        with pytest.raises(OSError, match="flushing failed while pages were written"):
            jobs[0].result(30)
        with pytest.raises(ValueError, match="that are written"):
            store.read([2], [bytearray(PAGE_BYTES)])


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_calls_that_move_less_than_asked(folder, monkeypatch, name, direct):
    real = getattr(os, name)
    sizes = []

    def short(handle, views, start):
        sizes.append(sum(map(len, views)))
        first = views[0][: len(views[0]) // 2 // 512 * 512 or len(views[0])]
        return real(handle, [first], start)

    monkeypatch.setattr(pagefile.os, name, short)
    with open_store(folder, direct=direct, page_bytes=2048, num_pages=200) as store:
        data = np.random.default_rng(0).integers(0, 256, (9, 2048), dtype=np.uint8)
        back = np.zeros_like(data)
        store.write(range(1, 10), data).result(30)
        store.read(range(1, 10), back).result(30)
        assert (back == data).all()
    assert len(sizes) > 5


def test_a_system_that_writes_nothing(folder, monkeypatch):
    with open_store(folder) as store:
        monkeypatch.setattr(pagefile.os, "pwritev", lambda *_: 0)
        with pytest.raises(OSError, match="wrote less than it was given"):
            store.write([1], [bytes(PAGE_BYTES)]).result(30)
        with pytest.raises(ValueError, match="that are written, got 1"):
            store.added([segment("a", pages=[1])])


def test_an_unreadable_page_does_not_take_its_neighbours(folder, faults, monkeypatch):
    with open_store(folder) as store:
        add(store, CHAIN)
        real = os.preadv

        def read(handle, views, start):
            if start <= 3 * 512 < start + sum(map(len, views)):
                raise OSError(errno.EIO, "bad sector")
            return real(handle, views, start)

        monkeypatch.setattr(pagefile.os, "preadv", read)
        buffers = np.zeros((4, PAGE_BYTES), np.uint8)
        with pytest.raises(DamagedPages, match=r"page 4: .*bad sector") as error:
            store.read([2, 5, 4, 3], buffers).result(30)
        assert error.value.pages == (4,)
        expected = {1: content(CHAIN[0], 1), 2: content(CHAIN[2], 1), 3: content(CHAIN[1], 0)}
        assert [b.tobytes() for b in buffers[[0, 1, 3]]] == list(expected.values())


def test_a_full_disk_ends_a_job_and_no_other(folder, monkeypatch):
    """The file grows by what is there; a job past that fails, and leaves no half-grown file."""
    real, space = os.posix_fallocate, 12 * 512

    def allocate(handle, start, length):
        if start + length > space:
            real(handle, start, max(0, space - start) or 1)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle, start, length)

    monkeypatch.setattr(pagefile.os, "posix_fallocate", allocate)
    with open_store(folder) as store:
        add(store, CHAIN)
        assert os.path.getsize(os.path.join(folder, "pages")) == 9 * 512
        with pytest.raises(OSError, match="No space left"):
            store.write([10, 30], [bytes(PAGE_BYTES)] * 2).result(30)
        assert os.path.getsize(os.path.join(folder, "pages")) <= 10 * 512
        assert wrong_in(store, CHAIN) == []
        add(store, [segment("d", "c", 4, [11, 12])])
        space = 1 << 20
        add(store, [segment("e", "d", 5, [30])])


def test_a_file_system_that_cannot_allocate(folder, monkeypatch):
    def allocate(handle, start, length):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(pagefile.os, "posix_fallocate", allocate)
    with open_store(folder) as store:
        traffic = Traffic(store, 0)
        for _ in range(20):
            traffic.step()
        traffic.check()


def test_without_direct_io(folder, monkeypatch):
    """Where the system refuses it, pages go through the page cache, and `describe` says so."""
    real = os.open

    def refuse(path, flags, *mode):
        if flags & pagefile._O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(pagefile.os, "open", refuse)
    with open_store(folder) as store:
        assert "page cache (no O_DIRECT)" in store.describe()
        traffic = Traffic(store, 0)
        for _ in range(20):
            traffic.step()
        traffic.check()
    assert not [name for name in os.listdir(folder) if name.startswith(".probe")]
    monkeypatch.setattr(pagefile.os, "open", real)
    with open_store(folder) as store:
        traffic.check(store)


def test_an_error_while_it_opens_leaves_it_free(folder, faults, monkeypatch):
    with open_store(folder) as store:
        add(store, CHAIN)
    for where, name in ((disk, "_sync_folder"), (disk, "PageJobs"), (disk, "PageFile")):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
            with pytest.raises(OSError, match="no"):
                open_store(folder)
    with open_store(folder) as store:
        assert wrong_in(store, CHAIN) == [] and store.num_dropped == 0
