"""Rules of the Gemma families, each broken once: the comparison with transformers (test_families.py) must see it."""

from dataclasses import replace

import pytest
import torch

from quire.bench.common.bounds import UNIT
from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.kernels import norm_rope
from quire.models.config.named import RopeConfig, get_config
from quire.models.families import gemma
from quire.models.layers import basic as layers
from quire.models.layers import rotary
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from tests.support.budgets import ordinary
from tests.support.models.breaks import (
    PATHS,
    adjacent_pairs,
    check_rule_matters,
    frequencies,
    modules,
    patched,
    weights,
    with_config,
    without_rope,
)
from tests.support.models.hand_paged import HandPaged, difference
from tests.support.models.tolerance import tolerance


def test_blocks_of_two_sizes_in_one_pool():
    """gemma4-small: pages of 16 tokens in sliding layers and of 32 in full ones, as in gemma-4-31b."""
    model = random_model(get_config("gemma4-small"))
    paged = HandPaged(model, num_seqs=1, max_len=300)
    assert {group.block_size for group in paged.groups} == {16, 32}
    ids = torch.randint(3, 259, (300,), generator=torch.Generator().manual_seed(1))
    logits = torch.cat([paged.step({0: chunk}) for chunk in ids.split([130, 1, 1, 168])])
    assert difference(logits, model.full_forward(ids)) < tolerance(model)


@pytest.mark.parametrize("name", ["gemma3-tiny", "gemma4-small"])
def test_bf16_pages_cost_no_more_than_bf16_itself(tmp_path, name):
    """Against fp32 arithmetic on the same (rounded) weights, the paged run errs at most twice as much as the run without a cache."""
    save_checkpoint(random_model(get_config(name), dtype=torch.bfloat16), tmp_path)
    model, exact = load_model(tmp_path), load_model(tmp_path, dtype=torch.float32)
    ids = torch.randint(3, 259, (200,), generator=torch.Generator().manual_seed(1))
    expected = exact.full_forward(ids)

    def error(logits):
        assert logits.dtype == torch.float32 and logits.isfinite().all()
        return (logits - expected).pow(2).mean().sqrt().item()

    plain = error(model.full_forward(ids))
    paged = HandPaged(model, num_seqs=1, max_len=200, ring=True)
    chunks = torch.cat([paged.step({0: chunk}) for chunk in ids.split([130, 1, 1, 68])])
    assert 0 < error(chunks) <= 2 * plain < expected.std() / 2


@pytest.mark.parametrize(
    ("hidden_size", "scale"), [(5376, 73.5), (1152, 34.0), (2560, 50.5), (3840, 62.0)]
)
def test_embedding_scale_is_rounded_to_bf16(hidden_size, scale):
    assert layers.Embedding(2, hidden_size, torch.device("cpu"), torch.bfloat16).scale == scale


def test_proportional_rotary_frequencies():
    got = rotary.inverse_frequencies(
        RopeConfig("proportional", 1e6, partial_rotary_factor=0.25), 32
    )
    want = torch.tensor([1e6 ** (-i / 16) for i in range(4)] + [0.0] * 12, dtype=torch.float64)
    # A power errs by less than two units, a reciprocal by half of one.
    torch.testing.assert_close(got.double(), want, rtol=3 * UNIT, atol=0)


def _values_of_normed_keys(qkv, cos, sin, **options):
    """`norm_rope` whose values, where they are keys, are keys with their norm weight."""
    out = norm_rope(qkv, cos, sin, **options)
    if not options["has_v"]:
        count = options["num_kv_heads"]
        keys = without_rope(qkv, cos, sin, **options)[:, -2 * count : -count]
        out[:, -count:] = layers.rms_norm(keys, None, options["eps"])
    return out


def _wrong_width(model, monkeypatch):
    """Proportional RoPE whose exponents are divided by the rotated width instead of head_dim."""
    head_dim = model.config.full.head_dim
    exponent = torch.arange(0, head_dim // 4, 2) / (head_dim // 4)
    wrong = torch.zeros(head_dim // 2)
    wrong[: len(exponent)] = 1.0 / 1e6**exponent
    model.frequencies["full_attention"] = wrong


def _post_norm_after_sum(model, monkeypatch):
    def forward(self, x, residual, rotary, attend, norm, per_layer_input):
        x = self.post_attention_layernorm(residual + self.self_attn(x, rotary, attend))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        residual.copy_(x if self.layer_scalar is None else x * self.layer_scalar)
        return norm(residual)

    monkeypatch.setattr(gemma.DecoderLayer, "forward", forward)


def _scaled_queries(model, monkeypatch):
    """Gemma-4 with softmax scale head_dim^-0.5."""
    q_heads = model.config.sliding.num_heads

    def apply(*arguments, **options):
        out = norm_rope(*arguments, **options)
        out[:, :q_heads] *= out.shape[-1] ** -0.5
        return out

    monkeypatch.setattr(gemma, "norm_rope", apply)


def _window(change):
    return with_config(
        lambda c: replace(
            c, sliding=replace(c.sliding, sliding_window=c.sliding.sliding_window + change)
        )
    )


PLAIN_GLOBAL = RopeConfig("default", 1e6)
BOTH = {
    "window one shorter": _window(-1),
    "window one longer": _window(1),
    "embedding not scaled": modules(layers.Embedding, scale=1.0),
    "adjacent RoPE pairs": adjacent_pairs(gemma),
    "post norm after the sum": _post_norm_after_sum,
    "local RoPE base in full layers": frequencies("full", RopeConfig("default", 1e4)),
    "global RoPE base in sliding layers": frequencies("sliding", PLAIN_GLOBAL),
}
SENSITIVITIES = {
    "gemma3-tiny": BOTH
    | {
        "q_norm = 1": weights("q_norm.weight", 0.0),
        "k_norm = 1": weights("k_norm.weight", 0.0),
        "norm without 1 +": modules(layers.RMSNorm, offset=0.0),
        "scale from head_dim": with_config(lambda c: replace(c, query_pre_attn_scalar=32)),
        "no linear factor": frequencies("full", PLAIN_GLOBAL),
        "linear factor in sliding layers": frequencies("sliding", RopeConfig("linear", 1e4, 8.0)),
        "v_norm added": modules(gemma.Attention, has_v_norm=True),
    },
    "gemma4-tiny": BOTH
    | {
        "q_norm = 1": weights("q_norm.weight", 1.0),
        "k_norm = 1": weights("k_norm.weight", 1.0),
        "layer_scalar = 1": weights("layer_scalar", 1.0),
        "norm with 1 +": modules(layers.RMSNorm, offset=1.0),
        "no v_norm": modules(gemma.Attention, has_v_norm=False),
        "no softcap": with_config(lambda c: replace(c, final_logit_softcapping=None)),
        "scale from head_dim": _scaled_queries,
        "RoPE of the whole head": frequencies("full", PLAIN_GLOBAL),
        "RoPE over the rotated width": _wrong_width,
        "v from the normed k": patched(gemma, "norm_rope", _values_of_normed_keys),
    },
}


@ordinary("paged")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "mutation"),
    [(name, mutation) for name, table in SENSITIVITIES.items() for mutation in table],
)
def test_each_rule_matters(oracles, monkeypatch, name, mutation, path):
    """The comparison with transformers sees every single rule."""
    check_rule_matters(oracles[name], SENSITIVITIES[name][mutation], path, monkeypatch)
