"""Retention-aware KV-cache allocator for hybrid-attention models; needs numpy and nothing else."""

from .adaptive import Adaptive
from .events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog, tail_hashes
from .eviction import LRU, S3FIFO, CostAware, Entry, EvictionPolicy, Ranked
from .exports import PagedRows, linear_table, paged_rows
from .hashing import Prompt
from .manager import KVCache
from .plan import OutOfPages, StepPlan
from .report import Match
from .spec import NULL_BLOCK, GroupSpec

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
    "Prompt",
    "Ranked",
    "StepPlan",
    "linear_table",
    "paged_rows",
    "tail_hashes",
]
