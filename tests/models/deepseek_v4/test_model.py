"""The model against transformers on whole sequences without a cache."""

import pytest
import torch

from quire.models.loading.weights import load_model
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
