"""The engine: continuous batching on one model, one cache pool and one device.

A step: drafts -> schedule (which plans pages) -> tensors -> forward -> sample -> commit -> deliver. Attention reads the pages as they
were before the step, and the model writes the rows that the plan kept.

A model is a module with ``config`` (vocab_size, max_position_embeddings, eos_token_ids, activation_size), ``dtype`` and ``device``, called as
``model(input_ids, positions, attn, pool, logits_rows=, impl=)`` (and ``return_hidden=True`` for a `ModelDrafter`);
``make_cache`` gives it its cache (`quire.models.memory.model_cache`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from quire.kernels.impls import expect_impl
from quire.kvcore import KVCache
from quire.models.batch import AttnMetadata, BatchBuilder
from quire.models.engine_config import EngineConfig
from quire.models.graphs import DecodeGraphs, sizes_to_capture
from quire.models.memory import model_cache, plan_memory
from quire.models.report import (
    DELIVER,
    DRAFT,
    MODEL,
    SAMPLE,
    TENSORS,
    EngineTotals,
    StepClock,
    StepReport,
)
from quire.models.request import (
    OutputDelta,
    Request,
    RequestOutput,
    SamplingParams,
)
from quire.models.sampling import Sampler, derived_seed
from quire.models.scheduler import ScheduledStep, Scheduler
from quire.models.speculative import (
    Drafter,
    ModelDrafter,
    NewTokens,
    SamplingDrafter,
    rows_to_sample,
    tokens_after,
    verify,
)
from quire.models.tokenizer import TextStream, Tokenizer


class Engine:
    """Runs many requests at once. ``while engine.has_work: engine.step()``.

    tokenizer: for stop strings and streamed text. drafter: speculates; None = one token a step.

    Attributes:
        kv: the allocator, for its ``describe`` and ``stats``. pool: the page tensors. memory: how the pool was sized.
        totals: sums over steps. clock: of the step that runs.

    Raises: ValueError for settings out of range, or a pool that does not hold one request; NotImplementedError for what the model
        cannot, naming what it can.
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
        self.model = model
        self.tokenizer = tokenizer
        self.drafter = drafter
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

    @property
    def unfinished(self) -> frozenset[str]:
        """Ids of all requests that are waiting or running."""
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
        Raises: ValueError for a prompt or id that breaks these rules, or stop strings without a tokenizer.
        """
        params = params or SamplingParams()
        request_id = str(self._num_added) if request_id is None else request_id
        if request_id in self._requests:
            raise ValueError(
                f"request_id: expected a new id, got {request_id!r}, which is unfinished"
            )
        prompt = self.check(prompt_token_ids, params)
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
        """The prompt as an array [num_tokens]; raises ValueError where `add_request` does. Queues nothing."""
        prompt = np.asarray(prompt_token_ids)
        if prompt.ndim != 1:
            raise ValueError(
                f"prompt_token_ids: expected a list of ids, got shape {list(prompt.shape)}"
            )
        if not 1 <= len(prompt) < self.max_model_len:
            raise ValueError(
                f"prompt_token_ids: expected 1..{self.max_model_len - 1} ids (max_model_len - 1), got {len(prompt)}"
            )
        vocab_size = self.model.config.vocab_size
        if prompt.dtype.kind not in "iu" or prompt.min() < 0 or prompt.max() >= vocab_size:
            raise ValueError(
                f"prompt_token_ids: expected ints in 0..{vocab_size - 1}, got {prompt}"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: expected no strings, as this engine has no tokenizer")
        return prompt

    def abort(self, request_id: str) -> RequestOutput:
        """Ends a request, all of its samples, with what it has so far; raises ValueError for an unknown id.

        Returns: the output of its first unfinished sample.
        """
        if request_id not in self._requests:
            raise ValueError(f"request_id: expected an unfinished request, got {request_id!r}")
        outputs = []
        for request in list(self._requests[request_id]):
            waiting = self._siblings.pop(request, [])
            self.scheduler.waiting.extend(waiting)  # from where `_finish` takes them
            outputs.append(self._finish(request, "abort"))
        return outputs[0]

    @torch.inference_mode()
    def step(self) -> StepReport | None:
        """Runs one step of the batch; None when there is nothing to do.

        Raises: RuntimeError when one request alone does not fit the pool; that request is dropped, the others stay. What the model
            raises, such as that the device is out of memory; then nothing is lost, and the next call tries again.
        """
        # Launches, streams and captures are those of the current device.
        with torch.cuda.device_of(self._builder.tables):
            return self._step()

    def _step(self) -> StepReport | None:
        self.clock.start()
        try:
            self._draft()
            step = self.scheduler.schedule()
        except RuntimeError:
            self._forget_dropped()
            raise
        if step is None:
            return None
        try:
            new = self._forward(step)
        except BaseException:
            self.scheduler.take_back(step)
            raise
        finished, deltas, num_generated = self._deliver(new)
        num_decodes = step.num_new_tokens.count(1)
        num_drafts = sum(step.num_drafts)
        num_accepted = sum(len(tokens.ids) - 1 for tokens in new) if num_drafts else 0
        self.clock.switch(DELIVER)
        report = StepReport(
            q_lens=step.plan.num_new_tokens,
            seq_lens=step.plan.seq_lens,
            num_tokens=sum(step.num_new_tokens),
            num_decodes=num_decodes,
            num_prefills=len(step.requests) - num_decodes,
            num_preempted=step.num_preempted,
            num_generated=num_generated,
            num_drafts=num_drafts,
            num_accepted=num_accepted,
            wall=np.array(self.clock.wall),
            cpu=np.array(self.clock.cpu),
            finished=finished,
            deltas=deltas,
        )
        self.totals.add(report)
        return report

    def _draft(self) -> None:
        """Asks the drafter for the requests that decode next."""
        if self.drafter is None:
            return
        before = self.clock.switch(DRAFT if self._observer is None else MODEL)
        running = zip(self.scheduler.running, self.scheduler.pending(), strict=True)
        requests = [r for r, count in running if count == 1]
        if requests and self._drafts_are_drawn:
            for request, drawn in zip(requests, self.drafter.sample(requests), strict=True):
                request.set_drafts(*drawn)
        elif requests:
            for request, drafts in zip(requests, self.drafter.propose(requests), strict=True):
                request.set_drafts(drafts)
        self.clock.switch(before)

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
        with self.scheduler.allocating:
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

    def _deliver(self, new: list[NewTokens]) -> tuple[list[RequestOutput], list[OutputDelta], int]:
        """Gives requests their new tokens. Returns what ended, what is streamed, and the number of tokens."""
        now = time.perf_counter()
        finished, deltas, num_generated = [], [], 0
        for tokens in new:
            request, reason = tokens.request, None
            before = request.num_tokens
            for i, token in enumerate(tokens.ids):
                if request.params.logprobs is not None:
                    request.logprobs.append(tokens.logprobs[i])
                reason = request.append(token, now)
                if reason is not None:
                    break  # accepted drafts may go past the end
            num_generated += request.num_tokens - before
            if request in self._siblings:
                self.scheduler.waiting.extendleft(reversed(self._siblings.pop(request)))
            if reason is not None:
                finished.append(self._finish(request, reason))
            if request.stream:
                text = request.text.take() if request.text is not None else ""
                ids = tuple(request.tokens[before:].tolist())
                deltas.append(OutputDelta(request.request_id, request.sample, ids, text, reason))
        return finished, deltas, num_generated

    def _finish(self, request: Request, reason: str) -> RequestOutput:
        self.scheduler.finish(request)
        samples = self._requests[request.request_id]
        samples.remove(request)
        if not samples:
            del self._requests[request.request_id]
        return request.output(reason)

    def _forget_dropped(self) -> None:
        """Forgets requests that the scheduler no longer has."""
        alive = {*self.scheduler.running, *self.scheduler.waiting}
        self._siblings = {r: samples for r, samples in self._siblings.items() if r in alive}
        alive.update(*self._siblings.values())
        kept = {i: [r for r in samples if r in alive] for i, samples in self._requests.items()}
        self._requests = {i: samples for i, samples in kept.items() if samples}


def _replay_tokens(model: nn.Module) -> int | None:
    if not hasattr(model.config, "replay_tokens"):
        raise ValueError(
            f"replay: expected False for {type(model).__name__}{getattr(model, 'no_replay', '')}; supported with models of full and "
            "sliding attention"
        )
    return model.config.replay_tokens
