"""How much a layer launches in a decode step."""

import torch

from quire.models.deepseek_v4 import model as v4
from quire.models.deepseek_v4.config import CONFIGS, CSA, HCA, SLIDING
from quire.models.layers import basic
from quire.models.loading.random_weights import random_model
from tests.support.models.launches import launches_of_layers, one_product
from tests.support.models.v4_engine import SmallEngine

BARS = {SLIDING: 30, HCA: 30, CSA: 40}


def test_launches_of_a_layer(monkeypatch):
    """With the kernels that a device runs, which take no part in the count of what the step does once for all layers."""
    model = random_model(CONFIGS["deepseek-v4-tiny"], dtype=torch.bfloat16)
    ids = torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(0))
    engine = SmallEngine(model, caching=False)
    for name in "ab":
        engine.admit(name, ids)
    engine.step({"a": 21, "b": 30})
    engine.impl = "triton"
    for module in (basic, v4):
        monkeypatch.setattr(module, "linear_fp32", one_product)
    found = launches_of_layers(model, lambda: engine.step({"a": 1, "b": 1}), monkeypatch)
    counts = {}
    for layer, counter in zip(model.layers, found, strict=True):  # the last layer of each kind
        counts[layer.self_attn.kind] = counter
    for kind, bar in BARS.items():
        assert counts[kind].total() <= bar, f"{kind}: {counts[kind].total()}: {counts[kind]}"
        # What experts give is added up where it is written to the streams.
        assert counts[kind]["expand_kernel"] == 2 and "combine_kernel" not in counts[kind]
