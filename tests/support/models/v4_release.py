"""Directories of DeepSeek-V4 in the release's names and formats: fp8 with E8M0 and fp32 scales, fp4 experts, shards."""

import json
from dataclasses import replace

import torch
from safetensors.torch import save_file

from quire.bench.common.hf_checkpoint import to_hf
from quire.models.deepseek_v4.config import CONFIGS, CSA, HASH_MOE, HCA, MOE, SLIDING, DSparkConfig
from quire.models.loading.random_weights import random_model

# Matrices of more than one block of 128, the last one cut short; every kind of layer once.
CONFIG = replace(
    CONFIGS["deepseek-v4-tiny"],
    hidden_size=160,
    moe_intermediate_size=192,
    num_experts=4,
    layer_types=(SLIDING, CSA, HCA),
    mlp_layer_types=(HASH_MOE, MOE, MOE),
)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
RELEASE = {
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.compressor.kv_proj.weight": "attn.compressor.wkv.weight",
    "self_attn.compressor.gate_proj.weight": "attn.compressor.wgate.weight",
    "self_attn.compressor.kv_norm.weight": "attn.compressor.norm.weight",
    "self_attn.compressor.position_bias": "attn.compressor.ape",
    "self_attn.compressor.indexer.kv_proj.weight": "attn.indexer.compressor.wkv.weight",
    "self_attn.compressor.indexer.gate_proj.weight": "attn.indexer.compressor.wgate.weight",
    "self_attn.compressor.indexer.kv_norm.weight": "attn.indexer.compressor.norm.weight",
    "self_attn.compressor.indexer.position_bias": "attn.indexer.compressor.ape",
    "self_attn.compressor.indexer.q_b_proj.weight": "attn.indexer.wq_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "attn.indexer.weights_proj.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "attn_hc.fn": "hc_attn_fn", "attn_hc.base": "hc_attn_base", "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn", "ffn_hc.base": "hc_ffn_base", "ffn_hc.scale": "hc_ffn_scale",
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
    "main_proj.weight": "main_proj.weight", "main_norm.weight": "main_norm.weight",
    "markov_head.markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_head.markov_w2.weight",
    "enorm.weight": "enorm.weight", "hnorm.weight": "hnorm.weight", "norm.weight": "norm.weight",
    "e_proj.weight": "e_proj.weight", "h_proj.weight": "h_proj.weight",
    "hc_head.hc_fn": "hc_head_fn", "hc_head.hc_base": "hc_head_base", "hc_head.hc_scale": "hc_head_scale",
}  # fmt: skip
TOP = {
    "embed_tokens.weight": "embed.weight", "lm_head.weight": "head.weight", "norm.weight": "norm.weight",
    "hc_head.hc_fn": "hc_head_fn", "hc_head.hc_base": "hc_head_base", "hc_head.hc_scale": "hc_head_scale",
}  # fmt: skip
FP8 = (
    "attn.wq_", "indexer.wq_b", "attn.wkv", "attn.wo_", "shared_experts", "e_proj", "h_proj",
    "main_proj",
)  # fmt: skip


def release_tensors(model):
    """The model's weights under the release's names, experts one by one."""
    tensors = {}
    for name, weight in model.named_parameters():
        if name in TOP:
            tensors[TOP[name]] = weight
            continue
        kind, index, rest = name.split(".", 2)
        prefix = f"{kind}.{index}."
        if rest == "mlp.experts.gate_up_proj":
            width = weight.shape[1] // 2
            for expert, matrix in enumerate(weight):
                tensors[f"{prefix}ffn.experts.{expert}.w1.weight"] = matrix[:width]
                tensors[f"{prefix}ffn.experts.{expert}.w3.weight"] = matrix[width:]
        elif rest == "mlp.experts.down_proj":
            for expert, matrix in enumerate(weight):
                tensors[f"{prefix}ffn.experts.{expert}.w2.weight"] = matrix
        else:
            tensors[prefix + RELEASE[rest]] = weight
    return {name: weight.detach().contiguous() for name, weight in tensors.items()}


def e8m0(exponents):
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def to_fp8(weight, e8m0_scales, shift):
    """(values, scales, exact product) block by block, with loops. shift: of the exponents, as a scale says more where all differ."""
    rows, columns = weight.shape
    blocks = (-(-rows // 128), -(-columns // 128))
    exponents = torch.zeros(blocks, dtype=torch.int32)
    values = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    exact = torch.zeros(rows, columns, dtype=torch.float64)
    factor = 1.0 if e8m0_scales else 1.25  # fp32 scales need not be powers of two
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            e = int(torch.ceil(torch.log2(weight[block].abs().max() / 448 / factor)))
            e += i + 2 * j + shift  # the largest of random weights is much the same in all blocks
            exponents[i, j] = e
            values[block] = (weight[block] / (factor * 2.0**e)).to(torch.float8_e4m3fn)
            exact[block] = values[block].double() * factor * 2.0**e
    scale = e8m0(exponents) if e8m0_scales else factor * torch.ldexp(torch.ones(blocks), exponents)
    return values, scale, exact


def to_fp4(weight):
    """(packed values, scales, exact product), value by value."""
    rows, columns = weight.shape
    groups = weight.view(rows, columns // 32, 32)
    exponents = torch.ceil(torch.log2(groups.abs().amax(-1).clamp(min=1e-6) / 6)).int()
    scaled = groups / torch.exp2(exponents.float())[..., None]
    levels = torch.tensor(E2M1)
    nearest = (scaled.abs()[..., None] - levels).abs().argmin(-1).view(rows, columns)
    negative = (scaled < 0).view(rows, columns)
    code = nearest + 8 * negative.int()
    packed = (code[:, 0::2] + 16 * code[:, 1::2]).to(torch.uint8).view(torch.int8)
    signed = torch.where(negative, -levels[nearest], levels[nearest]).double()
    exact = signed * 2.0 ** exponents.double().repeat_interleave(32, dim=1)
    return packed, e8m0(exponents), exact


def write_release(path, model, experts, e8m0_scales=True, num_files=2, edit=None):
    """A release directory; returns {release name: the exact weight that its bytes stand for}. experts: fp4, fp8, or None = nothing is quantized."""
    stored, exact = {}, {}
    for n, (name, weight) in enumerate(release_tensors(model).items()):
        if ".experts." in name and experts == "fp4":
            values, scale, exact[name] = to_fp4(weight)
        elif experts and (".experts." in name or any(part in name for part in FP8)):
            values, scale, exact[name] = to_fp8(weight, e8m0_scales, 4 * (n % 2))
        else:
            stored[name] = exact[name] = weight
            continue
        stored[name] = values
        stored[name.removesuffix("weight") + "scale"] = scale
    if edit is not None:
        edit(stored)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(to_hf(model.config)))
    names = sorted(stored)
    shards = [names[i::num_files] for i in range(num_files)]  # values and scales apart
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
        save_file({name: stored[name] for name in shard}, path / file)
        weight_map |= dict.fromkeys(shard, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return exact


def of_transformers(model, exact):
    """Weights by release names, under transformers' names, experts stacked; drafters are none of its."""
    tensors = {}
    for name in [name for name, _ in model.named_parameters() if not name.startswith("mtp.")]:
        if name in TOP:
            value = exact[TOP[name]]
        elif ".mlp.experts." in name:
            experts = f"layers.{name.split('.')[1]}.ffn.experts"
            parts = ("w1", "w3") if name.endswith("gate_up_proj") else ("w2",)
            value = torch.stack([
                torch.cat([exact[f"{experts}.{i}.{part}.weight"] for part in parts])
                for i in range(model.config.num_experts)
            ])  # fmt: skip
        else:
            _, layer, rest = name.split(".", 2)
            value = exact[f"layers.{layer}.{RELEASE[rest]}"]
        stored = name if name == "lm_head.weight" else f"model.{name}"
        tensors[stored] = value.float() if value.is_floating_point() else value
    return tensors


def with_dspark():
    """A model with the drafter of DeepSeek-V4-Flash-0731: three stages."""
    stages = DSparkConfig(3, 5, 250, 8, (0, 1, 2))
    return random_model(replace(CONFIG, num_mtp_layers=0, dspark=stages))


def say_ratios(path, num_nextn):
    """Layers as DeepSeek-V4-Flash-0731 has them, where the drafter's three stages are counted as one layer; None = not."""
    config = json.loads((path / "config.json").read_text())
    del config["layer_types"], config["num_nextn_predict_layers"]
    config |= {"compress_ratios": [0, 4, 128, 0, 0, 0]}
    config |= {} if num_nextn is None else {"num_nextn_predict_layers": num_nextn}
    (path / "config.json").write_text(json.dumps(config))


def without_drafters(stored):
    """Drop the drafters' tensors: an ``edit`` of `write_release`."""
    for name in [name for name in stored if name.startswith("mtp.")]:
        del stored[name]
