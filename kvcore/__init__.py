"""Retention-aware KV-cache allocator for hybrid-attention models; needs numpy and nothing else.

Read it in this order, each file from top to bottom:

    spec                                    groups and their arithmetic
    pages                                   the pool
    prefix.keys, prefix.tree, prefix.index  cached entries and their eviction
    tables.rows, tables.planner             pages of a step
    prefix.chains                           running requests become cached entries
    cache                                   the one class

Policies, pins, replays, events and the host tier stand beside this path.
"""

from .cache import KVCache
from .events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog, tail_hashes
from .layers import LayerPlacement, LayerShape, cache_groups
from .plan import OutOfPages, StepPlan
from .policies.adaptive import Adaptive
from .policies.base import LRU, Entry, EvictionPolicy, Ranked
from .prefix.keys import Prompt
from .prefix.lookup import Match
from .spec import NULL_BLOCK, GroupSpec
from .tables.formats import PagedRows, linear_table, paged_rows
from .worker import StepArrays, WorkerTables, step_arrays

__all__ = [
    "LRU", "NULL_BLOCK", "Adaptive", "AllBlocksCleared", "BlockRemoved", "BlockStored", "Entry",
    "EventLog", "EvictionPolicy", "GroupSpec", "KVCache", "LayerPlacement", "LayerShape",
    "Match", "OutOfPages", "PagedRows", "Prompt", "Ranked", "StepArrays", "StepPlan",
    "WorkerTables", "cache_groups", "linear_table", "paged_rows", "step_arrays", "tail_hashes",
]  # fmt: skip
