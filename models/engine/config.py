"""Settings of an engine."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from numbers import Real

from quire.kvcore.spec import as_int

from ..transfer.store import STORE_METHODS, Store
from .scheduler import SchedulerPolicy

MEMORY_SETTINGS = (
    "max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_pages", "cache_bytes",
    "host_cache_gib",
)  # fmt: skip
"""Settings that memory depends on."""
REQUIRED = ("max_num_seqs", "max_num_batched_tokens")
FLASHINFER = "flashinfer"
IMPLS = ("triton", "torch", FLASHINFER)
TIER_DTYPES = ("auto", "fp8")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine.

    Attributes:
        max_num_seqs: requests running at once.
        max_num_batched_tokens: new tokens in a step.
        max_model_len: longest sequence in tokens; None = the model's, or what the pool holds if
            that is less.
        num_pages: page ids including the null page.
        cache_bytes: bytes of all page tensors.
        memory_fraction: share of the free memory that they take. One of the three at most; default:
            256 MiB on a CPU, a fraction of 0.9 on a GPU.
        base_block_size: tokens in a page of the heaviest kind of layer; of DeepSeek-V4, of a page
            of compressed entries, which is a multiple of both ratios. None = 16, and with
            DeepSeek-V4 two windows of its heavily compressed layers.
        kv_cache_dtype: what pages hold: "auto" = the model's dtype; "fp8" = e4m3 with a scale for
            each row, where the model can; "fp8_per_tensor" = e4m3 with one scale for a layer's keys
            and one for its values, the model's ``kv_scales`` (1.0 unless set).
        retention, enable_caching, hash_seed: as in `quire.kvcore.KVCache`.
        replay: where full attention has cached far more of a prompt than any resume point reaches,
            compute just the tokens that restore the windows of sliding layers, instead of all
            tokens from the resume point on. Not with DeepSeek-V4, whose replayed tokens would have
            to be kept from pooling into the entries that are cached.
        host_cache_gib: GiB of host memory behind the pool: what is cached and leaves the pool goes
            there, and comes back where loading it is quicker than computing it again
            (`quire.models.engine.tiering`). None = none.
        disk_cache: a folder behind these, for one engine at a time, which outlives the process
            (`Engine.close` writes what is not there yet); None = none. It goes with one model: with
            other weights or settings it is refused. Or a store (`quire.models.transfer.store`),
            which has pages while the engine lives (`quire.models.transfer.tier`).
        disk_cache_gib: GiB that it may take.
        max_hint_gib: GiB of prefixes that one tenant (one salt) may have retained by `Engine.hint`,
            as tiers count them; None = no limit but that of pins.
        tier_dtype: what pages hold in host memory and on a disk: "auto" = the same bytes; "fp8" =
            e4m3 with a scale for each row of a head, of keys and values in bf16, fp16 or fp32: half
            or a quarter of the bytes, on the link too. Hits on what came back so are marked
            (`RequestOutput.lossy_tokens`), as they are not what a request computes without a cache.
        policy: how a step is divided between prefill and decode.
        seed: requests without a seed of their own get one from it, in the order they come.
        impl: "triton" or "torch" for the kernels; None = by device; "flashinfer" = attention
            through FlashInfer where that can serve all layers (`quire.models.layers.flashinfer`),
            without graphs, and other kernels by device.
        rejection_sample_method: how drafts of sampled requests are verified; greedy ones do not
            depend on it. "strict" = the output is that of the same seed without drafts. "standard"
            = drafters that can, draw, and where outputs are diverse more of their drafts stay; the
            same distribution, but other tokens. See `quire.models.engine.speculative`.
        decode_graphs: decode through CUDA graphs of a few batch sizes, which are captured, and all
            kernels compiled, when the engine is made (`quire.models.engine.graphs`); on a CPU
            through the same buffers. None = on a GPU, unless impl is "torch" or "flashinfer".
        async_scheduling: while the device runs a step, the host prepares the next one, whose input
            ids go from sampler to model on the device; a step's tokens are in the report of the
            call after it. The same output. Steps that preempt wait for the tokens before them,
            and all do where there are drafts. None = on a GPU.
        tensor_parallel_size: ranks that run the model together, each on a device of its own, with a
            part of its weights and of its cache (`quire.models.parallel.shard`).
        context_parallel_size: ranks that share a context: each has every so many-th token of what
            full attention has in pages, or entry of DeepSeek-V4. 1, or tensor_parallel_size. See
            `quire.models.parallel.context`.
        rank_timeout: seconds after which a rank that gets no further ends all of them, with an
            error that names it; more than the longest step takes, compiling included. One that dies
            is noticed at once.

    Raises:
        ValueError: a value of another type, or unless 1 <= max_num_seqs <= max_num_batched_tokens,
            which lets every running request go on.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    num_pages: int | None = None
    cache_bytes: int | None = None
    memory_fraction: float | None = None
    base_block_size: int | None = None
    kv_cache_dtype: str = "auto"
    retention: str | int = "auto"
    enable_caching: bool = True
    hash_seed: bytes = b""
    replay: bool = False
    host_cache_gib: float | None = None
    disk_cache: str | os.PathLike[str] | Store | None = None
    disk_cache_gib: float = 16.0
    max_hint_gib: float | None = None
    tier_dtype: str = "auto"
    policy: SchedulerPolicy = field(default_factory=SchedulerPolicy)
    seed: int = 0
    impl: str | None = None
    rejection_sample_method: str = "strict"
    decode_graphs: bool | None = None
    async_scheduling: bool | None = None
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    rank_timeout: float = 300.0

    def __post_init__(self) -> None:
        for name, low in (
            ("max_num_seqs", 0),
            ("max_num_batched_tokens", 0),
            ("max_model_len", 0),
            ("num_pages", 0),
            ("cache_bytes", 0),
            ("base_block_size", 1),
            ("seed", 0),
            ("tensor_parallel_size", 1),
            ("context_parallel_size", 1),
        ):
            value = getattr(self, name)
            if value is not None or name in (*REQUIRED, "seed") or name.endswith("parallel_size"):
                object.__setattr__(self, name, as_int(name, value, low))
        if self.context_parallel_size not in (1, self.tensor_parallel_size):
            raise ValueError(
                f"context_parallel_size: expected 1 or tensor_parallel_size="
                f"{self.tensor_parallel_size}, got {self.context_parallel_size}"
            )
        by_device = ("decode_graphs", "async_scheduling")
        for name in ("enable_caching", "replay", *by_device):
            value = getattr(self, name)
            if not (isinstance(value, bool) or (value is None and name in by_device)):
                raise ValueError(f"{name}: expected True or False, got {value!r}")
        fraction = self.memory_fraction
        if fraction is not None and (isinstance(fraction, bool) or not isinstance(fraction, Real)):
            raise ValueError(f"memory_fraction: expected a number in (0, 1], got {fraction!r}")
        for name in ("host_cache_gib", "disk_cache_gib", "max_hint_gib"):
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not (
                (is_number and 0 < value < 2**33) or (value is None and name != "disk_cache_gib")
            ):
                raise ValueError(f"{name}: expected a number > 0, got {value!r}")
        limit = self.rank_timeout
        if isinstance(limit, bool) or not isinstance(limit, Real) or not 0 < limit < 2**31:
            raise ValueError(f"rank_timeout: expected a number of seconds > 0, got {limit!r}")
        place = self.disk_cache
        is_store = all(callable(getattr(place, name, None)) for name in STORE_METHODS)
        if not (place is None or isinstance(place, str | os.PathLike) or is_store):
            raise ValueError(f"disk_cache: expected a path, a store or None, got {place!r}")
        if self.has_tiers and not self.enable_caching:
            raise ValueError(
                "enable_caching: expected True with host_cache_gib or disk_cache, got False"
            )
        if self.tier_dtype not in TIER_DTYPES:
            names = " or ".join(map(repr, TIER_DTYPES))
            raise ValueError(f"tier_dtype: expected {names}, got {self.tier_dtype!r}")
        if self.tier_dtype != "auto" and not self.has_tiers:
            raise ValueError(
                f"tier_dtype: expected 'auto' without host_cache_gib and disk_cache, got "
                f"{self.tier_dtype!r}"
            )
        if not isinstance(self.policy, SchedulerPolicy):
            raise ValueError(f"policy: expected a SchedulerPolicy, got {self.policy!r}")
        if self.impl is not None and self.impl not in IMPLS:
            names = ", ".join(map(repr, IMPLS))
            raise ValueError(f"impl: expected {names} or None, got {self.impl!r}")
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs: expected 1..max_num_batched_tokens={self.max_num_batched_tokens}, "
                f"got {self.max_num_seqs}"
            )

    @property
    def has_tiers(self) -> bool:
        """Whether there is anything behind the pool."""
        return self.host_cache_gib is not None or self.disk_cache is not None
