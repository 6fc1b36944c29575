"""Gemma-4 E and MoE: their rules, each broken once, and layers that run only for rows whose logits somebody wants."""

from dataclasses import replace

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels.experts import torch_impl as experts
from quire.kernels.gating.torch_impl import gated_product
from quire.models.config.named import FULL, SLIDING, get_config
from quire.models.families import gemma
from quire.models.families.gemma_moe import Router
from quire.models.layers import basic as layers
from quire.models.layers.per_layer import HostEmbedding
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from tests.support.budgets import ordinary
from tests.support.helpers import assert_within_budget
from tests.support.models.breaks import PATHS, check_rule_matters, modules, patched, weights
from tests.support.models.hand_paged import HandPaged, difference
from tests.support.models.tolerance import tolerance

FIRST_SHARED = get_config("gemma4-e-tiny").num_kv_owners
LAST_ROW_ONLY = {"linear": False, "ring": True}


def _donors(choose):
    """A break by which shared layers read another owner of their kind."""

    def apply(model, monkeypatch):
        config = model.config
        owners = range(config.num_kv_owners)
        donors = list(owners)
        for kind in config.layer_types[config.num_kv_owners :]:
            donors.append(choose([i for i in owners if config.layer_types[i] == kind]))
        monkeypatch.setitem(config.__dict__, "_donor_of", tuple(donors))
        monkeypatch.delitem(config.__dict__, "kv_donors", raising=False)

    return apply


def _inputs(change):
    """A break of the tensor that every layer gets a slice of."""
    original = gemma.Gemma.per_layer_inputs
    return patched(
        gemma.Gemma, "per_layer_inputs", lambda self, ids, x: change(original(self, ids, x))
    )


def _unscaled_context(model, monkeypatch):
    """The context part made from embeddings without their scale."""
    original = gemma.Gemma.per_layer_inputs
    scale = model.embed_tokens.scale
    monkeypatch.setattr(
        gemma.Gemma, "per_layer_inputs", lambda self, ids, x: original(self, ids, x / scale + 0.1)
    )


def _layer(forward):
    return patched(gemma.DecoderLayer, "forward", forward)


def _scalar_before_inputs(self, x, residual, rotary, attend, norm, inputs):
    x = residual + self.post_attention_layernorm(self.self_attn(x, rotary, attend))
    h = self.feedforward(self.pre_feedforward_layernorm(x), x, None)
    x = (x + self.post_feedforward_layernorm(h)) * self.layer_scalar
    gated = layers.gelu_tanh(self.per_layer_input_gate(x)) * inputs
    residual.copy_(x + self.post_per_layer_input_norm(self.per_layer_projection(gated)))
    return norm(residual)


def _feedforward(forward):
    return patched(gemma.DecoderLayer, "feedforward", forward)


def _experts_after_norm(self, x, residual, impl):
    chosen = self.experts(self.pre_feedforward_layernorm_2(x), *self.router(x))
    return self.post_feedforward_layernorm_1(self.mlp(x)) + self.post_feedforward_layernorm_2(
        chosen
    )


def _router_after_norm(self, x, residual, impl):
    h = self.pre_feedforward_layernorm_2(residual)
    chosen = self.experts(h, *self.router(h))
    return self.post_feedforward_layernorm_1(self.mlp(x)) + self.post_feedforward_layernorm_2(
        chosen
    )


def _experts_alone(self, x, residual, impl):
    chosen = self.experts(self.pre_feedforward_layernorm_2(residual), *self.router(residual))
    return self.post_feedforward_layernorm_2(chosen)


def _outer_norm_of_mlp_only(self, x, residual, rotary, attend, norm, inputs):
    x = residual + self.post_attention_layernorm(self.self_attn(x, rotary, attend))
    h = self.feedforward(self.pre_feedforward_layernorm(x), x, None)
    residual.copy_((x + h) * self.layer_scalar)
    return norm(residual)


def _unscaled_router(model, monkeypatch):
    """Router logits without the factor hidden_size^-0.5."""
    for module in model.modules():
        if isinstance(module, Router):
            module.scale.mul_(model.config.hidden_size**0.5)


SENSITIVITIES = {
    "gemma4-e-tiny": {
        "no token table": weights("embed_tokens_per_layer.weight", 0.0),
        "token table not scaled": modules(HostEmbedding, scale=1.0),
        "no context projection": weights("per_layer_model_projection.weight", 0.0),
        "projection norm = 1": weights("per_layer_projection_norm.weight", 1.0),
        "context not from x": _unscaled_context,
        "inputs of the next layer": _inputs(lambda x: x.roll(1, dims=1)),
        "no gate": weights("per_layer_input_gate.weight", 0.0),
        "input norm = 1": weights("post_per_layer_input_norm.weight", 1.0),
        "layer_scalar = 1": weights("layer_scalar", 1.0),
        "layer_scalar before the inputs": _layer(_scalar_before_inputs),
        "keys of the first owner": _donors(min),
    },
    "gemma4-moe-tiny": {
        "router.scale = 1": weights("router.scale", 1.0),
        "router.proj = 0": weights("router.proj.weight", 0.0),
        "per_expert_scale = 1": weights("per_expert_scale", 1.0),
        "layernorm_1 = 1": weights("post_feedforward_layernorm_1.weight", 1.0),
        "layernorm_2 = 1": weights("post_feedforward_layernorm_2.weight", 1.0),
        "expert norm = 1": weights("pre_feedforward_layernorm_2.weight", 1.0),
        "router logits not scaled": _unscaled_router,
        "one expert fewer": modules(Router, top_k=1),
        "one expert more": modules(Router, top_k=3),
        "experts read the MLP's input": _feedforward(_experts_after_norm),
        "router reads the experts' input": _feedforward(_router_after_norm),
        "no MLP beside the experts": _feedforward(_experts_alone),
        "no norm over the sum": _layer(_outer_norm_of_mlp_only),
        "gate and up exchanged": patched(
            experts, "gated_product", lambda gate, up, **more: gated_product(up, gate, **more)
        ),
    },
}


@ordinary("paged")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "rule"), [(name, rule) for name, table in SENSITIVITIES.items() for rule in table]
)
def test_each_rule_matters(oracles, monkeypatch, name, rule, path):
    check_rule_matters(oracles[name], SENSITIVITIES[name][rule], path, monkeypatch)


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


def test_triton_kernels_run_shared_layers():
    """Chunk and decode with gathered windows; few tokens, because without a GPU the kernels run in Triton's interpreter."""
    few = replace(
        get_config("gemma4-e-tiny"), layer_types=(SLIDING, FULL) * 2, num_kv_shared_layers=2
    )
    model = random_model(few, seed=1)
    ids = torch.randint(3, 259, (24,), generator=torch.Generator().manual_seed(0))
    expected = model.full_forward(ids)
    paged = HandPaged(model, num_seqs=1, max_len=24, ring=True, impl="triton")
    got = paged.step({0: ids[:20]}, logits_rows=torch.tensor([19]))
    assert difference(got, expected[19:20]) < tolerance(model)
    got = paged.step({0: ids[20:23]}, logits_rows=torch.tensor([1, 2]))
    assert difference(got, expected[21:23]) < tolerance(model)
    assert difference(paged.step({0: ids[23:]}), expected[23:]) < tolerance(model)


def test_per_layer_table_stays_on_the_host():
    model = gemma.Gemma(get_config("gemma-4-e2b"), device="meta", dtype=torch.bfloat16)
    table = model.embed_tokens_per_layer.weight
    assert table.numel() * table.element_size() == 262144 * 35 * 256 * 2
    assert HostEmbedding.weight_device(torch.device("cuda")) == torch.device("cpu")
