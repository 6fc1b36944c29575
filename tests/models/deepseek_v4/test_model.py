"""The model against transformers on whole sequences without a cache."""

import pytest
import torch

from quire.bench.common.bounds import UNIT
from quire.models.deepseek_v4.attention import rope_table
from quire.models.deepseek_v4.config import CONFIGS
from quire.models.layers.rotary import inverse_frequencies
from quire.models.loading.weights import load_model
from tests.support.models.tolerance import tolerance


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape and got.isfinite().all()
    return (got - expected).abs().max().item()


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 9, 16, 17, 33])
def test_prefixes_of_every_shape(length, v4_oracles):
    """Shorter than a window of any kind, at its end, and around it: causality makes prefixes of the oracle's run oracles too."""
    oracle = v4_oracles["ours"]
    model = load_model(oracle.path, dtype=torch.float32)
    got = model.full_forward(oracle.input_ids[:length])
    assert difference(got, oracle.logits[:length]) < tolerance(model)


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


def test_rotary_table_at_its_end():
    """The angles of position 1,048,575, as the fp32 product that models are trained with."""
    config = CONFIGS["deepseek-v4-flash"]
    frequencies = inverse_frequencies(config.rope, config.rope_dim)
    table = rope_table(frequencies, config.max_position_embeddings)
    angles = (torch.tensor(float(len(table) - 1)) * frequencies).double()
    # Sine and cosine are within a unit in the last place of numbers up to 1.
    assert len(table) == 1_048_576
    assert (table[-1].double() - torch.cat([angles.cos(), angles.sin()])).abs().max() <= UNIT
