"""From the integers of plans to the tensors that kernels take, for any engine.

It needs torch, without which the rest of `quire.kvcore` imports. It knows no model and no kernel.
"""

from .batch import AttnMetadata, Batch, BatchBuilder, known_ids
from .staging import HostCopy, Staging

__all__ = ["AttnMetadata", "Batch", "BatchBuilder", "HostCopy", "Staging", "known_ids"]
