"""Statistics of a cache as Prometheus metrics; needs the package prometheus-client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.kvcore import KVCache

# Name in `KVCache.stats`: (metric, help, label). Names with "/" have a value of the label after it.
COUNTERS = {
    "requests": ("requests", "Requests admitted.", None),
    "hits": ("hits", "Requests admitted with at least one cached token.", None),
    "misses": ("misses", "Requests admitted without a hit, by what limited it.", "reason"),
    "limited_by": ("limited", "Requests admitted, by what limited their hit.", "reason"),
    "prompt_tokens": ("prompt_tokens", "Tokens of admitted prompts.", None),
    "hit_tokens": ("hit_tokens", "Tokens of admitted prompts that were not computed again.", None),
    "group_tokens": ("group_tokens", "Tokens that each group could have served.", "group"),
    "tokens_without_resume_point": (
        "lost_tokens",
        "Tokens computed again although their dense blocks were cached, for want of a resume "
        "point.",
        None,
    ),
    "resume_points_kept": ("resume_points_kept", "Resume points made.", None),
    "resume_points_used": ("resume_points_used", "Hits that resumed at a resume point.", None),
    "replays": (
        "replays",
        "Requests that computed cached tokens again for want of a resume point.",
        None,
    ),
    "replayed_tokens": ("replayed_tokens", "Tokens that these requests computed again.", None),
    "lossy_tokens": (
        "lossy_tokens",
        "Tokens of hits that rest on rows which a tier had in a lossy form.",
        None,
    ),
    "forks": ("forks", "Requests that went on as two.", None),
    "resumed_requests": ("resumed_requests", "Requests admitted again after preemption.", None),
    "resumed_prompt_tokens": ("resumed_prompt_tokens", "Tokens of their prompts.", None),
    "resumed_hit_tokens": ("resumed_hit_tokens", "Those that were not computed again.", None),
    "evicted_resume_points": ("evicted_resume_points", "Resume points evicted.", None),
    "evicted_segments": ("evicted_segments", "Dense segments evicted, by reason.", "reason"),
    "demoted_pins": ("demoted_pins", "Pins ended by lack of pages.", None),
}
# Of caches with tiers; each has the tier as its label.
TIER_COUNTERS = {
    "tier_stored_pages": "Pages stored in a tier.",
    "tier_stored_points": "Resume points stored in a tier.",
    "tier_stored_segments": "Dense segments stored in a tier.",
    "tier_store_failures": "Stores of which a copy failed.",
    "tier_refused_stores": "Stores for which a tier had no room.",
    "tier_lost": "Entries evicted before they were stored in the tier.",
    "tier_loaded_pages": "Pages loaded from a tier.",
    "tier_loaded_points": "Resume points loaded from a tier.",
    "tier_loaded_segments": "Dense segments loaded from a tier.",
    "tier_load_failures": "Loads of which a copy failed.",
    "tier_journal_errors": "Errors of a tier's journal.",
}
TIER_GAUGES = {
    "tier_points": "Resume points in a tier now.",
    "tier_segments": "Dense segments in a tier now.",
    "tier_free_pages": "Pages of a tier that hold nothing.",
    "tier_queued_bytes": "Bytes of loads that are not done.",
}
GAUGES = {
    "resume_points": ("resume_points", "Resume points cached now."),
    "cached_segments": ("cached_segments", "Dense segments cached now."),
    "pins": ("pins", "Pinned entries now."),
    "pinned_pages": ("pinned_pages", "Pages of pinned entries now."),
    "free_pages": ("free_pages", "Pages that hold nothing."),
    "evictable_pages": ("evictable_pages", "Pages that hold only what no running request needs."),
    "pages_in_use": ("pages_in_use", "Pages that running requests need."),
}


def _client() -> Any:
    try:
        import prometheus_client.core
    except ImportError as error:
        raise ImportError(
            "metrics need the package prometheus-client: pip install prometheus-client (extra "
            "`events`)"
        ) from error
    return prometheus_client


class KVCacheCollector:
    """Reads `KVCache.stats` whenever it is scraped: ``REGISTRY.register(KVCacheCollector(kv))``.

    Args:
        kv: the cache.
        prefix: in front of each metric name.

    Raises:
        ImportError: prometheus-client is missing.
    """

    def __init__(self, kv: KVCache, prefix: str = "quire_kv") -> None:
        self._kv, self._prefix = kv, prefix
        self._core = _client().core

    def collect(self) -> Iterator[Any]:
        """All metrics, as prometheus-client asks for them."""
        stats = self._kv.stats()
        for key, (name, text, label) in COUNTERS.items():
            full = f"{self._prefix}_{name}"
            if label is None:
                yield self._core.CounterMetricFamily(full, text, value=stats[key])
                continue
            family = self._core.CounterMetricFamily(full, text, labels=[label])
            for stat, value in stats.items():
                if stat.startswith(f"{key}/"):
                    family.add_metric([stat.partition("/")[2]], value)
            yield family
        for key, (name, text) in GAUGES.items():
            yield self._core.GaugeMetricFamily(f"{self._prefix}_{name}", text, value=stats[key])
        families = self._core.CounterMetricFamily, self._core.GaugeMetricFamily
        for of_tiers, make in zip((TIER_COUNTERS, TIER_GAUGES), families, strict=True):
            for key, text in of_tiers.items():
                family = make(f"{self._prefix}_{key}", text, labels=["tier"])
                for stat, value in stats.items():
                    if stat.startswith(f"{key}/"):
                        family.add_metric([stat.partition("/")[2]], value)
                if family.samples:
                    yield family


def metrics_text(kv: KVCache, prefix: str = "quire_kv") -> str:
    """Statistics of `kv` now in the Prometheus text format.

    Raises:
        ImportError: prometheus-client is missing.
    """
    client = _client()
    registry = client.CollectorRegistry()
    registry.register(KVCacheCollector(kv, prefix))
    return str(client.generate_latest(registry).decode())
