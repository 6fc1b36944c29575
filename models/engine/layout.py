"""What has to be the same for pages to be of use to another engine, or to a later one."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from .config import EngineConfig
    from .memory import MemoryPlan

PAGE_FORMAT = 1  # of what pages hold; raised when rows are laid out in another way
SAMPLES = 64  # of each weight, in a digest


def layout(
    model: nn.Module, memory: MemoryPlan, config: EngineConfig
) -> dict[str, str | int | bytes]:
    """What has to be the same for pages on a disk to be of use."""
    return {
        "page_format": PAGE_FORMAT,
        "model": repr(model.config).encode(),
        "weights": weights_digest(model),
        "dtype": str(model.dtype),
        "kv_cache_dtype": config.kv_cache_dtype,
        "kv_scales": repr(getattr(model, "kv_scales", None)).encode(),
        "groups": repr(memory.groups).encode(),
        "hash_seed": config.hash_seed,
    }


@torch.no_grad()
def weights_digest(model: nn.Module) -> bytes:
    """Tells weights apart by some numbers of each of them, without reading all."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        flat = weight.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // SAMPLES)][: 2 * SAMPLES]
        digest.update(some.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.digest()
