"""Ranks for tests: threads that send each other tensors in place of `quire.models.parallel.group.Group`, and processes that serve a whole module."""

import threading
from collections import Counter
from contextlib import contextmanager

import torch

from quire.models.engine.config import EngineConfig
from quire.models.llm import LLM
from quire.models.loading.random_weights import random_model
from quire.models.parallel.lockstep import CALL, CLOSE, LockstepEngine


class ThreadGroup:
    """One rank of several in this process; sums are in the order of the ranks."""

    def __init__(self, rank, size, shared, split_context=False):
        self.split_context = split_context
        self.rank, self.size, self.device = rank, size, torch.device("cpu")
        self._slots, self._barrier = shared
        self.sent, self.calls = Counter(), Counter()

    def _exchange(self, what):
        self._slots[self.rank] = what
        self._barrier.wait(60)
        found = list(self._slots)
        self._barrier.wait(60)
        return found

    def sum(self, part):
        parts = self._exchange(part.clone())
        part.copy_(torch.stack(parts).sum(0))
        return part

    def gather(self, part, kind="gather"):
        return torch.cat(self._exchange(part.clone()), dim=1)

    def exchange(self, parts):
        return torch.stack([sent[self.rank] for sent in self._exchange(parts.clone())])

    def from_first(self, data):
        return data.copy_(self._exchange(data.clone())[0])

    def say(self, message=None):
        return self._exchange(message)[0]

    def all_say(self, message):
        return self._exchange(message)


def groups(size, **options):
    shared = [None] * size, threading.Barrier(size)
    return [ThreadGroup(rank, size, shared, **options) for rank in range(size)]


def on_ranks(size, work, **options):
    """What ``work(group)`` gives on each of ``size`` ranks."""
    out, failed = [None] * size, []

    def run(group):
        try:
            out[group.rank] = work(group)
        except BaseException as error:
            failed.append(error)
            group._barrier.abort()

    threads = [threading.Thread(target=run, args=(group,)) for group in groups(size, **options)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [e for e in failed if not isinstance(e, threading.BrokenBarrierError)]
    if failed:
        raise (real or failed)[0]
    return out


class Processes:
    """Ranks that are processes, started once, on gloo; engines of any models run on them one after another."""

    def __init__(self, size):
        config = EngineConfig(num_pages=10, tensor_parallel_size=size, rank_timeout=120)
        self.llm = LLM("llama-tiny", engine=config)

    @contextmanager
    def engine(self, config, drafter=None, **settings):
        """settings: of the engine; context_parallel_size splits the context of the group."""
        outer = self.llm.engine
        settings = EngineConfig(tensor_parallel_size=outer.group.size, **settings)
        outer.group.say((CALL, _follow, (config, drafter, settings)))
        inner = _inner(outer, config, drafter, settings)
        yield inner
        inner.group.say((CLOSE,))


def _inner(outer, config, drafter, settings):
    outer.group.split_context = settings.context_parallel_size > 1
    model = random_model(config, seed=5, group=outer.group)
    made = None if drafter is None else drafter(model)
    inner = LockstepEngine(model, settings, ranks=outer.ranks, drafter=made)
    inner.check_steps = 1
    return inner


def _follow(outer, *arguments):
    _inner(outer, *arguments).follow()


def full_forward(engine, ids):
    """For `LockstepEngine.everywhere`."""
    return engine.model.full_forward(ids)


def sent_by_forward(engine, num_tokens):
    """Bytes of each kind of message in a forward pass without a cache that gives logits of all rows."""
    before = engine.group.sent.copy()
    engine.model.full_forward(torch.zeros(num_tokens, dtype=torch.int64))
    return dict(engine.group.sent - before)


def add_a_page_on(engine, rank):
    """One rank's allocator comes to know a prefix that the others do not."""
    if engine.group.rank == rank:
        slot = engine.kv.admit("drift", engine.kv.match(list(range(3, 60))))
        plan = engine.kv.plan([slot], [57])
        engine.kv.commit(plan, list(range(3, 60)))
        engine.kv.release("drift")
