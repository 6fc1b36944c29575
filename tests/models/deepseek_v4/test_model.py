"""The model against transformers on whole sequences without a cache, and what each rule is worth in that comparison."""

from dataclasses import replace

import pytest
import torch

from quire.bench.common.bounds import UNIT
from quire.kernels import expand_streams
from quire.kernels.experts import torch_impl as experts
from quire.models.deepseek_v4 import hyper_connections, layer, moe, rope, unpaged_attention
from quire.models.deepseek_v4.config import CONFIGS, CSA, HCA, SLIDING
from quire.models.deepseek_v4.rope import rope_frequencies, rope_table
from quire.models.loading.weights import load_model
from tests.support.budgets import ordinary
from tests.support.models.breaks import weights
from tests.support.models.tolerance import tolerance


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape and got.isfinite().all()
    return (got - expected).abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ours", "long", "hybrid", "pure"])
def test_full_forward_equals_transformers(name, v4_oracles):
    """Also: weights are found under transformers' names, and under the mixture that its save_pretrained writes."""
    oracle = v4_oracles[name]
    model = load_model(oracle.path, dtype=torch.float32)
    assert oracle.logits.std() > 0.5  # a dead model would agree with anything
    assert difference(model.full_forward(oracle.input_ids), oracle.logits) < tolerance(model)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 199])
def test_prefixes_of_every_shape(length, v4_oracles):
    """Shorter than a window of any kind, at its end, and around it: causality makes prefixes of the oracle's run oracles too."""
    oracle = v4_oracles["ours"]
    model = load_model(oracle.path, dtype=torch.float32)
    got = model.full_forward(oracle.input_ids[:length])
    assert difference(got, oracle.logits[:length]) < tolerance(model)


def test_logits_rows_selects_rows(v4_oracles):
    oracle = v4_oracles["ours"]
    rows = torch.tensor([202, 0, 64])
    model = load_model(oracle.path, dtype=torch.float32)
    got = model.full_forward(oracle.input_ids, logits_rows=rows)
    assert difference(got, oracle.logits[rows]) < tolerance(model)


def test_bf16_keeps_in_fp32_what_must_be(v4_oracles):
    oracle = v4_oracles["ours"]
    model = load_model(oracle.path, dtype=torch.bfloat16)
    kept = {
        name.split(".")[-1] if "norm" not in name else "norm"
        for name, weight in model.named_parameters()
        if weight.dtype == torch.float32
    }
    assert kept == {
        "fn", "base", "scale", "hc_fn", "hc_base", "hc_scale", "norm", "sinks", "position_bias",
        "e_score_correction_bias",
    }  # fmt: skip
    got = model.full_forward(oracle.input_ids)
    assert got.dtype == torch.float32
    # Routers and indexers flip in bf16, so logits differ by much here and there, as transformers' own do.
    assert (got.argmax(-1) == oracle.logits.argmax(-1)).float().mean() > 0.8


def test_rope_frequencies_of_the_released_models():
    """Pairs 0..15 stay, 25..31 turn 16 times slower, and between them the two mix."""
    config = CONFIGS["deepseek-v4-flash"]
    plain = rope_frequencies(replace(config, yarn=None), compressed=True)
    got = rope_frequencies(config, compressed=True)
    assert got[:16].equal(plain[:16]) and got[25:].equal(plain[25:] / 16)
    assert ((plain / got)[16:26].diff() > 0).all()
    # A power errs by less than two units, a reciprocal by half of one.
    want = 1e4 ** (-torch.arange(32, dtype=torch.float64) / 32)
    got = rope_frequencies(config, compressed=False).double()
    torch.testing.assert_close(got, want, rtol=3 * UNIT, atol=0)


def _config(**changes):
    """A sensitivity that replaces fields of every configuration in the model."""

    def apply(model, monkeypatch):
        changed = replace(model.config, **changes)
        for module in model.modules():
            if hasattr(module, "config"):
                module.config = changed

    return apply


def _patch(module, name, make):
    """A sensitivity that replaces a function, wherever it was imported, by ``make(original)``."""

    def apply(model, monkeypatch):
        original = getattr(module, name)
        for other in (unpaged_attention, layer, rope):
            if getattr(other, name, None) is original:
                monkeypatch.setattr(other, name, make(original))

    return apply


def _method(cls, name, make):
    return lambda model, monkeypatch: monkeypatch.setattr(cls, name, make(getattr(cls, name)))


def _not_transposed(streams, y, post, comb, **more):
    return expand_streams(streams, y, post, comb.transpose(1, 2).contiguous(), **more)


def _comb_not_transposed(model, monkeypatch):
    monkeypatch.setattr(hyper_connections, "expand_streams", _not_transposed)


def _rope(compressed, **changes):
    """A sensitivity that gives one kind of layer another rotary table."""

    def apply(model, monkeypatch):
        config = replace(model.config, **{k: v for k, v in changes.items() if k != "like"})
        like = changes.get("like", compressed)
        frequencies = rope_frequencies(config, compressed=like)
        for kind in (CSA, HCA) if compressed else (SLIDING,):
            model.rope[kind] = rope_table(frequencies, len(model.rope[kind]))

    return apply


def _window_end(original):
    """Entries rotated by the last position of their window."""

    def pool(weights, kv, gate, cos_sin):
        return original(weights, kv, gate, cos_sin[weights.ratio - 1 :])

    return pool


def _no_inverse(original):
    return lambda x, cos_sin, inverse=False: x if inverse else original(x, cos_sin)


def _half_split_pairs(original):
    """Pairs (i, i + rope_dim / 2)."""

    def apply(x, cos_sin, inverse=False):
        d = cos_sin.shape[1]
        order = torch.arange(d).view(2, d // 2).t().flatten()
        rope = original(x[..., -d:][..., order], cos_sin, inverse=inverse)
        return torch.cat([x[..., :-d], rope[..., order.argsort()]], dim=-1)

    return apply


def _biased_weights(original):
    """Correction bias in the weights too."""

    def forward(self, x, input_ids, impl):
        ids, weights = original(self, x, input_ids, impl)
        if self.e_score_correction_bias is None:
            return ids, weights
        scores = torch.nn.functional.softplus(x.float() @ self.weight.float().T).sqrt()
        weights = (scores + self.e_score_correction_bias).gather(1, ids)
        return ids, weights / weights.sum(-1, keepdim=True) * self.scale

    return forward


def _activation(make):
    def apply(model, monkeypatch):
        for module in (moe, experts):  # the shared expert, and the routed ones
            monkeypatch.setattr(module, "gated_product", make(module.gated_product))

    return apply


def _both_sides(original):
    return lambda gate, up, *, limit, **more: original(
        gate.clamp(min=-limit), up, limit=limit, **more
    )


def _no_head_norm(model, monkeypatch):
    original = rope.write_latent
    monkeypatch.setattr(
        rope,
        "write_latent",
        lambda *args, **kwargs: original(*args, **kwargs | {"norm_weight": None}),
    )


SENSITIVITIES = {
    "sinks = 0": weights("sinks", 0.0),
    "position_bias = 0": weights("compressor.position_bias", 0.0),
    "indexer position_bias = 0": weights("indexer.position_bias", 0.0),
    "tid2eid = 0": weights("tid2eid", 0),
    "correction bias = 0": weights("e_score_correction_bias", 0.0),
    "correction bias in the weights": _method(moe.Router, "forward", _biased_weights),
    "hc base = 0": weights("_hc.base", 0.0),
    "hc scale = 1": weights("_hc.scale", 1.0),
    "hc_head base = 0": weights("hc_base", 0.0),
    "compressor norms = 1": weights("compressor.kv_norm.weight", 1.0),
    "indexer norms = 1": weights("indexer.kv_norm.weight", 1.0),
    "kv norm = 1": weights("self_attn.kv_norm.weight", 1.0),
    "q norm = 1": weights("q_a_norm.weight", 1.0),
    "no norm of q heads": _no_head_norm,
    "index weights = 0": weights("weights_proj.weight", 0.0),
    "comb not transposed": _comb_not_transposed,
    "3 Sinkhorn iterations": _config(hc_sinkhorn_iters=3),
    "routed scaling 1": lambda model, monkeypatch: [
        setattr(one.mlp.gate, "scale", 1.0) for one in model.layers
    ],
    "no clamp": _activation(
        lambda original: lambda gate, up, **more: original(gate, up, **more | {"limit": None})
    ),
    "gate clamped below": _activation(_both_sides),
    "window one shorter": _config(sliding_window=15),
    "window one longer": _config(sliding_window=17),
    "one topk index less": _config(index_topk=3),
    "one topk index more": _config(index_topk=5),
    "entries rotated by their end": _patch(unpaged_attention, "compress_windows", _window_end),
    "entries visible one token late": _patch(
        unpaged_attention, "num_visible", lambda f: lambda p, ratio: f(p - 1, ratio)
    ),
    "output not rotated back": _patch(rope, "apply_rope", _no_inverse),
    "RoPE pairs split in halves": _patch(rope, "apply_rope", _half_split_pairs),
    "main RoPE in compressed layers": _rope(True, like=False),
    "compressed RoPE in sliding layers": _rope(False, like=True),
    "no YaRN": _rope(True, yarn=None),
}


@ordinary("no clamp", "compressor norms", "index weights")
@pytest.mark.parametrize("mutation", SENSITIVITIES)
def test_each_rule_matters(monkeypatch, mutation, v4_oracles):
    """The comparison with transformers sees every single rule: breaking one moves logits far past the tolerance."""
    oracle = v4_oracles["ours"]
    model = load_model(oracle.path, dtype=torch.float32)
    limit = 100 * tolerance(model)
    SENSITIVITIES[mutation](model, monkeypatch)
    assert difference(model.full_forward(oracle.input_ids), oracle.logits) > limit
