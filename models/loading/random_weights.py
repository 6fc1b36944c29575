"""Models with random weights: outputs of order one, and no weight at a value that hides it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..families.registry import family_of
from ..parallel.group import Group
from ..parallel.shard import cuts_of
from .weights import build_model


def random_model(
    config: Any,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    group: Group | None = None,
) -> nn.Module:
    """A model with random weights: matrices N(0, 1 / in_size), all others of order one.

    Args:
        seed: the same one gives the same weights on the same kind of device.
        group: the ranks; each draws whole weights and keeps its part. None = one.
    """
    model = build_model(config, device=device, dtype=dtype, group=group)
    whole = model if group is None else build_model(config, device="meta", dtype=dtype)
    cuts = cuts_of(dict(whole.named_parameters()), dict(model.named_parameters()), group)
    generators: dict[torch.device, torch.Generator] = {}
    fill = family_of(config).draw or draw
    for (name, weight), shaped in zip(model.named_parameters(), whole.parameters(), strict=True):
        if weight.device not in generators:
            generators[weight.device] = torch.Generator(device=weight.device).manual_seed(seed)
        drawn = torch.empty_like(shaped, device=weight.device) if name in cuts else weight
        fill(name, drawn, config, generators[weight.device])
        if name in cuts:
            cuts[name].fill(weight, cuts[name].of(drawn))
    return model


def draw(name: str, weight: Tensor, config: Any, generator: torch.Generator) -> None:
    """Fill a weight of a `Decoder` with random numbers."""
    if name.endswith("layer_scalar"):
        weight.uniform_(0.8, 1.2, generator=generator)
    elif name.startswith("embed_tokens"):
        weight.normal_(0.0, 0.15, generator=generator)
    elif name.endswith(("bias", "sinks")):
        weight.normal_(0.0, 1.0, generator=generator)
    elif weight.ndim == 1:
        weight.normal_(1.0 - config.norm_offset, 0.3, generator=generator)
    else:
        weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
