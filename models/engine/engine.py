"""The engine: continuous batching on one model, one cache pool and one device.

One step, `Engine._step`::

    drafts -> Scheduler.schedule    requests, their new tokens, and `KVCache.plan` of their pages
           -> ModelRunner.run       reads pages as they were, writes the rows that have a slot
                                    (DeepSeek-V4 writes first)
           -> Sampler               the largest logit or a draw, in one copy to the host
           -> Step.verify           accepted drafts, if any, and the next tokens
           -> KVCache.commit        the plan becomes real
           -> Scheduler.deliver     appends each token to its request, whose next step computes it;
                                    after the last one `KVCache.release`

With `EngineConfig.async_scheduling` a step is launched before the tokens of the previous step are
on the host. Its input ids are placeholders, which the device replaces (`BatchBuilder.sampled`).
`commit` is then of the step just launched, `verify` and `deliver` are of the one before.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..config.fields import shown
from ..tokenizer import TextStream, Tokenizer, decode_of
from .config import EngineConfig
from .memory import max_prompt_rows
from .outputs import NewTokens, RequestOutput
from .report import (
    ALLOCATOR,
    DELIVER,
    DRAFT,
    MODEL,
    SAMPLE,
    TENSORS,
    WAIT,
    EngineTotals,
    StepReport,
)
from .request import Request, SamplingParams, checked_prompt
from .runner import ModelRunner
from .sampler import Sampler, derived_seed
from .scheduler import Scheduler, Step
from .speculative import Drafter, set_drafts

if TYPE_CHECKING:
    from ..parallel.steps import StepSender


class Engine:
    """Runs many requests at once. ``while engine.has_work: engine.step()``.

    An error in one request, such as text that cannot be decoded, ends that request alone, with
    finish_reason "error". Logits that give no token (NaN, +inf, or -inf alone) end it with "nan".
    The prefix cache then drops all rows that no running request needs.

    An engine belongs to one thread; only `check` may be called from others. A call that comes while
    a step runs, from another thread or from within the step, raises RuntimeError.

    Args:
        model: has ``config`` (vocab_size, max_position_embeddings, eos_token_ids,
            activation_size), ``dtype``, ``device`` and ``make_cache`` (`model_cache`). It is called
            as ``model(input_ids, positions, attn, pool, logits_rows=, impl=)``, with
            ``return_hidden=True`` too where a `DeviceDrafter` reads its hidden states.
        config: settings; None = `EngineConfig()`.
        tokenizer: for texts of outputs, stop strings and streams.
        drafter: speculates; None = one token a step.
        ranks: makes the other ranks run the steps of this one, which is rank 0; None = one rank.

    Attributes:
        kv: the allocator, for its ``describe`` and ``stats``.
        pool: the page tensors, as the model's cache allocated them.
        host_tier: the host tier; None = none.
        memory: the `MemoryPlan`, with the pages of the pool and their bytes.
        scheduler: the unfinished requests.
        totals: sums over steps.

    Raises:
        ValueError: settings out of range or too large for the memory, or a pool that does not hold
            one request.
        NotImplementedError: settings that the model or the kernels do not support.
    """

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        drafter: Drafter | None = None,
        ranks: StepSender | None = None,
    ) -> None:
        config = config or EngineConfig()
        self.model, self.drafter, self.tokenizer = model, drafter, tokenizer
        try:
            self.runner = runner = ModelRunner(model, config, drafter)
            self._sampler = Sampler(
                model.config.vocab_size,
                model.device,
                runner.builder.sampled,
                rejection_sample_method=config.rejection_sample_method,
                impl=runner.impl,
            )
        except MemoryError as error:
            raise ValueError(f"config: expected settings that fit the memory: {error}") from error
        self.clock, self.totals = runner.clock, EngineTotals()
        self.memory, self.kv, self.pool = runner.memory, runner.kv, runner.pool
        self.host_tier, self.max_model_len = runner.host_tier, runner.memory.max_model_len
        self.scheduler = Scheduler(
            self.kv,
            self.clock,
            config,
            self.host_tier,
            max_prompt_rows=max_prompt_rows(model.config.vocab_size),
        )
        is_standard = config.rejection_sample_method == "standard"
        self._drafts_are_drawn = is_standard and hasattr(drafter, "sample")
        self._in_flight: Step | None = None  # launched, its tokens are not known yet
        self._seeds = np.random.default_rng(config.seed)
        self._num_added = 0
        self._is_stepping = self._is_closed = False
        self._ranks = ranks
        if ranks is not None:
            ranks.attach(self.kv, runner.tables, drafter)

    @property
    def unfinished(self) -> frozenset[str]:
        """Ids of all requests that are waiting or running."""
        return frozenset(self.scheduler.unfinished)

    @property
    def has_work(self) -> bool:
        """True if any request is unfinished."""
        return bool(self.scheduler.unfinished)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        salt: bytes = b"",
        stream: bool = False,
    ) -> str:
        """Queue a request. Its ``params.n`` samples share the pages of the prompt.

        Args:
            prompt_token_ids: at least one id, all below vocab_size, and fewer than max_model_len.
            params: sampling parameters; None = greedy.
            request_id: unique among unfinished requests; None = a running number.
            salt: requests with different salts never share cached prefixes.
            stream: report new tokens (and, with a tokenizer, text) in `StepReport.deltas`.

        Returns:
            The request id.

        Raises:
            ValueError: arguments that break these rules, or samples that do not fit the memory.
            RuntimeError: called while a step runs, or after `close`.
        """
        self._expect_between_steps("add_request", is_open=True)
        params = SamplingParams() if params is None else params
        prompt = self.check(prompt_token_ids, params)
        if request_id is None:
            request_id = str(self._num_added)
        if not isinstance(request_id, str) or request_id in self.scheduler.unfinished:
            raise ValueError(
                f"request_id: expected a new id, a string or None, got {shown(request_id)}"
            )
        arrival = time.perf_counter()
        match = self.kv.match(prompt, salt=salt)
        self.totals.hashing += time.perf_counter() - arrival
        seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
        eos = () if params.ignore_eos else self.model.config.eos_token_ids
        stop_ids = frozenset(params.stop_token_ids) | frozenset(eos)
        decode = None
        if self.tokenizer is not None:
            decode = decode_of(self.tokenizer, params.skip_special_tokens)
        has_text = decode is not None and (stream or params.stop)
        prompt_logprobs = None if params.prompt_logprobs is None else []
        samples = [
            Request(
                request_id=request_id,
                prompt_token_ids=prompt,
                params=params,
                capacity=min(len(prompt) + params.max_tokens, self.max_model_len),
                stop_ids=stop_ids,
                salt=salt,
                arrival=arrival,
                match=match,
                sample=sample,
                seed=derived_seed(seed, sample),
                text=TextStream(decode, params.stop, stop_ids) if has_text else None,
                decode=decode,
                stream=stream,
                prompt_logprobs=prompt_logprobs,
            )
            for sample in range(params.n)
        ]
        self.scheduler.add(samples)
        self._num_added += 1
        return request_id

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> np.ndarray:
        """A copy of the prompt, [num_tokens] int32. Queues nothing.

        Raises:
            ValueError: the errors of `add_request`.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params: expected SamplingParams, got {shown(params)}")
        prompt = checked_prompt(prompt_token_ids, self.model.config.vocab_size, self.max_model_len)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: expected no strings, as this engine has no tokenizer")
        return prompt

    def abort(self, request_id: str) -> RequestOutput:
        """End a request with all its samples; return the output of the first unfinished one.

        Raises:
            ValueError: an unknown id.
            RuntimeError: called while a step runs.
        """
        self._expect_between_steps("abort")
        return self.scheduler.abort(request_id)

    def close(self) -> None:
        """End the other ranks and wait for the host tier; no request or step may follow."""
        self._expect_between_steps("close")
        self._is_closed = True
        if self.host_tier is not None:
            self.host_tier.close()
        if self._ranks is not None:
            self._ranks.close()

    def _expect_between_steps(self, name: str, *, is_open: bool = False) -> None:
        if self._is_stepping:
            raise RuntimeError(
                f"{name}: expected to be called between steps, got a call from within one, or "
                "from a second thread"
            )
        if is_open and self._is_closed:
            raise RuntimeError(f"{name}: expected an engine that is open, got one after `close`")

    @torch.inference_mode()
    def step(self) -> StepReport | None:
        """Run one step of the batch; None when there is nothing to do.

        Ctrl-C is held back until the step has ended; its report is then lost, and nothing else. A
        second one is raised at once, wherever the step is: use the engine no more.

        Raises:
            Exception: an error of the model, or of a drafter in it, such as a device out of memory;
                then nothing is lost, and the next call tries again (on ranks it raises RankError).
            RuntimeError: called while a step runs, or after `close`.
        """
        self._expect_between_steps("step", is_open=True)
        with interrupts_wait():
            self._is_stepping = True
            try:
                ranks = nullcontext() if self._ranks is None else self._ranks.step()
                # Launches, streams and captures are those of the current device.
                with torch.cuda.device_of(self.runner.builder.tables), ranks:
                    return self._step()
            finally:
                self._is_stepping = False

    def _step(self) -> StepReport | None:
        clock, scheduler, runner = self.clock, self.scheduler, self.runner
        clock.start()
        before = self._in_flight
        if self.drafter is not None:
            self._draft()
        step = scheduler.schedule(ahead=before is not None)
        if step is None and before is None and not scheduler.finished:
            clock.forget_device()
            return None
        due = before if runner.is_async else step  # the step whose tokens this call delivers
        try:
            if step is not None:
                self._forward(step)
            new = [] if due is None else self._tokens(due)
            if step is not None and before is not None:
                step.learn(before.sampled.ids)
        except BaseException:
            self._take_back(step)
            raise
        if step is not None:
            clock.switch(ALLOCATOR)
            # There are no pages to copy: `BatchBuilder` refuses groups with states.
            self.kv.commit(step.plan, step.input_ids, step.accepted)
        clock.switch(DELIVER)
        self._in_flight = ahead = step if runner.is_async else None
        num_generated, has_nan = scheduler.deliver(new, time.perf_counter())
        if has_nan:
            # Any cached row may be NaN: drop those that no running request needs, and take back
            # requests that the step in flight admitted, as their hits may have such rows.
            if ahead is not None:
                scheduler.take_back_admitted(ahead)
            scheduler.clear_cache()
        if ahead is not None:
            ahead.set_placeholders()
        if not scheduler.unfinished:
            clock.forget_device()
        finished, deltas = scheduler.finished, scheduler.deltas
        scheduler.finished, scheduler.deltas = [], []
        return self.totals.report(due, ahead, clock.stop(), finished, deltas, num_generated)

    def _draft(self) -> None:
        clock, drafter, draws = self.clock, self.drafter, self._drafts_are_drawn
        requests = [r for r, count in self.scheduler.pending().items() if count == 1]
        if not requests:
            return
        if self.runner.has_hidden:
            before = clock.switch(MODEL)
            drafter.set_drafts(requests, self.runner.builder.sampled, draws=draws)
        else:
            before = clock.switch(DRAFT)
            vocab_size = self.model.config.vocab_size
            for request, error in set_drafts(drafter, requests, vocab_size, draws=draws):
                self.scheduler.fail(request, error)
        clock.switch(before)

    def _forward(self, step: Step) -> None:
        """Run the model and sample; on a GPU, all of it begins and nothing is waited for."""
        clock, runner, ranks = self.clock, self.runner, self._ranks
        clock.switch(TENSORS)
        plan, ids, rows = step.plan, step.input_ids, step.rows
        shape = None
        if step.scored:
            rows = np.concatenate([rows, step.prompt_rows])
        elif runner.graphs is not None:
            shape = runner.graphs.shape_of(plan, len(rows))
        if ranks is not None:
            plan = ranks.run(plan, ids, rows, shape)
        logits, step.hidden, step.batch = runner.run(plan, ids, rows, shape)
        clock.switch(SAMPLE)
        if step.scored:
            logits, prompt_logits = logits.split([len(step.rows), len(step.prompt_rows)])
            step.prompt_scores = self._sampler.score_prompts(prompt_logits, step.scored)
        num_unknown = max(0, -int(ids.min())) if step.has_drafts else 0
        requests, num_rows = [], []
        for i in step.ready:
            requests.append(step.requests[i])
            num_rows.append(1 + step.num_drafts[i])
        unknown = runner.builder.sampled[:num_unknown]
        step.sampled = self._sampler(logits, requests, num_rows, unknown)
        if runner.is_async:
            next_ids = runner.builder.sampled[: len(step.ready)]
            next_ids.copy_(step.sampled.device_ids)
            if ranks is not None:
                ranks.group.from_first(runner.builder.sampled[: len(rows)])

    def _tokens(self, step: Step) -> list[NewTokens]:
        """Wait for the tokens of a step, and verify its drafts."""
        self.clock.switch(WAIT)
        step.sampled.wait()
        if step.scored:
            step.prompt_scores.wait()
        self.clock.switch(DELIVER)
        if step.scored:
            step.keep_prompt_scores()
        if step.has_drafts:
            step.learn(step.sampled.drafts)
        new = step.verify()
        if self.runner.has_hidden:
            self.clock.switch(MODEL)
            self.drafter.observe_step(step)
        return new

    def _take_back(self, step: Step | None) -> None:
        """A step failed: its requests, and those whose tokens are not known, wait again."""
        self.clock.forget_device()
        in_flight, self._in_flight = self._in_flight, None
        steps = [one for one in (step, in_flight) if one is not None]
        self.scheduler.take_back({request for one in steps for request in one.requests})
        if in_flight is not None:
            # Its rows may be NaN. Only its tokens would have shown that, and they are not read.
            self.scheduler.clear_cache()


@contextmanager
def interrupts_wait() -> Iterator[Callable[[], None]]:
    """Hold back SIGINT until the outermost such block has ended; a second one is handled at once.

    Within a step Ctrl-C would leave pages without an owner. Only in the main thread, and where a
    Python function handles the signal. A call of what is yielded handles one that is held back.
    """
    handler = signal.getsignal(signal.SIGINT)
    if (handle := getattr(handler, "handle_held", None)) is not None:
        yield handle
        return
    held: list[tuple[Any, ...]] = []

    def hold(*arguments: Any) -> None:
        held.append(arguments)
        if len(held) > 1:
            handler(*arguments)

    def handle_held() -> None:
        arguments = held.copy()
        held.clear()
        if len(arguments) == 1:
            handler(*arguments[0])

    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield handle_held
        return
    hold.handle_held = handle_held
    signal.signal(signal.SIGINT, hold)
    try:
        yield handle_held
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(held) == 1:
            handler(*held[0])
