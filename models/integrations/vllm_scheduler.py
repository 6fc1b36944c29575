"""vLLM 0.33's Scheduler with `quire.kvcore` as its KV cache manager; extra ``vllm``.

    vllm serve MODEL --scheduler-cls quire.models.integrations.vllm_scheduler.QuireScheduler

Queues, budgets, preemption, drafts and outputs are vLLM's, with asynchronous scheduling too; which
pages requests get, what stays cached and where a prompt may resume are kvcore's (`vllm_kv_manager`).
Workers and attention backends are as before: tables are append-only, and all rows that queries see
are in pages. What is not served is refused by name when the engine starts: see `refusals`.
"""

from __future__ import annotations

from typing import Any

try:
    import vllm
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
    )
except ImportError as error:
    raise ImportError("needs vLLM 0.33: pip install 'quire[vllm]'") from error

SUPPORTED = "0.33"

if not vllm.__version__.startswith(f"{SUPPORTED}."):
    raise ImportError(f"vllm: expected {SUPPORTED}, got {vllm.__version__}")

from quire.kvcore import GroupSpec  # noqa: E402

from .vllm_kv_manager import CacheManager  # noqa: E402  of this version alone

DENSE, WINDOWS = (FullAttentionSpec, MLAAttentionSpec), (SlidingWindowSpec, SlidingWindowMLASpec)


def unsupported(config: Any) -> list[str]:
    """List the cache groups of a model that are not served."""
    what = [] if config.kv_cache_groups else ["models without cache groups"]
    for i, group in enumerate(config.kv_cache_groups):
        spec, name = group.kv_cache_spec, f"cache group {i}"
        if type(spec) not in DENSE + WINDOWS or not spec.prefix_cacheable:
            what.append(f"{name}: {type(spec).__name__}")
        elif spec.prefix_replay_tokens or getattr(spec, "extra_retained_tokens", 0):
            what.append(f"{name}: windows that are computed again")
        elif group.host_resident:
            what.append(f"{name}: pages on the host")
    return what


def group_specs(config: Any) -> list[GroupSpec]:
    """A model's cache groups; pages count as one byte each."""
    groups = []
    for i, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        window = spec.sliding_window if type(spec) in WINDOWS else None
        groups.append(
            GroupSpec(str(i), "window" if window else "dense", spec.block_size, 1, window)
        )
    return groups


def refusals(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """List the parts of a configuration that are not served, in words."""
    parallel, events = vllm_config.parallel_config, vllm_config.kv_events_config
    what = {
        "KV connectors (kv_transfer_config)": vllm_config.kv_transfer_config is not None,
        "KV events (enable_kv_cache_events)": events is not None and events.enable_kv_cache_events,
        "auxiliary outputs": vllm_config.aux_output_config.enabled,
        "metrics of blocks (kv_cache_metrics)": vllm_config.observability_config.kv_cache_metrics,
        "encoder-decoder models": vllm_config.model_config.is_encoder_decoder,
        "diffusion models": vllm_config.model_config.is_diffusion,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "multi-module MTP": vllm_config.num_prefill_lookahead_tokens > 1,
    }
    return [name for name, asked in what.items() if asked] + unsupported(kv_cache_config)


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
        refused = refusals(vllm_config, kv_cache_config)
        if refused:
            raise NotImplementedError(
                "QuireScheduler: supported are decoders with full and sliding-window attention, "
                f"got {'; '.join(refused)}"
            )
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self.kv_cache_manager = CacheManager(self, group_specs(kv_cache_config))


class QuireAsyncScheduler(QuireScheduler, AsyncScheduler):
    """`QuireScheduler` with asynchronous scheduling."""
