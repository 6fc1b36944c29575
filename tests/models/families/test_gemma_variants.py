"""Gemma-4 E and MoE: routers, inputs of layers, and layers that run only for rows with wanted logits."""

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.models.config.named import get_config
from quire.models.families import gemma
from quire.models.layers.per_layer import HostEmbedding
from quire.models.loading.weights import load_model
from tests.support.helpers import assert_within_budget
from tests.support.models.hand_paged import HandPaged, difference
from tests.support.models.tolerance import tolerance

FIRST_SHARED = get_config("gemma4-e-tiny").num_kv_owners
LAST_ROW_ONLY = {"linear": False, "ring": True}


def test_router_weights(oracles):
    """Norms hide from the logits that weights sum to one before they are scaled: both are seen here, against fp64."""
    model = load_model(oracles["gemma4-moe-tiny"].ours)
    router = model.layers[3].router
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    ids, got = router(x)
    for row, chosen, weights_of_row in zip(x.double(), ids, got, strict=True):
        with bounding():
            z = row / (row.square().mean() + 1e-6).sqrt() * router.scale.double() / 8
            p = torch.softmax(router.proj.weight.double() @ z, 0)
            best = sorted(range(8), key=lambda e: -p.value[e])[:2]
            want = p[best] / p[best].sum() * router.per_expert_scale[best].double()
        assert chosen.tolist() == best
        assert_within_budget("weights", weights_of_row, want)


def test_per_layer_inputs(oracles):
    """A norm hides their factor from the logits: it is seen here, against fp64."""
    model = load_model(oracles["gemma4-e-tiny"].ours)
    ids = torch.tensor([5, 7, 258])
    x = model.embed_tokens(ids)
    got = model.per_layer_inputs(ids, x)
    assert got.shape == (3, 9, 8)
    matrix = model.per_layer_model_projection.weight.double()
    norm = model.per_layer_projection_norm.weight.double()
    for token in range(3):
        for layer in range(9):
            rows = slice(8 * layer, 8 * layer + 8)
            with bounding():
                context = matrix[rows] @ x[token].double() / 8
                context = context / (context.square().mean() + 1e-6).sqrt() * norm
                own = model.embed_tokens_per_layer.weight[ids[token], rows].double() * 8**0.5
                want = (context + own) / 2**0.5
            assert_within_budget("inputs", got[token, layer], want)


def rows_of_each_layer(model):
    """A list that grows by the rows that each layer is run for."""
    seen = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    return seen


@pytest.mark.parametrize("ring", LAST_ROW_ONLY.values(), ids=LAST_ROW_ONLY)
def test_shared_layers_run_for_wanted_rows_only(oracles, ring):
    """Chunks of three sequences, decodes among them; several rows of one sequence, as drafts have; a chunk longer than a window."""
    oracle = oracles["gemma4-e-tiny"]
    model = load_model(oracle.ours)
    ids, expected = oracle.input_ids, oracle.ours_logits
    seen = rows_of_each_layer(model)
    paged = HandPaged(model, num_seqs=3, max_len=131, ring=ring)

    def step(chunks, rows):
        """rows: {sequence: how many of its last rows}"""
        seen.clear()
        ends, index, want, start = [], [], [], 0
        for seq, count in chunks.items():
            end = int(paged.context[seq]) + count
            ends.append((seq, ids[end - count : end]))
            wanted = rows.get(seq, 0)
            index += range(start + count - wanted, start + count)
            want.append(expected[end - wanted : end])
            start += count
        got = paged.step(dict(ends), logits_rows=torch.tensor(index, dtype=torch.int64))
        assert got.shape == (len(index), 259)
        if index:
            assert difference(got, torch.cat(want)) < tolerance(oracle.model)
        if start > len(chunks):
            shared = len(model.layers) - FIRST_SHARED if index else 0
            assert seen == [start] * FIRST_SHARED + [len(index)] * shared
        else:
            assert seen == [start] * len(model.layers)

    step({0: 50, 1: 17}, {})
    step({1: 1, 0: 30, 2: 33}, {1: 1, 2: 1})
    step({0: 4, 1: 3, 2: 5}, {0: 3, 1: 3, 2: 2})
    step({0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1})
    step({1: 1, 0: 46, 2: 90}, {1: 1, 0: 1, 2: 1})
    step({1: 20}, {1: 20})


def test_per_layer_table_stays_on_the_host():
    model = gemma.Gemma(get_config("gemma-4-e2b"), device="meta", dtype=torch.bfloat16)
    table = model.embed_tokens_per_layer.weight
    assert table.numel() * table.element_size() == 262144 * 35 * 256 * 2
    assert HostEmbedding.weight_device(torch.device("cuda")) == torch.device("cpu")
