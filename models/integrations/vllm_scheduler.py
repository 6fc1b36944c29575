"""vLLM 0.33's Scheduler with `quire.kvcore` as its KV cache manager; extra ``vllm``.

    vllm serve MODEL --scheduler-cls quire.models.integrations.vllm_scheduler.QuireScheduler

Queues, budgets, preemption, drafts and outputs are vLLM's, with asynchronous scheduling too; kvcore
decides which pages requests get, what stays cached and where a prompt may resume. Workers and
attention backends stay: tables are append-only, and all rows that queries see are in pages.
"""

# ruff: noqa: E402  the version is checked before modules that others may not have

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import require

require("vllm", "0.33")

from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from quire.kvcore import GroupSpec, KVCache, Match, OutOfPages

DENSE = kinds.FullAttentionSpec, kinds.MLAAttentionSpec
WINDOWS = kinds.SlidingWindowSpec, kinds.SlidingWindowMLASpec
KEY_BYTES = 32


class QuireScheduler(Scheduler):
    """vLLM's Scheduler with kvcore; arguments are as of vLLM's.

    Raises:
        NotImplementedError: the configuration needs what is not served; all of it is named.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> QuireScheduler:
        """The asynchronous one, if that is configured."""
        if cls is QuireScheduler and vllm_config.scheduler_config.async_scheduling:
            cls = QuireAsyncScheduler
        return super().__new__(cls)

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        if refused := _refusals(vllm_config, kv_cache_config):
            raise NotImplementedError(
                "QuireScheduler: supported are decoders with full and sliding-window attention, "
                f"got {'; '.join(refused)}"
            )
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self.kv_cache_manager = CacheManager(self)


class QuireAsyncScheduler(QuireScheduler, AsyncScheduler):
    """`QuireScheduler` with asynchronous scheduling."""


def _refusals(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """List the parts of a configuration that are not served, in words."""
    parallel, events = vllm_config.parallel_config, vllm_config.kv_events_config
    what = {
        "KV connectors (kv_transfer_config)": vllm_config.kv_transfer_config is not None,
        "KV events (enable_kv_cache_events)": events is not None and events.enable_kv_cache_events,
        "auxiliary outputs": vllm_config.aux_output_config.enabled,
        "metrics of blocks (kv_cache_metrics)": vllm_config.observability_config.kv_cache_metrics,
        "diffusion models": vllm_config.model_config.is_diffusion,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "multi-module MTP": vllm_config.num_prefill_lookahead_tokens > 1,
        "models without cache groups": not kv_cache_config.kv_cache_groups,
    }
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        spec, name = group.kv_cache_spec, f"cache group {i}"
        served = type(spec) in DENSE + WINDOWS and spec.prefix_cacheable
        what[f"{name}: {type(spec).__name__}"] = not served
        what[f"{name}: windows that are computed again"] = served and spec.prefix_replay_tokens
        what[f"{name}: pages on the host"] = group.host_resident
    return [name for name, asked in what.items() if asked]


@dataclass
class Pages(KVCacheBlocks):
    """Page ids of each group, where vLLM's has blocks; of a look-up, what it found."""

    match: Match | None = None

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Copies; None if there are no pages and `allow_none`."""
        return None if allow_none and not any(self.blocks) else tuple(map(list, self.blocks))


@dataclass(slots=True)
class Tracked:
    request: Request
    slot: int
    published: int  # tokens that others find
    paged: int = 0  # tokens that have pages
    room: int = 0  # tokens up to which nothing is to be done


class CacheManager(KVCacheManager):
    """kvcore behind the interface of vLLM's `KVCacheManager`, whose documentation holds.

    Keys of segments are vLLM's block hashes, so salts, adapters, images and lookaheads separate
    prompts as they do there. A running request may be preempted in the step in which it was given
    slots, and then nobody computes these rows. So what a step completes becomes findable only when
    no more requests are preempted: at a look-up of a waiting request, or when the scheduler is done
    with the step.
    """

    def __init__(self, scheduler: Any) -> None:
        # The state of the scheduler's first manager, whose coordinator and pool get no requests.
        for name, value in vars(scheduler.kv_cache_manager).items():
            setattr(self, name, value)  # updating vars(self) makes each later read slower
        self.empty_kv_cache_blocks = Pages(self.empty_kv_cache_blocks.blocks)
        groups = []  # pages count as one byte each
        # Block sizes, and the most blocks that an admission counts: windows free what they passed.
        self._groups, self._has_windows = [], False
        for i, spec in enumerate(g.kv_cache_spec for g in self.kv_cache_config.kv_cache_groups):
            kind, window, most = "dense", None, self.max_model_len
            if type(spec) in WINDOWS:
                kind, window, self._has_windows = "window", spec.sliding_window, True
                in_flight = scheduler.vllm_config.max_in_flight_tokens
                most = spec.max_admission_blocks_per_request(in_flight, self.max_model_len)
            groups.append(GroupSpec(str(i), kind, spec.block_size, 1, window))
            self._groups.append((spec.block_size, most))
        interval = self.kv_cache_config.prefix_cache_retention_interval
        self.cache = KVCache(
            groups, num_pages=self.kv_cache_config.num_blocks, max_model_len=self.max_model_len,
            max_requests=scheduler.max_num_running_reqs, enable_caching=self.enable_caching,
            retention="dense" if interval is None else interval or "latest",
            reads="pages", adopt=False, append_only=True,
        )  # fmt: skip
        # Tokens of a key; without caching more than any request has.
        self._segment = self.cache.alignment if self.enable_caching else self.max_model_len + 1
        self._block_size = math.gcd(*(size for size, _ in self._groups))
        self._per_key = self.cache.alignment // scheduler.hash_block_size
        self._tracked: dict[str, Tracked] = {}
        self._pending: dict[str, int] = {}  # tokens up to which requests become findable

    @property
    def usage(self) -> float:
        cache = self.cache
        return 1.0 - (cache.num_free_pages + cache.num_evictable_pages) / (cache.num_pages - 1)

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[Pages, int, int]:
        """(no pages yet, tokens that are cached, 0)."""
        self.new_step_starts()
        most = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        match = self._match(request, most)
        # A drafter's last rows depend on the token after them, which hashes may cover, or not.
        if self.use_eagle and 0 < match.num_tokens == match.dense_tokens:
            match = self._match(request, match.num_tokens - self._segment)
        return Pages(self.empty_kv_cache_blocks.blocks, match), match.num_tokens, 0

    def _match(self, request: Request, most: int) -> Match:
        keys = b""
        if self.prefix_cache_lookup_enabled(request):
            keys = self._keys(request, 0, len(request.block_hashes) // self._per_key)
        return self.cache.match(keys=keys, num_tokens=request.num_tokens, max_tokens=most)

    def _keys(self, request: Request, first: int, last: int) -> bytes:
        """Keys of segments [first, last) of a request, as far as they are known."""
        n = self._per_key
        hashes = request.block_hashes[(first + 1) * n - 1 : last * n : n]
        return b"".join([key.ljust(KEY_BYTES) for key in hashes])

    def allocate_slots(
        self, request: Request, num_new_tokens: int, num_new_computed_tokens: int = 0,
        new_computed_blocks: Pages | None = None, num_lookahead_tokens: int = 0,
        full_sequence_must_fit: bool = False, has_scheduled_reqs: bool = True,
        **_: Any,  # of connectors and encoders, which the scheduler refuses
    ) -> Pages | None:  # fmt: skip
        tracked = self._tracked.get(request.request_id)
        end = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        if tracked is not None and end + num_lookahead_tokens <= tracked.room:
            return self.empty_kv_cache_blocks
        slots, pages = min(end + num_lookahead_tokens, self.max_model_len), []
        if tracked is None or slots > tracked.paged:
            least = 0
            if request.status != RequestStatus.RUNNING:
                full = request.num_tokens if full_sequence_must_fit else 0
                least = self._lacking(tracked, num_new_computed_tokens, slots, full)
                least += self.watermark_blocks * has_scheduled_reqs
            if tracked is None:
                tracked = self._admit(request, least, num_new_computed_tokens, new_computed_blocks)
                if tracked is None:
                    return None
            elif self._has_windows:
                self._let_go([tracked])
            # A running request goes before what the resume points of others would need.
            pages = self.cache.reserve(tracked.slot, slots, least)
            for keep_tails in (True, False):
                if pages.__class__ is OutOfPages:  # faster than isinstance
                    self._let_go(self._tracked.values(), keep_tails)
                    pages = self.cache.reserve(tracked.slot, slots, least)
            if pages.__class__ is OutOfPages:
                return None
            tracked.paged = -(-slots // self._block_size) * self._block_size
            for each in pages:  # the worker zeroes new ones where caches need that
                self.coordinator.single_type_managers[0].new_block_ids += each
        until = min(end, request.num_tokens)
        if until - tracked.published >= self._segment:
            self._pending[request.request_id] = until
        tracked.room = min(tracked.paged, tracked.published + self._segment - 1)
        return Pages(tuple(pages)) if pages else self.empty_kv_cache_blocks

    def _lacking(self, tracked: Tracked | None, hit: int, slots: int, full: int) -> int:
        """Blocks that a request lacks up to token `slots`, or at once for all `full` tokens."""
        lengths = [hit // size for size, _ in self._groups]
        if tracked is not None:
            lengths = [*map(len, self.cache.pages_of(tracked.slot))]
        now = at_once = 0
        for (size, most), length in zip(self._groups, lengths, strict=True):
            now += max(0, -(-slots // size) - length)
            at_once += max(0, min(-(-full // size), most) - length)
        return max(now, at_once)

    def _admit(self, request: Request, least: int, hit: int, found: Pages | None) -> Tracked | None:
        """None where fewer than `least` pages are available beside those of the hit."""
        if not self.cache.num_free_slots:
            return None
        name, match = request.request_id, (found and found.match) or self._match(request, hit)
        slot = self.cache.admit(name, match, least=least)
        if slot.__class__ is OutOfPages:
            self._let_go(self._tracked.values())
            slot = self.cache.admit(name, match, least=least)
        if slot.__class__ is OutOfPages:
            return None
        if self.cache.num_computed[slot] != hit:  # what is cached has changed since the look-up
            self.cache.release(name)
            return None
        tracked = self._tracked[name] = Tracked(request, slot, hit)
        return tracked

    def _let_go(self, requests: Iterable[Tracked], keep_tails: bool = True) -> None:
        """Free what has left windows; steps in flight still read what their queries see."""
        for tracked in requests:
            request = tracked.request
            computed, in_flight = request.num_computed_tokens, request.num_in_flight_tokens
            self.cache.advance(tracked.slot, computed, computed - in_flight, keep_tails=keep_tails)

    def _publish(self, tracked: Tracked, until: int) -> None:
        first, end = tracked.published // self._segment, until // self._segment
        if keys := self._keys(tracked.request, first, end):
            self.cache.publish(tracked.slot, until, keys=keys)
            tracked.published += len(keys) // KEY_BYTES * self._segment

    def new_step_starts(self) -> None:
        """Publish what the last step completed."""
        for request_id, until in self._pending.items():
            self._publish(self._tracked[request_id], until)
        self._pending.clear()

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """None; the scheduler is done with its step."""
        self.new_step_starts()
        return {}

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        tracked = self._tracked.get(request.request_id)
        if tracked is not None:
            self._publish(tracked, num_computed_tokens)

    def estimate_cached_tokens(self, request: Request) -> int:
        tracked = self._tracked.get(request.request_id)
        return 0 if tracked is None else tracked.published

    def reset_prefix_cache(self) -> bool:
        if self._tracked:
            return False
        self.cache.clear()
        return super().reset_prefix_cache()

    def free(self, request: Request) -> None:
        self._pending.pop(request.request_id, None)
        if self._tracked.pop(request.request_id, None) is not None:
            self.cache.release(request.request_id)

    def get_blocks(self, request_id: str) -> Pages:
        tracked = self._tracked.get(request_id)
        return Pages(tuple(self.cache.pages_of(tracked.slot) if tracked else ()))
