"""Settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real

from quire.kvcore.spec import as_int

from .scheduler import SchedulerPolicy

MEMORY_SETTINGS = (
    "max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_pages", "cache_bytes",
    "host_cache_gib",
)  # fmt: skip
"""Settings that memory depends on."""
REQUIRED = ("max_num_seqs", "max_num_batched_tokens")
IMPLS = ("triton", "torch")


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
        policy: how a step is divided between prefill and decode.
        seed: requests without a seed of their own get one from it, in the order they come.
        impl: "triton" or "torch" for the kernels; None = by device.
        rejection_sample_method: how drafts of sampled requests are verified; greedy ones do not
            depend on it. "strict" = the output is that of the same seed without drafts. "standard"
            = drafters that can, draw, and where outputs are diverse more of their drafts stay; the
            same distribution, but other tokens. See `quire.models.engine.speculative`.
        decode_graphs: decode through CUDA graphs of a few batch sizes, which are captured, and all
            kernels compiled, when the engine is made (`quire.models.engine.graphs`); on a CPU
            through the same buffers. None = on a GPU, unless impl is "torch".
        async_scheduling: while the device runs a step, the host prepares the next one, whose input
            ids go from sampler to model on the device; a step's tokens are in the report of the
            call after it. The same output. Steps that preempt wait for the tokens before them,
            and all do where there are drafts. None = on a GPU.
        tensor_parallel_size: ranks that run the model together, each on a device of its own, with a
            part of its weights and of its cache (`quire.models.parallel.shard`).
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
    policy: SchedulerPolicy = field(default_factory=SchedulerPolicy)
    seed: int = 0
    impl: str | None = None
    rejection_sample_method: str = "strict"
    decode_graphs: bool | None = None
    async_scheduling: bool | None = None
    tensor_parallel_size: int = 1
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
        ):
            value = getattr(self, name)
            if value is not None or name in (*REQUIRED, "seed") or name.endswith("parallel_size"):
                object.__setattr__(self, name, as_int(name, value, low))
        by_device = ("decode_graphs", "async_scheduling")
        for name in ("enable_caching", "replay", *by_device):
            value = getattr(self, name)
            if not (isinstance(value, bool) or (value is None and name in by_device)):
                raise ValueError(f"{name}: expected True or False, got {value!r}")
        fraction = self.memory_fraction
        if fraction is not None and (isinstance(fraction, bool) or not isinstance(fraction, Real)):
            raise ValueError(f"memory_fraction: expected a number in (0, 1], got {fraction!r}")
        host = self.host_cache_gib
        is_number = isinstance(host, Real) and not isinstance(host, bool)
        if not (host is None or (is_number and 0 < host < 2**33)):
            raise ValueError(f"host_cache_gib: expected a number > 0, got {host!r}")
        limit = self.rank_timeout
        if isinstance(limit, bool) or not isinstance(limit, Real) or not 0 < limit < 2**31:
            raise ValueError(f"rank_timeout: expected a number of seconds > 0, got {limit!r}")
        if host is not None and not self.enable_caching:
            raise ValueError("enable_caching: expected True with host_cache_gib, got False")
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
