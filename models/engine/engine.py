"""The engine: continuous batching on one model, one cache pool and one device.

A step: drafts -> schedule (which plans pages) -> tensors -> forward -> sample -> commit -> deliver. Attention reads the pages as they
were before the step, and the model writes the rows that the plan kept.

A model is a module with ``config`` (vocab_size, max_position_embeddings, eos_token_ids, activation_size), ``dtype`` and ``device``, called as
``model(input_ids, positions, attn, pool, logits_rows=, impl=)`` (and ``return_hidden=True`` for a `ModelDrafter`);
``make_cache`` gives it its cache (`quire.models.engine.memory.model_cache`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.kernels.common.impls import expect_impl
from quire.kvcore import KVCache

from ..config.fields import shown
from ..tokenizer import TextStream, Tokenizer
from .batch import AttnMetadata, BatchBuilder
from .config import EngineConfig
from .graphs import DecodeGraphs, sizes_to_capture
from .memory import model_cache, plan_memory
from .report import DELIVER, DRAFT, MODEL, SAMPLE, TENSORS, EngineTotals, StepClock, StepReport
from .request import OutputDelta, Request, RequestError, RequestOutput, SamplingParams, failure
from .sampler import NO_TOKEN, Sampler, derived_seed
from .scheduler import ScheduledStep, Scheduler
from .speculative import (
    Drafter,
    ModelDrafter,
    NewTokens,
    SamplingDrafter,
    rows_to_sample,
    tokens_after,
    verify,
)

SIZES = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_pages", "cache_bytes")
"""Settings that memory depends on."""


class Engine:
    """Runs many requests at once. ``while engine.has_work: engine.step()``.

    What fails in one request, such as its text that cannot be decoded, ends that request alone, with finish_reason "error"; logits that
    give no token (NaN, +inf, or -inf alone) end it with "nan", and empty the prefix cache of all that no running request needs, since
    nobody knows which of its rows are bad.

    Threads: any may call `add_request`, `check`, `abort`, `unfinished` and `has_work` at any time; they do not wait for the model of a
    step that runs. One thread at a time steps, others wait for it. Everything else, ``kv`` above all, belongs to the thread that steps.

    tokenizer: for stop strings and streamed text. drafter: speculates; None = one token a step.

    Attributes:
        kv: the allocator, for its ``describe`` and ``stats``. pool: the page tensors. memory: how the pool was sized.
        totals: sums over steps. clock: of the step that runs.
        lock: held whenever requests change. Whoever holds it adds several requests, or notes their ids, before any of them can end.

    Raises: ValueError for settings out of range or of more than the memory, or a pool that does not hold one request;
        NotImplementedError for what the model or the kernels cannot, naming what they can.
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
        expect_impl(config.impl, model.device.type)
        if hasattr(model, "expect_impl"):
            model.expect_impl(config.impl or ("triton" if model.device.type == "cuda" else "torch"))
        self.model = model
        self.tokenizer = tokenizer
        self.drafter = drafter
        try:
            self._make(config)
        except (MemoryError, RecursionError) as error:
            settings = ", ".join(f"{name}={getattr(config, name)}" for name in SIZES)
            raise ValueError(
                f"config: expected an engine that fits the memory, got {settings}: {type(error).__name__}: {error}"
            ) from error

    def _make(self, config: EngineConfig) -> None:
        model, drafter = self.model, self.drafter
        num_drafts = drafter.max_draft_tokens if drafter else 0
        self._observer = drafter if isinstance(drafter, ModelDrafter) else None
        cache = model_cache(
            model,
            base_block_size=config.base_block_size,
            kv_cache_dtype=config.kv_cache_dtype,
            max_requests=config.max_num_seqs,
            max_draft_tokens=num_drafts,
            drafter_layers=self._observer is not None,
        )
        graph_sizes = sizes_to_capture(
            config, model.device, drafter_in_model=self._observer is not None
        )
        self.memory = plan_memory(
            model, cache, config, max_draft_tokens=num_drafts, num_graph_rows=sum(graph_sizes)
        )
        self.max_model_len = self.memory.max_model_len
        self.kv = KVCache(
            self.memory.groups,
            num_pages=self.memory.num_pages,
            max_requests=config.max_num_seqs,
            max_model_len=self.max_model_len,
            retention=config.retention,
            hash_seed=config.hash_seed,
            enable_caching=config.enable_caching,
            max_draft_tokens=num_drafts,
            replay_tokens=_replay_tokens(model) if config.replay else None,
            track_deltas=True,
        )
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
        self._builder = BatchBuilder(self.kv, model.device)
        self._sampler = Sampler(
            model.config.vocab_size,
            config.max_num_seqs,
            model.device,
            rejection_sample_method=config.rejection_sample_method,
        )
        self._drafts_are_drawn = config.rejection_sample_method == "standard" and isinstance(
            drafter, SamplingDrafter
        )
        self._impl = config.impl
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
                device=model.device,
            )
        self._requests: dict[str, list[Request]] = {}  # unfinished samples
        # Samples that wait for the first one's prompt.
        self._siblings: dict[Request, list[Request]] = {}
        self._num_added = 0
        self._seeds = np.random.default_rng(config.seed)
        # Requests that were aborted in a step that runs; they have pages until its end.
        self._aborted: set[Request] = set()
        # What ended and what was streamed since the last report.
        self._finished: list[RequestOutput] = []
        self._deltas: list[OutputDelta] = []
        # Held whenever requests or the allocator change, but not while the model runs. `_one_step` is held for all of a step.
        self.lock = threading.RLock()
        self._one_step = threading.Lock()
        self._stepping: int | None = None  # the thread that steps

    @property
    def unfinished(self) -> frozenset[str]:
        """Ids of all requests that are waiting or running."""
        with self.lock:
            return frozenset(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        salt: bytes = b"",
        stream: bool = False,
    ) -> str:
        """Queues a request. With ``params.n`` samples, the others start when the prompt of the first is computed, and share its pages.

        prompt_token_ids: at least one id, all below vocab_size, and fewer than max_model_len.
        request_id: unique among unfinished requests; default: a running number.
        salt: requests with different salts never share cached prefixes.
        stream: report new tokens (and, with a tokenizer, text) in `StepReport.deltas`.

        Returns: the request id.
        Raises: ValueError for a prompt or another argument that breaks these rules, stop strings without a tokenizer, or samples that
            do not fit the memory.
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
                f"prompt_token_ids: expected what fits the memory, got {len(prompt)} ids for n={params.n} samples: "
                f"{type(error).__name__}: {error}"
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
        if request_id in self._requests:
            raise ValueError(
                f"request_id: expected a new id, got {shown(request_id)}, which is unfinished"
            )
        arrival = time.perf_counter()
        match = self.kv.match(prompt, salt=salt)
        self.totals.hashing += time.perf_counter() - arrival
        seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
        eos = () if params.ignore_eos else self.model.config.eos_token_ids
        stop_ids = frozenset(params.stop_token_ids) | frozenset(eos)
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
                text=TextStream(self.tokenizer, params.stop, stop_ids)
                if self.tokenizer is not None and (stream or params.stop)
                else None,
                stream=stream,
            )
            for sample in range(params.n)
        ]
        self._requests[request_id] = samples
        self._num_added += 1
        self.scheduler.waiting.append(samples[0])
        if len(samples) > 1:
            self._siblings[samples[0]] = samples[1:]
        return request_id

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> np.ndarray:
        """The prompt as an array of its own [num_tokens] int32; raises ValueError where `add_request` does. Queues nothing."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params: expected SamplingParams, got {shown(params)}")
        limit, vocab_size = self.max_model_len, self.model.config.vocab_size
        prompt = _as_array(prompt_token_ids, limit)
        if prompt.ndim != 1:
            raise ValueError(
                f"prompt_token_ids: expected a list of ids, got shape {list(prompt.shape)}"
            )
        if not len(prompt):
            raise ValueError(
                f"prompt_token_ids: expected 1..{limit - 1} ids (max_model_len - 1), got 0"
            )
        if prompt.dtype.kind not in "iu" or prompt.min() < 0 or prompt.max() >= vocab_size:
            raise ValueError(
                f"prompt_token_ids: expected ints in 0..{vocab_size - 1}, got {shown(prompt.tolist())}"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: expected no strings, as this engine has no tokenizer")
        return prompt.astype(np.int32)

    def abort(self, request_id: str) -> RequestOutput:
        """Ends a request, all of its samples, with what it has so far; raises ValueError for an unknown id.

        Where a step runs meanwhile, what it computes for the request is dropped.

        Returns: the output of its first unfinished sample.
        """
        with self.lock:
            if not isinstance(request_id, str) or request_id not in self._requests:
                raise ValueError(
                    f"request_id: expected an unfinished request, got {shown(request_id)}"
                )
            outputs = []
            for request in list(self._requests[request_id]):
                # From where `finish` takes them.
                self.scheduler.waiting.extend(self._siblings.pop(request, []))
                if self._stepping is not None and request.slot >= 0:
                    self._aborted.add(request)  # the step needs its pages
                else:
                    self.scheduler.finish(request)
                outputs.append(self._close(request, "abort", None))
            return outputs[0]

    @torch.inference_mode()
    def step(self) -> StepReport | None:
        """Runs one step of the batch; None when there is nothing to do.

        Raises: what the model or a drafter in it raises, such as that the device is out of memory; then nothing is lost, and the next
            call tries again. RuntimeError when it is called from within a step.
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
                    self._end_failed()
                    for request in self._aborted:
                        self.scheduler.finish(request)
                    self._aborted.clear()

    def _step(self) -> StepReport | None:
        self.clock.start()
        with self.lock:
            self._draft()
            step = self.scheduler.schedule()
            self._end_failed()
            if step is None:
                return self._report() if self._finished else None
        try:
            new = self._forward(step)
        except BaseException:
            with self.lock:
                self.scheduler.take_back(step)
            raise
        with self.lock:
            num_generated = self._deliver(new)
            self.clock.switch(DELIVER)
            num_drafts = sum(step.num_drafts)
            num_decodes = step.num_new_tokens.count(1)
            return self._report(
                q_lens=step.plan.num_new_tokens,
                seq_lens=step.plan.seq_lens,
                num_tokens=sum(step.num_new_tokens),
                num_decodes=num_decodes,
                num_prefills=len(step.requests) - num_decodes,
                num_preempted=step.num_preempted,
                num_generated=num_generated,
                num_drafts=num_drafts,
                num_accepted=sum(len(tokens.ids) - 1 for tokens in new) if num_drafts else 0,
            )

    def _report(self, **numbers: Any) -> StepReport:
        """What ended and was streamed since the last report. numbers: of the step; none where nothing was computed."""
        nothing = np.zeros(0, dtype=np.int64)
        names = ("num_tokens", "num_decodes", "num_prefills", "num_preempted", "num_generated", "num_drafts", "num_accepted")  # fmt: skip
        report = StepReport(
            **{"q_lens": nothing, "seq_lens": nothing, **dict.fromkeys(names, 0), **numbers},
            wall=np.array(self.clock.wall),
            cpu=np.array(self.clock.cpu),
            finished=self._finished,
            deltas=self._deltas,
        )
        self._finished, self._deltas = [], []
        self.totals.add(report)
        return report

    def _draft(self) -> None:
        """Asks the drafter for the requests that decode next."""
        if self.drafter is None:
            return
        before = self.clock.switch(DRAFT if self._observer is None else MODEL)
        running = zip(self.scheduler.running, self.scheduler.pending(), strict=True)
        requests = [r for r, count in running if count == 1]
        if requests:
            try:
                self._ask_drafter(requests)
            except Exception:
                if self._observer is not None:
                    raise  # the model's, as any other failure of it
                for request in requests:  # whose failure it was, each alone tells
                    try:
                        self._ask_drafter([request])
                    except Exception as error:
                        self.scheduler.finish(request)
                        self.scheduler.failed.append((request, error))
        self.clock.switch(before)

    def _ask_drafter(self, requests: list[Request]) -> None:
        vocab_size = self.model.config.vocab_size
        if self._drafts_are_drawn:
            drafts = self.drafter.sample(requests)
        else:
            drafts = [(ids, None) for ids in self.drafter.propose(requests)]
        for request, (ids, probs) in zip(requests, drafts, strict=True):
            # A drafter that is a part of the model chooses among its logits.
            if self._observer is None and len(ids) and not 0 <= min(ids) <= max(ids) < vocab_size:
                raise ValueError(f"drafts: expected ids in 0..{vocab_size - 1}, got {shown(ids)}")
            request.set_drafts(ids, probs)

    def _forward(self, step: ScheduledStep) -> list[NewTokens]:
        """Runs the model, samples, verifies drafts and commits. Returns the new tokens."""
        plan, clock = step.plan, self.clock
        clock.switch(TENSORS)
        ready, inputs = [], []
        for i, (request, end) in enumerate(zip(step.requests, plan.seq_lens.tolist(), strict=True)):
            inputs.append(request.inputs(end - step.num_new_tokens[i], end))
            if end >= request.num_tokens:
                ready.append(i)
        input_ids = np.concatenate(inputs)
        batch = hidden = rows = None
        if self._graphs is not None and len(input_ids) == len(ready) == len(step.requests):
            clock.switch(MODEL)
            logits = self._graphs(plan, input_ids)
        else:
            rows = rows_to_sample(step, ready)
            batch = self._builder.build(plan, input_ids, rows)
            clock.switch(MODEL)
            logits = self._run(batch.input_ids, batch.positions, batch.attn, batch.logits_rows)
            if self._observer is not None:
                logits, hidden = logits
        clock.switch(SAMPLE)
        requests = [step.requests[i] for i in ready]
        sampled = self._sampler(logits, requests, [1 + step.num_drafts[i] for i in ready])
        clock.switch(DELIVER)
        new, accepted = verify(step, ready, sampled)
        if self._observer is not None:
            clock.switch(MODEL)
            stay = plan.num_new_tokens if accepted is None else accepted
            last = plan.cu_seqlens_q[:-1] + stay - 1
            after = tokens_after(step, input_ids, rows, sampled)
            self._observer.observe(batch, hidden, after, last, plan.slots)
            clock.switch(DELIVER)
        with self.lock, self.scheduler.allocating:
            self.kv.commit(plan, input_ids, accepted)
        return new

    def _run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attn: AttnMetadata,
        logits_rows: Tensor | None = None,
    ) -> Tensor:
        more = {} if self._observer is None else {"return_hidden": True}
        return self.model(
            input_ids, positions, attn, self.pool, logits_rows=logits_rows, impl=self._impl, **more
        )

    def _deliver(self, new: list[NewTokens]) -> int:
        """Gives requests their new tokens, each on its own: what fails in one ends that one. Returns the number of tokens."""
        now, num_generated, bad = time.perf_counter(), 0, False
        for tokens in new:
            request = tokens.request
            if request in self._aborted:
                continue
            before, reason, error = request.num_tokens, None, None
            try:
                reason = _take(tokens, now)
                if reason is None and request.stream:
                    self._deltas.append(_delta(request, before))
            except Exception as cause:
                reason, error = "error", failure(request, cause)
            if reason == "nan":
                bad = True
                error = RequestError(
                    f"{request}: expected logits whose largest is a number, got NaN, +inf, or -inf alone for position {request.num_tokens}"
                )
            num_generated += request.num_tokens - before
            if error is None:
                self.scheduler.waiting.extendleft(reversed(self._siblings.pop(request, [])))
            if reason is not None:
                self.scheduler.finish(request)
                self._end(request, reason, error, before)
        if bad:
            # Any row that it computed, in this step or before, may be NaN: none may be found again.
            with self.scheduler.allocating:
                self.kv.clear()
        return num_generated

    def _end_failed(self) -> None:
        """Ends the requests that the scheduler took out."""
        for request, cause in self.scheduler.failed:
            if request in self._aborted:
                self._aborted.remove(request)
            else:
                self._end(request, "error", failure(request, cause), request.num_tokens)
        self.scheduler.failed.clear()

    def _end(self, request: Request, reason: str, error: RequestError | None, before: int) -> None:
        """Reports the end of a request that the scheduler has no more. Samples that waited for the prompt of one that failed end too.

        before: its tokens when the step began.
        """
        for one in (request, *self._siblings.pop(request, ())):
            output = self._close(one, reason, error)
            if one.stream:
                try:
                    self._deltas.append(_delta(one, before, output))
                except Exception as cause:
                    output = replace(output, finish_reason="error", error=failure(one, cause))
                    self._deltas.append(_delta(one, before, output))
            self._finished.append(output)

    def _close(self, request: Request, reason: str, error: RequestError | None) -> RequestOutput:
        samples = self._requests[request.request_id]
        samples.remove(request)
        if not samples:
            del self._requests[request.request_id]
        return request.output(reason, error)


def _take(tokens: NewTokens, now: float) -> str | None:
    """Adds a step's tokens to their request; returns the finish reason if one of them was the last."""
    request = tokens.request
    for i, token in enumerate(tokens.ids):
        if token == NO_TOKEN:
            return "nan"
        if request.params.logprobs is not None:
            request.logprobs.append(tokens.logprobs[i])
        reason = request.append(token, now)
        if reason is not None:
            return reason  # accepted drafts may go past the end
    return None


def _delta(request: Request, before: int, output: RequestOutput | None = None) -> OutputDelta:
    """What came to a request since it had ``before`` tokens. output: where it has ended."""
    try:
        text = request.text.take() if request.text is not None else ""
    except Exception:
        if output is None or output.error is None:
            raise
        text = ""
    ids = tuple(request.tokens[before:].tolist())
    reason, error = (None, None) if output is None else (output.finish_reason, output.error)
    return OutputDelta(request.request_id, request.sample, ids, text, reason, error)


def _as_array(prompt: Any, limit: int) -> np.ndarray:
    """Prompt ids of any kind as an array; raises ValueError where they are none."""
    try:
        length = len(prompt)
        if length < limit:
            return np.asarray(prompt.cpu() if isinstance(prompt, Tensor) else prompt)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"prompt_token_ids: expected a list of ids, got {shown(prompt)}"
        ) from error
    # Not even copied.
    raise ValueError(
        f"prompt_token_ids: expected 1..{limit - 1} ids (max_model_len - 1), got {length}"
    )


def _replay_tokens(model: nn.Module) -> int | None:
    if not hasattr(model.config, "replay_tokens"):
        raise ValueError(
            f"replay: expected False for {type(model).__name__}{getattr(model, 'no_replay', '')}; supported with models of full and "
            "sliding attention"
        )
    return model.config.replay_tokens
