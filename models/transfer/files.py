"""A store in a folder, which several processes and machines may share."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .store import (
    TIMEOUT,
    Buffers,
    DamagedObject,
    MissingObject,
    StoreKey,
    ThreadedStore,
    num_bytes,
)

PARTIAL = ".partial"
LEFT_BEHIND = 3600.0  # seconds after which a file that was not finished is nobody's
_NUMBERS = itertools.count()


class FileStore(ThreadedStore):
    """Objects as files.

    A file gets its name when all of it is written, so nobody sees a part of one. Nothing is flushed
    to the disk: what a crash of the machine leaves of a file, its checksum finds. Nothing is evicted
    either: delete what is old, at any time.

    Args:
        folder: is made if it is not there (its parent is), for the user alone: what it holds tells
            prompts.
        workers, timeout: see `ThreadedStore`.

    Raises:
        OSError: as of the system.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, workers: int = 4, timeout: float = TIMEOUT
    ) -> None:
        self.folder = Path(folder)
        with suppress(FileExistsError):
            self.folder.mkdir(0o700)
        for path in self.folder.glob(f"*/*{PARTIAL}"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > LEFT_BEHIND:
                    path.unlink()
        super().__init__(workers=workers, timeout=timeout)

    def path(self, key: StoreKey) -> Path:
        """Of an object."""
        return self.folder / key.segment.hex()[:2] / key.text

    def _exists(self, keys: Sequence[StoreKey]) -> list[int | None]:
        return [_size(self.path(key)) for key in keys]

    def _put(self, key: StoreKey, buffers: Buffers) -> None:
        path = self.path(key)
        with suppress(FileExistsError):
            path.parent.mkdir(0o700)
        name = f"{path.name}-{os.uname().nodename}-{os.getpid()}-{next(_NUMBERS)}{PARTIAL}"
        partial = path.with_name(name)
        try:
            with open(partial, "xb") as file:
                for buffer in buffers:
                    file.write(buffer.data)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _get(self, key: StoreKey, buffers: Buffers) -> None:
        try:
            with open(self.path(key), "rb") as file:
                found = os.fstat(file.fileno()).st_size
                filled = 0
                if found == num_bytes(buffers):
                    filled = sum(file.readinto(buffer.data) for buffer in buffers)
        except FileNotFoundError:
            raise MissingObject(key) from None
        if filled != num_bytes(buffers):
            raise DamagedObject(key, f"expected {num_bytes(buffers)} bytes, got {found}")

    def _remove(self, keys: Sequence[StoreKey]) -> None:
        for key in keys:
            self.path(key).unlink(missing_ok=True)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
