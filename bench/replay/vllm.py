"""Replay of a trace through vLLM's `KVCacheManager`, in a pool of as many pages.

The manager is called as vLLM's scheduler calls it, and answers are decoded in steps of `DECODE`
tokens. Groups and block sizes are those of the preset, but for DeepSeek-V4: vLLM keeps the
compressors' states in windows of 4 and 8 tokens a page. Importing this module needs vLLM.
"""

from __future__ import annotations

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from quire.kvcore import KVCache

from ..kvcore.vllm import STATE_GROUPS, freeze, manager_of, sizes_of
from .presets import PRESETS
from .simulate import Replay, SimulatedTiming, TraceWorkload

DECODE = 64  # tokens: a step of one token each would take minutes


def vllm_groups(preset: str) -> list[tuple[int, int | None]]:
    """(tokens a block, window) of vLLM's cache groups."""
    is_v4 = preset.startswith("v4")
    groups = [g for g in PRESETS[preset] if not (is_v4 and g.name == "overlap")]
    return [(g.block_size, g.sliding_window) for g in groups] + (STATE_GROUPS if is_v4 else [])


class VLLMReplay(Replay):
    """A run of a workload through vLLM's manager.

    Args:
        empty: a cache of the preset's groups, for keys alone.
        num_pages: pages of the pool, the null page included.
        retention: see `manager_of`.
    """

    def __init__(
        self, workload: TraceWorkload, empty: KVCache, preset: str, timing: SimulatedTiming,
        num_pages: int, retention: int | None,
    ) -> None:  # fmt: skip
        super().__init__(workload, empty, timing, None)
        groups = vllm_groups(preset)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(sizes_of(groups)["hash_block_size"], sha256)
        self._manager: KVCacheManager = manager_of(
            groups, num_pages, workload.longest, timing.chunk, retention
        )
        self._running: dict[int, Request] = {}
        freeze()

    def _request(self, number: int) -> Request:
        request = self.requests[number]
        prompt = request.tokens(number)[: request.input].tolist()
        salt = request.scope or None
        return Request(
            str(number), prompt, SamplingParams(max_tokens=max(1, request.output)), None,
            cache_salt=salt, block_hasher=self._hasher,
        )  # fmt: skip

    def _look_up(self, number: int) -> int:
        return int(self._manager.get_computed_blocks(self._request(number))[1])

    def _admit(self, number: int) -> int:
        request = self._running[number] = self._request(number)
        found = self._manager.get_computed_blocks(request)
        self._found, hit, request.shared_prefix_boundary = found
        self.from_device[number] = hit
        return int(hit)

    def _take_pages(self, number: int, tokens: np.ndarray) -> int | str:
        manager, request = self._manager, self._running[number]
        start = request.num_computed_tokens
        hit = 0 if start else int(self.hits[number])
        is_answer = start + hit >= request.num_prompt_tokens
        count = min(DECODE if is_answer else self._timing.chunk, len(tokens))
        end = start + hit + count
        if end > request.num_tokens:
            request.append_output_token_ids(tokens[:count].tolist())
        blocks = manager.allocate_slots(
            request, count, hit, None if start else self._found, full_sequence_must_fit=not start
        )
        if blocks is None:
            free = manager.block_pool.get_num_free_blocks()
            return f"vLLM found no blocks for {count} more, with {free} free"
        request.num_computed_tokens = end
        return count

    def _release(self, number: int) -> None:
        self._manager.free(self._running.pop(number))
