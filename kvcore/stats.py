"""Counters of a cache: a flat dict of ints, where "name/value" counts one value of a label."""

from __future__ import annotations

from typing import get_args

from .report import Match, Reason
from .spec import Layout


def new_counters(layout: Layout) -> dict[str, int]:
    """All counters, at zero.

    ``misses/...`` counts requests without a hit, ``limited_by/...`` all requests, by `Match.limited_by`;
    ``group_tokens/...`` sums `Match.per_group`.
    """
    names = [
        "requests", "hits", "prompt_tokens", "hit_tokens", "tokens_without_resume_point",
        "resume_points_kept", "resume_points_used", "replays", "replayed_tokens",
    ]  # fmt: skip
    reasons = get_args(Reason)
    names += [f"limited_by/{reason}" for reason in reasons]
    names += [f"misses/{reason}" for reason in reasons if reason != "prompt-end"]
    names += [f"group_tokens/{g.name}" for g in layout.groups]
    return dict.fromkeys(names, 0)


def count_admission(counters: dict[str, int], match: Match) -> None:
    """A request was admitted with the hit `match`."""
    counters["requests"] += 1
    counters["prompt_tokens"] += match.prompt.num_tokens
    counters["hit_tokens"] += match.num_saved_tokens
    counters[f"limited_by/{match.limited_by}"] += 1
    if match.replay_from is not None and match.replay_to is not None:
        counters["replays"] += 1
        counters["replayed_tokens"] += match.replay_to - match.replay_from
    if match.num_saved_tokens:
        counters["hits"] += 1
    else:
        counters[f"misses/{match.limited_by}"] += 1
    for name, tokens in match.per_group.items():
        counters[f"group_tokens/{name}"] += tokens
    if match.limited_by == "resume-point":
        counters["tokens_without_resume_point"] += match.dense_tokens - match.num_tokens
