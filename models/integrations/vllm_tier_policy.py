"""A `CachePolicy` of vLLM 0.33's host tier that keeps resume points whole; extra ``vllm``.

In the settings of vLLM's offloading connector (``kv_connector_extra_config``)::

    "eviction_policy": "ResumePointPolicy",
    "cache_policy_module_path": "quire.models.integrations.vllm_tier_policy"

A request that resumes at a boundary needs all chunks of full attention before it, but of each
window group only the last few, its tail. vLLM stores the last tail of a prompt, or, as
``prefix_cache_retention_interval`` says, those of more boundaries, and its policies treat their
chunks like others. Here, when a request finishes, its window chunks are spare but for

* the tail of its end, where the next turn of a chat resumes,
* the tail of a junction, where its chunks of full attention stop being those of an earlier request,
* a tail at which a second request has resumed.

Spare chunks go first; then the rest, requests that were used longest ago first, their ends before
their beginnings, as in vLLM's own LRU. Which groups have windows, and how long tails are, is seen
from the first chunks that are loaded; until then nothing is spare.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

try:
    import vllm
    from vllm.v1.kv_offload.base import get_offload_group_idx
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, order_request_keys
except ImportError as error:
    raise ImportError("needs vLLM 0.33: pip install 'quire[vllm]'") from error

SUPPORTED = "0.33"

if not vllm.__version__.startswith(f"{SUPPORTED}."):
    raise ImportError(f"vllm: expected {SUPPORTED}, got {vllm.__version__}")


class ResumePointPolicy(CachePolicy):
    """See above; methods are as vLLM's `CachePolicy` says.

    Args:
        cache_capacity: chunks of the tier.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clear()

    def clear(self) -> None:
        """Forget all chunks; what is known of groups stays true, but is learned again."""
        self._chunks: dict[Any, Any] = {}
        # In the order of eviction.
        self._spare: OrderedDict[Any, None] = OrderedDict()
        self._kept: OrderedDict[Any, None] = OrderedDict()
        self._resumed: set[Any] = set()  # window chunks that one request has loaded
        self._chunk_tokens: dict[int, int] = {}  # of each group: where its first chunk ends
        self._tails: dict[int, int] = {}  # of each window group: tokens that a hit loads

    def get(self, key: Any) -> Any:
        """The chunk of a key, or None."""
        return self._chunks.get(key)

    def insert(self, key: Any, chunk: Any, req_context: Any) -> None:
        """A chunk of a running request: newer than all others."""
        self._chunks[key], self._kept[key] = chunk, None
        position = req_context.get_offload_key_position(key)
        if position is not None:
            group = get_offload_group_idx(key)
            self._chunk_tokens[group] = min(position, self._chunk_tokens.get(group, position))

    def remove(self, key: Any) -> None:
        """Drop a chunk whose store failed."""
        self._drop(key)

    def touch(self, keys: Iterable[Any], req_context: Any) -> None:
        """These are used now, the last ones first to go."""
        for key in reversed(list(keys)):
            order = self._spare if key in self._spare else self._kept
            if key in order:
                order.move_to_end(key)

    def on_store_miss(self, keys: Iterable[Any], req_context: Any) -> None:
        """Chunks that are not here have no rank."""

    def on_request_access(self, keys: Iterable[Any], req_context: Any) -> None:
        """Learn from a load which groups have windows: they load fewer tokens than others."""
        loaded: dict[int, int] = {}
        for key in keys:
            chunk, group = self._chunks.get(key), get_offload_group_idx(key)
            if chunk is not None and chunk.ref_cnt > 0 and group in self._chunk_tokens:
                loaded[group] = loaded.get(group, 0) + self._chunk_tokens[group]
        longest = max(loaded.values(), default=0)
        for group, tokens in loaded.items():
            if tokens < longest:
                self._tails[group] = max(tokens, self._tails.get(group, 0))
            elif group in self._tails and tokens > self._tails[group]:
                del self._tails[group]  # as long as any: it was shortened by a local hit before

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[Any]],
        insertion_only_keys: set[Any],
        reused_keys: set[Any],
        req_context: Any,
    ) -> None:
        """Rank what a request used, and tell which of its window chunks are spare."""
        position = req_context.get_offload_key_position
        keys = order_request_keys(key_groups, req_context)
        known = [key for key in keys if position(key) is not None]
        window = {key for key in known if get_offload_group_idx(key) in self._tails}
        dense = [key for key in known if key not in window]
        ends = {max((position(key) for key in known), default=0)}
        junction = max((position(key) for key in dense if key in reused_keys), default=0)
        if junction > max((position(key) for key in window & reused_keys), default=0):
            ends.add(junction)
        for key in reversed(keys):
            if key not in self._chunks:
                continue
            again = key in self._resumed
            if key in window and key in reused_keys:
                self._resumed.add(key)
            spare = key in window and not again and not self._in_tail(key, position(key), ends)
            here, other = (self._spare, self._kept) if spare else (self._kept, self._spare)
            other.pop(key, None)
            here[key] = None
            here.move_to_end(key)

    def _in_tail(self, key: Any, position: int, ends: set[int]) -> bool:
        tail = self._tails[get_offload_group_idx(key)]
        return any(end - tail < position <= end for end in ends)

    def evict(self, n: int, protected: set[Any]) -> list[tuple[Any, Any]] | None:
        """Drop exactly `n` chunks that no transfer uses, or none and return None."""
        chosen: list[Any] = []
        for order in (self._spare, self._kept):
            for key in order:
                if len(chosen) == n:
                    break
                if self._chunks[key].ref_cnt == 0 and key not in protected:
                    chosen.append(key)
        if len(chosen) < n:
            return None
        return [(key, self._drop(key)) for key in chosen]

    def _drop(self, key: Any) -> Any:
        self._spare.pop(key, None)
        self._kept.pop(key, None)
        self._resumed.discard(key)
        return self._chunks.pop(key)
