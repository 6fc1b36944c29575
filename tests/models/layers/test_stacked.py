"""Linear layers as one product: `Stacked`, and where loaded models keep such weights."""

import pytest
import torch
from torch import nn

from quire.bench.common.bounds import bounding
from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.models.config.named import get_config
from quire.models.layers.basic import Linear, Stacked, WeightPlacement
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from tests.support.helpers import assert_within_budget
from tests.support.models.launches import LaunchCounter

PLACE = WeightPlacement(torch.device("cpu"), torch.float32)
SIZES = (6, 4, 2)


def make(bias):
    layers = [Linear(8, size, PLACE, bias=bias) for size in SIZES]
    stacked = Stacked(*layers)
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        for weight in layer.parameters():
            weight.normal_(generator=generator)
    return layers, stacked, torch.randn(5, 8, generator=generator)


def exact(layers, x):
    """The products side by side in float64, with bounds."""
    with bounding():
        parts = []
        for layer in layers:
            part = x.double() @ layer.matrix(torch.float32).double().T
            parts.append(part if layer.bias is None else part + layer.bias.double())
        return torch.cat(parts, 1)


def products(stacked, x, monkeypatch):
    """(what comes out, matrix products that it took)."""
    with torch.inference_mode(), LaunchCounter(monkeypatch) as counter:
        out = stacked(x)
    return out, counter.counts["linear"]


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_of_layers_that_keep_their_weights(bias, monkeypatch):
    layers, stacked, x = make(bias)
    out, count = products(stacked, x, monkeypatch)
    assert count == 1
    assert_within_budget("out", out, exact(layers, x))
    layers[1].weight[0] = 0.0
    assert not stacked(x)[:, SIZES[0]].equal(out[:, SIZES[0]])  # no copy


def _fp8(layer):
    layer.keep_fp8((layer.weight * 3).to(torch.float8_e4m3fn), torch.tensor(0.25))


def _moved(layer):
    layer.weight.data = layer.weight.data * 2


def _without_bias(layer):
    layer.bias = None


def _exchanged(layer):
    layer.weight = nn.Parameter(layer.weight + 1, requires_grad=False)


@pytest.mark.parametrize("change", [_fp8, _moved, _without_bias, _exchanged])
@pytest.mark.parametrize("which", range(3))
def test_a_layer_that_holds_another_weight_counts_with_it(change, which, monkeypatch):
    layers, stacked, x = make(True)
    change(layers[which])
    out, count = products(stacked, x, monkeypatch)
    assert count == 3
    assert_within_budget("out", out, exact(layers, x))


@pytest.mark.parametrize("name", ["llama-tiny", "gemma4-tiny", "gemma4-e-tiny", "gpt-oss-tiny"])
def test_loaded_models_have_their_weights_in_one_place(name, tmp_path, monkeypatch):
    """Also those of a checkpoint that names each by itself."""
    made = random_model(get_config(name))
    save_checkpoint(made, tmp_path)
    for model in (made, load_model(tmp_path)):
        stacks = [
            (module, part)
            for module in model.modules()
            for part in vars(module).values()
            if isinstance(part, Stacked)
        ]
        assert len(stacks) >= model.config.num_layers
        for module, stacked in stacks:
            x = torch.randn(2, stacked.layers[0].weight.shape[1])
            assert products(stacked, x, monkeypatch)[1] == 1, type(module)
        names = dict(model.named_parameters())
        assert "layers.0.self_attn.k_proj.weight" in names
        memory = {w.untyped_storage().data_ptr(): w.untyped_storage() for w in names.values()}
        total = sum(storage.nbytes() for storage in memory.values())
        assert total == sum(w.nbytes for w in names.values())  # nothing is there twice
