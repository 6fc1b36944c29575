"""What can be served through FlashInfer: asked when an engine is made, not in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..config.named import ModelConfig

if TYPE_CHECKING:
    from ..engine.config import EngineConfig

DEVICES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
KV_CACHE_DTYPES = ("auto", "fp8_per_tensor")


def expect_supported(model: nn.Module, config: EngineConfig) -> None:
    """Raises what stands against ``impl="flashinfer"``.

    Raises:
        NotImplementedError: naming the layer, where it is one, and the reason.
    """
    name = model.config.name
    if not isinstance(model.config, ModelConfig):
        kind = model.config.layer_types[0]
        _refuse(f"{name!r}: layer 0 is {kind}, over latents; FlashInfer has full and sliding ones")
    for layer in range(model.config.num_layers):
        if reason := _against(model, layer):
            _refuse(f"{name!r}: layer {layer} ({model.config.layer_types[layer]}) {reason}")
    if model.device.type not in DEVICES:
        _refuse(f"tensors on {model.device.type!r}, supported is {list(DEVICES)}")
    if model.dtype not in DTYPES:
        _refuse(f"a model in {model.dtype}, supported are {[str(dtype) for dtype in DTYPES]}")
    if config.kv_cache_dtype not in KV_CACHE_DTYPES:
        _refuse(
            f"kv_cache_dtype={config.kv_cache_dtype!r}: FlashInfer takes no scales of rows, "
            f"supported are {list(KV_CACHE_DTYPES)}"
        )
    if config.replay:
        # A replay's first rows are to see nothing before, wherever in a page they are.
        _refuse("replay=True: FlashInfer takes no first row of a window")


def _against(model: nn.Module, layer: int) -> str | None:
    """Why a layer cannot be served; None if it can."""
    config = model.config
    shape = config.attention(layer)
    if shape.head_dim not in HEAD_DIMS:
        return f"has a head_dim of {shape.head_dim}, supported are {list(HEAD_DIMS)}"
    if shape.sliding_window is not None and shape.sliding_window < 2:
        # The own row of such a query is in no page.
        return f"has a window of {shape.sliding_window}, supported are 2 and more"
    if any(name.endswith("sinks") for name, _ in model.layers[layer].named_parameters()):
        return "has attention sinks"
    if config.kv_donor(layer) != layer:
        return f"reads the keys and values of layer {config.kv_donor(layer)}"
    return None


def _refuse(reason: str) -> None:
    raise NotImplementedError(f"impl: 'flashinfer' cannot serve {reason}")
