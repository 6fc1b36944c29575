"""Sampling on a device: real vocabularies against torch."""

import pytest
import torch

from quire.bench.common.bounds import UNIT
from quire.kernels import sample_tokens
from tests.gpu.conftest import DRY_RUN
from tests.kernels.layers.test_sampling import FILTERS, make_call, make_logits
from tests.support.helpers import DEVICE, NAN

pytestmark = pytest.mark.gpu

ROWS = len(FILTERS) * (1 if DRY_RUN else 4)


@pytest.mark.parametrize("vocab_size", [300] if DRY_RUN else [128_256, 262_144, 151_937])
def test_real_vocabularies(vocab_size):
    """The tokens that torch keeps, but those within rounding of a border, and the same each time."""
    u = torch.rand(ROWS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    filters = FILTERS * (ROWS // len(FILTERS))
    call = make_call(make_logits(ROWS, vocab_size), filters, ((u * 2**32).floor() / 2**32).tolist())
    logits, heat, u = (call[name] for name in ("logits", "temperature", "u"))
    expected = torch.full((ROWS, vocab_size), NAN, device=DEVICE)
    greedy = sample_tokens(**call, probs=expected, impl="torch")
    probs = torch.full_like(expected, NAN)
    ids = sample_tokens(**call, probs=probs, impl="triton")
    assert sample_tokens(logits, impl="triton").equal(logits.argmax(dim=1))
    for _ in range(1 if DRY_RUN else 10):
        assert sample_tokens(**call, impl="triton").equal(ids)
    assert ids[heat == 0].equal(greedy[heat == 0])
    assert probs[heat == 0].equal(expected[heat == 0])
    # What torch adds up in fp32: an exponent, an exponential, a sum of the row.
    near = (logits.max() * 8 / heat + vocab_size) * UNIT
    assert ((probs - expected).abs().sum(dim=1) < 4 * near).all()
    after = probs.double().cumsum(dim=1)
    [last, own] = (x.gather(1, ids[:, None])[:, 0] for x in (after, probs.double()))
    u, drawn = u * after[:, -1], heat > 0
    right = (own > 0) & (last - own - 1e-5 <= u) & (u <= last + 1e-5)
    assert right[drawn].all()
