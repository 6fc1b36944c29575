"""What callers say to the tiers of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from quire.kvcore.tier import Answer
from quire.kvcore.tier.hints import Intent

from .input_processor import InputProcessor
from .output_processor import OutputProcessor
from .request import SamplingParams
from .tiering import EngineTiers

if TYPE_CHECKING:
    from .batch import LaunchedStep
    from .report import StepReport
    from .scheduler import ScheduledStep, Scheduler


class TierCalls:
    """The part of `Engine` that no request needs.

    Attributes:
        tiers: what is behind the pool; None = nothing.
        scheduler: whose requests wait for it.
        inputs: checks prompts.
        outputs: the unfinished requests.
    """

    tiers: EngineTiers | None
    scheduler: Scheduler
    inputs: InputProcessor
    outputs: OutputProcessor
    _expect_between_steps: Callable[[str], None]
    _in_flight: LaunchedStep | None
    _receive: Callable[[LaunchedStep], dict[str, Any]]
    _report: Callable[..., StepReport]

    def hint(
        self,
        prompt_token_ids: Sequence[int] | str,
        intent: Intent,
        *,
        salt: bytes = b"",
        ttl: float | None = None,
        until: float | None = None,
        priority: int = 0,
        max_bytes: int | None = None,
    ) -> Answer:
        """Says what the caller intends with a prefix. Outputs never change.

        Args:
            prompt_token_ids: of the prefix; or the id of an unfinished request: what is cached yet
                of its tokens so far, with its salt.
            intent: "prefetch" = it is wanted soon: its copies begin at once; "demote" = a pause
                begins: it leaves the pool first; "retain" = it is kept for ``ttl`` seconds, or
                ``until``; "release" = none of that any more. See `quire.kvcore.tier.Tiers.hint`.
            salt: of its requests.
            ttl, until, priority: for "retain"; until: seconds on the clock of `time.monotonic`;
                what has a lower priority goes before it.
            max_bytes: for "prefetch".

        Raises:
            ValueError: an engine without tiers, an unknown request, or arguments out of range.
        """
        tiers = self.tiers
        if tiers is None:
            raise ValueError("hint: expected an engine with host_cache_gib or disk_cache")
        is_request = isinstance(prompt_token_ids, str)
        if not is_request:
            prompt = self.inputs.check(prompt_token_ids, SamplingParams())
        if until is not None and ttl is not None:
            raise ValueError(f"ttl, until: expected one of them, got {ttl!r} and {until!r}")
        self._expect_between_steps("hint")
        with torch.cuda.device_of(tiers.copier.addresses):
            if is_request:
                request = self.outputs.unfinished_sample(prompt_token_ids)
                prompt, salt = request.tokens, request.salt
            now = time.monotonic()
            ttl = ttl if until is None else until - now
            return tiers.hint(
                prompt, intent, salt=salt, now=now, ttl=ttl, priority=priority, max_bytes=max_bytes
            )

    def _drop_step(self, step: ScheduledStep) -> StepReport:
        """A load failed that a step ran ahead of: its requests wait again, and find what is left.
        The tokens of the step before are good."""
        before = self._in_flight
        delivered = {} if before is None else self._receive(before)
        admitted = self.scheduler.take_back_admitted(step)
        self.scheduler.take_back(set(step.requests) - admitted)
        self.tiers.drop_lost()
        return self._report(**delivered)

    def close(self) -> None:
        """Waits for what is copied, and writes what is cached to `EngineConfig.disk_cache`, whose
        folder is free then, even where an error is raised. No step may follow: it raises
        RuntimeError. Without tiers, and a second time, it does nothing.
        """
        tiers = self.tiers
        if tiers is not None:
            self._expect_between_steps("close")
            with torch.cuda.device_of(tiers.copier.addresses):
                tiers.close()
