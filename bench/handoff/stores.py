"""Stores on this machine: their processes, and clients of them."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from quire.models.transfer.files import FileStore
from quire.models.transfer.mooncake_store import MooncakeStore
from quire.models.transfer.nixl_store import NixlStore
from quire.models.transfer.nixl_wire import nixl_api
from quire.models.transfer.store import ThreadedStore, parse_address

KINDS = ("files", "mooncake", "nixl")
START = 60.0  # seconds until a store's process answers
HOST = "127.0.0.1"


def lacking(kind: str) -> str | None:
    """Why a kind of store cannot be used here; None if it can."""
    try:
        if kind == "mooncake":
            import_module("mooncake.store")
        if kind == "nixl":
            nixl_api()
    except ImportError as error:
        return f"{kind}: {error}"
    return None


@dataclass(frozen=True)
class RunningStore:
    """A store that processes of this machine reach.

    Attributes:
        kind: one of `KINDS`.
        address: a folder, or host:port.
        process: that has it, if any has.
    """

    kind: str
    address: str
    process: subprocess.Popen | None = None

    def connect(self, **options: object) -> ThreadedStore:
        """A client in this process."""
        return connect(self.kind, self.address, **options)


def connect(kind: str, address: str, **options: object) -> ThreadedStore:
    """A client of a store in this process; ``options`` are its own."""
    if kind == "files":
        return FileStore(address, **options)
    if kind == "mooncake":
        return MooncakeStore(address, **options)
    return NixlStore(*parse_address("address", address), **options)


@contextmanager
def running(kind: str, *, gib: float = 1.0) -> Iterator[RunningStore]:
    """A new store, which ends with the block.

    Args:
        kind: one of `KINDS`.
        gib: of its memory.

    Raises:
        ImportError: what it is made of is not installed.
        OSError: its process does not start.
    """
    if (why := lacking(kind)) is not None:
        raise ImportError(f"store: {why}")
    if kind == "files":
        with tempfile.TemporaryDirectory(prefix="quire-handoff-") as folder:
            yield RunningStore(kind, folder)
        return
    start = _start_mooncake if kind == "mooncake" else _start_nixl
    process, address = start(gib)
    try:
        if kind == "mooncake":  # the master has no memory of its own
            giver = MooncakeStore(address, segment_bytes=int(gib * 2**30))
            try:
                yield RunningStore(kind, address, process)
            finally:
                giver.close()
        else:
            yield RunningStore(kind, address, process)
    finally:
        process.kill()
        process.wait()


def _start_nixl(gib: float) -> tuple[subprocess.Popen, str]:
    module = "quire.models.transfer.nixl_server"
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--listen", f"{HOST}:0", "--gib", str(gib)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=tempfile.gettempdir(),
    )
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START)
    line = process.stdout.readline().decode() if ready else ""
    while line and not line.startswith("listening at "):  # NIXL's own
        line = process.stdout.readline().decode()
    if not line:
        process.kill()
        raise OSError(f"store: the NIXL server did not start: exit status {process.wait()}")
    return process, line.split()[-1]


def _start_mooncake(gib: float) -> tuple[subprocess.Popen, str]:
    master = Path(import_module("mooncake").__file__).parent / "mooncake_master"
    port, metrics = _free_port(), _free_port()
    process = subprocess.Popen(
        [
            str(master),
            f"--rpc_address={HOST}",
            f"--rpc_port={port}",
            f"--metrics_host={HOST}",
            f"--metrics_port={metrics}",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "GLOG_minloglevel": "2"},
    )
    end = time.monotonic() + START
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection((HOST, port), 1).close()
            return process, f"{HOST}:{port}"
        except OSError:
            time.sleep(0.02)
    process.kill()
    raise OSError(f"store: mooncake_master did not start: exit status {process.wait()}")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        return one.getsockname()[1]
