"""Models with random weights: outputs of order one, and no weight at a value that hides it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config.model import ModelConfig
from ..deepseek_v4.config import DeepseekV4Config
from ..deepseek_v4.model import DeepseekV4
from ..families.decoder import Decoder
from ..parallel.group import Group
from ..parallel.shard import cuts_of
from .weights import build_model


def random_model(
    config: ModelConfig | DeepseekV4Config,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    group: Group | None = None,
) -> Decoder | DeepseekV4:
    """A model with random weights drawn on its device.

    Matrices are N(0, 1 / in_size), norm weights 1 + 0.3 N(0, 1) in effect, sinks and biases N(0,
    1). Of text models, embeddings are 0.15 N(0, 1) and layer scalars uniform in 0.8 .. 1.2. Of
    DeepSeek-V4, the embedding and position biases are N(0, 1), correction biases 0.2 N(0, 1),
    hyper-connection scales 1 + 0.3 N(0, 1), their bases 0.5 N(0, 1), their projections 0.05 N(0,
    1), router weights 0.3 N(0, 1), and hash tables name distinct experts.

    Args:
        config: shapes.
        seed: the same one gives the same weights on the same kind of device.
        device, dtype: of the model.
        group: the ranks of which this one has a part of the same weights; each weight is drawn
            whole.
    """
    model = build_model(config, device=device, dtype=dtype, group=group)
    whole = model if group is None else build_model(config, device="meta", dtype=dtype)
    cuts = cuts_of(dict(whole.named_parameters()), dict(model.named_parameters()), group)
    generators: dict[torch.device, torch.Generator] = {}
    draw = _draw_deepseek_v4 if isinstance(config, DeepseekV4Config) else _draw
    for (name, weight), shaped in zip(model.named_parameters(), whole.parameters(), strict=True):
        if weight.device not in generators:
            generators[weight.device] = torch.Generator(device=weight.device).manual_seed(seed)
        drawn = torch.empty_like(shaped, device=weight.device) if name in cuts else weight
        draw(name, drawn, config, generators[weight.device])
        if name in cuts:
            cuts[name].fill(weight, cuts[name].of(drawn))
    return model


def _draw(name: str, weight: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
    if name.endswith("layer_scalar"):
        weight.uniform_(0.8, 1.2, generator=generator)
    elif name.startswith("embed_tokens"):
        weight.normal_(0.0, 0.15, generator=generator)
    elif name.endswith(("bias", "sinks")):
        # Some gates of gpt-oss must pass the limit of their clamp.
        weight.normal_(0.0, 4.0 if name.endswith("gate_up_proj_bias") else 1.0, generator=generator)
    elif weight.ndim == 1:
        weight.normal_(1.0 - config.norm_offset, 0.3, generator=generator)
    else:
        in_axis = 1 if config.family == "gpt_oss" and weight.ndim == 3 else -1
        weight.normal_(0.0, weight.shape[in_axis] ** -0.5, generator=generator)


_DEVIATIONS = {
    "fn": 0.05, "hc_fn": 0.05, "base": 0.5, "hc_base": 0.5, "e_score_correction_bias": 0.2,
    "sinks": 1.0, "position_bias": 1.0,
}  # fmt: skip


def _draw_deepseek_v4(
    name: str, weight: Tensor, config: DeepseekV4Config, generator: torch.Generator
) -> None:
    leaf = name.split(".")[-1]
    if leaf == "tid2eid":
        shape = (config.vocab_size, config.num_experts)
        order = torch.rand(shape, generator=generator, device=weight.device)
        weight.copy_(order.argsort(dim=1)[:, : weight.shape[1]])
    elif leaf in ("scale", "hc_scale") or (leaf == "weight" and weight.ndim == 1):
        weight.normal_(1.0, 0.3, generator=generator)
    elif name == "embed_tokens.weight":
        weight.normal_(0.0, 1.0, generator=generator)
    elif name.endswith("mlp.gate.weight"):
        weight.normal_(0.0, 0.3, generator=generator)
    else:
        weight.normal_(0.0, _DEVIATIONS.get(leaf, weight.shape[-1] ** -0.5), generator=generator)
