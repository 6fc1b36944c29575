"""Ranks that are threads of one process; their collectives exchange tensors in its memory."""

import pickle
import threading
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from quire.models.engine.config import EngineConfig
from quire.models.engine.engine import Engine
from quire.models.loading.random_weights import random_model
from quire.models.parallel.channel import Channel
from quire.models.parallel.group import Group
from quire.models.parallel.launch import local_store
from quire.models.parallel.steps import CLOSE, StepSender, follow


class ThreadGroup(Group):
    """One rank of several in this process; sums are in the order of the ranks.

    sent: bytes given to each method.
    """

    def __init__(self, channel, shared):
        self.rank, self.size = channel.rank, channel.size
        self.device, self.channel = torch.device("cpu"), channel
        self._slots, self._barrier = shared
        self.sent = Counter()
        self.calls = Counter(dict.fromkeys(("sum", "gather", "from_first", "step"), 0))

    def _exchange(self, what):
        self._slots[self.rank] = what
        self._barrier.wait(60)
        found = list(self._slots)
        self._barrier.wait(60)
        return found

    def _count(self, kind, data):
        self.calls[kind] += 1
        self.sent[kind] += data.numel() * data.element_size()

    def sum(self, part):
        self._count("sum", part)
        parts = self._exchange(part.clone())
        part.copy_(torch.stack(parts).sum(0))
        return part

    def gather(self, part):
        self._count("gather", part)
        return torch.cat(self._exchange(part.clone()), dim=1)

    def from_first(self, data):
        self._count("from_first", data)
        return data.copy_(self._exchange(data.clone())[0])

    def abort(self):
        self._barrier.abort()
        self.channel.send(pickle.dumps((CLOSE,)))


def groups(size):
    store, shared = local_store(size), ([None] * size, threading.Barrier(size))

    def check():
        if shared[1].broken:
            raise threading.BrokenBarrierError

    channels = [Channel(rank, size, store.clone(), check) for rank in range(size)]
    return [ThreadGroup(channel, shared) for channel in channels], store


def on_ranks(size, work):
    """Results of ``work(group)`` on each of ``size`` ranks."""
    out, failed = [None] * size, []

    def run(group):
        try:
            out[group.rank] = work(group)
        except BaseException as error:
            failed.append(error)
            group.abort()

    ranks, _store = groups(size)  # connections do not keep the store
    threads = [threading.Thread(target=run, args=(group,)) for group in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in failed if not isinstance(error, threading.BrokenBarrierError)]
    if failed:
        raise (real or failed)[0]
    return out


class ThreadRanks:
    """In place of `quire.models.parallel.launch.Ranks`: no processes, and nothing is noticed."""

    ended = ""

    def __init__(self, group):
        self.group, self.heartbeat = group, SimpleNamespace(verdict="")

    @contextmanager
    def failing(self):
        try:
            yield
        except BaseException as error:
            self.close(f"rank {self.group.rank} failed: {type(error).__name__}: {error}")
            raise

    def close(self, failed=""):
        self.ended = failed or "closed"
        if failed:
            self.group.abort()


def run_on_ranks(size, config, work, *, drafter=None, seed=5, **settings):
    """Result of ``work(engine)`` on rank 0, whose steps the other ranks follow."""
    settings = EngineConfig(tensor_parallel_size=size, **settings)

    def rank(group):
        model = random_model(config, seed=seed, group=group)
        made = None if drafter is None else drafter(model)
        if group.rank:
            return follow(group, model, settings, made)
        engine = Engine(model, settings, drafter=made, ranks=StepSender(ThreadRanks(group)))
        found = work(engine)
        engine.close()
        return found

    return on_ranks(size, rank)[0]
