"""The figures of `bench.kvcore` for vLLM's `KVCacheManager`, block pool and request hashes, driven
as its scheduler drives them.

No engine, no model, no device: objects and integers in Python. Nothing else needs vLLM; `rows`
imports it.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import re
import time
import tracemalloc
from collections.abc import Callable
from importlib import import_module, metadata
from statistics import median
from types import SimpleNamespace
from typing import Any

from .measure import row

MILLION, CHUNK = 1 << 20, 8192
KNOWN = ("0.33",)
# Everything that is used of vLLM, by module.
USED = {
    "vllm.sampling_params": "SamplingParams",
    "vllm.utils.hashing": "sha256",
    "vllm.v1.core.kv_cache_manager": "KVCacheManager",
    "vllm.v1.core.kv_cache_utils": "get_group_id get_request_block_hasher init_none_hash",
    "vllm.v1.kv_cache_interface": "FullAttentionSpec KVCacheConfig KVCacheGroupSpec SlidingWindowSpec",
    "vllm.v1.request": "Request",
}
# (block size, sliding window) of the cache groups that vLLM makes of a model's layers; None is full
# attention. V4's compressor states are windows there: of 8 tokens at ratio 4, of 128 at ratio 128.
GROUPS: dict[str, list[tuple[int, int | None]]] = {
    "v4": [(256, None), (64, 128), (64, 128), (4, 8), (8, 128)],
    "gemma4-31b": [(32, None), *[(16, 1024)] * 5],
}
NAMES = (
    "hash_1m", "admit_1m_interval", "admit_1m_dense", "lookup_1m_hit", "lookup_1m_tails_gone",
    "release_1m", "pool_1m_build", "pool_1m_bytes", "decode_step_256", "decode_step_4096",
)  # fmt: skip
PROMPT = NAMES[:7]


def available() -> str | None:
    """Version of the installed vLLM, or None. Imports nothing of it, and never raises."""
    try:
        return metadata.version("vllm") if importlib.util.find_spec("vllm") else None
    except Exception:  # an installation too broken to say its version cannot be measured either
        return None


def rows(spec: str, *names: str, repeats: int = 3, steps: int = 100) -> list[dict[str, object]]:
    """Measure vLLM's allocator.

    Args:
        spec: a key of `GROUPS`.
        names: which figures, of `NAMES` or decode_step_<requests>; all of `NAMES` if none are given.
        repeats: runs of the million-token prompt.
        steps: decode steps to time.

    Returns:
        ``{name, spec, value, unit}`` for each name, in order; medians in seconds ("s"), or bytes
        ("B").

    Raises:
        ValueError: an argument is not as above.
        ImportError: vLLM is missing or does not import.
        NotImplementedError: a version not known here.
    """
    if spec not in GROUPS:
        raise ValueError(f"spec: expected one of {sorted(GROUPS)}, got {spec!r}")
    for name in names:
        if name not in NAMES and not re.fullmatch(r"decode_step_[1-9]\d*", name):
            raise ValueError(f"names: expected {NAMES} or decode_step_<requests>, got {name!r}")
    if min(repeats, steps) < 1:
        raise ValueError(f"repeats, steps: expected at least 1, got {repeats}, {steps}")
    api, names = _api(spec), names or NAMES
    try:
        times = _prompt_times(api, repeats) if set(names) & set(PROMPT) else {}
        for name in names:
            if name.startswith("decode_step_"):
                times[name] = _decode_times(api, int(name.removeprefix("decode_step_")), steps)
            elif name == "pool_1m_bytes":
                times[name] = [_pool_bytes(api)]
    finally:
        gc.unfreeze()
    unit = {"pool_1m_bytes": "B"}
    return [row(n, spec, median(times[n]), unit.get(n, "s")) for n in names]


def _api(spec: str) -> Any:
    """What is used of vLLM, and the sizes of the spec, as one object.

    Raises:
        ImportError, NotImplementedError.
    """
    if (version := available()) is None:
        raise ImportError("vllm: not installed")
    known = f"vllm: expected {', '.join(KNOWN)}, got {version}"
    if ".".join(version.split(".")[:2]) not in KNOWN:
        raise NotImplementedError(known)
    try:
        used = {n: getattr(import_module(m), n) for m, ns in USED.items() for n in ns.split()}
    except AttributeError as error:
        raise NotImplementedError(f"{known} with another API: {error}") from error
    # Hits end where every group ends a block; hashes, of its default kind, are of the unit that all
    # block sizes share.
    sizes = [size for size, _ in GROUPS[spec]]
    units = {"scheduler_block_size": math.lcm(*sizes), "hash_block_size": math.gcd(*sizes)}
    api = SimpleNamespace(groups=GROUPS[spec], units=units, **used)
    api.init_none_hash(api.sha256)
    api.hasher = api.get_request_block_hasher(units["hash_block_size"], api.sha256)
    return api


def _manager(api: Any, num_blocks: int, retention: int | None = 0) -> Any:
    """A manager.

    Args:
        retention: tokens between the window tails that it keeps; None: at every boundary; 0, its
            default: the last.
    """
    # Heads and dtype decide the bytes of a block, which the manager never asks for.
    shape = {"num_kv_heads": 1, "head_size": 64, "dtype": import_module("torch").uint8}
    groups = []
    for size, window in api.groups:
        more = {} if window is None else {"sliding_window": window}
        kind = api.SlidingWindowSpec if more else api.FullAttentionSpec
        layers = kind(block_size=size, **shape, **more)
        groups.append(api.KVCacheGroupSpec([f"layer.{len(groups)}"], layers))
    config = api.KVCacheConfig(num_blocks, [], groups, prefix_cache_retention_interval=retention)
    return api.KVCacheManager(config, 2 * MILLION, max_in_flight_tokens=CHUNK, **api.units)


def _allocate(manager: Any, request: Any, count: int, **options: bool) -> None:
    """One request's part of a scheduler step: slots for its next tokens, which must fit, and the
    ids of new blocks.
    """
    blocks = manager.allocate_slots(request, count, **options)
    assert blocks is not None, "the pool is full"
    blocks.get_block_ids(allow_none=True)
    request.num_computed_tokens += count


def _prefill(manager: Any, request: Any) -> None:
    """A prompt that is not cached, in chunks; it is admitted only if all of it fits."""
    for start in range(0, request.num_tokens, CHUNK):
        count = min(CHUNK, request.num_tokens - start)
        _allocate(manager, request, count, full_sequence_must_fit=start == 0)


def _prompt_times(api: Any, repeats: int) -> dict[str, list[float]]:
    """Seconds of each part of the life of a million-token prompt."""
    tokens = [i % 50021 for i in range(MILLION)]
    unit = api.units["scheduler_block_size"]
    longest = (MILLION - 1) // unit * unit  # at least one token is left to compute
    times: dict[str, list[float]] = {name: [] for name in PROMPT}

    def timed(name: str, run: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = run(*args)
        times[name].append(time.perf_counter() - start)
        return result

    for _ in range(repeats):
        for admit, retention in (("admit_1m_interval", 32768), ("admit_1m_dense", None)):
            manager = timed("pool_1m_build", _manager, api, MILLION, retention)
            request = api.Request("a", tokens, api.SamplingParams(), None)
            _freeze()
            request.block_hashes = timed("hash_1m", api.hasher, request)
            timed(admit, _prefill, manager, request)
            timed("release_1m", manager.free, request)
            _, hit, _ = timed("lookup_1m_hit", manager.get_computed_blocks, request)
            assert hit == longest, (hit, longest)
        cached = [b for b in manager.block_pool.blocks if b.block_hash is not None]
        manager.evict_blocks({b.block_id for b in cached if api.get_group_id(b.block_hash) > 0})
        _, hit, dense = timed("lookup_1m_tails_gone", manager.get_computed_blocks, request)
        assert (hit, dense) == (0, longest), (hit, dense)
    return times


def _pool_bytes(api: Any) -> int:
    """Bytes that a manager of a million blocks allocates before its first request."""
    tracemalloc.start()
    manager = _manager(api, MILLION)  # noqa: F841  it has to live
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used


def _decode_times(api: Any, num_requests: int, steps: int) -> list[float]:
    """Seconds of each decode step: a slot for each request, then the sampled tokens, hashed where
    they fill a block.
    """
    manager = _manager(api, 4 * MILLION)
    _freeze()
    tokens = [i % 50021 for i in range(64 * num_requests + 2 * CHUNK)]
    requests, times = [], []
    for i in range(num_requests):
        prompt = tokens[64 * i : 64 * i + CHUNK + 67 * i % 256]
        request = api.Request(str(i), prompt, api.SamplingParams(), None, block_hasher=api.hasher)
        _prefill(manager, request)
        request.append_output_token_ids(0)
        requests.append(request)
    for _ in range(steps):
        start = time.perf_counter()
        manager.new_step_starts()
        for request in requests:
            _allocate(manager, request, 1)
        for request in requests:
            request.append_output_token_ids(0)
        times.append(time.perf_counter() - start)
    return times


def _freeze() -> None:
    """Keep the pool out of garbage collections, as vLLM does once it is built."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
