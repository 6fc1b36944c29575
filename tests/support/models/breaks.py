"""Rules of a model, broken on purpose: each is a function of the model and a monkeypatch, and must move logits."""

import torch

from quire.kernels import norm_rope
from quire.models.layers.rotary import inverse_frequencies
from quire.models.loading.weights import load_model
from tests.support.models.hand_paged import HandPaged, difference
from tests.support.models.tolerance import tolerance

PATHS = ("full", "paged")


def with_config(change):
    """A break that replaces fields of the configuration."""
    return lambda model, monkeypatch: setattr(model, "config", change(model.config))


def weights(suffix, value):
    """A break that sets all weights whose name ends so to ``value``."""

    def apply(model, monkeypatch):
        matches = [w for name, w in model.named_parameters() if name.endswith(suffix)]
        assert matches
        for weight in matches:
            weight.fill_(value)

    return apply


def frequencies(kind, rope):
    """A break that turns the layers of a kind with another RoPE."""

    def apply(model, monkeypatch):
        head_dim = {"sliding": model.config.sliding, "full": model.config.full}[kind].head_dim
        model.frequencies[f"{kind}_attention"] = inverse_frequencies(rope, head_dim)

    return apply


def modules(kind, **attributes):
    """A break that sets attributes of every module of a class."""

    def apply(model, monkeypatch):
        for module in model.modules():
            if isinstance(module, kind):
                for name, value in attributes.items():
                    assert hasattr(module, name)
                    setattr(module, name, value)

    return apply


def patched(module, name, value):
    """A break that replaces what ``module`` knows by ``name``."""
    return lambda model, monkeypatch: monkeypatch.setattr(module, name, value)


def without_rope(qkv, cos, sin, **options):
    """`norm_rope` whose queries and keys keep their places."""
    return norm_rope(qkv, torch.ones_like(cos), torch.zeros_like(sin), **options)


def adjacent_pairs(module):
    """A break that turns the channel pairs (2i, 2i + 1)."""

    def apply(qkv, cos, sin, **options):
        out = without_rope(qkv, cos, sin, **options)
        heads = qkv.shape[1] - options["num_kv_heads"] * options.get("has_v", True)
        even, odd = out[:, :heads, 0::2], out[:, :heads, 1::2]
        cos, sin = cos[:, None], sin[:, None]
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        return torch.cat((turned.flatten(-2), out[:, heads:]), dim=1)

    return patched(module, "norm_rope", apply)


def check_rule_matters(oracle, rule, path, monkeypatch):
    """Breaking a rule moves the logits far past the tolerance of the comparison with transformers."""
    model = load_model(oracle.ours)
    rule(model, monkeypatch)
    if path == "full":
        got = model.full_forward(oracle.input_ids)
    else:
        paged = HandPaged(model, num_seqs=1, max_len=131)
        got = torch.cat([paged.step({0: ids}) for ids in oracle.input_ids.split([100, 31])])
    assert difference(got, oracle.ours_logits) > 3 * tolerance(oracle.model)
