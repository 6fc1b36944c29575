"""Ranks: processes that are there already, or that rank 0 starts.

Under ``torchrun``, and wherever ``torch.distributed`` is initialized, each process is a rank.
Elsewhere rank 0 starts the others on its own machine (`quire.models.parallel.worker`).
"""

from __future__ import annotations

import datetime
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from .group import Group
from .watch import RankError, Watch, connect

WORKER = f"from {__name__.rpartition('.')[0]}.worker import main; main()"
LOCAL = "127.0.0.1"
ONE_MODEL = "quire/models"  # in the store: how many models the processes have run
STARTED = "quire/started"
SECONDS_TO_END = 5.0
SECONDS_TO_SEE = 1.0  # until a process that was killed has ended
MEETING = datetime.timedelta(seconds=300)  # of processes that torchrun has started


def launched() -> tuple[int, int]:
    """How many ranks ``torchrun`` or the caller has started, and which is this; (1, 0) = none.

    Raises:
        RankError: ranks of ``torchrun`` that do not reach each other.
    """
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        try:
            dist.init_process_group("gloo", timeout=MEETING)
        except RuntimeError as error:
            # Of Debian and Ubuntu machines the name is a loopback address, unless somebody changes it.
            raise RankError(
                "the ranks do not reach each other. Of several machines each announces the address "
                "that its own name has, or that of the network interface in GLOO_SOCKET_IFNAME: "
                f"{error}"
            ) from error
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


class Ranks:
    """All ranks of one model, and this one's part in them.

    Args:
        size: ranks.
        device: None, or what each rank is to run on: "cuda" = the GPU of its number on its machine.
        timeout: seconds after which a rank that gets no further is stuck.
        split_context: as of `Group`.
        work: arguments of `quire.models.llm.LLM` for ranks that are started.

    Attributes:
        group: of the ranks.
        watch: of the ranks.
        processes: that this one has started.

    Raises:
        ValueError: another number of ranks was started, ranks that run a model already, or arguments
            that cannot be sent to another process.
        RankError: ranks that do not come.
    """

    def __init__(
        self,
        size: int,
        device: torch.device | str | None,
        *,
        timeout: float,
        split_context: bool = False,
        work: Mapping[str, Any],
    ) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._watch: Watch | None = None
        started, _ = launched()
        self._owns = started == 1
        if started not in (1, size):
            raise ValueError(f"tensor_parallel_size: expected {started}, the ranks, got {size}")
        try:
            if self._owns:
                self._start(size, timeout, work)
            self._meet(size, device, timeout, split_context)
        except BaseException as error:
            # gloo tells of a connection, before the end of a process can be seen.
            broken = type(error) is RuntimeError and self._ended(SECONDS_TO_SEE)
            self.close(f"{type(error).__name__}: {error}")
            if broken:
                raise RankError(f"{broken}: {error}") from error
            raise

    def _meet(
        self, size: int, device: torch.device | str | None, timeout: float, split_context: bool
    ) -> None:
        """Makes the groups and the watch."""
        store = dist.group.WORLD.get_group_store()
        rank = dist.get_rank()
        if rank == 0 and store.add(ONE_MODEL, 1) > 1:
            raise ValueError(
                "tensor_parallel_size: expected ranks without a model; `close` the one they have, "
                "or start other processes"
            )
        place = _device_of(device, rank, self._owns)
        self.group = Group(place, timeout, split_context=split_context)
        peers = connect(rank, size, self.group.say, _host(store), timeout)
        self.watch = Watch(
            rank,
            peers,
            progress=self.group.calls.total,
            timeout=timeout,
            give_up=self._give_up,
        )
        self._watch = self.watch
        if rank != 0 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 says when it is over

    def close(self, error: str = "") -> None:
        """Ends the watch and the processes that were started.

        Args:
            error: of this rank, for which the others end; "" = all are done.
        """
        if self._watch is not None and error:
            self._watch.fail(error)
        elif self._watch is not None:
            self._watch.close()
        self._watch = None
        for process in self.processes:
            if error:
                process.kill()
            try:
                process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._owns and dist.is_initialized():
            with suppress(Exception):
                dist.destroy_process_group()

    def _ended(self, seconds: float) -> str:
        """Which of the processes that were started has ended, waiting a while for one to; "" = none."""
        until = time.monotonic() + seconds
        while self.processes:
            for rank, process in enumerate(self.processes, start=1):
                if process.poll() is not None:
                    return f"rank {rank} ended at its start, with exit status {process.returncode}"
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        return ""

    def _give_up(self) -> None:
        for process in self.processes:  # one that is stopped would end nothing itself
            process.kill()
        self.group.abort()

    def _start(self, size: int, timeout: float, work: Mapping[str, Any]) -> None:
        if dist.is_initialized():
            raise ValueError(
                f"tensor_parallel_size: expected 1, the ranks of torch.distributed, got {size}"
            )
        store = dist.TCPStore(LOCAL, 0, size, is_master=True, wait_for_workers=False)
        threads = max(1, torch.get_num_threads() // size)
        given = {"port": store.port, "size": size, "threads": threads}
        try:
            specs = [pickle.dumps(given | {"rank": r, "work": dict(work)}) for r in range(1, size)]
        except Exception as error:
            raise ValueError(
                "tensor_parallel_size: expected arguments that can be sent to another process, "
                f"got {type(error).__name__}: {error}"
            ) from error
        torch.set_num_threads(threads)
        for spec in specs:
            process = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE)
            self.processes.append(process)
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(spec)
                process.stdin.close()
        for rank in range(1, size):
            while not store.check([f"{STARTED}/{rank}"]):
                if ended := self._ended(0.0):
                    self.close("another rank ended")
                    raise RankError(ended)
                time.sleep(0.01)
        # However this process ends, the others do not stay: their connections break.
        weakref.finalize(self, _kill, self.processes)
        dist.init_process_group("gloo", store=store, rank=0, world_size=size)


def join(spec: Mapping[str, Any]) -> None:
    """Makes this process the rank that another one started it for.

    Args:
        spec: of `Ranks`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(spec["threads"])
    store = dist.TCPStore(LOCAL, spec["port"], spec["size"], is_master=False)
    store.set(f"{STARTED}/{spec['rank']}", "")
    dist.init_process_group("gloo", store=store, rank=spec["rank"], world_size=spec["size"])


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def _device_of(device: torch.device | str | None, rank: int, started_here: bool) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type != "cuda":
        return found
    if found.index is not None:
        raise ValueError(f"device: expected 'cuda' or 'cpu' with several ranks, got {device!r}")
    local = rank if started_here else dist.get_node_local_rank(fallback_rank=rank)
    if local >= torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel_size: expected a GPU for each rank of this machine, got "
            f"{torch.cuda.device_count()} for rank {local}"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _host(store: Any) -> str:
    """Where rank 0 is."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", LOCAL)
