"""Checkpoints in the release's names and formats, written here by hand: fp8 with E8M0 and fp32 scales, fp4 experts, shards."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from quire.bench.common.hf_checkpoint import save_checkpoint, to_hf
from quire.kernels.common.dequantize import (
    dequantize_fp4,
    scale_values,
)
from quire.models.deepseek_v4.config import (
    CONFIGS,
    CSA,
    HASH_MOE,
    HCA,
    MOE,
    SLIDING,
    DSparkConfig,
)
from quire.models.deepseek_v4.model import Experts
from quire.models.deepseek_v4.mtp import MTPDrafter
from quire.models.layers.moe import PackedExperts
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model

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
    "attn.wq_",
    "indexer.wq_b",
    "attn.wkv",
    "attn.wo_",
    "shared_experts",
    "e_proj",
    "h_proj",
    "main_proj",
)


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
    """A release directory; returns {release name: the exact weight that its bytes stand for}."""
    stored, exact = {}, {}
    for n, (name, weight) in enumerate(release_tensors(model).items()):
        if ".experts." in name and experts == "fp4":
            values, scale, exact[name] = to_fp4(weight)
        elif ".experts." in name or any(part in name for part in FP8):
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


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


@pytest.mark.parametrize(("experts", "e8m0_scales"), [("fp4", True), ("fp8", True), ("fp8", False)])
def test_release_directory(tmp_path, model, experts, e8m0_scales):
    """Every weight is exactly what its bytes stand for, and packed experts compute the same."""
    exact = write_release(tmp_path / "release", model, experts, e8m0_scales)
    loaded = load_model(tmp_path / "release", dtype=torch.float32)
    got = release_tensors(loaded)
    assert set(got) == set(exact)
    for name, weight in exact.items():
        assert torch.equal(got[name].double(), weight.double()), name
    packed = load_model(tmp_path / "release", dtype=torch.float32, fp8="keep")
    ids = torch.randint(3, 259, (50,), generator=torch.Generator().manual_seed(0))
    expected = loaded.full_forward(ids)
    assert (packed.full_forward(ids) - expected).abs().max() < 1e-5 < expected.std()
    size = sum(w.numel() * w.element_size() for w in packed.layers[0].mlp.experts.parameters())
    plain = 2 * sum(w.numel() for w in loaded.layers[0].mlp.experts.parameters())
    assert size < plain * {"fp8": 0.51, "fp4": 0.27}[experts]  # of bf16


@pytest.mark.parametrize(("free", "kind"), [(10**9, Experts), (10**5, PackedExperts)])
def test_memory_decides(tmp_path, model, monkeypatch, free, kind):
    write_release(tmp_path / "release", model, "fp8")
    monkeypatch.setattr("quire.models.engine.memory.free_memory", lambda device: free)
    assert isinstance(load_model(tmp_path / "release").layers[0].mlp.experts, kind)


def _with_copies(stored):
    stored["mtp.0.emb.tok_emb.weight"] = stored["embed.weight"].clone()
    stored["mtp.0.head.weight"] = stored["head.weight"].clone()


def _without_drafters(stored):
    for name in [name for name in stored if name.startswith("mtp.")]:
        del stored[name]


@pytest.mark.parametrize(("edit", "num_layers"), [(_with_copies, 1), (_without_drafters, 0)])
def test_drafters_may_repeat_what_they_share_or_be_absent(tmp_path, model, edit, num_layers):
    write_release(tmp_path / "release", model, "fp8", edit=edit)
    assert load_model(tmp_path / "release").config.num_mtp_layers == num_layers


@pytest.fixture(scope="module")
def with_dspark():
    stages = DSparkConfig(3, 5, 250, 8, (0, 1, 2))
    return random_model(replace(CONFIG, num_mtp_layers=0, dspark=stages))


@pytest.mark.parametrize("num_nextn", [0, 1, 3, None])
def test_a_dspark_drafter(tmp_path, with_dspark, num_nextn):
    """As DeepSeek-V4-Flash-0731 has it: three stages in mtp.*, and keys that may count one of them."""

    def edit(stored):
        stored["mtp.2.confidence_head.proj.weight"] = torch.zeros(1, 168)

    path = tmp_path / "release"
    exact = write_release(path, with_dspark, "fp8", edit=edit)
    config = json.loads((path / "config.json").read_text())
    del config["layer_types"], config["num_nextn_predict_layers"]
    config |= {"compress_ratios": [0, 4, 128, 0, 0, 0]}
    if num_nextn is not None:
        config["num_nextn_predict_layers"] = num_nextn
    (path / "config.json").write_text(json.dumps(config))
    loaded = load_model(path, dtype=torch.float32)
    assert loaded.config.dspark == with_dspark.config.dspark
    assert loaded.config.num_mtp_layers == 0
    tensors = release_tensors(loaded)
    assert tensors.keys() == exact.keys()
    for name, weight in exact.items():
        assert torch.equal(tensors[name].double(), weight.double()), name
    with pytest.raises(ValueError, match="expected one with MTP layers"):
        MTPDrafter(loaded)


def test_the_trunk_of_a_dspark_checkpoint_without_its_drafter(tmp_path, with_dspark):
    path = tmp_path / "release"
    write_release(path, with_dspark, "fp8", edit=_without_drafters)
    loaded = load_model(path, dtype=torch.float32)
    assert loaded.config.dspark is None
    write_release(tmp_path / "whole", with_dspark, "fp8")
    whole = load_model(tmp_path / "whole", dtype=torch.float32)
    ids = torch.arange(3, 53)
    assert torch.equal(loaded.full_forward(ids), whole.full_forward(ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load(tmp_path, model, dtype):
    save_checkpoint(model, tmp_path)
    loaded = dict(load_model(tmp_path, dtype=dtype).named_parameters())
    for name, weight in model.named_parameters():
        assert torch.equal(loaded[name], weight.to(loaded[name].dtype)), name
    with pytest.raises(ValueError, match="not quantized"):
        load_model(tmp_path, fp8="keep")


def test_every_fp4_value_and_every_scale_byte():
    quantized = torch.arange(256, dtype=torch.uint8)[None].repeat(2, 1)  # [2, 512 columns]
    scale = torch.tensor([[127] * 16, [130] * 16], dtype=torch.uint8)
    got = dequantize_fp4(quantized.view(torch.int8), scale, torch.float32)
    signed = [*E2M1, *(-x for x in E2M1)]
    row = [value for byte in range(256) for value in (signed[byte % 16], signed[byte // 16])]
    assert torch.equal(got[0], torch.tensor(row)) and torch.equal(got[1], 8 * got[0])
    values = scale_values(torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    assert values[:255].double().tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert values[255].isnan()
