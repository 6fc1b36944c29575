"""Linear layers as one product: `Stacked`, and where loaded models keep such weights."""

import pytest
import torch
from torch import nn

from quire.bench.common.bounds import bounding
from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.models.config.named import get_config
from quire.models.layers import basic
from quire.models.layers.basic import Linear, Stacked, WeightPlacement
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from tests.support.helpers import assert_within_budget

PLACE = WeightPlacement(torch.device("cpu"), torch.float32)
SIZES = (6, 4, 2)


def products(stacked, x, monkeypatch):
    """(what comes out, matrix products that it took)."""
    linear, calls = basic.F.linear, []
    with monkeypatch.context() as patch:
        patch.setattr(basic.F, "linear", lambda *args: (calls.append(args), linear(*args))[1])
        return stacked(x), len(calls)


CHANGES = {
    "fp8": lambda layer: layer.keep_fp8((layer.weight * 3).to(torch.float8_e4m3fn), torch.tensor(0.25)),
    "moved": lambda layer: setattr(layer.weight, "data", layer.weight.data * 2),
    "without bias": lambda layer: setattr(layer, "bias", None),
    "exchanged": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight + 1, requires_grad=False)),
}  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("change", [None, *CHANGES])
@pytest.mark.parametrize("which", range(3))
def test_a_layer_that_holds_another_weight_counts_with_it(change, which, bias, monkeypatch):
    """In a product of its own; without a change there is one for all."""
    layers = [Linear(8, size, PLACE, bias=bias) for size in SIZES]
    stacked, generator = Stacked(*layers), torch.Generator().manual_seed(0)
    for layer in layers:
        for weight in layer.parameters():
            weight.normal_(generator=generator)
    x = torch.randn(5, 8, generator=generator)
    if change is not None:
        CHANGES[change](layers[which])
    out, count = products(stacked, x, monkeypatch)
    assert count == (1 if change is None or (change == "without bias" and not bias) else 3)
    with bounding():
        parts = []
        for layer in layers:
            part = x.double() @ layer.matrix(torch.float32).double().T
            parts.append(part if layer.bias is None else part + layer.bias.double())
        exact = torch.cat(parts, 1)
    assert_within_budget("out", out, exact)
    if count == 1:
        layers[1].weight[0] = 0.0
        assert not stacked(x)[:, SIZES[0]].equal(out[:, SIZES[0]])  # no copy


@pytest.mark.parametrize("name", ["llama-tiny", "gemma4-tiny", "gemma4-e-tiny", "gpt-oss-tiny"])
def test_loaded_models_have_their_weights_in_one_place(name, tmp_path, monkeypatch):
    """Also those of a checkpoint that names each by itself."""
    made = random_model(get_config(name))
    save_checkpoint(made, tmp_path)
    for model in (made, load_model(tmp_path)):
        parts = [part for module in model.modules() for part in vars(module).values()]
        stacks = [part for part in parts if isinstance(part, Stacked)]
        assert len(stacks) >= model.config.num_layers
        for stacked in stacks:
            x = torch.randn(2, stacked.layers[0].weight.shape[1], dtype=model.dtype)
            assert products(stacked, x, monkeypatch)[1] == 1
        names = dict(model.named_parameters())
        assert "layers.0.self_attn.k_proj.weight" in names
        memory = {w.untyped_storage().data_ptr(): w.untyped_storage() for w in names.values()}
        total = sum(storage.nbytes() for storage in memory.values())
        assert total == sum(w.nbytes for w in names.values())  # nothing is there twice
