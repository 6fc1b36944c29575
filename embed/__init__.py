"""From the integers of `quire.kvcore` to the tensors that `quire.kernels` take, for any engine.

It needs numpy and torch, so it can be part of neither: the allocator imports without torch, and the
kernels without numpy. It knows no model and no request.
"""

from .batch import (
    AttentionPlanner,
    AttnMetadata,
    Batch,
    BatchBuilder,
    FixedPlan,
    MakePlanner,
    known_ids,
)
from .staging import HostCopy, Staging

__all__ = [
    "AttentionPlanner",
    "AttnMetadata",
    "Batch",
    "BatchBuilder",
    "FixedPlan",
    "HostCopy",
    "MakePlanner",
    "Staging",
    "known_ids",
]
