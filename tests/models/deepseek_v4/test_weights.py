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
