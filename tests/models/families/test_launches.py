"""The number of launches of a layer in a decode step."""

import pytest
import torch

from quire.kernels.attention import launch
from quire.kernels.common.arch import named
from quire.models.config.named import get_config
from quire.models.families import gpt_oss
from quire.models.loading.random_weights import random_model
from tests.support.models.hand_paged import HandPaged
from tests.support.models.launches import launches_of_layers, one_product

# Two or three of them are attention and the write of its rows, four matrix products.
BARS = {"llama-tiny": 11, "gemma3-tiny": 11, "gemma4-tiny": 11, "gemma4-e-tiny": 15}
# With experts: of these, routing takes four launches, its product in fp32 included (gpt-oss: two), the experts four.
WITH_EXPERTS = {"gemma4-moe-tiny": 22, "gpt-oss-tiny": 15}


def decode_launches(name, monkeypatch, context=4000):
    """Launches of each layer, in bf16 on a GPU that has room for splits of a sequence."""
    monkeypatch.setattr(launch, "arch_and_sms", lambda tensor: (named("sm_90"), 132))
    model = random_model(get_config(name), dtype=torch.bfloat16)
    paged = HandPaged(model, num_seqs=2, max_len=context + 8, impl="triton")
    paged.context[:] = context
    token = torch.zeros(1, dtype=torch.int64)
    return launches_of_layers(model, lambda: paged.step({0: token, 1: token}), monkeypatch)


@pytest.mark.parametrize("name", BARS)
def test_launches_of_a_layer(name, monkeypatch):
    for counts in decode_launches(name, monkeypatch):
        assert counts.total() <= BARS[name], counts
        # Merged: q with k and v, gate with up. E has two more, and a sum of its own.
        more = name == "gemma4-e-tiny"
        assert counts["linear"] == 4 + 2 * more
        assert counts["residual_norm_kernel"] == 2 + more


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_launches_of_a_layer_with_experts(name, monkeypatch):
    monkeypatch.setattr(gpt_oss, "linear_fp32", one_product)
    for counts in decode_launches(name, monkeypatch):
        assert counts.total() <= WITH_EXPERTS[name], counts
        launches = {"route": 1, "order": 1, "product": 2, "combine": 1}
        assert {kernel: counts[f"{kernel}_kernel"] for kernel in launches} == launches
