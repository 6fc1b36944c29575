"""Reports of a cache: counters, as a flat dict of ints ("name/value" counts one value of a label),
and a description of its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from .prefix.lookup import Match, Reason
from .spec import Layout

if TYPE_CHECKING:
    from .cache import KVCache


def new_counters(layout: Layout) -> dict[str, int]:
    """All counters, at zero. ``resumed_...`` count requests after a preemption, which the others
    leave out, but for resume points and replays; ``misses/...`` requests without a hit and
    ``limited_by/...`` all, by `Match.limited_by`; ``group_tokens/...`` sums `Match.per_group`.
    """
    names = [
        "requests", "hits", "prompt_tokens", "hit_tokens", "tokens_without_resume_point",
        "resume_points_kept", "resume_points_used", "replays", "replayed_tokens",
        "resumed_requests", "resumed_prompt_tokens", "resumed_hit_tokens",
    ]  # fmt: skip
    reasons = get_args(Reason)
    names += [f"limited_by/{reason}" for reason in reasons]
    names += [f"misses/{reason}" for reason in reasons if reason != "prompt-end"]
    names += [f"group_tokens/{g.name}" for g in layout.groups]
    return dict.fromkeys(names, 0)


def count_admission(counters: dict[str, int], match: Match, resumed: bool) -> None:
    if match.replay_from is not None and match.replay_to is not None:
        counters["replays"] += 1
        counters["replayed_tokens"] += match.replay_to - match.replay_from
    if resumed:
        counters["resumed_requests"] += 1
        counters["resumed_prompt_tokens"] += match.prompt.num_tokens
        counters["resumed_hit_tokens"] += match.num_saved_tokens
        return
    counters["requests"] += 1
    counters["prompt_tokens"] += match.prompt.num_tokens
    counters["hit_tokens"] += match.num_saved_tokens
    counters[f"limited_by/{match.limited_by}"] += 1
    if match.num_saved_tokens:
        counters["hits"] += 1
    else:
        counters[f"misses/{match.limited_by}"] += 1
    for name, tokens in match.per_group.items():
        counters[f"group_tokens/{name}"] += tokens
    if match.limited_by == "resume-point":
        counters["tokens_without_resume_point"] += match.dense_tokens - match.num_tokens


def stats(cache: KVCache) -> dict[str, int]:
    index, useless = cache.index, cache.index.num_useless_evicted
    return {
        **cache.counters,
        "resume_points": index.num_points,
        "cached_segments": index.num_segments,
        "evicted_resume_points": index.num_evicted_points,
        "evicted_segments": index.num_evicted_segments,
        "evicted_segments/useless": useless,
        "evicted_segments/policy": index.num_evicted_segments - useless,
        "pins": len(index.pins),
        "pinned_pages": index.pins.num_pages,
        "demoted_pins": index.pins.num_demoted,
        "free_pages": cache.num_free_pages,
        "evictable_pages": cache.num_evictable_pages,
        "pages_in_use": cache.num_pages - 1 - cache.num_free_pages - cache.num_evictable_pages,
        **({} if cache.tiers is None else cache.tiers.stats()),
    }


def describe(cache: KVCache) -> str:
    layout, a = cache.layout, cache.alignment
    mib = layout.page_bytes / 2**20
    retention = f"every {cache.interval} tokens" if cache.interval else "none besides"
    lines = [
        f"{cache.num_pages} pages of {mib:.3g} MiB "
        f"({cache.num_pages * mib / 1024:.3g} GiB a page tensor), "
        f"{cache.max_requests} requests of up to {cache.max_model_len} tokens",
        f"hits are multiples of {a} tokens; smallest cacheable prefix {a} tokens "
        f"(a prompt of at least {a + 1}), keys: SHA-256, one per {a} tokens",
    ]
    if not cache.enable_caching:
        lines.append("prefix caching is off")
    elif cache.hybrid:
        lines.append(
            f"resume points: the resend boundaries of a prompt, junctions, the end of a request; "
            f"retention {cache.retention!r}: {retention}; "
            f"{layout.pages_per_point} pages each ({layout.pages_per_point * mib:.3g} MiB)"
        )
        if cache.index.span > 1:
            lines.append(
                f"resume points at most {min(cache.index.span * a, cache.max_model_len)} tokens "
                f"apart also hold what the boundaries between them need"
            )
    for g in layout.groups:
        ahead = f", keys cover {g.lookahead} tokens ahead" if g.lookahead else ""
        if g.kind == "dense":
            lines.append(f"  {g.name}: dense, {g.block_size} tokens a block{ahead}")
        elif g.kind == "state":
            lines.append(f"  {g.name}: state, snapshots at multiples of {a}")
        else:
            lines.append(
                f"  {g.name}: window {g.sliding_window}, {g.block_size} tokens a block, "
                f"{g.tail_blocks} blocks to resume{ahead}"
            )
    return "\n".join(lines)
