"""Checkpoints of DeepSeek-V4: names and storage of tensors, loading, and random weights.

Names of any of three schemes become the model's own, those of transformers without ``model.``::

    release       layers.0.attn.wq_a.weight               layers.0.ffn.experts.3.w1.weight
    transformers  model.layers.0.self_attn.q_a_proj.weight  model.layers.0.mlp.experts.gate_up_proj
    hybrid        model.layers.0.attn.wq_a.weight         model.layers.0.ffn.experts.3.w1.weight

A quantized matrix ``x.weight`` has its scales in ``x.scale``.

Source: the released checkpoints; transformers 5.23 ``conversion_mapping``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quire.kernels.common.dequantize import FP4_GROUP

from ..engine.memory import fits, free_memory
from ..families.registry import Family, register_family
from ..layers.moe import FP8_BLOCK
from ..loading.checkpoint import FP8, Stored, read_headers
from ..loading.dequantize import fill
from ..loading.names import GATE, UP, WHOLE, Storage, TensorTarget, match
from ..loading.shards import pieces_of
from ..parallel.group import Group
from .config import CONFIGS, MODEL_TYPE, DeepseekV4Config, from_hf, to_hf
from .model import DeepseekV4

_V41 = (
    "of DeepSeek-V4.1, single-pass hyper-connections, compressed caches and indexers that layers "
    "share, compress_ratios of 1 and 2, two-level top-k and Engram tables are not supported"
)

# Applied in this order; each leaves names alone that are right already.
_RENAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^model\.", ""),
        (r"^embed\.weight$", "embed_tokens.weight"),
        (r"^head\.weight$", "lm_head.weight"),
        (r"\bhc_head_(fn|base|scale)$", r"hc_head.hc_\1"),
        (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.self_attn\.indexer\.(compressor\.)?", ".self_attn.compressor.indexer."),
        (r"\.indexer\.weights_proj\.", ".indexer.scorer.weights_proj."),
        (r"(\.self_attn\..*|\.self_attn)\.norm\.", r"\1.kv_norm."),
        (r"\.self_attn\.q_norm\.", ".self_attn.q_a_norm."),
        (r"\.attn_sink$", ".sinks"),
        (r"\.ape$", ".position_bias"),
        (r"\.wq_a\.", ".q_a_proj."),
        (r"\.wq_b\.", ".q_b_proj."),
        (r"\.wkv\.", ".kv_proj."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.wo_a\.", ".o_a_proj."),
        (r"\.wo_b\.", ".o_b_proj."),
        (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
        (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
        (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    )
]
_DRAFTER = re.compile(r"(?:model\.)?mtp\.(\d{1,6})\.")
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d{1,6})\.(w[123])\.(weight|scale)$")
# Drafters may bring copies of what they share with the trunk. DSpark's confidence is not used.
_IGNORED = re.compile(r"^(model\.)?mtp\.\d+\.(emb\.tok_emb|head|confidence_head\.proj)\.weight$")


def target(stored: str) -> TensorTarget | None:
    """As `Storage.target`; a name that no rule knows stays as it is."""
    if _IGNORED.match(stored):
        return None
    name = stored
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    if parts := _EXPERT.match(name):
        stack, expert, matrix, leaf = parts.groups()
        part = {"w1": GATE, "w3": UP, "w2": WHOLE}[matrix]
        parameter = f"{stack}.{'down_proj' if matrix == 'w2' else 'gate_up_proj'}"
        return TensorTarget(parameter, int(expert), part, leaf == "scale")
    # hc scales are weights of their own: `.attn_hc.scale`.
    if name.endswith(".scale") and not name.endswith("_hc.scale"):
        return TensorTarget(name.removesuffix("scale") + "weight", is_scale=True)
    return TensorTarget(name)


STORAGE = Storage(target, {FP8: "fp8", "I8": "fp4", "U8": "fp4"}, (FP8_BLOCK, FP8_BLOCK))


def load(
    path: Path, config: DeepseekV4Config, device: torch.device, dtype: torch.dtype, fp8: str,
    group: Group | None,
) -> DeepseekV4:  # fmt: skip
    """As `quire.models.loading.weights.load_model`; what stays quantized are the routed experts."""
    tables = 2 * 4 * config.rope_dim * config.max_position_embeddings
    if tables > (free := free_memory(device)):
        raise ValueError(
            f"max_position_embeddings: expected rotary tables of at most the free {free} bytes, "
            f"got {tables} bytes for {config.max_position_embeddings} tokens"
        )
    stored = read_headers(path)
    config = _with_stored_drafter(config, stored)
    whole = DeepseekV4(config, device="meta", dtype=dtype)
    parameters = dict(whole.named_parameters())
    sources = match(path, stored, parameters, STORAGE)
    experts = [source for source in sources if ".mlp.experts." in source.target.parameter]
    formats = {source.kind: source.value for source in experts}
    if len(formats) > 1:
        of = " and ".join(f"{kind} of {stored}" for kind, stored in formats.items())
        raise NotImplementedError(f"experts: expected one format for all, got {of}")
    kept = next((kind for kind in formats if kind != "plain"), None)
    if fp8 == "keep" and kept is None:
        raise ValueError("fp8: expected 'auto' or 'dequantize', the experts here are not quantized")
    plain, pieces = whole, {}
    if group is not None:
        # Other matrices than experts are dequantized: they may be cut anywhere.
        unit = {"fp8": FP8_BLOCK, "fp4": FP4_GROUP}.get(kept, 1)
        config = config.shard(group.size, unit)
        plain = DeepseekV4(config, device="meta", dtype=dtype, group=group)
        pieces = pieces_of(sources, parameters, dict(plain.named_parameters()), group)
    if fp8 == "dequantize" or (fp8 == "auto" and fits(plain, device)):
        kept = None
    model = DeepseekV4(config, device=device, dtype=dtype, expert_format=kept, group=group)
    fill(model, sources, {}, pieces)
    return model


def _with_stored_drafter(config: DeepseekV4Config, stored: Iterable[Stored]) -> DeepseekV4Config:
    """The config with the drafter layers that the files have: they may have none."""
    names = [_DRAFTER.match(one.name) for one in stored if not _IGNORED.match(one.name)]
    stages = {int(name[1]) for name in names if name}
    if not stages:
        return replace(config, num_mtp_layers=0, dspark=None)
    if config.dspark is None:
        return config
    return replace(config, dspark=replace(config.dspark, num_stages=max(stages) + 1))


_DEVIATIONS = {
    "fn": 0.05, "hc_fn": 0.05, "base": 0.5, "hc_base": 0.5, "e_score_correction_bias": 0.2,
    "sinks": 1.0, "position_bias": 1.0,
}  # fmt: skip


def _draw(name: str, weight: Tensor, config: DeepseekV4Config, generator: torch.Generator) -> None:
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


register_family(
    Family(
        MODEL_TYPE,
        (MODEL_TYPE,),
        from_hf,
        DeepseekV4,
        to_hf,
        draw=_draw,
        load=load,
        refused={"deepseek_v41": _V41, "deepseek_v41_text": _V41},
        configs=tuple(CONFIGS.values()),
    )
)
