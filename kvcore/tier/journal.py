"""Records of a tier in SQLite: which there are, the checksums of their pages, and of what layout.

A call is one transaction, durable when it returns (write-ahead log, flushed). Rows are numbered as
they come, so each record comes after those that it needs. A row has a digest of its own, which
tells a damaged one from a sound one wherever SQLite itself sees no difference.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sqlite3
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

from ..page_layout import LayoutMismatch
from .records import Record

VERSION = "1"
_CHUNK = 1024
_COLUMNS = "id, point, key, parent, depth, pages, sums, digest"
# Words in messages of SQLite that do not tell of damage.
_SYSTEM_ERRORS = {
    "is full": errno.ENOSPC,
    "I/O error": errno.EIO,
    "locked": errno.EBUSY,
    "unable to open": errno.EACCES,
    "interrupted": errno.EINTR,
}
_TABLES = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE records (
    id INTEGER PRIMARY KEY,
    point INTEGER NOT NULL,     -- 0: segment, 1: resume point
    key BLOB NOT NULL,
    parent BLOB NOT NULL,
    depth INTEGER NOT NULL,
    pages BLOB NOT NULL,        -- int32, little-endian
    sums BLOB NOT NULL,         -- uint32, of each page
    digest BLOB NOT NULL,       -- of all before but the id
    UNIQUE (key, point)
)""",
)


REMEDY = (
    'another folder starts anew, as does this one removed, or with on_mismatch="clear" of DiskStore'
)


class DamagedDatabase(OSError):
    """The database of records is no SQLite database any more, or never was one of ours."""

    def __init__(self, path: str, reason: object) -> None:
        super().__init__(
            errno.EIO,
            f"expected the database of records of a tier, got: {reason} "
            f"({REMEDY}; what was kept is lost)",
            path,
        )


class Row(NamedTuple):
    """One record as SQLite has it; `id` is None before it is there."""

    id: int | None
    point: int
    key: bytes
    parent: bytes
    depth: int
    pages: bytes
    sums: bytes
    digest: bytes

    @classmethod
    def of(cls, record: Record, pages: bytes, sums: bytes) -> Row:
        """A new row with its digest."""
        values = (int(record.kind == "point"), record.key, record.parent, record.depth, pages, sums)
        return cls(None, *values, _digest(*values))

    @property
    def sound(self) -> bool:
        """Whether it is as it was written."""
        if type(self.point) is not int or type(self.depth) is not int:  # SQLite takes any type
            return False
        try:
            return self.digest == _digest(*self[1:-1])
        except TypeError:
            return False

    @property
    def record(self) -> Record:
        """As the tier knows it."""
        pages = struct.unpack(f"<{len(self.pages) // 4}i", self.pages)
        kind = "point" if self.point else "segment"
        return Record(kind, self.key, self.parent, self.depth, pages)  # type: ignore[arg-type]


def _digest(point: int, key: bytes, parent: bytes, depth: int, pages: bytes, sums: bytes) -> bytes:
    """8 bytes over all columns but the id."""
    head = b"%d %d %d %d;" % (point, depth, len(parent), len(pages))
    data = b"".join((head, key, parent, pages, sums))
    return hashlib.blake2b(data, digest_size=8).digest()


class RecordDatabase:
    """Rows of records in one SQLite file. Methods may be called by several threads.

    Args:
        path: of the file, which is made if it is not there.
        layout: settings as text that must be the same each time.
        strides: bytes from page to page: for a new one, and others that an older one may have.

    Attributes:
        new: whether it was made just now. stride: of `strides`.

    Raises:
        LayoutMismatch: it was made with another layout.
        DamagedDatabase: it cannot be read.
    """

    def __init__(self, path: str, layout: Mapping[str, str], strides: Sequence[int]) -> None:
        self.path = path
        # Only the user's: what is kept can tell prompts.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        self._lock = threading.RLock()
        self._undo: Callable[[], None] | None = None
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.text_factory = lambda data: data.decode(errors="replace")  # of damaged rows
        try:
            with self._errors():
                self.new = self._prepare(layout, strides[0])
                row = self._db.execute("SELECT value FROM meta WHERE name = 'stride'").fetchone()
                if row not in [(str(stride),) for stride in strides]:
                    raise DamagedDatabase(path, f"stride {row}")
                self.stride = int(row[0])
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, layout: Mapping[str, str], stride: int) -> bool:
        db = self._db
        tables = db.execute("SELECT sql FROM sqlite_master WHERE sql NOT NULL ORDER BY name")
        found = [sql for (sql,) in tables]
        if found and found != list(_TABLES):
            raise DamagedDatabase(self.path, "other tables")
        if db.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise OSError(errno.ENOTSUP, "expected a file system with shared memory", self.path)
        db.execute("PRAGMA synchronous = FULL")
        if sys.platform == "darwin":
            db.execute("PRAGMA fullfsync = 1")
        asked = {"format": VERSION, **layout}
        if not found:
            db.execute("BEGIN IMMEDIATE")
            for statement in _TABLES:
                db.execute(statement)
            rows = [(f"layout.{name}", text) for name, text in asked.items()]
            rows += [("stride", str(stride)), ("undone", "0")]
            db.executemany("INSERT INTO meta VALUES (?, ?)", rows)
            db.execute("COMMIT")
            return True
        meta = db.execute("SELECT name, value FROM meta WHERE name LIKE 'layout.%'")
        kept = {name.removeprefix("layout."): value for name, value in meta}
        if kept != asked:
            raise LayoutMismatch(self.path, kept, asked, REMEDY)
        if not self._whole():
            db.execute("REINDEX")  # what is wrong may be an index only, or a row without one
            if not self._whole():
                raise DamagedDatabase(self.path, "tables that contradict each other")
        return False

    def _whole(self) -> bool:
        return bool(self._db.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",))

    def close(self) -> None:
        """Give the file back; the log is merged into it."""
        with self._lock:
            self._db.close()

    # Rows.

    def rows(self) -> Iterator[Row]:
        """All rows, oldest first. Changes in between are allowed: it reads some at a time."""
        return chain.from_iterable(self.chunks())

    def chunks(self) -> Iterator[list[Row]]:
        """As `rows`, in lists."""
        last = -1 << 63
        while True:
            with self._lock, self._errors():
                found = self._db.execute(
                    f"SELECT {_COLUMNS} FROM records WHERE id > ? ORDER BY id LIMIT ?",
                    (last, _CHUNK),
                ).fetchall()
            if found:
                yield [*map(Row._make, found)]
            if len(found) < _CHUNK:
                return
            last = found[-1][0]

    def find(self, point: int, key: bytes) -> Row | None:
        """The row of one record."""
        with self._lock, self._errors():
            self.settle()  # or what it finds may be undone next
            found = self._db.execute(
                f"SELECT {_COLUMNS} FROM records WHERE key = ? AND point = ?", (key, point)
            ).fetchone()
            return None if found is None else Row(*found)

    def add(self, rows: Sequence[Row]) -> None:
        """Keep new rows, all or none.

        Raises:
            ValueError: one is there already.
        """
        with self._lock, self._errors():
            self.settle()
            try:
                self._commit(lambda: self._insert(rows), lambda: self._delete(rows))
            except sqlite3.IntegrityError as error:
                seen: set[tuple[int, bytes]] = set()
                for row in rows:
                    if (row.point, row.key) in seen or self.find(row.point, row.key):
                        raise ValueError(
                            "records: expected records that are not kept yet, got "
                            f"{row.record.kind} {row.key.hex()}"
                        ) from error
                    seen.add((row.point, row.key))
                raise

    def remove(self, rows: Sequence[Row]) -> None:
        """Forget rows that were found, all or none."""
        with self._lock, self._errors():
            self.settle()
            self._commit(lambda: self._delete(rows), lambda: self._insert(rows, "OR IGNORE"))

    def forget(self, rows: Sequence[Row]) -> None:
        """Forget rows that may be damaged."""
        with self._lock, self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("DELETE FROM records WHERE id = ?", [(row.id,) for row in rows])
            self._db.execute("COMMIT")

    @property
    def unsettled(self) -> bool:
        """Whether `settle` has something to do."""
        return self._undo is not None

    def settle(self) -> None:
        """After a commit that failed, and whose outcome nobody knows: make sure that nothing of it
        is on the disk. Until then no page that it speaks of may be written."""
        with self._lock, self._errors():
            undo = self._undo
            if undo is None:
                return

            def undo_and_count() -> None:
                undo()
                # Something must be written, or what the failed commit left at the end of the log
                # stays there, and counts after a crash.
                self._db.execute("UPDATE meta SET value = value + 1 WHERE name = 'undone'")

            self._commit(undo_and_count, undo)

    def _commit(self, change: Callable[[], None], undo: Callable[[], None]) -> None:
        """One transaction. If its commit fails, `undo` remains to be done; it must be right whether
        or not the change took place."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            change()
            self._undo = undo
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._undo = None

    def _insert(self, rows: Sequence[Row], otherwise: str = "") -> None:
        values = "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        self._db.executemany(f"INSERT {otherwise} INTO records ({_COLUMNS}) {values}", rows)

    def _delete(self, rows: Sequence[Row]) -> None:
        keys = [(row.key, row.point) for row in rows]
        self._db.executemany("DELETE FROM records WHERE key = ? AND point = ?", keys)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of SQLite as those of the system, or as damage."""
        try:
            yield
        except sqlite3.ProgrammingError as error:
            raise ValueError(f"{self.path}: expected an open store, got: {error}") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # one: of a message with text
            for words, number in _SYSTEM_ERRORS.items():
                if isinstance(error, sqlite3.OperationalError) and words in str(error):
                    raise OSError(number, str(error), self.path) from error
            raise DamagedDatabase(self.path, error) from error
