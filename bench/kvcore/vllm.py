"""Figures of `bench.kvcore` for vLLM 0.33: `KVCacheManager`, block pool and request hashes.

They are driven as vLLM's scheduler drives them, without an engine, a model or a device. Importing
this module needs vLLM.
"""

from __future__ import annotations

import gc
import math

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_group_id, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from . import measure
from .measure import CHUNK, SPECS, Row, Times, row

LATEST = 0  # retention of vLLM: keep the last window tail only; None: at every boundary
# (tokens a block, window): V4's compressor states, which vLLM keeps in windows.
STATE_GROUPS = [(4, 8), (8, 128)]


def rows(spec: str, requests: list[int], repeats: int, steps: int) -> list[Row]:
    """Measure vLLM's allocator; arguments and names of figures are those of `measure.spec_rows`."""
    init_none_hash(sha256)
    times = Times()
    try:
        for _ in range(repeats):
            million(spec, times)
        for num_requests in requests:
            decode_step(spec, num_requests, steps, times)
        made = measure.bytes_of(lambda: build(spec, measure.MILLION))
        return [*times.rows(spec), row("pool_1m_bytes", spec, made, "B")]
    finally:
        gc.unfreeze()


def groups(spec: str) -> list[tuple[int, int | None]]:
    """(tokens a block, window) of the cache groups that vLLM makes of a model's layers."""
    paged = [g for g in SPECS[spec] if g.kind != "state"]
    states = STATE_GROUPS if len(paged) < len(SPECS[spec]) else []
    return [(g.block_size, g.sliding_window) for g in paged] + states


def sizes_of(groups: list[tuple[int, int | None]]) -> dict[str, int]:
    """Hits end where every group ends a block; hashes are of the unit that all blocks share."""
    blocks = [size for size, _ in groups]
    return {"scheduler_block_size": math.lcm(*blocks), "hash_block_size": math.gcd(*blocks)}


def manager_of(
    groups: list[tuple[int, int | None]], num_blocks: int, longest: int, chunk: int,
    retention: int | None,
) -> KVCacheManager:  # fmt: skip
    """A manager with an empty pool.

    Args:
        groups: (tokens a block, window or None) of each cache group.
        longest: tokens of the longest request.
        chunk: tokens of a request in one step.
        retention: tokens between the window tails that it keeps; 0: those of each prompt's end;
            None: one at every boundary.
    """
    # Heads and dtype decide the bytes of a block, which the manager never asks for.
    shape = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.uint8}
    specs = [
        FullAttentionSpec(block_size=size, **shape)
        if window is None
        else SlidingWindowSpec(block_size=size, sliding_window=window, **shape)
        for size, window in groups
    ]
    layers = [KVCacheGroupSpec([f"layer.{i}"], each) for i, each in enumerate(specs)]
    config = KVCacheConfig(num_blocks, [], layers, prefix_cache_retention_interval=retention)
    return KVCacheManager(config, longest, max_in_flight_tokens=chunk, **sizes_of(groups))


def build(spec: str, num_blocks: int, retention: int | None = LATEST) -> KVCacheManager:
    return manager_of(groups(spec), num_blocks, 2 * measure.MILLION, CHUNK, retention)


def allocate(manager: KVCacheManager, request: Request, count: int, **options: bool) -> None:
    """The part of a scheduler step for one request: slots for its next tokens, and block ids."""
    blocks = manager.allocate_slots(request, count, **options)
    assert blocks is not None, "the pool is full"
    blocks.get_block_ids(allow_none=True)
    request.num_computed_tokens += count


def prefill(manager: KVCacheManager, request: Request) -> None:
    """Allocate an uncached prompt in chunks; it is admitted only if all of it fits."""
    for start in range(0, request.num_tokens, CHUNK):
        count = min(CHUNK, request.num_tokens - start)
        allocate(manager, request, count, full_sequence_must_fit=start == 0)


def million(spec: str, times: Times) -> None:
    """The life of a million-token prompt, under two retentions."""
    tokens = [i % 50021 for i in range(measure.MILLION)]
    unit = sizes_of(groups(spec))["scheduler_block_size"]
    longest = (measure.MILLION - 1) // unit * unit  # at least one token is left to compute
    hasher = get_request_block_hasher(sizes_of(groups(spec))["hash_block_size"], sha256)
    for name, retention in (("admit_1m_interval", 32768), ("admit_1m_dense", None)):
        manager = times.run("pool_1m_build", lambda r=retention: build(spec, measure.MILLION, r))
        request = Request("a", tokens, SamplingParams(), None)
        freeze()
        request.block_hashes = times.run("hash_1m", lambda r=request: hasher(r))
        times.run(name, lambda m=manager, r=request: prefill(m, r))
        times.run("release_1m", lambda m=manager, r=request: m.free(r))
        look_up = manager.get_computed_blocks
        _, hit, _ = times.run("lookup_1m_hit", lambda call=look_up, r=request: call(r))
        assert hit == longest, (hit, longest)
    cached = [b for b in manager.block_pool.blocks if b.block_hash is not None]
    manager.evict_blocks({b.block_id for b in cached if get_group_id(b.block_hash) > 0})
    _, hit, dense = times.run("lookup_1m_tails_gone", lambda: look_up(request))
    assert (hit, dense) == (0, longest), (hit, dense)


def decode_step(spec: str, num_requests: int, steps: int, times: Times) -> None:
    """A slot for each request, then the sampled tokens, hashed where they fill a block."""
    manager = build(spec, 4 * measure.MILLION)
    freeze()
    hasher = get_request_block_hasher(sizes_of(groups(spec))["hash_block_size"], sha256)
    tokens = [i % 50021 for i in range(64 * num_requests + 2 * CHUNK)]
    requests = []
    for i in range(num_requests):
        prompt = tokens[64 * i : 64 * i + CHUNK + 67 * i % 256]
        request = Request(str(i), prompt, SamplingParams(), None, block_hasher=hasher)
        prefill(manager, request)
        request.append_output_token_ids(0)
        requests.append(request)

    def step() -> None:
        manager.new_step_starts()
        for request in requests:
            allocate(manager, request, 1)
        for request in requests:
            request.append_output_token_ids(0)

    for _ in range(steps):
        times.run(f"decode_step_{num_requests}", step)


def freeze() -> None:
    """Keep the pool out of garbage collections, as vLLM does once it is built."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
