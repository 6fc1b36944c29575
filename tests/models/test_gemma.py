"""The model against transformers: whole sequences without a cache, and steps over pages that a hand-made linear table names."""

from dataclasses import replace

import pytest
import torch

from quire.models import gemma, layers
from quire.models.configs import RopeConfig, get_config
from quire.models.weights import load_model, random_model, save_checkpoint
from tests.models.hand_paged import TOLERANCE, HandPaged, difference

CHUNKS = {"whole": [131], "chunks": [1, 37, 64, 5, 24], "steps": [40] + [1] * 91}


def test_full_forward_equals_transformers_on_our_checkpoint(oracle):
    assert oracle.ours_logits.std() > 1  # a dead model would agree with anything
    assert difference(oracle.model.full_forward(oracle.input_ids), oracle.ours_logits) < TOLERANCE


def test_full_forward_equals_transformers_on_its_own_checkpoint(oracle):
    model = load_model(oracle.theirs)
    assert difference(model.full_forward(oracle.input_ids), oracle.theirs_logits) < TOLERANCE


@pytest.mark.parametrize("ring", [False, True], ids=["linear", "ring"])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_paged_forward_equals_transformers(oracle, chunks, ring):
    paged = HandPaged(oracle.model, num_seqs=1, max_len=131, ring=ring)
    logits = torch.cat([paged.step({0: ids}) for ids in oracle.input_ids.split(chunks)])
    assert difference(logits, oracle.ours_logits) < TOLERANCE


def test_ragged_batch_equals_each_sequence_alone(oracle):
    ids, expected = oracle.input_ids, oracle.ours_logits
    paged = HandPaged(oracle.model, num_seqs=3, max_len=131)
    paged.step({0: ids[:50], 1: ids[:17]})
    mixed = paged.step({1: ids[17:18], 0: ids[50:99], 2: ids[:33]})  # a decode before two prefills
    want = torch.cat([expected[17:18], expected[50:99], expected[:33]])
    assert difference(mixed, want) < TOLERANCE
    decodes = paged.step({2: ids[33:34], 0: ids[99:100], 1: ids[18:19]})
    assert difference(decodes, expected[[33, 99, 18]]) < TOLERANCE


def test_logits_rows_selects_rows(oracle):
    rows = torch.tensor([130, 0, 64])
    logits = HandPaged(oracle.model, 1, 131).step({0: oracle.input_ids}, logits_rows=rows)
    assert difference(logits, oracle.ours_logits[rows]) < TOLERANCE
    logits = oracle.model.full_forward(oracle.input_ids, logits_rows=rows)
    assert difference(logits, oracle.ours_logits[rows]) < TOLERANCE


def test_blocks_of_two_sizes_in_one_pool():
    """gemma4-small: pages of 16 tokens in sliding layers and of 32 in full ones, as in gemma-4-31b."""
    model = random_model(get_config("gemma4-small"))
    paged = HandPaged(model, num_seqs=1, max_len=300)
    assert {group.block_size for group in paged.groups} == {16, 32}
    ids = torch.randint(3, 259, (300,), generator=torch.Generator().manual_seed(1))
    logits = torch.cat([paged.step({0: chunk}) for chunk in ids.split([130, 1, 1, 168])])
    assert difference(logits, model.full_forward(ids)) < TOLERANCE


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
    got = layers.inverse_frequencies(
        RopeConfig("proportional", 1e6, partial_rotary_factor=0.25), 32
    )
    want = torch.tensor([1.0, 0.421697, 0.177828, 0.0749894] + [0.0] * 12)
    torch.testing.assert_close(got, want)


def _config(change):
    """A sensitivity that replaces fields of the configuration."""
    return lambda model, monkeypatch: setattr(model, "config", change(model.config))


def _weights(suffix, value):
    """A sensitivity that sets all weights whose name ends so to ``value``."""

    def apply(model, monkeypatch):
        matches = [w for name, w in model.named_parameters() if name.endswith(suffix)]
        assert matches
        for weight in matches:
            weight.fill_(value)

    return apply


def _frequencies(kind, rope):
    def apply(model, monkeypatch):
        head_dim = {"sliding": model.config.sliding, "full": model.config.full}[kind].head_dim
        model.frequencies[f"{kind}_attention"] = layers.inverse_frequencies(rope, head_dim)

    return apply


def _modules(kind, **attributes):
    """A sensitivity that sets attributes of every module of a class."""

    def apply(model, monkeypatch):
        for module in model.modules():
            if isinstance(module, kind):
                for name, value in attributes.items():
                    assert hasattr(module, name)
                    setattr(module, name, value)

    return apply


def _values(make):
    return lambda model, monkeypatch: monkeypatch.setattr(gemma.Attention, "values", make)


def _wrong_width(model, monkeypatch):
    """Proportional RoPE whose exponents are divided by the rotated width instead of head_dim."""
    head_dim = model.config.full.head_dim
    exponent = torch.arange(0, head_dim // 4, 2) / (head_dim // 4)
    frequencies = torch.zeros(head_dim // 2)
    frequencies[: len(exponent)] = 1.0 / 1e6**exponent
    model.frequencies["full_attention"] = frequencies


def _adjacent_pairs(model, monkeypatch):
    """RoPE that turns the pairs (2i, 2i + 1)."""

    def apply(x, rotary):
        cos, sin = rotary
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)

    monkeypatch.setattr(gemma, "apply_rotary", apply)


def _post_norm_after_sum(model, monkeypatch):
    def forward(self, x, rotary, attend, per_layer_input):
        x = self.post_attention_layernorm(
            x + self.self_attn(self.input_layernorm(x), rotary, attend)
        )
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x if self.layer_scalar is None else x * self.layer_scalar

    monkeypatch.setattr(gemma.DecoderLayer, "forward", forward)


def _scaled_queries(model, monkeypatch):
    """Gemma-4 with softmax scale head_dim^-0.5."""
    original = layers.apply_rotary
    q_heads = model.config.sliding.num_heads

    def apply(x, rotary):
        x = original(x, rotary)
        return x * x.shape[-1] ** -0.5 if x.shape[1] == q_heads else x

    monkeypatch.setattr(gemma, "apply_rotary", apply)


def _window(change):
    return _config(
        lambda c: replace(
            c, sliding=replace(c.sliding, sliding_window=c.sliding.sliding_window + change)
        )
    )


PLAIN_GLOBAL = RopeConfig("default", 1e6)
BOTH = {
    "window one shorter": _window(-1),
    "window one longer": _window(1),
    "embedding not scaled": _modules(layers.Embedding, scale=1.0),
    "adjacent RoPE pairs": _adjacent_pairs,
    "post norm after the sum": _post_norm_after_sum,
    "local RoPE base in full layers": _frequencies("full", RopeConfig("default", 1e4)),
    "global RoPE base in sliding layers": _frequencies("sliding", PLAIN_GLOBAL),
}
SENSITIVITIES = {
    "gemma3-tiny": BOTH
    | {
        "q_norm = 1": _weights("q_norm.weight", 0.0),
        "k_norm = 1": _weights("k_norm.weight", 0.0),
        "norm without 1 +": _modules(layers.RMSNorm, offset=0.0),
        "scale from head_dim": _config(lambda c: replace(c, query_pre_attn_scalar=32)),
        "no linear factor": _frequencies("full", PLAIN_GLOBAL),
        "linear factor in sliding layers": _frequencies("sliding", RopeConfig("linear", 1e4, 8.0)),
        "v_norm added": _modules(gemma.Attention, has_v_norm=True),
    },
    "gemma4-tiny": BOTH
    | {
        "q_norm = 1": _weights("q_norm.weight", 1.0),
        "k_norm = 1": _weights("k_norm.weight", 1.0),
        "layer_scalar = 1": _weights("layer_scalar", 1.0),
        "norm with 1 +": _modules(layers.RMSNorm, offset=1.0),
        "no v_norm": _modules(gemma.Attention, has_v_norm=False),
        "no softcap": _config(lambda c: replace(c, final_logit_softcapping=None)),
        "scale from head_dim": _scaled_queries,
        "RoPE of the whole head": _frequencies("full", PLAIN_GLOBAL),
        "RoPE over the rotated width": _wrong_width,
        "v from the normed k": _values(
            lambda self, x, k_raw: layers.rms_norm(
                self.k_norm(k_raw) if self.v_proj is None else self.v_proj(x).view_as(k_raw),
                None,
                self.eps,
            )
        ),
    },
}


@pytest.mark.parametrize("path", ["full", "paged"])
@pytest.mark.parametrize(
    ("name", "mutation"),
    [(name, mutation) for name, table in SENSITIVITIES.items() for mutation in table],
)
def test_each_rule_matters(oracles, monkeypatch, name, mutation, path):
    """The comparison with transformers sees every single rule: breaking one moves logits far past the tolerance."""
    oracle = oracles[name]
    model = load_model(oracle.ours)
    SENSITIVITIES[name][mutation](model, monkeypatch)
    if path == "full":
        got = model.full_forward(oracle.input_ids)
    else:
        paged = HandPaged(model, num_seqs=1, max_len=131)
        got = torch.cat([paged.step({0: ids}) for ids in oracle.input_ids.split([100, 31])])
    assert difference(got, oracle.ours_logits) > 30 * TOLERANCE
