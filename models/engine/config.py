"""Settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..config.fields import MAX_INT32, Share, check_fields, floats, ints

Impl = Literal["triton", "torch"]
KvCacheDtype = Literal["auto", "fp8", "fp8_per_tensor"]
RejectionSampleMethod = Literal["strict", "standard"]
IMPLS, KV_CACHE_DTYPES = get_args(Impl), get_args(KvCacheDtype)
Count = ints(1, MAX_INT32)
NumPages = ints(0, MAX_INT32)
Seed = ints(0, 2**64 - 1)
Gib = floats(0, 10**6, is_open=True)


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine.

    Attributes:
        max_num_seqs: requests running at once.
        max_num_batched_tokens: new tokens in a step, which bounds the time between two tokens.
        max_model_len: longest sequence in tokens; None = the model's limit, or the longest that the
            pool holds if that is less.
        num_pages: page ids, the null page included.
        memory_fraction: share of the free memory for pages, instead of num_pages; default: 0.9 on a
            GPU, 256 MiB on a CPU.
        kv_cache_dtype: "auto" = pages of the model's dtype; "fp8" = e4m3 with a scale for each row,
            where the model can; "fp8_per_tensor" = e4m3 with one scale for a layer's keys and one
            for its values, the model's ``kv_scales``.
        retention, enable_caching: arguments of `quire.kvcore.KVCache`.
        replay: True = where dense blocks are cached far beyond any resume point, compute only the
            tokens that restore the windows.
        host_cache_gib: GiB of host memory behind the pool. Cached pages are copied
            there before they are evicted, and come back where a load is quicker than a prefill;
            None = none.
        seed: seed of requests without one, in order of arrival.
        impl: "triton" or "torch" for the kernels; None = by device.
        rejection_sample_method: verification of drafts of sampled requests
            (`quire.models.engine.speculative`). "strict" = the same output as without drafts, by
            seed, up to near ties and the rounding of e4m3 pages. "standard" = the same
            distribution, other tokens, more accepted drafts.
        decode_graphs: decode through CUDA graphs of a few batch sizes, captured at start; on a CPU
            through the same buffers. None = on a GPU, unless impl is "torch".
        async_scheduling: prepare the next step while the device runs one; a step's tokens are in
            the report of the call after it. The output is the same. A step that preempts waits for
            the one before. Off with a drafter. None = on a GPU.
        tensor_parallel_size: ranks that run the model together, each with its own device, a part
            of the weights and a part of the cache (`quire.models.parallel`).

    Raises:
        ValueError: a value of another type or out of range, or max_num_seqs >
            max_num_batched_tokens.
    """

    max_num_seqs: Count = 64
    max_num_batched_tokens: Count = 2048
    max_model_len: Count | None = None
    num_pages: NumPages | None = None
    memory_fraction: Share | None = None
    kv_cache_dtype: KvCacheDtype = "auto"
    retention: str | Count = "auto"
    enable_caching: bool = True
    replay: bool = False
    host_cache_gib: Gib | None = None
    seed: Seed = 0
    impl: Impl | None = None
    rejection_sample_method: RejectionSampleMethod = "strict"
    decode_graphs: bool | None = None
    async_scheduling: bool | None = None
    tensor_parallel_size: Count = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_pages is not None and self.memory_fraction is not None:
            raise ValueError(
                "num_pages, memory_fraction: expected one of them at most, got "
                f"{self.num_pages}, {self.memory_fraction}"
            )
        if self.host_cache_gib is not None and not self.enable_caching:
            raise ValueError("enable_caching: expected True with host_cache_gib, got False")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs: expected 1..max_num_batched_tokens={self.max_num_batched_tokens}, "
                f"got {self.max_num_seqs}"
            )
