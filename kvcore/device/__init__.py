"""From the integers of plans to the tensors that kernels take, for any engine.

It needs torch, without which the rest of `quire.kvcore` imports. It knows no model and no kernel.
"""

from .batch import AttnMetadata, Batch, BatchBuilder, Staging, known_ids

__all__ = ["AttnMetadata", "Batch", "BatchBuilder", "Staging", "known_ids"]
