"""The model of a bench: a checkpoint, or random weights whose output shows what attention read."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from quire.models.config.model import ModelConfig
from quire.models.config.named import named_configs
from quire.models.deepseek_v4.model import DeepseekV4
from quire.models.engine.memory import weight_bytes
from quire.models.families.decoder import Decoder
from quire.models.families.gpt_oss import Experts as GptOssExperts
from quire.models.layers.basic import RMSNorm
from quire.models.llm import expect_room
from quire.models.loading.locate import locate_checkpoint
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from quire.models.tokenizer import ByteTokenizer, Tokenizer, find_tokenizer

from ..common.hf_checkpoint import save_checkpoint

CHECKPOINT_BYTES = 2**28  # random models up to this size take the way over a checkpoint on disk
EMBEDDING_SHRINK = 1 / 32
SHARPNESS = 2.0
SHRINK_OF_CHOICES = 1 / 16
SHRINK_OF_LAYERS = 1 / 4


@dataclass(frozen=True)
class BenchModel:
    """A model with its tokenizer, one phrase on the source of its weights, and their directory
    where they have one.
    """

    model: Decoder
    tokenizer: Tokenizer
    source: str
    directory: Path | None = None


def build_model(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    kv_cache_dtype: str = "auto",
    seed: int = 0,
) -> BenchModel:
    """Load a checkpoint (`locate_checkpoint`), or make random weights for a named configuration.

    A small random model is saved as a checkpoint and read back, so that a default run covers the
    way real weights take (not where safetensors is missing). Models without a tokenizer.json read
    bytes.

    Args:
        name: a named configuration, a directory, a .gguf file, or a name on the Hub.
        dtype: default: the checkpoint's own; for random weights bfloat16 on a GPU, else float32.

    Raises:
        ValueError: no such name, or a model that does not fit the memory; errors of `load_model`.
    """
    if (config := named_configs().get(name)) is None:
        path = locate_checkpoint(name)
        model = load_model(path, device=device, dtype=dtype)
        tokenizer = find_tokenizer(model.config, path) or ByteTokenizer()
        return BenchModel(model, tokenizer, "weights from a directory", path)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    expect_room(config, device, dtype)
    model = random_model(config, seed=seed, device=device, dtype=dtype)
    rounded = kv_cache_dtype != "auto"
    if not isinstance(config, ModelConfig):
        _adjust_v4(model)
    else:
        _adjust(model, config, 1.0 if rounded or dtype != torch.float32 else SHARPNESS)
        if rounded:
            _shrink_choices(model)
    source = f"random weights (seed {seed})"
    if weight_bytes(model) <= CHECKPOINT_BYTES and find_spec("safetensors") is not None:
        with tempfile.TemporaryDirectory(prefix="quire-bench-") as directory:
            save_checkpoint(model, directory)
            model = load_model(directory, device=device)
        # The name in config.json's place is the directory's.
        model.config = replace(model.config, name=config.name)
        source += ", saved as a checkpoint and loaded"
    return BenchModel(model, ByteTokenizer(), source)


def _adjust(model: Decoder, config: ModelConfig, sharpness: float) -> None:
    """Make output depend on what attention read.

    With its usual size the embedding drowns what the layers add, and the tied output repeats the
    last token for ever: a check of such tokens would prove nothing. The final norm keeps the logits
    at order one.

    Trained queries carry the scale that the softmax lacks. Without it scores have a deviation of
    sqrt(head_dim), and rounding decides which keys attention picks: in bf16, or over pages of e4m3,
    two right programs would then generate different texts. In fp32 a deviation of SHARPNESS is
    harmless, and gives more varied answers.
    """
    if config.tie_word_embeddings:
        model.embed_tokens.weight.mul_(EMBEDDING_SHRINK)
        _scale_norm(model.norm, 1 / EMBEDDING_SHRINK)
    for layer in model.layers:
        attention = layer.self_attn
        factor = sharpness / (config.softmax_scale * attention.head_dim**0.5)
        if attention.q_norm is not None:
            _scale_norm(attention.q_norm, factor)
        else:
            for weight in attention.q_proj.parameters():
                weight.mul_(factor)


def _shrink_choices(model: Decoder) -> None:
    """Shrink what experts and per-layer inputs add: in random models a rounded row becomes another
    expert's, or moves a gate, and then logits by more than they spread.
    """
    for name, module in model.named_modules():
        if name.endswith(("post_feedforward_layernorm_2", "post_per_layer_input_norm")):
            _scale_norm(module, SHRINK_OF_CHOICES)
        elif isinstance(module, GptOssExperts):
            module.down_proj.mul_(SHRINK_OF_CHOICES)
            module.down_proj_bias.mul_(SHRINK_OF_CHOICES)


def _adjust_v4(model: DeepseekV4) -> None:
    """Make the drafter guess right now and then, as no random one does: it and the trunk lean on
    the newest token, and it collapses and normalises as the trunk does.
    """
    for layer in [*model.layers, *model.mtp]:
        layer.self_attn.o_b_proj.weight.mul_(SHRINK_OF_LAYERS)
        for name, weight in layer.mlp.named_parameters():
            if "down_proj" in name:
                weight.mul_(SHRINK_OF_LAYERS)
    for drafter in model.mtp:
        torch.nn.init.eye_(drafter.e_proj.weight)
        drafter.h_proj.weight.mul_(SHRINK_OF_LAYERS)
        drafter.enorm.weight.fill_(1.0)
        drafter.hc_head.load_state_dict(model.hc_head.state_dict())
        drafter.norm.load_state_dict(model.norm.state_dict())


def _scale_norm(norm: RMSNorm, factor: float) -> None:
    """Multiply the effective weight of a norm, which is stored minus its offset."""
    norm.weight.add_(norm.offset).mul_(factor).sub_(norm.offset)
