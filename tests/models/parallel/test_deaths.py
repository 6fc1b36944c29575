"""A rank that is killed or stopped, at the start, in a load and in a step, ends all of them by name and in time."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from quire.models.parallel import heartbeat
from quire.models.parallel.heartbeat import BEAT, Heartbeat
from tests.support.models.rank_program import NAMED

ROOT = Path(__file__).resolve().parents[3]
# RANK_TIMEOUT by phase: a rank is silent while it imports torch, 10 s on a loaded machine.
TIMEOUT = {"start": 8.0, "load": 20.0, "step": 20.0}
WITHIN = 30.0  # seconds after it; 5 on a machine with a free core
CASES = [(s, rank) for s in (signal.SIGKILL, signal.SIGSTOP) for rank in (0, 1)]


class Program:
    """Two ranks; both are gone when this ends."""

    def __init__(self, timeout):
        self.timeout = timeout

    def __enter__(self):
        command = [sys.executable, "-m", "tests.support.models.rank_program", str(self.timeout)]
        self.first = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.other = int(self.first.stdout.readline())  # it has just been started
        self.handle = os.pidfd_open(self.other)
        return self

    def __exit__(self, *_):
        if not self.other_has_ended(0):
            os.kill(self.other, signal.SIGKILL)
        self.first.kill()
        os.close(self.handle)
        self.first.communicate()

    def other_has_ended(self, seconds):
        return bool(select.select([self.handle], [], [], seconds)[0])


def hit(number, rank, phase, said):
    """Output of the ranks after ``rank`` got the signal; an AssertionError if they do not end."""
    most = TIMEOUT[phase] + WITHIN
    with Program(TIMEOUT[phase]) as ranks:
        for line in PHASES[phase]:
            assert ranks.first.stdout.readline() == line
        time.sleep(0.3)  # at the start it imports torch
        os.kill((ranks.first.pid, ranks.other)[rank], number)
        begin = time.monotonic()
        assert ranks.other_has_ended(most), "rank 1 runs"
        if rank == 1:
            while not (text := ranks.first.stdout.readline()).startswith("named: "):
                assert text in PHASES["step"]
            assert time.monotonic() - begin < most
            said[number, rank] = ranks.first.wait(60), text  # to leave Python takes time too
            return
        if number == signal.SIGSTOP:
            assert ranks.first.poll() is None
            ranks.first.kill()
        said[number, rank] = EXITED, ranks.first.communicate()[1].splitlines()[-1]


EXITED = "rank 1 has ended"
PHASES = {"start": [], "load": ["loading\n"], "step": ["loading\n", "ready\n"]}  # lines before


@pytest.mark.parametrize("phase", PHASES)
def test_each_rank_that_is_killed_or_stopped(phase):
    """All cases at once: they wait most of the time."""
    said = {}
    threads = [
        threading.Thread(target=hit, args=(*case, phase, said), daemon=True) for case in CASES
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said.keys() == set(CASES)  # else a thread has failed, and pytest shows it
    for (_, rank), (status, text) in said.items():
        assert f"rank {rank} died: " in text
        assert status == (NAMED if rank == 1 else EXITED)


OWN = """
import sys
import torch.distributed as dist
from quire.models import LLM, EngineConfig, RankError, SamplingParams
port, rank = sys.argv[1:]
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2)
llm = LLM("llama-tiny", engine=EngineConfig(num_pages=100, tensor_parallel_size=2), device="cpu")
print("ready", flush=True)
params = SamplingParams(max_tokens=200, ignore_eos=True)
try:
    while True:
        llm.generate([[5, 6, 7], [8, 9]], params, progress=False)
except RankError as error:
    print(error)
"""


def test_a_rank_of_another_launcher_is_killed_in_a_step():
    """Its process is not rank 0's: a collective fails, and then silence says which rank it is."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", OWN, port]
    first, other = (
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    )
    assert first.stdout.readline() == "ready\n"
    time.sleep(0.3)
    other.kill()
    assert first.communicate(timeout=60)[0].startswith("rank 1 died: nothing was heard")
    other.communicate()


@pytest.fixture
def beats(monkeypatch):
    """Heartbeats of two ranks in this process, which must not end it."""
    ended, gave_up, store = threading.Event(), threading.Event(), dist.HashStore()
    monkeypatch.setattr(heartbeat.os, "_exit", lambda status: ended.set())
    first, second = (Heartbeat(rank, 2, 2.0, store, {}, gave_up.set) for rank in (0, 1))
    yield first, second, ended, gave_up
    first.leave()
    second.leave()


def verdict(one, seconds):
    until = time.monotonic() + seconds
    while not one.verdict and time.monotonic() < until:
        time.sleep(0.05)
    return one.verdict


def test_a_rank_that_makes_no_progress(beats):
    """Only in a step; the one with the fewest calls is it."""
    first, second, ended, gave_up = beats
    first.calls, second.calls = lambda: 7, lambda: 6
    assert not verdict(first, 3.5)
    first.is_stepping = True
    assert verdict(first, 6.0) == "rank 1 is stuck: no progress for 2 s"
    assert ended.wait(4 * BEAT) and gave_up.wait(2 * BEAT)
    assert second.verdict == first.verdict


def test_a_rank_that_fails(beats):
    first, second, ended, _ = beats
    second.leave("ValueError: " + "é" * 1000)
    assert verdict(first, 3.0).startswith("rank 1 failed: ValueError: é")
    assert not ended.is_set()
