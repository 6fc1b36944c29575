"""Hit rates of replayed traces: ``replay_*.json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .data import NONE, percent, rows, table

POLICIES = {
    "lru": "`LRU`",
    "s3fifo": "`S3FIFO`",
    "cost-aware": "`CostAware`",
    "adaptive": "`Adaptive`",
}
MODELS = {"v4-flash": "V4-Flash", "gemma-4-31b": "Gemma-4-31B"}
OTHERS = {
    "clairvoyant": "clairvoyant",
    "infinite auto": 'infinite pool, `retention="auto"`',
    "infinite any": "infinite pool that keeps all",
}
PARTS = {
    "1 to 4,000": "replay_conversation.json",
    "4,001 to 8,000": "replay_conversation_4001.json",
    "8,001 to 12,000": "replay_conversation_8001.json",
}


def hits(found: list[dict[str, Any]]) -> dict[str, dict[str | None, float]]:
    """Hit rates by policy (an infinite pool's with its retention), then by pool, None: any."""
    rates: dict[str, dict[str | None, float]] = {}
    for row in found:
        name = row["eviction"] + (f" {row['retention']}" if row["eviction"] == "infinite" else "")
        rates.setdefault(name, {})[row["pool"]] = row["hit_rate"]
    return rates


def round_robin() -> str:
    """Chats that take turns: a line for each pool, a column for each policy."""
    rates = hits(rows("replay_round_robin.json"))
    policies = ("lru", "s3fifo", "adaptive")
    return table(
        ["pool, of the dense working set", *(POLICIES[p] for p in policies), "infinite pool"],
        [
            [
                _size(pool),
                *(percent(rates[p][pool]) for p in policies),
                percent(rates["infinite auto"][None]),
            ]
            for pool in rates["lru"]
        ],
    )


def conversation() -> str:
    """The first requests of the Mooncake conversation trace: a column for each pool."""
    lines = []
    names = ("replay_conversation.json", "replay_conversation_gemma.json")
    for name, model in zip(names, MODELS.values(), strict=True):
        rates = hits(rows(name))
        pools = list(rates["lru"])
        for policy in ("adaptive", "cost-aware", "s3fifo", "lru"):
            if policy in rates:
                lines.append([f"{model}, {POLICIES[policy]}", *_line(rates[policy], pools)])
        for policy, what in OTHERS.items():
            lines.append([f"{model}, {what}", *_line(rates[policy], pools)])
    return table(["pool, of the dense working set", *map(_size, pools)], lines)


def conversation_parts() -> str:
    """`Adaptive` on three parts of the trace, V4-Flash; the first two were looked at to tune it."""
    lines = []
    for what, name in PARTS.items():
        rates = hits(rows(name))
        pools = list(rates["adaptive"])
        infinite = percent(rates["infinite auto"][None])
        lines.append([what, *_line(rates["adaptive"], pools), infinite])
    header = ["requests, V4-Flash, `Adaptive`", *map(_size, pools), "infinite pool"]
    return table(header, lines)


def prefix_sweep() -> str:
    """300 prompts of 28,032 tokens, by the number of prefixes that they share."""
    found = rows("replay_prefix_sweep.json")
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in found):
        rates = hits([row for row in found if row["workload"] == workload])
        pools = list(rates["lru"])
        assert len(pools) == 1, pools
        shown = [rates["lru"][pools[0]], rates["adaptive"][pools[0]], rates["infinite auto"][None]]
        lines.append([workload.rpartition("=")[2], *map(percent, shown)])
    return table(["prefixes", POLICIES["lru"], POLICIES["adaptive"], "infinite pool"], lines)


def pr43447() -> str:
    """Look-ups at 10 to 100 % of prompts of 1,048,576 tokens, by retention."""
    lines = []
    for row in rows("replay_pr43447.json"):
        if row["eviction"] == "adaptive":
            prompts = row["workload"].rpartition("=")[2] if "=" in row["workload"] else "14"
            shares = [percent(row["mean_hit"]), percent(row["hit_rate"])]
            lines.append([prompts, f"`{row['retention']}`", *shares])
    return table(["prompts", "`retention=`", "mean hit", "prompt tokens from the cache"], lines)


def _line(rates: dict[str | None, float], pools: Sequence[str | None]) -> list[str]:
    """Percentages by pool; the same in all for what does not depend on it."""
    if None in rates:
        return [percent(rates[None])] * len(pools)
    return [percent(rates[pool]) if pool in rates else NONE for pool in pools]


def _size(pool: str | None) -> str:
    return str(pool).replace("%", " %")
