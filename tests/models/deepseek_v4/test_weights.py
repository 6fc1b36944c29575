"""Checkpoints in the release's names and formats; `test_layouts` has their logits."""

import json

import pytest
import torch

from quire.kernels.common.dequantize import dequantize_fp4, scale_values
from quire.models.deepseek_v4.drafters import MTPDrafter
from quire.models.deepseek_v4.model import Experts
from quire.models.layers.moe import PackedExperts
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from tests.support.models.v4_release import (  # fmt: skip
    CONFIG,
    E2M1,
    release_tensors,
    with_dspark,
    write_release,
)


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


@pytest.mark.parametrize(("free", "kind"), [(10**9, Experts), (10**5, PackedExperts)])
def test_memory_decides(tmp_path, model, monkeypatch, free, kind):
    write_release(tmp_path / "release", model, "fp8")
    monkeypatch.setattr("quire.models.engine.memory.free_memory", lambda device: free)
    assert isinstance(load_model(tmp_path / "release").layers[0].mlp.experts, kind)


@pytest.mark.parametrize("num_nextn", [0, 1, 3, None])
def test_a_dspark_drafter(tmp_path, num_nextn):
    """As DeepSeek-V4-Flash-0731 has it: three stages in mtp.*, and keys that may count one of them."""

    def edit(stored):
        stored["mtp.2.confidence_head.proj.weight"] = torch.zeros(1, 168)

    path, model = tmp_path / "release", with_dspark()
    exact = write_release(path, model, "fp8", edit=edit)
    config = json.loads((path / "config.json").read_text())
    del config["layer_types"], config["num_nextn_predict_layers"]
    config |= {"compress_ratios": [0, 4, 128, 0, 0, 0]}
    if num_nextn is not None:
        config["num_nextn_predict_layers"] = num_nextn
    (path / "config.json").write_text(json.dumps(config))
    loaded = load_model(path, dtype=torch.float32)
    assert loaded.config.dspark == model.config.dspark
    assert loaded.config.num_mtp_layers == 0
    tensors = release_tensors(loaded)
    assert tensors.keys() == exact.keys()
    for name, weight in exact.items():
        assert torch.equal(tensors[name].double(), weight.double()), name
    with pytest.raises(ValueError, match="expected one with MTP layers"):
        MTPDrafter(loaded)


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
