"""Ranks: processes that are there already, or that rank 0 starts.

Under ``torchrun``, and wherever ``torch.distributed`` is initialized, each process is a rank.
Elsewhere rank 0 starts the others on its own machine (`quire.models.parallel.worker`)::

    rank 0                                        rank 1
    listens, starts the others  ----- stdin --->  heartbeat, before torch is imported
    heartbeat  <--------------------------------> heartbeat
    all_say    <----------- channel ------------> all_say: the same settings?
    process group  <------- gloo, NCCL ---------> process group
    weights, pool, graphs                         weights, pool, graphs
    Engine     -------- channel: steps ---------> follow
"""

from __future__ import annotations

import datetime
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..engine.config import FLASHINFER, EngineConfig
from ..engine.speculative import Drafter
from .channel import Channel
from .follow import follow
from .group import MARGIN, Group
from .heartbeat import Heartbeat, RankError

if TYPE_CHECKING:
    from ..llm import ModelSource

WORKER = f"from {__name__.rpartition('.')[0]}.worker import main; main()"
LOCAL = "127.0.0.1"
ONE_MODEL, PORTS = "quire/model", "quire/ports"  # keys in the store
SECONDS_TO_END = 5.0
SECONDS_TO_KNOW = 3.0  # until the heartbeat knows why a call failed


@dataclass(frozen=True)
class Work:
    """What all ranks run.

    Attributes:
        source: of the weights.
        config: of the engine.
        drafter: as of `quire.models.llm.LLM`.
        device: None, or "cuda" = the GPU of its number on its machine, or "cpu".
    """

    source: ModelSource
    config: EngineConfig
    drafter: Any
    device: torch.device | str | None

    def declared(self) -> dict[str, str]:
        """Settings that have to be the same on all ranks."""
        model, drafter = self.source.config, self.drafter
        said = {f"model.{each.name}": getattr(model, each.name) for each in fields(model)}
        said |= {"dtype": self.source.dtype, "seed": self.source.seed}
        said["drafter"] = getattr(drafter, "__qualname__", type(drafter).__qualname__)
        said |= {each.name: getattr(self.config, each.name) for each in fields(self.config)}
        return {name: str(value) for name, value in said.items()}

    def parts(self, group: Group) -> tuple[Any, Drafter | None]:
        """The model of a rank, and its drafter."""
        model = self.source.build(group.device, group)
        return model, self.drafter(model) if callable(self.drafter) else self.drafter


class Ranks:
    """All ranks of one model, as one of them sees them.

    Args:
        heartbeat, channel: of this rank; the channel of rank 0 still waits for the others.
        store: of torch.distributed.
        work: what all run.
        local_rank: number of this rank on its machine.
        processes: those that this rank has started, by rank.

    Attributes:
        group: of the ranks.

    Raises:
        ValueError: settings that differ between ranks, or a device that is not there.
        RankError: a rank that does not come.
    """

    group: Group

    def __init__(
        self, heartbeat: Heartbeat, channel: Channel, store: Any, work: Work, local_rank: int,
        processes: Mapping[int, subprocess.Popen[bytes]] | None = None,
    ) -> None:  # fmt: skip
        self.heartbeat, self.channel, self.work = heartbeat, channel, work
        self.processes, self._owns_group = processes or {}, not dist.is_initialized()
        heartbeat.give_up = self._give_up
        with self.failing():
            if channel.rank == 0:
                channel.accept(self._check)
            _expect_same(channel.all_say(work.declared()))
            device = _device_of(work.device, local_rank)
            if self._owns_group:
                _meet(store, channel, heartbeat.timeout)
            dist.group.WORLD.get_group_store().set(ONE_MODEL, "")
            self.group = Group(device, channel, heartbeat.timeout)
            heartbeat.calls = self.group.calls.total

    @contextmanager
    def failing(self) -> Iterator[None]:
        """On an error end all ranks; if another rank is its reason, raise RankError."""
        try:
            yield
        except BaseException as error:
            verdict = self.verdict_about(error)
            self.close(verdict or f"{type(error).__name__}: {error}")
            if verdict:
                raise RankError(verdict) from error
            raise

    def verdict_about(self, error: BaseException) -> str:
        """Which rank made a call fail; "" = the error is this rank's own."""
        kinds = (ConnectionError, RankError, dist.DistError)
        if type(error) is not RuntimeError and not isinstance(error, kinds):
            return ""
        until = time.monotonic() + SECONDS_TO_KNOW
        while not self.heartbeat.verdict and time.monotonic() < until:
            time.sleep(0.01)
        return self.heartbeat.verdict

    def follow(self) -> None:
        """Run the steps of rank 0 until it closes."""
        with self.failing():
            model, drafter = self.work.parts(self.group)
            follow(self.group, model, self.work.config, drafter)
        self.close()

    def close(self, error: str = "") -> None:
        """End the heartbeat, the process group, and the processes that were started.

        Args:
            error: of this rank, for which the others end; "" = all are done.
        """
        self.heartbeat.leave(error)
        self.channel.close()
        for process in self.processes.values():
            if error:
                process.kill()
            try:
                process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
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
    """How many ranks ``torchrun`` or the caller has started, and which is this; (1, 0) = none."""
    _, rank, size = _found()
    return size, rank


def join_ranks(work: Work) -> Ranks:
    """The ranks that are there already, or that are started here.

    Raises:
        ValueError: another number of ranks was started, they run a model already, or arguments
            that cannot be sent to another process; and as `Ranks`.
        RankError: as `Ranks`.
    """
    size, timeout = work.config.tensor_parallel_size, work.config.rank_timeout
    store, rank, found = _found()
    if found != size and (found > 1 or dist.is_initialized()):
        raise ValueError(f"tensor_parallel_size: expected {found}, the ranks, got {size}")
    if found == 1:
        return _start(work)
    if rank == 0:
        if dist.is_initialized() and store.check([ONE_MODEL]):
            raise ValueError(
                "tensor_parallel_size: expected ranks without a model; `close` the one they have, "
                "or start other processes"
            )
        heartbeat, channel = Heartbeat(0, size, timeout, ("", 0)), Channel(0, size, ("", 0))
        store.set(PORTS, f"{heartbeat.port} {channel.port}")
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 says when it is over
        try:
            store.wait([PORTS], datetime.timedelta(seconds=timeout))
        except dist.DistStoreError as error:
            raise RankError(f"rank 0 died: it did not come within {timeout:g} s") from error
        ports, host = map(int, store.get(PORTS).split()), _host(store)
        heartbeat = Heartbeat(rank, size, timeout, (host, next(ports)))
        channel = Channel(rank, size, (host, next(ports)))
    return Ranks(heartbeat, channel, store, work, dist.get_node_local_rank(fallback_rank=rank))


def run_rank(heartbeat: Heartbeat, spec: Mapping[str, Any]) -> None:
    """Be a rank that another process has started, until that closes.

    Args:
        spec: of `_start`.
    """
    rank, size = spec["rank"], spec["size"]
    channel = Channel(rank, size, (LOCAL, spec["channel"]))
    torch.set_num_threads(spec["threads"])
    store = dist.TCPStore(LOCAL, spec["store"], size, is_master=False)
    Ranks(heartbeat, channel, store, pickle.loads(spec["work"]), rank).follow()


def _start(work: Work) -> Ranks:
    size, timeout = work.config.tensor_parallel_size, work.config.rank_timeout
    try:
        pickled = pickle.dumps(work)
    except Exception as error:
        raise ValueError(
            "tensor_parallel_size: expected arguments that can be sent to another process, got "
            f"{type(error).__name__}: {error}"
        ) from error
    store = dist.TCPStore(LOCAL, 0, size, is_master=True, wait_for_workers=False)
    heartbeat, channel = Heartbeat(0, size, timeout, (LOCAL, 0)), Channel(0, size, (LOCAL, 0))
    threads = max(1, torch.get_num_threads() // size)
    torch.set_num_threads(threads)
    spec = {"size": size, "timeout": timeout, "threads": threads, "work": pickled}
    spec |= {"heartbeat": heartbeat.port, "channel": channel.port, "store": store.port}
    processes = {}
    for rank in range(1, size):
        process = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE)
        processes[rank] = process
        with suppress(BrokenPipeError), process.stdin as stdin:
            pickle.dump(spec | {"rank": rank}, stdin)
    return Ranks(heartbeat, channel, store, work, 0, processes)


def _found() -> tuple[Any, int, int]:
    """The store, this rank, and the number of ranks that were started; (None, 0, 1) = none."""
    if dist.is_initialized():
        return dist.group.WORLD.get_group_store(), dist.get_rank(), dist.get_world_size()
    if dist.is_torchelastic_launched():
        return next(rendezvous("env://"))
    return None, 0, 1


def _meet(store: Any, channel: Channel, timeout: float) -> None:
    """Make the process group of all ranks."""
    seconds = datetime.timedelta(seconds=timeout + MARGIN)
    store.set_timeout(seconds)
    try:
        dist.init_process_group(
            "gloo", store=store, rank=channel.rank, world_size=channel.size, timeout=seconds
        )
    except RuntimeError as error:
        # Of Debian and Ubuntu machines the name is a loopback address, unless somebody changes it.
        raise RankError(
            "the ranks do not reach each other. Of several machines each announces the address "
            "that its own name has, or that of the network interface in GLOO_SOCKET_IFNAME: "
            f"{error}"
        ) from error


def expect_ranks(config: EngineConfig) -> None:
    """Raise NotImplementedError for settings that several ranks do not support."""
    if config.has_tiers:
        raise NotImplementedError(
            "host_cache_gib, disk_cache: supported with tensor_parallel_size=1, got "
            f"{config.tensor_parallel_size}"
        )
    if config.impl == FLASHINFER:
        raise NotImplementedError(
            "impl: supported with tensor_parallel_size > 1 are 'triton' and 'torch', got "
            f"{config.impl!r}"
        )


def _expect_same(told: list[dict[str, str]]) -> None:
    """Raise ValueError, on all ranks, for a setting that differs between them."""
    for name, first in told[0].items():
        for rank, theirs in enumerate(told):
            if theirs.get(name) != first:
                raise ValueError(
                    f"{name}: expected the same on all ranks, got {first} on rank 0 and "
                    f"{theirs.get(name)} on rank {rank}"
                )


def _device_of(device: torch.device | str | None, local_rank: int) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type != "cuda":
        return found
    if found.index is not None:
        raise ValueError(f"device: expected 'cuda' or 'cpu' with several ranks, got {device!r}")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel_size: expected a GPU for each rank of this machine, got "
            f"{torch.cuda.device_count()} for rank {local_rank}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _host(store: Any) -> str:
    """Where rank 0 is."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", LOCAL)
