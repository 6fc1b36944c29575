"""`CacheManager`: `quire.kvcore` behind the interface of vLLM 0.33's `KVCacheManager`; of
`vllm_scheduler`.

What vLLM's Scheduler and engine use of that interface, for models that are served, is below; a
method that only others call raises `NotImplementedError`. Keys of segments are vLLM's block hashes,
so salts, adapters, images and lookaheads part prompts as vLLM has them.

A running request may be preempted in the very step in which it was given slots, and then nobody
computes these rows. So what it completes becomes findable once no more requests are preempted: at
the first look-up of a waiting request, or when the scheduler is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import Request, RequestStatus

from quire.kvcore import LRU, GroupSpec, KVCache, Match, OutOfPages

KEY_BYTES = 32


class Pages(KVCacheBlocks):
    """Pages of each group, where vLLM's `KVCacheBlocks` has blocks."""

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Copies; None if there are no pages and `allow_none`."""
        groups = self.blocks if group_ids is None else [self.blocks[i] for i in group_ids]
        if allow_none and not any(groups):
            return None
        return tuple([list(pages) for pages in groups])


class Tracked:
    """A request with slots.

    Attributes:
        request: vLLM's. slot: of the cache.
        quiet: tokens up to which nothing is to be done for it.
        pending: tokens up to which it becomes findable at the end of the step.
    """

    __slots__ = ("pending", "quiet", "request", "slot")

    def __init__(self, request: Request, slot: int) -> None:
        self.request, self.slot, self.quiet, self.pending = request, slot, 0, 0


class CacheManager(KVCacheManager):
    """See above; methods are as vLLM's `KVCacheManager` says.

    Args:
        scheduler: whose it is. groups: its cache groups, as kvcore has them.

    Attributes:
        cache: the pages of all groups.
    """

    def __init__(self, scheduler: Any, groups: Sequence[GroupSpec]) -> None:
        self.kv_cache_config = config = scheduler.kv_cache_config
        interval = config.prefix_cache_retention_interval
        self._has_windows = has_windows = any(group.kind == "window" for group in groups)
        self.max_model_len, self.log_stats = scheduler.max_model_len, scheduler.log_stats
        self.enable_caching = scheduler.cache_config.enable_prefix_caching
        self.cache = KVCache(
            groups,
            num_pages=config.num_blocks,
            max_requests=scheduler.max_num_running_reqs,
            max_model_len=self.max_model_len,
            reads="pages",
            adopt=False,
            append_only=True,
            retention="dense" if interval is None or not has_windows else interval or "latest",
            policy=None if has_windows else LRU(),  # as vLLM's: there is little to choose from
            enable_caching=self.enable_caching,
        )
        self.prefix_cache_stats = PrefixCacheStats() if self.log_stats else None
        self.watermark_blocks = int(scheduler.scheduler_config.watermark * config.num_blocks)
        self.num_kv_cache_groups = len(groups)
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        # What the engine asks of each group.
        each = [SimpleNamespace(block_size=s.block_size, kv_cache_spec=s) for s in specs]
        self.coordinator = SimpleNamespace(single_type_managers=each)
        # Block sizes, and the most blocks that a request has at once, as vLLM counts to admit one.
        longest = scheduler.vllm_config.max_in_flight_tokens, self.max_model_len
        self._groups = [
            (
                s.block_size,
                s.max_admission_blocks_per_request(*longest) if g.sliding_window else longest[1],
            )
            for s, g in zip(specs, groups, strict=True)
        ]
        self._alignment = self.cache.alignment
        self._per_key = self._alignment // scheduler.hash_block_size
        # A drafter's last rows depend on the token after them, which hashes may cover, or not.
        self._drop = scheduler.use_eagle_block_drop
        self._zeroes, self._to_zero = config.needs_kv_cache_zeroing, []
        self._tracked: dict[str, Tracked] = {}
        self._pending: dict[str, Tracked] = {}
        self._found: Match | None = None  # by the newest look-up, for this request
        self._found_for: Request | None = None
        self.empty_kv_cache_blocks = Pages(tuple(() for _ in specs))

    @property
    def usage(self) -> float:
        """Part of the pages that running requests need."""
        cache = self.cache
        return 1.0 - (cache.num_free_pages + cache.num_evictable_pages) / (cache.num_pages - 1)

    # Look-up.

    def _keys(self, request: Request, first: int, last: int) -> bytes:
        """Keys of segments [first, last) of a request, as far as they are known."""
        n, hashes = self._per_key, request.block_hashes
        every = hashes[(first + 1) * n - 1 : last * n : n]
        return b"".join([key if len(key) == KEY_BYTES else key.ljust(KEY_BYTES) for key in every])

    def _prompt_keys(self, request: Request) -> bytes:
        if not self.prefix_cache_lookup_enabled(request):
            return b""
        return self._keys(request, 0, len(request.block_hashes) // self._per_key)

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[Pages, int, int]:
        """(no pages yet, tokens that are cached, 0)."""
        self._publish_pending()
        most = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        match = self._match(request, most)
        hit = match.num_tokens
        if self._drop and hit and hit == match.dense_tokens:
            match = self._match(request, hit - self._alignment)
        self._found, self._found_for = match, request
        return self.empty_kv_cache_blocks, match.num_tokens, 0

    def _match(self, request: Request, most: int) -> Match:
        keys = self._prompt_keys(request)
        return self.cache.match(keys=keys, num_tokens=request.num_tokens, max_tokens=most)

    # Slots.

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        has_scheduled_reqs: bool = True,
        **unserved: Any,
    ) -> Pages | None:
        """New pages for the next tokens of a request; None where they lack."""
        tracked = self._tracked.get(request.request_id)
        end = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        if tracked is not None and end + num_lookahead_tokens <= tracked.quiet:
            return self.empty_kv_cache_blocks
        if any(unserved.values()):
            raise NotImplementedError(f"allocate_slots: supported are decoders, got {unserved}")
        slots, running = end + num_lookahead_tokens, request.status == RequestStatus.RUNNING
        slots = min(slots, self.max_model_len)
        if tracked is not None and self._has_windows:
            self._let_go(tracked)
        least = 0
        if not running or full_sequence_must_fit:
            lengths = [num_new_computed_tokens // size for size, _ in self._groups]
            if tracked is not None:
                lengths = [*map(len, self.cache.pages_of(tracked.slot))]
            least = self._missing(slots, lengths, slots)
            if full_sequence_must_fit:
                least = max(least, self._missing(request.num_tokens, lengths))
            if has_scheduled_reqs and not running:
                least += self.watermark_blocks
        given = self._give(request, tracked, slots, least, num_new_computed_tokens)
        if given is None:
            return None
        tracked = self._tracked[request.request_id]
        if self._zeroes:
            self._to_zero += [page for group in given for page in group]
        until = min(end, request.num_tokens)
        published = self.cache.num_published(tracked.slot)
        if self.enable_caching and until - published >= self._alignment:
            if running:
                tracked.pending, self._pending[request.request_id] = until, tracked
            else:
                self._publish(tracked, until)
        self._settle(tracked)
        return Pages(tuple(given)) if any(given) else self.empty_kv_cache_blocks

    def _missing(self, end: int, lengths: list[int], most: int | None = None) -> int:
        """Blocks up to token `end` that a request lacks, or those that it needs at once."""
        needed = 0
        for (size, at_once), length in zip(self._groups, lengths, strict=True):
            needed += max(0, min(-(-end // size), most or at_once) - length)
        return needed

    def _give(
        self, request: Request, tracked: Tracked | None, slots: int, least: int, hit: int
    ) -> Sequence[Sequence[int]] | None:
        """The pages up to token `slots`, where so many are available at `least`."""
        cache = self.cache
        for keep_tails in (None, True, False) if tracked else (None, True):
            if keep_tails is not None:  # others have not asked since they went on
                for other in self._tracked.values():
                    self._let_go(other, keep_tails)
            if tracked is not None:
                given = cache.reserve(tracked.slot, slots, least)
                if not isinstance(given, OutOfPages):
                    return given
            elif cache.num_free_slots:
                match = self._found
                if match is None or self._found_for is not request or match.num_tokens != hit:
                    match = self._match(request, hit)
                slot = cache.admit(request.request_id, match, least=least)
                if not isinstance(slot, OutOfPages):
                    assert match.num_tokens == hit, "what the look-up found"
                    self._tracked[request.request_id] = Tracked(request, slot)
                    return cache.reserve(slot, slots)
        return None

    def _let_go(self, tracked: Tracked, keep_tail: bool = True) -> None:
        """Steps in flight may still read what their queries see."""
        request = tracked.request
        start = request.num_computed_tokens - request.num_in_flight_tokens
        self.cache.advance(tracked.slot, request.num_computed_tokens, start, keep_tails=keep_tail)

    def _settle(self, tracked: Tracked) -> None:
        """Find when the request needs something again."""
        tracked.quiet = self.cache.room(tracked.slot)

    def _publish(self, tracked: Tracked, until: int) -> None:
        first = self.cache.num_published(tracked.slot) // self._alignment
        keys = self._keys(tracked.request, first, until // self._alignment)
        if keys:
            self.cache.publish(tracked.slot, until, keys=keys)
            self._settle(tracked)

    def _publish_pending(self) -> None:
        for tracked in self._pending.values():
            self._publish(tracked, tracked.pending)
        self._pending.clear()

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Tokens of a request are known."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None and self.enable_caching:
            self._publish(tracked, num_computed_tokens)

    def free(self, request: Request) -> None:
        """A request ends, or is preempted."""
        self._pending.pop(request.request_id, None)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            self.cache.release(request.request_id)

    def new_step_starts(self) -> None:
        """The scheduler begins a step."""
        self._publish_pending()

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """There are none; the scheduler is done with its step."""
        self._publish_pending()
        return {}

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """There are none: hits end where blocks do."""
        return [], []

    def take_new_block_ids(self) -> list[int]:
        """Pages for the worker to zero."""
        pages, self._to_zero = self._to_zero, []
        return pages

    def take_events(self) -> list[Any]:
        """There are none."""
        return []

    def get_blocks(self, request_id: str) -> Pages:
        """All pages of a request."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return self.empty_kv_cache_blocks
        return Pages(tuple(self.cache.pages_of(tracked.slot)))

    def estimate_cached_tokens(self, request: Request) -> int:
        """Tokens of a request that others find."""
        tracked = self._tracked.get(request.request_id)
        return 0 if tracked is None else self.cache.num_published(tracked.slot)

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached; False while requests run."""
        if self._tracked:
            return False
        self.cache.clear()
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True


def _refuse(self: CacheManager, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("CacheManager: supported are models without a connector")


for _name in (
    "evict_blocks", "finalize_partial_tail_offloads", "get_block_ids_for_computed_tokens",
    "get_computed_blocks_for_connector", "pop_blocks_for_free", "record_blocks_for_zeroing",
    "remove_skipped_blocks", "truncate_computed_blocks",
):  # fmt: skip
    setattr(CacheManager, _name, _refuse)
