"""Launches of a layer in a decode step, counted with the kernels that a device runs."""

import pytest
import torch

from quire.kernels.attention import launch
from quire.kernels.common.arch import named
from quire.kvcore.device import AttnMetadata
from quire.models.config.named import get_config
from quire.models.deepseek_v4 import model as v4
from quire.models.deepseek_v4.config import CSA, HCA, SLIDING
from quire.models.engine.memory import model_cache
from quire.models.families import gpt_oss
from quire.models.layers import basic
from quire.models.loading.random_weights import random_model
from tests.support.models.launches import launches_of_layers, one_product

# Two or three are attention and the write of its rows, four matrix products. With experts, routing
# takes four more, its product in fp32 included (gpt-oss: two), and the experts four.
BARS = {
    "llama-tiny": 11, "gemma3-tiny": 11, "gemma4-tiny": 11, "gemma4-e-tiny": 15,
    "gemma4-moe-tiny": 22, "gpt-oss-tiny": 15,
}  # fmt: skip
V4_BARS = {SLIDING: 22, HCA: 25, CSA: 32}


def launches(name, context, monkeypatch):
    """(kind of attention, launches) of each layer, in bf16 on a GPU with room for splits."""
    monkeypatch.setattr(launch, "arch_and_sms", lambda tensor: (named("sm_90"), 132))
    for module in (basic, v4, gpt_oss):
        monkeypatch.setattr(module, "linear_fp32", one_product)
    model = random_model(get_config(name), dtype=torch.bfloat16)
    cache = model_cache(model, max_requests=2)
    seq_lens = torch.tensor([context, context - 9], dtype=torch.int32)
    # Of every group; values do not count.
    pages = torch.ones(2, context // 16 + 1, dtype=torch.int32)
    attn = AttnMetadata(
        cu_seqlens_q=torch.arange(3, dtype=torch.int32), seq_lens=seq_lens,
        block_tables=(pages,) * len(cache.groups),
        slot_mappings=(torch.tensor([40, 80]),) * len(cache.groups), max_seqlen_q=1,
        max_seq_len=context, num_decodes=2, request_slots=torch.arange(2, dtype=torch.int32),
    )  # fmt: skip
    ids, pool = torch.tensor([5, 6]), cache.allocate(20)

    def step():
        model(ids, seq_lens.long() - 1, attn, pool, impl="triton")

    found = launches_of_layers(model, step, monkeypatch)
    kinds = model.config.layer_types
    return list(zip(kinds, found, strict=True))


@pytest.mark.parametrize("name", BARS)
def test_launches_of_a_layer(name, monkeypatch):
    experts = {"route": 1, "order": 1, "product": 2, "combine": 1}
    for _, counts in launches(name, 4000, monkeypatch):
        assert counts.total() <= BARS[name], counts
        if BARS[name] <= 15 and name != "gpt-oss-tiny":
            # Merged: q with k and v, gate with up. E has two more, and a sum of its own.
            more = name == "gemma4-e-tiny"
            assert counts["linear"] == 4 + 2 * more
            assert counts["residual_norm_kernel"] == 2 + more
        else:
            assert {kernel: counts[f"{kernel}_kernel"] for kernel in experts} == experts


def test_launches_of_a_layer_of_deepseek_v4(monkeypatch):
    """Of the last layer of each kind: work that a step does once falls on the first ones."""
    for kind, counts in dict(launches("deepseek-v4-tiny", 31, monkeypatch)).items():
        assert counts.total() <= V4_BARS[kind], f"{kind}: {counts.total()}: {counts}"
        # Rows of experts are added up where they are written to the streams.
        assert counts["expand_kernel"] == 2 and "combine_kernel" not in counts
