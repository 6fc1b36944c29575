"""Engines of several ranks that make the same steps.

Rank 0 has the requests. Before each step it says which of them came and went since the last one,
in the order in which it took them itself; then all ranks run the same scheduler over the same
allocator, and so plan the same pages. What is sampled, rank 0 says (`quire.models.engine.sampler`).
With each plan rank 0 says a digest of all plans so far, every few steps also of the tables that the
step reads. A rank that has another one stops before it runs the model: it would send tensors of
other sizes, for which gloo ends a process and NCCL waits.

What comes while a step runs waits for its end. So all ranks change their requests between the same
two steps.

How a model or its context is dealt to the ranks is not seen here: it is the same for the engine.
"""

from __future__ import annotations

import copy
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from quire.kvcore import StepPlan

from ..config.fields import shown
from ..engine.batch import LaunchedStep
from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.report import StepReport
from ..engine.request import RequestOutput, SamplingParams
from ..engine.scheduler import ScheduledStep
from ..engine.speculative import Drafter
from ..tokenizer import Tokenizer
from .group import Group
from .launch import Ranks
from .watch import FAILED, RankError

SECONDS_TO_KNOW = 3.0  # until it is known why a call failed
STEP, PLAN, CALL, CLOSE = "step", "plan", "call", "close"


class LockstepEngine(Engine):
    """An engine on one of several ranks: rank 0's is called, the others `follow` it.

    As `Engine`, but what is added or aborted while a step runs takes effect at its end, and after an
    error in a step no rank can go on: every further one raises `RankError`.

    Args:
        model: built for the group of ``ranks``.
        ranks: of the model.

    Attributes:
        check_steps: steps from one comparison of tables to the next.

    Raises:
        ValueError: settings that make ranks differ, and as `Engine`.
    """

    check_steps = 16

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig,
        *,
        ranks: Ranks,
        tokenizer: Tokenizer | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        expect_lockstep(config)
        super().__init__(model, config, tokenizer=tokenizer, drafter=drafter)
        self.ranks, self.group = ranks, ranks.group
        self._taken: list[tuple[Any, ...]] = []  # calls since the last step
        self._waiting_calls: list[tuple[Any, ...]] = []  # that came while a step runs
        self._silent: set[str] = set()  # requests aborted in a step that runs
        self._failed = ""
        self._digest = self._num_steps = 0

    @property
    def unfinished(self) -> frozenset[str]:
        """As `Engine.unfinished`."""
        with self.lock:
            added = {call[3] for call in self._waiting_calls if call[0] == "add"}
            return frozenset((set(self.outputs.unfinished) - self._silent) | added)

    @property
    def has_work(self) -> bool:
        """As `Engine.has_work`."""
        return bool(self.unfinished)

    def abort(self, request_id: str) -> RequestOutput:
        """As `Engine.abort`."""
        with self.lock:
            if not isinstance(request_id, str) or request_id not in self.unfinished:
                raise ValueError(
                    f"request_id: expected an unfinished request, got {shown(request_id)}"
                )
            if not self._turns.is_taken:
                self._taken.append(("abort", request_id))
                return super().abort(request_id)
            for i, call in enumerate(self._waiting_calls):
                if call[0] == "add" and call[3] == request_id:
                    del self._waiting_calls[i]
                    ids = tuple(call[1].tolist())
                    return RequestOutput(request_id, ids, (), "abort", 0, "", 0, 0.0, ())
            # Its step goes on as on other ranks; nobody hears of it any more.
            request = copy.copy(self.outputs.unfinished[request_id][0])
            request.text = copy.copy(request.text)
            self._silent.add(request_id)
            self._waiting_calls.append(("abort", request_id))
            return request.output("abort")

    def everywhere(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(engine, *arguments)`` on all ranks, between two steps; what rank 0's gives.

        Args:
            function: that can be pickled, as can be its arguments.
        """
        with self._turns.take(self._end_aborted):
            self.group.say((CALL, function, arguments))
            return function(self, *arguments)

    def forget_graphs(self) -> None:
        """No step of this rank is replayed any more: what is sent is then counted. For `everywhere`."""
        self._graphs = None

    def follow(self) -> None:
        """Does what rank 0 says, until it is done."""
        while (said := self.group.say())[0] != CLOSE:
            if said[0] == CALL:
                said[1](self, *said[2])
                continue
            if said[0] == PLAN:
                raise RankError(self._drift(said[1]))
            for name, *arguments in said[1]:
                self._take(name, arguments)
            self.step()

    def close(self) -> None:
        """Ends all ranks. No step may follow."""
        with self._turns.take():
            failed = self._failed or self.ranks.watch.verdict()
            if not failed:
                self.group.say((CLOSE,))
            self.ranks.close(failed)
            self._failed = failed or "the engine is closed"

    def _add(
        self, prompt: np.ndarray, params: SamplingParams, request_id: str | None, salt: bytes,
        stream: bool,
    ) -> str:  # fmt: skip
        unfinished = self.unfinished
        if request_id is None:
            waiting = sum(call[0] == "add" for call in self._waiting_calls)
            request_id = str(self._num_added + waiting)
        if request_id in unfinished:
            raise ValueError(
                f"request_id: expected a new id, got {shown(request_id)}, which is unfinished"
            )
        call = ("add", prompt, params, request_id, salt, stream)
        if self._turns.is_taken:
            self._waiting_calls.append(call)
        else:
            super()._add(*call[1:])
            self._taken.append(call)
        return request_id

    def _take(self, name: str, arguments: list[Any]) -> None:
        """Adds or aborts a request on this rank."""
        if name == "add":
            super()._add(*arguments)
        elif arguments[0] in self.outputs.unfinished:
            super().abort(*arguments)

    def _end_aborted(self) -> None:
        super()._end_aborted()
        self._silent.clear()
        calls, self._waiting_calls = self._waiting_calls, []
        for name, *arguments in calls:
            self._take(name, arguments)
        self._taken += calls

    def _step(self) -> StepReport | None:
        watch, first = self.ranks.watch, self.group.rank == 0
        failed = self._failed or watch.verdict()
        if failed:
            raise RankError(failed)
        try:
            watch.is_busy = True
            if first:
                with self.lock:
                    calls, self._taken = self._taken, []
                self.group.say((STEP, calls))
            report = super()._step()
        except BaseException as error:
            waits = isinstance(error, Exception) and not isinstance(error, RankError)
            self._failed = watch.verdict(SECONDS_TO_KNOW if waits else 0.0)
            if self._failed:
                raise RankError(self._failed) from error
            self._failed = f"rank {self.group.rank}: {_described(error)}"
            watch.fail(_described(error))
            raise
        finally:
            watch.is_busy = False
        if report is not None and self._silent:
            for kept in (report.finished, report.deltas):
                kept[:] = [one for one in kept if one.request_id not in self._silent]
        return report

    def _forward(self, step: ScheduledStep) -> LaunchedStep:
        self._agree(step.plan)
        return super()._forward(step)

    def _agree(self, plan: StepPlan) -> None:
        """Raises `RankError` on a rank that has planned another step than rank 0, which does not wait."""
        self._num_steps += 1
        for part in (plan.slots, plan.seq_lens, plan.num_new_tokens, plan.slot_mapping):
            self._digest = zlib.crc32(np.ascontiguousarray(part), self._digest)
        tables = 0
        if self._num_steps % self.check_steps == 0:
            tables = zlib.crc32(self.kv.tables[plan.slots])
        mine = PLAN, self._num_steps, self._digest, tables
        if self.group.say(mine) != mine:
            raise RankError(self._drift(self._num_steps))

    def _drift(self, step: int) -> str:
        return f"step {step}: rank {self.group.rank} planned other steps or pages than rank 0"


def expect_lockstep(config: EngineConfig) -> None:
    """Raises ValueError for settings by which ranks would not make the same steps."""
    if config.host_cache_gib is not None:
        raise ValueError(
            "host_cache_gib: expected None with tensor_parallel_size > 1: copies end at another "
            "time on each rank"
        )


def engine_of_ranks(
    build: Callable[[Group], nn.Module],
    config: EngineConfig,
    *,
    model: Any,
    tokenizer: Tokenizer | None,
    drafter: Drafter | Callable[[Any], Drafter] | None,
    device: torch.device | str | None,
    work: Mapping[str, Any],
) -> LockstepEngine:
    """The engine of rank 0. On other ranks it does not return: they follow, and their process ends.

    Args:
        build: makes the model of this rank.
        config, tokenizer: as of `Engine`.
        model: configuration of the whole model.
        drafter: as of `quire.models.llm.LLM`.
        device, work: as of `Ranks`.

    Raises:
        ValueError: settings that are others on some ranks.
        ValueError, RankError: as `Ranks` and `Engine`.
        SystemExit: on other ranks.
    """
    ranks = Ranks(
        config.tensor_parallel_size,
        device,
        timeout=config.rank_timeout,
        split_context=config.context_parallel_size > 1,
        work=work,
    )
    first = ranks.group.rank == 0
    try:
        expect_same(
            ranks.group,
            {
                **{f"model.{name}": value for name, value in declared(model).items()},
                "device": ranks.group.device.type,
                "dtype": work["dtype"],
                "seed": work["seed"],
                "drafter": getattr(drafter, "__qualname__", type(drafter).__qualname__),
                **declared(config),
            },
        )
        part = build(ranks.group)
        made = drafter(part) if callable(drafter) else drafter
        engine = LockstepEngine(part, config, ranks=ranks, tokenizer=tokenizer, drafter=made)
        if not first:
            engine.follow()
    except BaseException as error:
        verdict = ranks.watch.verdict(SECONDS_TO_KNOW if is_broken(error) else 0.0)
        ranks.close(f"{type(error).__name__}: {error}")
        if not first:
            print(f"quire: rank {ranks.group.rank}: {error}", file=sys.stderr, flush=True)
            raise SystemExit(FAILED) from error
        if verdict and is_broken(error):
            raise RankError(verdict) from error
        raise
    if not first:
        ranks.close()
        raise SystemExit(0)
    return engine


def declared(settings: Any) -> dict[str, Any]:
    """The fields of a dataclass, without what it has worked out of them meanwhile."""
    return {each.name: getattr(settings, each.name) for each in fields(settings)}


def expect_same(group: Group, settings: Mapping[str, Any]) -> None:
    """Raises ValueError, on all ranks, for a setting that is another one on some of them."""
    told = group.all_say({name: str(value) for name, value in settings.items()})
    for name, first in told[0].items():
        for rank, theirs in enumerate(told):
            if theirs.get(name) != first:
                raise ValueError(
                    f"{name}: expected the same on all ranks, got {first} on rank 0 and "
                    f"{theirs.get(name)} on rank {rank}"
                )


def _described(error: BaseException) -> str:
    return str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"


def is_broken(error: BaseException) -> bool:
    """Whether another rank may be why a call failed."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)
