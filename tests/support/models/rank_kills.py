"""Ranks of which one is killed: `kill -9` at a random step, and what must hold then.

python -m tests.support.models.rank_kills launched 4 50 0     each of 4 ranks 50 times, of seed 0

"launched": all are there when the model is made, as under torchrun; nobody ends a survivor but itself. "started": rank 0
starts the others. Every rank is forked from this program, which has loaded torch: to load it takes longer than all else.
"""

from __future__ import annotations

import atexit
import io
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from quire.models.engine.config import EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.llm import LLM
from quire.models.parallel import launch, worker
from quire.models.parallel.watch import RankError

IN_TIME = 40.0  # seconds until everybody has ended; `rank_timeout` is shorter
FAILED = 1
NAMED = 3  # the program of rank 0, which got an error that it knows


class Forked:
    """A process that is there already, as `subprocess.Popen` shows one that was started."""

    def __init__(self, pid: int, writer: int) -> None:
        self.pid, self.returncode = pid, None
        self.stdin = os.fdopen(writer, "wb")
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        if select.select([self._handle], [], [], 0)[0]:
            self.returncode = FAILED  # it is another's child, which alone learns its status
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._handle], [], [], timeout)[0]:
            raise launch.subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self.poll() or 0

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def forked(work: Callable[[], None], said: Path) -> int:
    """A process that does ``work`` and writes to the file ``said`` what it prints; it ends as a program of Python does."""
    pid = os.fork()
    if pid:
        return pid
    file = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    status = FAILED
    try:
        work()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else FAILED
    except BaseException:
        traceback.print_exc()
    finally:  # as a program ends, but without what the one that forked it has yet to do
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def generate(size: int, ready: Path) -> None:
    """The program of a rank: steps without end."""
    config = EngineConfig(num_pages=100, tensor_parallel_size=size, rank_timeout=20)
    try:
        llm = LLM("llama-tiny", engine=config)
        ready.touch()
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        while True:
            llm.generate([[5, 6, 7], [8, 9]], params, progress=False)
    except RankError as error:
        print("named:", error, flush=True)
        sys.exit(NAMED)


def start(folder: Path, size: int) -> list[int]:
    """Processes of which rank 0 believes that it starts the others."""
    pipes = [os.pipe() for _ in range(1, size)]
    pids = []
    for rank, (reader, _) in enumerate(pipes, start=1):

        def follow(reader: int = reader) -> None:
            for other, writer in pipes:
                os.close(writer)
                if other != reader:
                    os.close(other)
            sys.stdin = io.TextIOWrapper(os.fdopen(reader, "rb"))
            worker.main()

        pids.append(forked(follow, folder / str(rank)))

    def lead() -> None:
        for reader, _ in pipes:
            os.close(reader)
        processes = iter([Forked(pid, pipe[1]) for pid, pipe in zip(pids, pipes, strict=True)])
        # Only for the name: what is started, and how, is that of `launch`.
        launch.subprocess = SimpleNamespace(
            PIPE=-1, TimeoutExpired=launch.subprocess.TimeoutExpired,
            Popen=lambda *_, **__: next(processes),
        )  # fmt: skip
        generate(size, folder / "ready")

    first = forked(lead, folder / "0")
    for pipe in pipes:
        os.close(pipe[0])
        os.close(pipe[1])
    return [first, *pids]


def launched(folder: Path, size: int) -> list[int]:
    """Processes as torchrun makes them."""

    def rank_of(rank: int) -> Callable[[], None]:
        def work() -> None:
            store = dist.FileStore(str(folder / "store"), size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            generate(size, folder / "ready")

        return work

    return [forked(rank_of(rank), folder / str(rank)) for rank in range(size)]


def kill_one(how: str, size: int, victim: int, rng: random.Random) -> float:
    """Seconds from the kill until the last survivor ended; AssertionError if one does not, or cannot tell who died."""
    folder = Path(tempfile.mkdtemp(prefix="quire-kills-"))
    pids = (start if how == "started" else launched)(folder, size)
    statuses: dict[int, int] = {}

    def collect() -> None:
        for rank, pid in enumerate(pids):
            if rank not in statuses and (found := os.waitpid(pid, os.WNOHANG))[0]:
                statuses[rank] = os.waitstatus_to_exitcode(found[1])

    def told() -> str:
        return "\n".join(
            f"rank {rank} ({statuses.get(rank, 'runs')}): {(folder / str(rank)).read_text()}"
            for rank in range(size)
        )

    try:
        until = time.monotonic() + 120
        while not (folder / "ready").exists():
            collect()
            assert not statuses and time.monotonic() < until, f"no model: {told()}"
            time.sleep(0.005)
        time.sleep(rng.random() * 0.5)
        collect()
        assert not statuses, f"ended before the kill: {told()}"
        os.kill(pids[victim], signal.SIGKILL)
        begin = time.monotonic()
        while len(statuses) < size:
            assert time.monotonic() - begin < IN_TIME, f"still runs: {told()}"
            time.sleep(0.005)
            collect()
        seconds = time.monotonic() - begin
        name = f"rank {victim} died: its process has ended"
        for rank, status in statuses.items():
            said = (folder / str(rank)).read_text()
            if rank == victim:
                assert status == -signal.SIGKILL
            elif rank == 0:
                assert status == NAMED and f"named: {name}\n" in said, told()
            elif how == "started" and status == -signal.SIGKILL:
                pass  # by rank 0, which has said why
            else:
                assert status == FAILED and name in said, told()
        return seconds
    finally:
        for rank, pid in enumerate(pids):
            if rank not in statuses:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        shutil.rmtree(folder)


def main(how: str, size: int, tries: int, seed: int) -> None:
    """Prints the slowest time until all survivors had ended, by the rank that was killed."""
    rng = random.Random(seed)
    times: dict[int, list[float]] = {victim: [] for victim in range(size)}
    for n in range(size * tries):
        victim = n % size
        try:
            times[victim].append(kill_one(how, size, victim, rng))
        except AssertionError as error:
            raise AssertionError(f"{how}, {size} ranks, kill {n} of seed {seed}, rank {victim}: {error}") from None  # fmt: skip
    for victim, seconds in times.items():
        middle = sorted(seconds)[len(seconds) // 2]
        print(f"{how}: rank {victim} of {size} killed {len(seconds)} times: median {middle:.2f} s, slowest {max(seconds):.2f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
