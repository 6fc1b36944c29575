"""Launches of a layer in a decode step, counted with the kernels that a device runs."""

import torch

from quire.kvcore.device import AttnMetadata
from quire.models.deepseek_v4 import model as v4
from quire.models.deepseek_v4.config import CONFIGS, CSA, HCA, SLIDING
from quire.models.engine.memory import model_cache
from quire.models.layers import basic
from quire.models.loading.random_weights import random_model
from tests.support.models.launches import launches_of_layers, one_product

BARS = {SLIDING: 30, HCA: 30, CSA: 40}


def test_launches_of_a_layer(monkeypatch):
    """Work that a step does once for all layers is not counted: it falls on the first of a kind."""
    model = random_model(CONFIGS["deepseek-v4-tiny"], dtype=torch.bfloat16)
    cache = model_cache(model, max_requests=2)
    seq_lens = torch.tensor([22, 31], dtype=torch.int32)
    pages = torch.arange(1, 17, dtype=torch.int32).view(2, 8)  # of every group; values do not count
    attn = AttnMetadata(
        cu_seqlens_q=torch.arange(3, dtype=torch.int32),
        seq_lens=seq_lens,
        block_tables=(pages,) * len(cache.groups),
        slot_mappings=(torch.tensor([40, 80]),) * len(cache.groups),
        max_seqlen_q=1,
        max_seq_len=31,
        num_decodes=2,
        request_slots=torch.arange(2, dtype=torch.int32),
    )
    ids, pool = torch.tensor([5, 6]), cache.allocate(20)
    for module in (basic, v4):
        monkeypatch.setattr(module, "linear_fp32", one_product)

    def step():
        model(ids, seq_lens.long() - 1, attn, pool, impl="triton")

    found = launches_of_layers(model, step, monkeypatch)
    counts = {}
    for layer, counter in zip(model.layers, found, strict=True):  # the last layer of each kind
        counts[layer.self_attn.kind] = counter
    for kind, bar in BARS.items():
        assert counts[kind].total() <= bar, f"{kind}: {counts[kind].total()}: {counts[kind]}"
        # Rows of experts are added up where they are written to the streams.
        assert counts[kind]["expand_kernel"] == 2 and "combine_kernel" not in counts[kind]
