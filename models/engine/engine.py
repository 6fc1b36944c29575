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

A model has ``config`` (vocab_size, max_position_embeddings, eos_token_ids, activation_size),
``dtype``, ``device``, ``make_cache`` (`quire.models.engine.memory.model_cache`), and is called as
``model(input_ids, positions, attn, pool, logits_rows=, impl=)``, with ``return_hidden=True`` too
where a `ModelDrafter` reads its hidden states.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from quire.kernels.common.impls import expect_impl

from ..config.fields import shown
from ..flashinfer.planner import FlashInfer
from ..tokenizer import Tokenizer
from . import speculative
from .batch import BatchBuilder
from .config import FLASHINFER, MEMORY_SETTINGS, EngineConfig
from .graphs import DecodeGraphs, forward_pass, graph_bytes, sizes_to_capture
from .input_processor import InputProcessor
from .memory import make_allocator, model_cache, plan_memory
from .output_processor import OutputProcessor
from .report import DELIVER, DRAFT, MODEL, SAMPLE, TENSORS, EngineTotals, StepClock, StepReport
from .request import RequestOutput, SamplingParams
from .sampler import NewTokens, Sampler
from .scheduler import ScheduledStep, Scheduler
from .speculative import Drafter, ModelDrafter, SamplingDrafter
from .warm_up import warm_up


class Engine:
    """Runs many requests at once. ``while engine.has_work: engine.step()``.

    What fails in one request, such as its text that cannot be decoded, ends that request alone,
    with finish_reason "error"; logits that give no token (NaN, +inf, or -inf alone) end it with
    "nan", and empty the prefix cache of all that no running request needs, since nobody knows which
    of its rows are bad.

    Threads: any may call `add_request`, `check`, `abort`, `unfinished` and `has_work` at any time;
    they do not wait for the model of a step that runs. One thread at a time steps, others wait for
    it. Everything else, ``kv`` above all, belongs to the thread that steps.

    Args:
        model: see the docstring of the module.
        config: settings; None = `EngineConfig()`.
        tokenizer: for stop strings and streamed text.
        drafter: speculates; None = one token a step.

    Attributes:
        kv: the allocator, for its ``describe`` and ``stats``.
        pool: the page tensors.
        memory: how the pool was sized.
        inputs: checks prompts and makes requests of them.
        outputs: the unfinished requests.
        totals: sums over steps.
        clock: of the step that runs.
        lock: held whenever requests change. Whoever holds it adds several requests, or notes their
            ids, before any of them can end.

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
    ) -> None:
        config = config or EngineConfig()
        impl = None if config.impl == FLASHINFER else config.impl
        expect_impl(impl, model.device.type)
        if hasattr(model, "expect_impl"):
            model.expect_impl(impl or ("triton" if model.device.type == "cuda" else "torch"))
        self.model = model
        self.drafter = drafter
        try:
            self._make(config, tokenizer)
        except (MemoryError, RecursionError) as error:
            settings = ", ".join(f"{name}={getattr(config, name)}" for name in MEMORY_SETTINGS)
            raise ValueError(
                f"config: expected an engine that fits the memory, got {settings}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _make(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        model, drafter = self.model, self.drafter
        num_drafts = drafter.max_draft_tokens if drafter else 0
        planner = FlashInfer(model, config).planner if config.impl == FLASHINFER else None
        self._observer = drafter if isinstance(drafter, ModelDrafter) else None
        cache = model_cache(
            model,
            base_block_size=config.base_block_size,
            kv_cache_dtype=config.kv_cache_dtype,
            max_requests=config.max_num_seqs,
            max_draft_tokens=num_drafts,
            drafter_layers=self._observer is not None,
        )
        graph_sizes, hidden = sizes_to_capture(config, model.device), self._observer is not None
        self.memory = plan_memory(
            model,
            cache,
            config,
            max_draft_tokens=num_drafts,
            graph_bytes=graph_bytes(
                model, cache, config, graph_sizes, num_drafts, hidden=hidden, make_planner=planner
            ),
        )
        self.max_model_len = self.memory.max_model_len
        self.kv = make_allocator(model, self.memory, config)
        self.clock = StepClock()
        self.scheduler = Scheduler(
            self.kv,
            self.clock,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            policy=config.policy,
        )
        self.pool = cache.allocate(self.memory.num_pages)
        self.totals = EngineTotals()
        self._builder = BatchBuilder(self.kv, model.device, planner)
        self._sampler = Sampler(
            model.config.vocab_size,
            config.max_num_seqs,
            model.device,
            rejection_sample_method=config.rejection_sample_method,
            impl=config.impl,
        )
        self._drafts_are_drawn = config.rejection_sample_method == "standard" and isinstance(
            drafter, SamplingDrafter
        )
        self._run = forward_pass(model, self.pool, config.impl, hidden=hidden)
        if self._observer is not None:
            self._observer.attach(
                self.pool, self._builder, max_requests=config.max_num_seqs, impl=config.impl
            )
        self._graphs = None
        if graph_sizes:
            self._graphs = DecodeGraphs(
                self._run,
                self._builder,
                sizes=graph_sizes,
                max_seq_len=self.max_model_len,
                max_draft_tokens=num_drafts,
                device=model.device,
            )
            with torch.inference_mode(), torch.cuda.device_of(self._builder.tables):
                self._graphs.capture()
                if model.device.type == "cuda" or config.impl == "triton":
                    warm_up(self._run, self._builder, config, self.max_model_len, model.device)
        self.outputs = OutputProcessor(self.scheduler)
        self.inputs = InputProcessor(
            model, self.max_model_len, tokenizer=tokenizer, seed=config.seed
        )
        self._num_added = 0
        # Held whenever requests or the allocator change, but not while the model runs. `_one_step`
        # is held for all of a step.
        self.lock = threading.RLock()
        self._one_step = threading.Lock()
        self._stepping: int | None = None  # the thread that steps

    @property
    def unfinished(self) -> frozenset[str]:
        """Ids of all requests that are waiting or running."""
        with self.lock:
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
        """
        params = SamplingParams() if params is None else params
        prompt = self.check(prompt_token_ids, params)
        if request_id is not None and not isinstance(request_id, str):
            raise ValueError(f"request_id: expected a string or None, got {shown(request_id)}")
        try:
            with self.lock:
                return self._add(prompt, params, request_id, salt, stream)
        except (MemoryError, RecursionError) as error:
            raise ValueError(
                f"prompt_token_ids: expected what fits the memory, got {len(prompt)} ids for "
                f"n={params.n} samples: {type(error).__name__}: {error}"
            ) from error

    def _add(
        self,
        prompt: np.ndarray,
        params: SamplingParams,
        request_id: str | None,
        salt: bytes,
        stream: bool,
    ) -> str:
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

        Where a step runs meanwhile, what it computes for the request is dropped.

        Returns:
            The output of its first unfinished sample.

        Raises:
            ValueError: an unknown id.
        """
        with self.lock:
            return self.outputs.abort(request_id, in_step=self._stepping is not None)

    @torch.inference_mode()
    def step(self) -> StepReport | None:
        """Runs one step of the batch; None when there is nothing to do.

        Raises:
            Exception: what the model or a drafter in it raises, such as that the device is out of
                memory; then nothing is lost, and the next call tries again.
            RuntimeError: called from within a step.
        """
        # Launches, streams and captures are those of the current device.
        with self._alone(), torch.cuda.device_of(self._builder.tables):
            return self._step()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One step at a time; at its end those give up their pages that were aborted meanwhile."""
        if self._stepping == threading.get_ident():
            raise RuntimeError(
                "step: expected to be called between steps, got a call from within one"
            )
        with self._one_step:
            with self.lock:
                self._stepping = threading.get_ident()
            try:
                yield
            finally:
                with self.lock:
                    self._stepping = None
                    self.outputs.end_failed()
                    self.outputs.end_aborted()

    def _step(self) -> StepReport | None:
        self.clock.start()
        with self.lock:
            self._draft()
            step = self.scheduler.schedule()
            self.outputs.end_failed()
            if step is None:
                return self._report() if self.outputs.has_finished else None
        try:
            new = self._forward(step)
        except BaseException:
            with self.lock:
                self.scheduler.take_back(step)
            raise
        with self.lock:
            generated, bad = self.outputs.deliver(new, time.perf_counter())
            if bad:
                # Any row that it computed, in this step or before, may be NaN: none may be found.
                with self.scheduler.allocating:
                    self.kv.clear()
            self.clock.switch(DELIVER)
            accepted = sum(len(tokens.ids) - 1 for tokens in new)
            return self._report(num_generated=generated, num_accepted=accepted, **step.numbers())

    def _report(self, **numbers: Any) -> StepReport:
        """What ended and was streamed since the last report, and the step if there was one."""
        finished, deltas = self.outputs.take()
        report = StepReport.of(self.clock, finished, deltas, **numbers)
        self.totals.add(report)
        return report

    def _draft(self) -> None:
        """Asks the drafter for the requests that decode next."""
        if self.drafter is None:
            return
        before = self.clock.switch(DRAFT if self._observer is None else MODEL)
        failed = speculative.set_drafts(
            self.drafter,
            self.scheduler.decoding(),
            draws=self._drafts_are_drawn,
            vocab_size=self.model.config.vocab_size,
        )
        for request, error in failed:
            self.scheduler.fail(request, error)
        self.clock.switch(before)

    def _forward(self, step: ScheduledStep) -> list[NewTokens]:
        """Runs the model, samples and commits. Returns the new tokens."""
        plan, clock = step.plan, self.clock
        clock.switch(TENSORS)
        input_ids, ready = step.inputs()
        requests, has_drafts = [step.requests[i] for i in ready], any(step.num_drafts)
        rows = step.last_rows(ready)
        if has_drafts:
            rows = speculative.rows_with_drafts(step, ready)
        batch = accepted = shape = None
        if self._graphs is not None and len(rows) == len(input_ids):  # all decode
            shape = self._graphs.shape_of(plan)
        if shape is None or self._observer is not None:
            batch = self._builder.build(plan, input_ids, rows)
        clock.switch(MODEL)
        if shape is not None:
            out = self._graphs(shape, plan, input_ids)
        else:
            out = self._run(batch.input_ids, batch.positions, batch.attn, batch.logits_rows)
        logits, hidden = out if self._observer is not None else (out, None)
        clock.switch(SAMPLE)
        sampled = self._sampler(logits, requests, [1 + step.num_drafts[i] for i in ready])
        clock.switch(DELIVER)
        if has_drafts:
            new, accepted = speculative.verify(step, ready, sampled)
        else:
            new = sampled.one_each(requests)
        if self._observer is not None:
            clock.switch(MODEL)
            speculative.show_step(self._observer, step, batch, hidden, sampled, accepted)
            clock.switch(DELIVER)
        with self.lock, self.scheduler.allocating:
            # There are no pages to copy: `BatchBuilder` refuses groups with states.
            self.kv.commit(plan, input_ids, accepted)
        return new
