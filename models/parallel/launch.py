"""Ranks: processes that are there already (``torchrun``, torch.distributed), or that rank 0 starts.

rank 0                                        rank 1
listens, starts the others  ----- stdin --->  heartbeat, before torch is imported
channel    ------------- work --------------> channel
process group  <------- gloo, NCCL ---------> process group
Engine     -------- channel: steps ---------> follow
"""

from __future__ import annotations

import datetime
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..loading.checkpoint import weight_files
from .channel import Channel
from .group import MARGIN, Group
from .heartbeat import LOCAL, Heartbeat, RankError
from .steps import follow

if TYPE_CHECKING:
    from ..llm import ModelSource

WORKER = f"from {__name__.rpartition('.')[0]}.worker import main; main()"
# Seconds after which a rank without progress ends all of them: more than the longest step takes,
# compiling included. A rank that dies is noticed at once.
RANK_TIMEOUT = 300.0
ONE_MODEL, PORTS = "quire/model", "quire/ports"  # keys in the store
SECONDS_TO_END = 5.0  # of all processes together, until they are killed
NUM_SAMPLES, SAMPLE = 64, 4096  # of a file of weights; bytes of each
SECONDS_TO_KNOW = 3.0  # until the heartbeat knows why a call failed


class Ranks:
    """All ranks of one model, from the side of one of them.

    Args:
        channel: of this rank; the channel of rank 0 still waits for the others.
        store: of torch.distributed.
        source: pickled, on rank 0.
        processes: processes that this rank has started, by rank.

    Attributes:
        ended: the reason that no step can follow; "" = one can.

    Raises:
        ValueError: a device that is not there.
        RankError: a rank that does not come.
    """

    group: Group

    def __init__(
        self, heartbeat: Heartbeat, channel: Channel, store: Any, local_rank: int,
        source: bytes = b"", processes: Mapping[int, subprocess.Popen[bytes]] | None = None,
    ) -> None:  # fmt: skip
        self.heartbeat, self.channel, self.ended = heartbeat, channel, ""
        self.processes, self._owns_group = processes or {}, not dist.is_initialized()
        heartbeat.give_up = self._give_up
        seconds = datetime.timedelta(seconds=heartbeat.timeout + MARGIN)
        with self.failing():
            if channel.rank == 0:
                channel.accept(self._check)
                channel.send(source)
            self.source: ModelSource = pickle.loads(source or channel.receive())
            # Waits until all have imported what they need.
            expect_equal(channel.all_gather(versions_and_files(self.source.directory)))
            device = _device_of(self.source.device, local_rank)
            if self._owns_group:
                store.set_timeout(seconds)
                dist.init_process_group(
                    "gloo", store=store, rank=channel.rank, world_size=channel.size, timeout=seconds
                )
            dist.group.WORLD.get_group_store().set(ONE_MODEL, "")
            self.group = Group(device, channel, heartbeat.timeout)
            heartbeat.calls = self.group.calls.total

    @contextmanager
    def failing(self) -> Iterator[None]:
        """On an error end all ranks; raise RankError if another rank is its reason."""
        try:
            yield
        except RankError as error:
            self.close(str(error))
            raise
        except BaseException as error:
            if isinstance(error, ConnectionError | dist.DistError) or type(error) is RuntimeError:
                # gloo raises RuntimeError. The heartbeat may notice the reason later.
                until = time.monotonic() + SECONDS_TO_KNOW
                while not self.heartbeat.verdict and time.monotonic() < until:
                    time.sleep(0.01)
                if self.heartbeat.verdict:
                    self.close(self.heartbeat.verdict)
                    raise RankError(self.heartbeat.verdict) from error
            failed = f"{type(error).__name__}: {error}"
            self.ended = f"rank {self.channel.rank} failed: {failed}"
            self.close(failed)
            raise

    def follow(self) -> None:
        """Run the steps of rank 0 until it closes."""
        with self.failing():
            model, drafter = self.source.build(self.group.device, self.group)
            follow(self.group, model, self.source.engine, drafter)
        self.close()

    def close(self, error: str = "") -> None:
        """End the heartbeat, the process group, and the processes that were started.

        error: of this rank, for which the others end; "" = all are done.
        """
        self.ended = self.ended or error or "the engine is closed"
        self.heartbeat.leave(error)
        self.channel.close()
        until = time.monotonic() + (0.0 if error else SECONDS_TO_END)
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()
            process.wait()
        if self._owns_group and dist.is_initialized():
            with suppress(Exception):
                dist.destroy_process_group()

    def _give_up(self) -> None:
        for process in self.processes.values():  # one that is stopped does not end by itself
            process.kill()
        self.channel.close()
        if hasattr(self, "group"):
            self.group.abort()

    def _check(self) -> None:
        for rank, process in self.processes.items():
            if process.poll() is not None:
                raise RankError(f"rank {rank} died: its process ended, status {process.returncode}")
        if self.heartbeat.verdict:
            raise RankError(self.heartbeat.verdict)


def launched() -> tuple[int, int]:
    """(number of ranks, this rank), as ``torchrun`` or the caller started them; (1, 0) = none."""
    _, rank, size = _found()
    return size, rank


def join_ranks(source: ModelSource) -> Ranks:
    """Join ranks that are there already, or start them.

    Raises:
        ValueError: another number of ranks was started, they run a model already, or arguments
            that cannot be sent to another process; and as `Ranks`.
        RankError: as `Ranks`.
        NotImplementedError: a host tier.
    """
    if source.engine.host_cache_gib is not None:
        raise NotImplementedError("host_cache_gib: supported with tensor_parallel_size=1")
    size = source.engine.tensor_parallel_size
    store, rank, found = _found()
    if found != size and (found > 1 or dist.is_initialized()):
        raise ValueError(f"tensor_parallel_size: expected {found}, the ranks, got {size}")
    if rank != 0:
        return _join(store, rank, size)
    if dist.is_initialized() and store.check([ONE_MODEL]):
        raise ValueError(
            "tensor_parallel_size: expected ranks without a model; `close` the one they have, or "
            "start other processes"
        )
    try:
        pickled = pickle.dumps(source)
    except Exception as error:
        raise ValueError(
            "tensor_parallel_size: expected arguments that can be sent to another process, got "
            f"{type(error).__name__}: {error}"
        ) from error
    address = (LOCAL if found == 1 else _own_address(_host_of(store)), 0)
    heartbeat, channel = Heartbeat(0, size, RANK_TIMEOUT, address), Channel(0, size, address)
    if found == 1:
        listener = socket.create_server(address)  # the store's own would be on all interfaces
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            LOCAL, port, size, is_master=True, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        processes, local_rank = _start(heartbeat, channel, store.port), 0
    else:
        store.set(PORTS, f"{heartbeat.port} {channel.port}")
        processes, local_rank = {}, dist.get_node_local_rank(fallback_rank=0)
    return Ranks(heartbeat, channel, store, local_rank, pickled, processes)


def run_rank(heartbeat: Heartbeat, spec: Mapping[str, Any]) -> None:
    """Be a rank that another process has started with ``spec`` (`_start`), until that closes."""
    rank, size = spec["rank"], spec["size"]
    torch.set_num_threads(spec["threads"])
    channel = Channel(rank, size, (LOCAL, spec["channel"]))
    store = dist.TCPStore(LOCAL, spec["store"], size, is_master=False)
    Ranks(heartbeat, channel, store, rank).follow()


def _start(heartbeat: Heartbeat, channel: Channel, port: int) -> dict[int, subprocess.Popen[bytes]]:
    """Start the other ranks on this machine; port: of the store."""
    threads = max(1, torch.get_num_threads() // channel.size)
    torch.set_num_threads(threads)
    spec = {"size": channel.size, "timeout": heartbeat.timeout, "threads": threads}
    spec |= {"heartbeat": heartbeat.port, "channel": channel.port, "store": port}
    processes = {}
    for rank in range(1, channel.size):
        process = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE)
        processes[rank] = process
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(spec | {"rank": rank}).encode())
    return processes


def _join(store: Any, rank: int, size: int) -> Ranks:
    """Meet rank 0, which is there already or is about to come."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 says when it is over
    try:
        store.wait([PORTS], datetime.timedelta(seconds=RANK_TIMEOUT))
    except dist.DistStoreError as error:
        raise RankError(f"rank 0 died: it did not come within {RANK_TIMEOUT:g} s") from error
    beats, messages = map(int, store.get(PORTS).split())
    host = _host_of(store)
    heartbeat = Heartbeat(rank, size, RANK_TIMEOUT, (host, beats))
    channel = Channel(rank, size, (host, messages))
    return Ranks(heartbeat, channel, store, dist.get_node_local_rank(fallback_rank=rank))


def _host_of(store: Any) -> str:
    """The address that was given for rank 0."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", LOCAL))


def _own_address(host: str) -> str:
    """The address of this machine that a host is; "" = all, where other machines alone know it.

    Such are public addresses behind a router, and names that this machine takes for itself.
    """
    try:
        with socket.create_server((host, 0)) as server:
            address: str = server.getsockname()[0]
    except OSError:
        return ""
    is_own_name = address.startswith("127.") and host not in ("localhost", address)
    return "" if is_own_name else address


def versions_and_files(directory: Path | None) -> dict[str, Any]:
    """Versions of packages, and a checksum of samples of each file of weights."""
    version = import_module("quire").__version__
    found: dict[str, Any] = {"quire": version, "torch": torch.__version__}
    for name in () if directory is None else weight_files(directory):
        with open(directory / name, "rb") as file:
            size, checksum = os.fstat(file.fileno()).st_size, 0
            for start in range(0, size, max(size // NUM_SAMPLES, SAMPLE)):
                file.seek(start)
                checksum = zlib.crc32(file.read(SAMPLE), checksum)
        found[name] = [size, checksum]
    return found


def expect_equal(found: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ValueError for ranks that differ from rank 0; found: `versions_and_files` by rank."""
    for rank, one in enumerate(found):
        if differ := sorted(key for key in found[0] | one if found[0].get(key) != one.get(key)):
            key = differ[0]
            raise ValueError(
                f"tensor_parallel_size: expected ranks of equal versions and files, and rank {rank} "
                f"has {key} {one.get(key)}, rank 0 {found[0].get(key)}"
            )


def _found() -> tuple[Any, int, int]:
    """(store, this rank, number of ranks that were started); (None, 0, 1) = none."""
    if dist.is_initialized():
        return dist.group.WORLD.get_group_store(), dist.get_rank(), dist.get_world_size()
    if dist.is_torchelastic_launched():
        return next(rendezvous("env://"))
    return None, 0, 1


def _device_of(device: torch.device, local_rank: int) -> torch.device:
    if device.type != "cuda":
        return device
    if device.index is not None:
        raise ValueError(
            f"device: expected 'cuda' or 'cpu' with several ranks, got {str(device)!r}"
        )
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel_size: expected a GPU for each rank of this machine, got "
            f"{torch.cuda.device_count()} for rank {local_rank}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
