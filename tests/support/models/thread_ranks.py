"""Ranks that are threads of this process: what `quire.models.parallel.group.Group` does, without torch.distributed."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TIMEOUT = 120.0  # seconds: a rank that fails breaks the barrier at once


class ThreadGroup:
    """One rank of `run_ranks`; the attributes and methods of `Group` that a model uses."""

    def __init__(
        self, rank: int, size: int, shared: dict[str, Any], *, split_context: bool
    ) -> None:
        self.rank, self.size, self.split_context = rank, size, split_context
        self._cells, self._barrier = shared["cells"], shared["barrier"]

    def _all(self, value: Tensor) -> list[Tensor]:
        self._cells[self.rank] = value.clone()
        self._barrier.wait(TIMEOUT)
        found = list(self._cells)
        self._barrier.wait(TIMEOUT)
        return found

    def sum(self, part: Tensor) -> Tensor:
        return part.copy_(torch.stack(self._all(part)).sum(0))

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._all(part), 1)

    def exchange(self, parts: Tensor) -> Tensor:
        return torch.stack([sent[self.rank] for sent in self._all(parts)])


def run_ranks(size: int, work: Callable[[ThreadGroup], Any], *, split_context: bool) -> list[Any]:
    """What ``work(group)`` returns on each rank; raises what any rank raised."""
    shared = {"cells": [None] * size, "barrier": threading.Barrier(size)}
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(rank, size, shared, split_context=split_context))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            shared["barrier"].abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
