"""Ranks: processes that are there already (``torchrun``, torch.distributed), or that rank 0 starts.

rank 0                                       rank 1
store, starts the others  ----- argv ----->  store
heartbeat  <------------ store ------------> heartbeat
channel    ------- store: the model -------> channel
process group  <------ gloo, NCCL ---------> process group
Engine     ------- channel: steps ---------> follow
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
import threading
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
from .heartbeat import Heartbeat, RankError, end_process
from .steps import follow

if TYPE_CHECKING:
    from ..llm import ModelSource

# Rank 0 says when to end, so Ctrl-C does not, from the first import on.
WORKER = f"""
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from {__name__} import run_rank
run_rank()
"""
LOCAL = "127.0.0.1"
# Seconds after which a rank without progress ends all of them: more than the longest step takes,
# compiling included. A rank that dies is noticed at once.
RANK_TIMEOUT = 300.0
ONE_MODEL = "quire/model"  # key in the store
LONGEST_WAIT = datetime.timedelta(days=1)  # for a message; then the channel waits again
SECONDS_TO_END = 5.0  # of all processes together, until they are killed
NUM_SAMPLES, SAMPLE = 64, 4096  # of a file of weights; bytes of each
# After a call has failed: silence of a rank that is dead then, and until the heartbeat knows.
SILENT_AFTER_ERROR, SECONDS_TO_KNOW = 2.0, 4.0


class Ranks:
    """All ranks of one model, from the side of one of them.

    Args:
        store: of torch.distributed.
        local_rank: number of this rank on its machine.
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
        self, rank: int, size: int, store: dist.Store, local_rank: int, *, source: bytes = b"",
        processes: Mapping[int, subprocess.Popen[bytes]] | None = None, timeout: float,
    ) -> None:  # fmt: skip
        self.ended, self.processes = "", processes or {}
        self._owns_group = not dist.is_initialized()
        self.heartbeat = Heartbeat(
            rank, size, timeout, store.clone(), self.processes, self._give_up
        )
        seconds = datetime.timedelta(seconds=timeout + MARGIN)
        with self.failing():
            messages = store.clone()
            messages.set_timeout(LONGEST_WAIT)
            self.channel = Channel(rank, size, messages, self._check)
            if rank == 0:
                self.channel.send(source)
            self.source: ModelSource = pickle.loads(source or self.channel.receive())
            # Waits until all have imported what they need.
            expect_equal(self.channel.all_gather(versions_and_files(self.source.directory)))
            device = _device_of(self.source.device, local_rank)
            if self._owns_group:
                store.set_timeout(seconds)
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=size, timeout=seconds
                )
            dist.group.WORLD.get_group_store().set(ONE_MODEL, "")
            self.group = Group(device, self.channel, timeout)
            self.heartbeat.calls = self.group.calls.total

    @contextmanager
    def failing(self) -> Iterator[None]:
        """On an error end all ranks; raise RankError if another rank is its reason."""
        try:
            yield
        except RankError as error:
            self.close(str(error))
            raise
        except BaseException as error:
            if isinstance(error, dist.DistError) or type(error) is RuntimeError:
                # gloo raises RuntimeError. The heartbeat may notice the reason later.
                self.heartbeat.timeout = min(self.heartbeat.timeout, SILENT_AFTER_ERROR)
                until = time.monotonic() + SECONDS_TO_KNOW
                while not self.heartbeat.verdict and time.monotonic() < until:
                    time.sleep(0.01)
                if self.heartbeat.verdict:
                    self.close(self.heartbeat.verdict)
                    raise RankError(self.heartbeat.verdict) from error
            failed = f"{type(error).__name__}: {error}"
            self.ended = f"rank {self.heartbeat.rank} failed: {failed}"
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
        if hasattr(self, "group"):
            self.group.abort()

    def _check(self) -> None:
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
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 says when it is over
        local_rank = dist.get_node_local_rank(fallback_rank=rank)
        return Ranks(rank, size, store, local_rank, timeout=RANK_TIMEOUT)
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
    processes, local_rank = {}, 0
    if found == 1:
        store = local_store(size)
        processes = _start(size, store.port)
    else:
        local_rank = dist.get_node_local_rank(fallback_rank=0)
    return Ranks(
        0, size, store, local_rank, source=pickled, processes=processes, timeout=RANK_TIMEOUT
    )


def local_store(size: int) -> dist.TCPStore:
    """A store that only this machine can reach."""
    listener = socket.create_server((LOCAL, 0))  # the store's own would be on all interfaces
    return dist.TCPStore(
        LOCAL, listener.getsockname()[1], size, is_master=True, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def _start(size: int, port: int) -> dict[int, subprocess.Popen[bytes]]:
    threads = max(1, torch.get_num_threads() // size)
    torch.set_num_threads(threads)
    spec = {"size": size, "port": port, "timeout": RANK_TIMEOUT, "threads": threads}
    processes = {}
    for rank in range(1, size):
        command = [sys.executable, "-c", WORKER, json.dumps(spec | {"rank": rank})]
        processes[rank] = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    return processes


def run_rank() -> None:
    """Be a rank that another process has started (`_start`), until that closes."""
    spec = json.loads(sys.argv[1])
    rank, size, timeout = spec["rank"], spec["size"], spec["timeout"]
    torch.set_num_threads(spec["threads"])
    # torch tries again where rank 0 has ended, and waits for ever where it is stopped.
    try:
        socket.create_connection((LOCAL, spec["port"])).close()
    except OSError as error:
        end_process(rank, f"rank 0 died: {error}")
    reason = f"rank 0 died: nothing was heard of it for {timeout:g} s"
    silent = threading.Timer(timeout, end_process, (rank, reason))
    silent.start()
    store = dist.TCPStore(LOCAL, spec["port"], size, is_master=False)
    silent.cancel()
    Ranks(rank, size, store, rank, timeout=timeout).follow()


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
                f"tensor_parallel_size: expected ranks of equal versions and files, and rank "
                f"{rank} has {key} {one.get(key)}, rank 0 {found[0].get(key)}"
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
