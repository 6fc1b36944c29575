"""DeepSeek-V4 as a family: its config.json files, how it is loaded, and random weights.

Config files have the released keys or those of transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.kernels.common.dequantize import FP4_GROUP

from ..config import fields
from ..config.fields import checked, only, read_fields, shown
from ..config.keys import RopeKeys, token_ids
from ..engine.memory import fits, free_memory
from ..families.registry import Family, register_family
from ..layers.moe import FP8_BLOCK
from ..loading.checkpoint import read_headers
from ..loading.dequantize import fill
from ..loading.names import Target, match, unique
from ..loading.shards import pieces_of
from ..parallel.group import Group
from .config import (
    CONFIGS,
    CSA,
    HASH_MOE,
    HCA,
    MODEL_TYPE,
    MOE,
    DeepseekV4Config,
    DSparkConfig,
    LayerTypes,
    MlpLayerTypes,
    NumDrafters,
    NumIterations,
    NumStreams,
    Ratio,
    YarnConfig,
    layer_types_of,
)
from .model import DeepseekV4
from .names import V4Storage, format_of_experts

_V41 = (
    "of DeepSeek-V4.1, single-pass hyper-connections, compressed caches and indexers that layers "
    "share, compress_ratios of 1 and 2, two-level top-k and Engram tables are not supported"
)


@dataclass(frozen=True)
class QuantizationKeys:
    """The ``quantization_config`` of the released models: fp8 in blocks of 128 x 128."""

    quant_method: only("fp8") = None
    weight_block_size: only(None, [128, 128]) = None


@dataclass(frozen=True)
class RateKeys:
    """``compress_rates``: tokens of an entry, by kind of layer."""

    compressed_sparse_attention: Ratio = 4
    heavily_compressed_attention: Ratio = 128


@dataclass(frozen=True)
class DeepseekV4Keys:
    """Keys of the file, with what transformers 5.23 assumes where it says nothing.

    The types of layers have no default: that of transformers is no released model's.
    """

    model_type: only(MODEL_TYPE)
    vocab_size: fields.VocabSize = 129280
    hidden_size: fields.Width = 4096
    num_hidden_layers: fields.NumLayers = 43
    num_nextn_predict_layers: NumDrafters | None = None
    dspark_block_size: fields.NumTokens | None = None
    dspark_noise_token_id: fields.TokenId | None = None
    dspark_markov_rank: fields.Width | None = None
    dspark_target_layer_ids: tuple[fields.NumShared, ...] | None = None
    layer_types: LayerTypes | None = None
    compress_ratios: tuple[fields.ints(0, 2**16), ...] | None = None
    compress_rates: RateKeys | None = None
    compress_rate_csa: Ratio | None = None
    compress_rate_hca: Ratio | None = None
    mlp_layer_types: MlpLayerTypes | None = None
    num_hash_layers: fields.NumShared = 3
    num_attention_heads: fields.NumHeads = 64
    num_key_value_heads: only(1) = 1
    head_dim: fields.Width = 512
    qk_rope_head_dim: fields.HeadSize | None = None
    partial_rotary_factor: fields.Share | None = None
    q_lora_rank: fields.Width = 1024
    o_groups: fields.NumHeads = 8
    o_lora_rank: fields.Width = 1024
    sliding_window: fields.NumTokens = 128
    index_n_heads: fields.NumHeads = 64
    index_head_dim: fields.Width = 128
    index_topk: fields.NumTokens = 512
    n_routed_experts: fields.NumExperts | None = None
    num_local_experts: fields.NumExperts = 256
    n_shared_experts: only(1) = 1
    num_experts_per_tok: fields.NumExperts = 6
    moe_intermediate_size: fields.Width = 2048
    routed_scaling_factor: fields.Positive = 1.5
    swiglu_limit: fields.Positive = 10.0
    max_position_embeddings: fields.NumTokens = 1048576
    hc_mult: NumStreams = 4
    hc_sinkhorn_iters: NumIterations = 20
    hc_eps: fields.Epsilon = 1e-6
    rms_norm_eps: fields.Epsilon = 1e-6
    bos_token_id: fields.TokenId | None = 0
    eos_token_id: fields.TokenIds = 1
    rope_theta: fields.Theta = 1e4
    compress_rope_theta: fields.Theta = 1.6e5
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    quantization_config: QuantizationKeys | None = None
    hidden_act: only("silu") = "silu"
    scoring_func: only("sqrtsoftplus") = "sqrtsoftplus"
    norm_topk_prob: only(True) = True
    attention_bias: only(False) = False
    mlp_bias: only(False) = False
    tie_word_embeddings: only(False) = False
    n_group: only(None, 1) = None
    topk_group: only(None, 1) = None


def from_hf(config: Mapping[str, Any], name: str | None = None) -> DeepseekV4Config:
    """Read a ``config.json``, with the keys of the released models or with those of transformers.

    Args:
        config: the parsed file.
        name: what to call the model; default: its ``model_type``.

    Returns:
        DeepseekV4Config.

    Raises:
        NotImplementedError: naming each feature that is not supported.
        ValueError: keys that are missing, of another type or range, or contradict.

    Source: transformers ``configuration_deepseek_v4``; the config.json of the released models.
    """
    keys = read_fields(DeepseekV4Keys, config)
    layer_types, num_mtp_layers = _layer_types(keys)
    rates = keys.compress_rates or RateKeys()
    return DeepseekV4Config(
        name=name or MODEL_TYPE,
        layer_types=layer_types,
        mlp_layer_types=_mlp_layer_types(keys),
        num_mtp_layers=num_mtp_layers,
        dspark=_dspark(keys),
        num_heads=keys.num_attention_heads,
        csa_ratio=keys.compress_rate_csa or rates.compressed_sparse_attention,
        hca_ratio=keys.compress_rate_hca or rates.heavily_compressed_attention,
        index_num_heads=keys.index_n_heads,
        num_experts=keys.n_routed_experts or keys.num_local_experts,
        moe_intermediate_size=keys.moe_intermediate_size,
        eos_token_ids=token_ids(keys.eos_token_id),
        **_rope(keys),
        **{key: getattr(keys, key) for key in SAME_NAME},
    )


SAME_NAME = (
    "vocab_size", "hidden_size", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank",
    "sliding_window", "index_head_dim", "index_topk", "num_experts_per_tok",
    "routed_scaling_factor", "swiglu_limit", "max_position_embeddings", "hc_mult",
    "hc_sinkhorn_iters", "hc_eps", "rms_norm_eps", "bos_token_id",
)  # fmt: skip
"""Keys that are fields of `DeepseekV4Config` under the same name."""


def _layer_types(keys: DeepseekV4Keys) -> tuple[tuple[str, ...], int]:
    """Layer types of the trunk, and the number of drafter layers."""
    num_layers, num_mtp_layers = keys.num_hidden_layers, keys.num_nextn_predict_layers
    has_dspark = keys.dspark_block_size is not None  # then the counts are not of MTP layers
    if has_dspark:
        num_mtp_layers = 0
    if keys.layer_types is not None:
        return _first("layer_types", keys.layer_types, num_layers), num_mtp_layers or 0
    if keys.compress_ratios is None:
        raise ValueError("layer_types: expected layer_types or compress_ratios, got neither")
    ratios = _first("compress_ratios", keys.compress_ratios, num_layers)
    drafters = () if has_dspark else keys.compress_ratios[num_layers:]
    if any(drafters) or num_mtp_layers not in (None, len(drafters)):
        raise ValueError(
            f"compress_ratios: expected a 0 for each of num_nextn_predict_layers={num_mtp_layers} "
            f"after {num_layers} layers, got {shown(drafters)}"
        )
    return layer_types_of(ratios), len(drafters)


def _dspark(keys: DeepseekV4Keys) -> DSparkConfig | None:
    """DSpark's keys; `load` counts its stages in the files."""
    if keys.dspark_block_size is None:
        return None
    names = ("noise_token_id", "markov_rank", "target_layer_ids")
    given = {name: getattr(keys, f"dspark_{name}") for name in names}
    if absent := [f"dspark_{name}" for name, value in given.items() if value is None]:
        raise ValueError(f"{absent[0]}: expected a value beside dspark_block_size, got none")
    num_stages = 3  # of each released one
    if keys.compress_ratios is not None and len(keys.compress_ratios) > keys.num_hidden_layers:
        num_stages = len(keys.compress_ratios) - keys.num_hidden_layers
    return DSparkConfig(num_stages, keys.dspark_block_size, **given)


def _mlp_layer_types(keys: DeepseekV4Keys) -> tuple[str, ...]:
    num_layers = keys.num_hidden_layers
    if keys.mlp_layer_types is not None:
        return _first("mlp_layer_types", keys.mlp_layer_types, num_layers)
    num_hash_layers = min(keys.num_hash_layers, num_layers)
    return (HASH_MOE,) * num_hash_layers + (MOE,) * (num_layers - num_hash_layers)


def _first(name: str, entries: tuple[Any, ...], num_layers: int) -> tuple[Any, ...]:
    """The entries of the trunk's layers; what follows is the drafters'."""
    if len(entries) < num_layers:
        raise ValueError(
            f"{name}: expected at least num_hidden_layers={num_layers} entries, got {len(entries)}"
        )
    return entries[:num_layers]


def _rope(keys: DeepseekV4Keys) -> dict[str, Any]:
    """The fields rope_dim, rope_theta, compress_rope_theta and yarn.

    From nested or flat parameters.
    """
    name = "rope_parameters" if keys.rope_parameters else "rope_scaling"
    given = getattr(keys, name) or {}
    part = f"{name}.compress" if "main" in given else name
    # A flat rope_theta is the main one: only the nested form says what compressed layers use.
    flat = given | {"rope_theta": keys.compress_rope_theta}
    main = _rope_keys(given.get("main", {}), f"{name}.main", keys.rope_theta)
    compress = given.get("compress", {}) if "main" in given else flat
    compress = _rope_keys(compress, part, keys.compress_rope_theta)
    if main.kind != "default":
        raise NotImplementedError(
            f"{name}.main: supported is rope_type 'default', got {main.kind!r}"
        )
    if compress.kind not in ("default", "yarn") or compress.attention_factor not in (None, 1.0):
        raise NotImplementedError(
            f"{part}: supported are rope_type 'default', and 'yarn' with attention_factor 1.0, "
            f"got {compress.kind!r} with {compress.attention_factor}"
        )
    yarn = None
    if compress.kind == "yarn":
        given = {key: value for key, value in vars(compress).items() if value is not None}
        yarn = read_fields(YarnConfig, given, part)
    partial = keys.partial_rotary_factor or main.partial_rotary_factor or 64 / 512
    size = int(keys.head_dim * partial)
    if keys.qk_rope_head_dim is None and (size < 2 or size % 2):
        raise ValueError(
            f"partial_rotary_factor: expected an even number of head_dim={keys.head_dim} channels, "
            f"got {partial} of them"
        )
    return {
        "rope_dim": keys.qk_rope_head_dim or size,
        "rope_theta": main.rope_theta,
        "compress_rope_theta": compress.rope_theta,
        "yarn": yarn,
    }


def _rope_keys(data: Any, name: str, theta: float) -> RopeKeys:
    return read_fields(RopeKeys, {"rope_theta": theta} | checked(dict, name, data), name)


def to_hf(config: DeepseekV4Config) -> dict[str, Any]:
    """Write config.json."""
    partial = {"partial_rotary_factor": config.rope_dim / config.head_dim}
    main = {"rope_type": "default", "rope_theta": config.rope_theta} | partial
    compress = {"rope_type": "default", "rope_theta": config.compress_rope_theta} | partial
    if config.yarn is not None:
        compress |= {"rope_type": "yarn", "attention_factor": 1.0} | vars(config.yarn)
    dspark = {}
    if config.dspark is not None:
        given = vars(config.dspark)
        dspark = {f"dspark_{key}": given[key] for key in given if key != "num_stages"}
        dspark["dspark_target_layer_ids"] = list(config.dspark.target_layer_ids)
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "num_hidden_layers": config.num_layers,
        "num_nextn_predict_layers": config.num_mtp_layers,
        "layer_types": list(config.layer_types),
        "mlp_layer_types": list(config.mlp_layer_types),
        "compress_rates": {CSA: config.csa_ratio, HCA: config.hca_ratio},
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": 1,
        "index_n_heads": config.index_num_heads,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": 1,
        "moe_intermediate_size": config.moe_intermediate_size,
        "rope_theta": config.rope_theta,
        "compress_rope_theta": config.compress_rope_theta,
        "partial_rotary_factor": config.rope_dim / config.head_dim,
        "rope_parameters": {"main": main, "compress": compress},
        "eos_token_id": list(config.eos_token_ids),
        "tie_word_embeddings": False,
        **dspark,
    } | {key: getattr(config, key) for key in SAME_NAME}


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
    storage = V4Storage()
    found = unique(path, storage, read_headers(path))
    config = _with_stored_drafter(config, found)
    kept = format_of_experts(found)
    if fp8 == "keep" and kept is None:
        raise ValueError("fp8: expected 'auto' or 'dequantize', the experts here are not quantized")
    whole = DeepseekV4(config, device="meta", dtype=dtype)
    parameters = dict(whole.named_parameters())
    sources = match(path, found, parameters, storage)
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


def _with_stored_drafter(config: DeepseekV4Config, found: Iterable[Target]) -> DeepseekV4Config:
    """The config with the drafter layers that the files have: they may have none."""
    names = [where.parameter.split(".") for where in found]
    stages = {int(name[1]) for name in names if name[0] == "mtp" and name[1].isdigit()}
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
