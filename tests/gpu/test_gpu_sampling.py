"""Sampling on a device: real vocabularies against torch."""

import pytest
import torch

from quire.bench.common.bounds import UNIT
from quire.kernels import sample_tokens
from tests.gpu.conftest import DRY_RUN
from tests.support.helpers import DEVICE, NAN

pytestmark = pytest.mark.gpu

ROWS = 2 if DRY_RUN else 64
# temperature, top_k, top_p, min_p
FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.8, 50, 0.9, 0.0),
    (1.0, 0, 0.95, 0.02),
    (1.0, 6000, 1.0, 0.0),
    (30.0, 0, 0.9, 0.0),
]


def make_call(filters, vocab_size, scale=3.0):
    """ROWS rows of one kind of draw."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    logits = scale * torch.randn(ROWS, vocab_size, generator=generator, device=DEVICE)
    values = zip(("temperature", "top_k", "top_p", "min_p"), filters, strict=True)
    call = {name: torch.full((ROWS,), value, device=DEVICE) for name, value in values}
    call = {name: x.int() if name == "top_k" else x.float() for name, x in call.items()}
    u = torch.rand(ROWS, generator=generator, device=DEVICE, dtype=torch.float64)
    return {"logits": logits, **call, "u": (u * 2**32).floor() / 2**32}


@pytest.mark.parametrize("vocab_size", [300] if DRY_RUN else [128_256, 262_144, 151_937])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_real_vocabularies(filters, vocab_size):
    """The tokens that torch keeps, but those within rounding of a border, and the same each time."""
    call = make_call(filters, vocab_size)
    expected = torch.full_like(call["logits"], NAN)
    greedy = sample_tokens(**call, probs=expected, impl="torch")
    probs = torch.full_like(expected, NAN)
    ids = sample_tokens(**call, probs=probs, impl="triton")
    assert sample_tokens(call["logits"], impl="triton").equal(call["logits"].argmax(dim=1))
    for _ in range(1 if DRY_RUN else 10):
        assert sample_tokens(**call, impl="triton").equal(ids)
    if filters[0] == 0:
        assert ids.equal(greedy) and probs.equal(expected)
        return
    # What torch adds up in fp32: an exponent, an exponential, a sum of the row.
    near = float(((call["logits"].aminmax()[1] * 8 / filters[0]) + vocab_size) * UNIT)
    assert ((probs - expected).abs().sum(dim=1) < 4 * near).all()
    after = probs.double().cumsum(dim=1)
    [last, own] = (x.gather(1, ids[:, None])[:, 0] for x in (after, probs.double()))
    u = call["u"] * after[:, -1]
    assert (own > 0).all() and (last - own - 1e-5 <= u).all() and (u <= last + 1e-5).all()
