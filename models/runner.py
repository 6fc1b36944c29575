"""The engine: continuous batching of greedy requests on one model, one cache pool and one device.

A step: schedule (which plans pages) -> tensors -> forward -> commit -> sample. Attention reads the pages as they were before the
step, and the model writes the rows that the plan kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.kvcore import KVCache
from quire.models.batch import BatchBuilder
from quire.models.cache import PagePool, cache_groups, num_slots
from quire.models.gemma import Gemma
from quire.models.request import Request, RequestOutput, SamplingParams
from quire.models.scheduler import ScheduledStep, Scheduler

CPU_CACHE_BYTES = 256 * 2**20
CUDA_CACHE_SHARE = 0.9  # of the memory that is free once the weights are there


@dataclass(frozen=True)
class StepReport:
    """One step in numbers; times in seconds.

    q_lens, seq_lens: per sequence [num_seqs], its new tokens and its KV tokens including them.
    num_tokens: new tokens computed. num_decodes, num_prefills: sequences with one new token, and with more.
    allocator, model, total: time in kvcore; in the forward pass up to the sampled ids on the host; in the whole step.
    finished: requests that ended in it.
    """

    q_lens: np.ndarray
    seq_lens: np.ndarray
    num_tokens: int
    num_decodes: int
    num_prefills: int
    num_preempted: int
    allocator: float
    model: float
    total: float
    finished: list[RequestOutput]


@dataclass
class EngineTotals:
    """Sums over all steps since the start or since somebody replaced the object; times in seconds.

    hashing: time in which `Engine.add_request` hashed prompts and looked them up, outside of steps.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_generated_tokens: int = 0
    num_preempted: int = 0
    allocator: float = 0.0
    model: float = 0.0
    total: float = 0.0
    hashing: float = 0.0

    @property
    def rest(self) -> float:
        """Seconds neither in the allocator nor in the model: scheduling, tensors, bookkeeping."""
        return self.total - self.allocator - self.model

    def add(self, report: StepReport, num_generated_tokens: int) -> None:
        """Adds one step."""
        self.num_steps += 1
        self.num_tokens += report.num_tokens
        self.num_generated_tokens += num_generated_tokens
        self.num_preempted += report.num_preempted
        self.allocator += report.allocator
        self.model += report.model
        self.total += report.total


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine.

    max_num_seqs: requests running at once. max_num_batched_tokens: new tokens in a step.
    max_model_len: longest sequence in tokens; None = the model's.
    num_pages: page ids including the null page; None = as many as fit cache_bytes.
    cache_bytes: bytes of all page tensors; None = 256 MiB on a CPU, 90 % of the free memory on a GPU.
    base_block_size: tokens in a page of the heaviest kind of layer.
    retention, enable_caching, hash_seed: as in `quire.kvcore.KVCache`.
    impl: "triton" or "torch" for the kernels; None = by device.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    num_pages: int | None = None
    cache_bytes: int | None = None
    base_block_size: int = 16
    retention: str | int = "latest"
    enable_caching: bool = True
    hash_seed: bytes = b""
    impl: str | None = None


class Engine:
    """Runs many requests at once. ``while engine.has_work: engine.step()``.

    Attributes:
        kv: the allocator, for its ``describe`` and ``stats``. pool: the page tensors. totals: sums over steps.

    Raises: ValueError for settings out of range.
    """

    def __init__(self, model: Gemma, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        self.model = model
        self.max_model_len = config.max_model_len or model.config.max_position_embeddings
        if not 1 <= self.max_model_len <= model.config.max_position_embeddings:
            raise ValueError(
                f"max_model_len: expected 1..{model.config.max_position_embeddings}, got {self.max_model_len}"
            )
        groups, placement = cache_groups(
            model.config, model.dtype, base_block_size=config.base_block_size
        )
        num_pages = config.num_pages
        if num_pages is None:
            cache_bytes = config.cache_bytes or default_cache_bytes(model.device)
            num_pages = cache_bytes // (groups[0].page_bytes * num_slots(placement))
        self.pool = PagePool(
            model.config,
            groups,
            placement,
            num_pages=num_pages,
            dtype=model.dtype,
            device=model.device,
        )
        self.kv = KVCache(
            groups,
            num_pages=num_pages,
            max_requests=config.max_num_seqs,
            max_model_len=self.max_model_len,
            retention=config.retention,
            hash_seed=config.hash_seed,
            enable_caching=config.enable_caching,
            track_deltas=True,
        )
        self.scheduler = Scheduler(
            self.kv,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
        )
        self.totals = EngineTotals()
        self._builder = BatchBuilder(self.kv, model.device)
        self._impl = config.impl
        self._requests: dict[str, Request] = {}
        self._num_added = 0

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
    ) -> str:
        """Queues a request.

        prompt_token_ids: at least one id, all below vocab_size, and fewer than max_model_len.
        request_id: unique among unfinished requests; default: a running number.
        salt: requests with different salts never share cached prefixes.

        Returns: the request id.
        Raises: ValueError for a prompt or id that breaks these rules.
        """
        params = params or SamplingParams()
        request_id = str(self._num_added) if request_id is None else request_id
        if request_id in self._requests:
            raise ValueError(
                f"request_id: expected a new id, got {request_id!r}, which is unfinished"
            )
        prompt = np.asarray(prompt_token_ids)
        if prompt.ndim != 1 or not 1 <= len(prompt) < self.max_model_len:
            raise ValueError(
                f"prompt_token_ids: expected 1..{self.max_model_len - 1} ids (max_model_len - 1), got {list(prompt.shape)}"
            )
        vocab_size = self.model.config.vocab_size
        if prompt.dtype.kind not in "iu" or prompt.min() < 0 or prompt.max() >= vocab_size:
            raise ValueError(
                f"prompt_token_ids: expected ints in 0..{vocab_size - 1}, got {prompt}"
            )
        eos = () if params.ignore_eos else self.model.config.eos_token_ids
        arrival = time.perf_counter()
        match = self.kv.match(prompt, salt=salt)
        self.totals.hashing += time.perf_counter() - arrival
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            capacity=min(len(prompt) + params.max_tokens, self.max_model_len),
            stop_ids=frozenset(params.stop_token_ids) | frozenset(eos),
            salt=salt,
            arrival=arrival,
            match=match,
        )
        self._requests[request_id] = request
        self._num_added += 1
        self.scheduler.waiting.append(request)
        return request_id

    def abort(self, request_id: str) -> RequestOutput:
        """Ends a request with what it has so far; raises ValueError for an unknown id."""
        if request_id not in self._requests:
            raise ValueError(f"request_id: expected an unfinished request, got {request_id!r}")
        return self._finish(self._requests[request_id], "abort")

    def step(self) -> StepReport | None:
        """Runs one step of the batch; None when there is nothing to do.

        Raises: RuntimeError when one request alone does not fit the pool; that request is dropped, the others stay.
        """
        start = time.perf_counter()
        self.scheduler.allocator_seconds = 0.0
        try:
            step = self.scheduler.schedule()
        except RuntimeError:
            unfinished = {*self.scheduler.running, *self.scheduler.waiting}
            self._requests = {i: r for i, r in self._requests.items() if r in unfinished}
            raise
        if step is None:
            return None
        ready, ids, model_seconds = self._forward(step)
        now = time.perf_counter()
        finished = []
        for request, token in zip(ready, ids, strict=True):
            reason = request.append(token, now)
            if reason is not None:
                finished.append(self._finish(request, reason))
        num_decodes = sum(count == 1 for count in step.num_new_tokens)
        report = StepReport(
            q_lens=step.plan.num_new_tokens,
            seq_lens=step.plan.seq_lens,
            num_tokens=sum(step.num_new_tokens),
            num_decodes=num_decodes,
            num_prefills=len(step.requests) - num_decodes,
            num_preempted=step.num_preempted,
            allocator=self.scheduler.allocator_seconds,
            model=model_seconds,
            total=time.perf_counter() - start,
            finished=finished,
        )
        self.totals.add(report, len(ready))
        return report

    def _forward(self, step: ScheduledStep) -> tuple[list[Request], list[int], float]:
        """Runs the model and commits. Returns the requests that have all of their tokens computed, the next token of
        each, and the seconds in the model."""
        inputs, ready, rows = [], [], []
        last_rows = step.plan.cu_seqlens_q[1:] - 1
        for request, count, row in zip(step.requests, step.num_new_tokens, last_rows, strict=True):
            computed = int(self.kv.num_computed[request.slot])
            inputs.append(request.tokens[computed : computed + count])
            if computed + count == request.num_tokens:
                ready.append(request)
                rows.append(row)
        input_ids = np.concatenate(inputs)
        batch = self._builder.build(
            step.plan, [r.slot for r in step.requests], input_ids, np.array(rows, dtype=np.int64)
        )
        start = time.perf_counter()
        logits = self.model(
            batch.input_ids,
            batch.positions,
            batch.attn,
            self.pool,
            logits_rows=batch.logits_rows,
            impl=self._impl,
        )
        ids = logits.argmax(dim=-1).tolist()
        seconds = time.perf_counter() - start
        with self.scheduler.allocating():
            self.kv.commit(step.plan, input_ids)
        return ready, ids, seconds

    def _finish(self, request: Request, reason: str) -> RequestOutput:
        self.scheduler.finish(request)
        del self._requests[request.request_id]
        return request.output(reason)


def default_cache_bytes(device: torch.device) -> int:
    """Bytes for page tensors where the caller names none."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_CACHE_SHARE)
    return CPU_CACHE_BYTES
