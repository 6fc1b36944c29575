"""The engine: continuous batching on one model, one cache pool and one device.

One step, `Engine._step`::

    drafts -> Scheduler.schedule    requests, their new tokens, and `KVCache.plan` of their pages
           -> BatchBuilder.build    the plan as tensors (or `DecodeGraphs` for this and the next)
           -> model                 reads pages as they were, writes the rows that have a slot
           -> Sampler               the largest logit or a draw, in one copy to the host
           -> speculative.verify    where there are drafts: which of them stay
           -> KVCache.commit        the plan becomes real
           -> OutputProcessor       appends each token to its request, whose next step computes it;
                                    after the last one `KVCache.release`

With `EngineConfig.async_scheduling` a step is launched before the tokens of the one before are on
the host: its input ids are placeholders, which the device replaces (`BatchBuilder.sampled`). Then
these tokens are waited for, the commit takes them as the step's input, and they are delivered. A
request that they end has computed a row whose token is dropped.

A model has ``config`` (vocab_size, max_position_embeddings, eos_token_ids, activation_size),
``dtype``, ``device``, ``make_cache`` (`quire.models.engine.memory.model_cache`), and is called as
``model(input_ids, positions, attn, pool, logits_rows=, impl=)``, with ``return_hidden=True`` too
where a `ModelDrafter` reads its hidden states.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..config.fields import shown
from ..interrupts import interrupts_wait
from ..tokenizer import Tokenizer
from . import speculative
from .batch import LaunchedStep
from .config import EngineConfig
from .input_processor import InputProcessor
from .output_processor import OutputProcessor
from .outputs import RequestOutput
from .parts import make_parts
from .report import DELIVER, DRAFT, MODEL, SAMPLE, TENSORS, WAIT, EngineTotals, StepReport
from .request import SamplingParams
from .sampler import NewTokens
from .scheduler import ScheduledStep
from .speculative import Drafter, ModelDrafter, SamplingDrafter

if TYPE_CHECKING:
    from ..parallel.lead import Lead


class Engine:
    """Runs many requests at once. ``while engine.has_work: engine.step()``.

    What fails in one request, such as its text that cannot be decoded, ends that request alone,
    with finish_reason "error"; logits that give no token (NaN, +inf, or -inf alone) end it with
    "nan", and empty the prefix cache of all that no running request needs, since nobody knows which
    of its rows are bad.

    An engine belongs to one thread: only `check` may be called from others. A server queues what its
    other threads ask for, and adds and aborts requests between two steps. A call that comes while a
    step runs, from another thread or from within the step, raises RuntimeError.

    Args:
        model: see the docstring of the module.
        config: settings; None = `EngineConfig()`.
        tokenizer: for stop strings and streamed text.
        drafter: speculates; None = one token a step.
        ranks: makes the other ranks run the steps of this one, which is rank 0; None = one rank.

    Attributes:
        kv: the allocator, for its ``describe`` and ``stats``.
        pool: the page tensors.
        tiers: what is behind them; None = nothing.
        memory: how the pool was sized.
        inputs: checks prompts and makes requests of them.
        outputs: the unfinished requests.
        totals: sums over steps.
        clock: of the step that runs.

    Raises:
        ValueError: settings out of range or of more than the memory, or a pool that does not hold
            one request.
        NotImplementedError: what the model or the kernels cannot, naming what they can.
    """

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        drafter: Drafter | None = None,
        ranks: Lead | None = None,
    ) -> None:
        config = config or EngineConfig()
        self.model, self.drafter = model, drafter
        parts = make_parts(model, config, drafter)
        runner = parts.runner
        self.clock, self._idle, self.totals = parts.clock, parts.idle, EngineTotals()
        self.memory, self.kv, self.pool = runner.memory, runner.kv, runner.pool
        self.tiers = runner.tiers
        self.max_model_len = self.memory.max_model_len
        self.scheduler, self._builder, self._sampler = (
            parts.scheduler,
            runner.builder,
            parts.sampler,
        )
        self._run, self._graphs, self._is_async = runner.run, runner.graphs, runner.is_async
        self._observer = drafter if isinstance(drafter, ModelDrafter) else None
        self._drafts_are_drawn = config.rejection_sample_method == "standard" and isinstance(
            drafter, SamplingDrafter
        )
        self._in_flight: LaunchedStep | None = None  # its tokens are not known yet
        self.outputs = OutputProcessor(self.scheduler)
        self.inputs = InputProcessor(
            model, self.max_model_len, tokenizer=tokenizer, seed=config.seed
        )
        self._num_added = 0
        self._is_stepping = False
        self._ranks = ranks
        if ranks is not None:
            ranks.attach(self.kv, runner.tables, drafter)

    @property
    def unfinished(self) -> frozenset[str]:
        """Ids of all requests that are waiting or running."""
        return frozenset(self.outputs.unfinished)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.outputs.unfinished)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        salt: bytes = b"",
        stream: bool = False,
    ) -> str:
        """Queues a request.

        With ``params.n`` samples, the others start when the prompt of the first is computed, and
        share its pages.

        Args:
            prompt_token_ids: at least one id, all below vocab_size, and fewer than max_model_len.
            params: how to generate; None = greedily.
            request_id: unique among unfinished requests; None = a running number.
            salt: requests with different salts never share cached prefixes.
            stream: report new tokens (and, with a tokenizer, text) in `StepReport.deltas`.

        Returns:
            The request id.

        Raises:
            ValueError: arguments that break these rules, or samples that do not fit the memory.
            RuntimeError: called while a step runs.
        """
        self._expect_between_steps("add_request")
        params = SamplingParams() if params is None else params
        prompt = self.check(prompt_token_ids, params)
        if request_id is not None and not isinstance(request_id, str):
            raise ValueError(f"request_id: expected a string or None, got {shown(request_id)}")
        try:
            return self._add(prompt, params, request_id, salt, stream)
        except (MemoryError, RecursionError) as error:
            raise ValueError(
                f"prompt_token_ids: expected what fits the memory, got {len(prompt)} ids for "
                f"n={params.n} samples: {type(error).__name__}: {error}"
            ) from error

    def _add(
        self, prompt: np.ndarray, params: SamplingParams, request_id: str | None, salt: bytes,
        stream: bool,
    ) -> str:  # fmt: skip
        if request_id is None:
            request_id = str(self._num_added)
        if request_id in self.outputs.unfinished:
            raise ValueError(
                f"request_id: expected a new id, got {shown(request_id)}, which is unfinished"
            )
        arrival = time.perf_counter()
        match = self.kv.match(prompt, salt=salt)
        self.totals.hashing += time.perf_counter() - arrival
        samples = self.inputs.samples(
            prompt,
            params,
            request_id=request_id,
            match=match,
            salt=salt,
            stream=stream,
            arrival=arrival,
        )
        self.outputs.add(samples)
        self._num_added += 1
        return request_id

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> np.ndarray:
        """The prompt as an array of its own, [num_tokens] int32. Queues nothing.

        Raises:
            ValueError: as `add_request`.
        """
        return self.inputs.check(prompt_token_ids, params)

    def abort(self, request_id: str) -> RequestOutput:
        """Ends a request, all of its samples, with what it has so far.

        Returns:
            The output of its first unfinished sample.

        Raises:
            ValueError: an unknown id.
            RuntimeError: called while a step runs.
        """
        self._expect_between_steps("abort")
        return self.outputs.abort(request_id)

    @torch.inference_mode()
    def step(self) -> StepReport | None:
        """Runs one step of the batch; None when there is nothing to do.

        Ctrl-C is held back until the step has ended; its report is then lost, and nothing else.

        Raises:
            Exception: what the model or a drafter in it raises, such as that the device is out of
                memory; then nothing is lost, and the next call tries again.
            RuntimeError: called while a step runs.
        """
        self._expect_between_steps("step")
        with interrupts_wait():
            self._is_stepping = True
            try:
                ranks = nullcontext() if self._ranks is None else self._ranks.step()
                # Launches, streams and captures are those of the current device.
                with torch.cuda.device_of(self._builder.tables), ranks:
                    return self._step()
            finally:
                self._is_stepping = False

    def _expect_between_steps(self, name: str) -> None:
        if self._is_stepping:
            raise RuntimeError(
                f"{name}: expected to be called between steps, got a call from within one, or "
                "from a second thread"
            )

    def _step(self) -> StepReport | None:
        self.clock.start()
        before, step, delivered = self._in_flight, None, {}
        if before is not None:
            step = self.scheduler.schedule_ahead()
            self.outputs.end_failed()
            if step is None:
                delivered = self._receive(before)
        while step is None:
            self._draft()
            step = self.scheduler.schedule()
            self.outputs.end_failed()
            if step is None:
                self._idle.stop()
                if delivered or self.outputs.has_finished:
                    return self._report(**delivered)
                if self.tiers is None or not self.tiers.is_loading:
                    return None
                self.tiers.wait()  # all who wait, wait for pages
        try:
            launched = self._forward(step)
            due = self._in_flight if self._is_async else launched
            new = [] if due is None else self._tokens(due)
            if self._in_flight is not None:
                launched.learn(self._in_flight.ids)
        except BaseException:
            self._take_back(step)
            raise
        with self.scheduler.allocating:
            # There are no pages to copy: `BatchBuilder` refuses groups with states.
            self.kv.commit(step.plan, launched.input_ids, launched.accepted)
        if due is not None:
            delivered = self._deliver(due, new, launched if self._is_async else None)
        if self._is_async:
            self._in_flight = launched
            launched.set_placeholders()
        return self._report(**delivered)

    def _forward(self, step: ScheduledStep) -> LaunchedStep:
        """Runs the model and samples; on a GPU, all of it begins and nothing is waited for."""
        plan, clock = step.plan, self.clock
        clock.switch(TENSORS)
        self._idle.begin()
        input_ids, ready = step.inputs()
        requests, has_drafts = [step.requests[i] for i in ready], any(step.num_drafts)
        rows = step.last_rows(ready)
        if has_drafts:
            rows = speculative.rows_with_drafts(step, ready)
        batch = shape = None
        if self._graphs is not None and len(rows) == len(input_ids):  # all decode
            shape = self._graphs.shape_of(plan)
        if self._ranks is not None:
            plan = self._ranks.run(plan, input_ids, rows, shape)
        if shape is None or self._observer is not None:
            batch = self._builder.build(plan, input_ids, rows)
        clock.switch(MODEL)
        if shape is not None:
            out = self._graphs(shape, plan, input_ids)
        else:
            out = self._run(batch.input_ids, batch.positions, batch.attn, batch.logits_rows)
        logits, hidden = out if self._observer is not None else (out, None)
        clock.switch(SAMPLE)
        num_rows = [1 + step.num_drafts[i] for i in ready]
        # Drafts that only the device knows come along with the tokens.
        unknown = max(0, -int(input_ids.min())) if has_drafts else 0
        sampled = self._sampler(logits, requests, num_rows, self._builder.sampled[:unknown])
        if self._is_async:
            self._builder.sampled[: len(ready)] = sampled.ids
            if self._ranks is not None:
                self._ranks.group.from_first(self._builder.sampled[: len(ready)])
        self._idle.end()
        return LaunchedStep(step, ready, input_ids, sampled, batch, hidden)

    def _tokens(self, launched: LaunchedStep) -> list[NewTokens]:
        """Waits for the tokens of a step, and verifies its drafts."""
        step, ready, clock = launched.step, launched.ready, self.clock
        clock.switch(WAIT)
        sampled = launched.sampled.wait()
        clock.switch(DELIVER)
        launched.ids = sampled.ids
        if any(step.num_drafts):
            launched.learn(sampled.drafts)
            new, launched.accepted = speculative.verify(step, ready, sampled)
        else:
            new = sampled.one_each(launched.requests)
        if self._observer is not None:
            clock.switch(MODEL)
            speculative.show_step(
                self._observer, step, launched.batch, launched.hidden, sampled, launched.accepted
            )
            self._idle.end()
            clock.switch(DELIVER)
        return new

    def _receive(self, launched: LaunchedStep) -> dict[str, Any]:
        """Waits for the tokens that nothing was launched behind, and delivers them."""
        try:
            new = self._tokens(launched)
        except BaseException:
            self._take_back()
            raise
        self._in_flight = None
        return self._deliver(launched, new)

    def _deliver(
        self, launched: LaunchedStep, new: list[NewTokens], ahead: LaunchedStep | None = None
    ) -> dict[str, Any]:
        """Requests get the tokens of a step that ``ahead`` runs behind; returns what to report."""
        wanted = [tokens for tokens in new if tokens.request not in launched.taken_back]
        generated, bad = self.outputs.deliver(wanted, time.perf_counter())
        if bad:
            # Any row so far may be NaN: none may be found, nor have been by those admitted since.
            if ahead is not None:
                ahead.taken_back = self.scheduler.take_back_admitted(ahead.step)
            self.scheduler.clear_cache()
        self.clock.switch(DELIVER)
        accepted = sum(len(tokens.ids) - 1 for tokens in new)
        return {"num_generated": generated, "num_accepted": accepted, **launched.step.numbers()}

    def _take_back(self, step: ScheduledStep | None = None) -> None:
        """A step failed: its requests, and those whose tokens are not known, wait again."""
        self._idle.stop()
        requests = [] if step is None else [*step.requests]
        before, self._in_flight = self._in_flight, None
        self.scheduler.take_back([*requests, *(before.step.requests if before else ())])
        if before is not None:
            # Its tokens would have said whether its rows may be found.
            self.scheduler.clear_cache()
        self.outputs.end_failed()

    def close(self) -> None:
        """End the other ranks, and wait for the copies of the host tier. No step may follow: it
        raises RuntimeError. Without ranks and host tier, and a second time, it does nothing.
        """
        self._expect_between_steps("close")
        if self.tiers is not None:
            with torch.cuda.device_of(self.tiers.copier.addresses):
                self.tiers.close()
        if self._ranks is not None:
            self._ranks.close()

    def _report(self, **numbers: Any) -> StepReport:
        """What ended and was streamed since the last report, and the step that gave its tokens."""
        finished, deltas = self.outputs.take()
        report = StepReport.of(self.clock, finished, deltas, self._idle.take(), **numbers)
        self.totals.add(report)
        return report

    def _draft(self) -> None:
        """Asks the drafter for the requests that decode next."""
        if self.drafter is None:
            return
        before = self.clock.switch(DRAFT if self._observer is None else MODEL)
        if self._observer is not None:
            self._idle.begin()
        failed = speculative.set_drafts(
            self.drafter,
            self.scheduler.decoding(),
            draws=self._drafts_are_drawn,
            vocab_size=self.model.config.vocab_size,
            sampled=self._builder.sampled,
        )
        for request, error in failed:
            self.scheduler.fail(request, error)
        self.clock.switch(before)
