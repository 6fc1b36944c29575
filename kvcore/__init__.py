"""Retention-aware KV-cache allocator for hybrid-attention models; needs numpy and nothing else."""

from .cache import KVCache
from .events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog, tail_hashes
from .part import Part
from .plan import OutOfPages, StepPlan
from .policies.adaptive import Adaptive
from .policies.base import Entry, EvictionPolicy, Ranked
from .policies.cost_aware import CostAware
from .policies.lru import LRU
from .policies.s3fifo import S3FIFO
from .prefix.keys import Prompt
from .prefix.lookup import Match
from .spec import NULL_BLOCK, GroupSpec
from .step import Step
from .tables.formats import PagedRows, linear_table, paged_rows

__all__ = [
    "LRU",
    "NULL_BLOCK",
    "S3FIFO",
    "Adaptive",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CostAware",
    "Entry",
    "EventLog",
    "EvictionPolicy",
    "GroupSpec",
    "KVCache",
    "Match",
    "OutOfPages",
    "PagedRows",
    "Part",
    "Prompt",
    "Ranked",
    "Step",
    "StepPlan",
    "linear_table",
    "paged_rows",
    "tail_hashes",
]
