"""Pages, dtypes, embedding scales and frequencies of the Gemma families."""

import pytest
import torch

from quire.bench.common.bounds import UNIT
from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.models.config.model import RopeConfig
from quire.models.config.named import get_config
from quire.models.layers import basic as layers
from quire.models.layers import rotary
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from tests.support.models.hand_paged import HandPaged


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
    place = layers.WeightPlacement(torch.device("cpu"), torch.bfloat16)
    table = layers.Embedding(2, hidden_size, place, scale=hidden_size**0.5)
    assert table.scale == scale


def test_proportional_rotary_frequencies():
    got = rotary.inverse_frequencies(
        RopeConfig("proportional", 1e6, partial_rotary_factor=0.25), 32
    )
    want = torch.tensor([1e6 ** (-i / 16) for i in range(4)] + [0.0] * 12, dtype=torch.float64)
    # A power errs by less than two units, a reciprocal by half of one.
    torch.testing.assert_close(got.double(), want, rtol=3 * UNIT, atol=0)
