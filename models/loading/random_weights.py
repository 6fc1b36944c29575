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
    """A model with random weights drawn on its device.

    Matrices are N(0, 1 / in_size), norm weights 1 + 0.3 N(0, 1) in effect, sinks and biases N(0,
    1). Of text models, embeddings are 0.15 N(0, 1) and layer scalars uniform in 0.8 .. 1.2. Of
    DeepSeek-V4, the embedding and position biases are N(0, 1), correction biases 0.2 N(0, 1),
    hyper-connection scales 1 + 0.3 N(0, 1), their bases 0.5 N(0, 1), their projections 0.05 N(0,
    1), router weights 0.3 N(0, 1), and hash tables name distinct experts.

    Args:
        config: shapes.
        seed: the same one gives the same weights on the same kind of device.
        device, dtype: device and data type of the model.
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
    """Fill a weight of a `Decoder` with random numbers, as `random_model` says."""
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
