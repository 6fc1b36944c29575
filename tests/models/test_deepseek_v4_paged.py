"""The paged model under kvcore's plans against transformers: any cut of the work gives the logits of one uncached forward."""


import pytest
import torch

from quire.models.deepseek_v4_weights import load_model
from tests.models import v4_oracle
from tests.models.v4_engine import SmallEngine

TOLERANCE = 1e-4  # fp32 logits of standard deviation 1
ODD_CHUNKS = [1, 37, 64, 5, 19, 77]


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape and got.isfinite().all()
    return (got - expected).abs().max().item()


@pytest.fixture(scope="module")
def oracle():
    return v4_oracle.oracles()["ours"]


@pytest.fixture(scope="module")
def model(oracle):
    return load_model(oracle.path, dtype=torch.float32)


def engine_for(model, **options) -> SmallEngine:
    return SmallEngine(model, **options)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("chunks", [[203], ODD_CHUNKS, [50] + [1] * 153], ids=["full", "odd", "steps"])  # fmt: skip
def test_chunks(oracle, model, chunks, caching):
    engine = engine_for(model, caching=caching)
    engine.admit("a", oracle.input_ids)
    got = []
    for chunk in chunks:
        got.append(engine.run("a", engine.computed("a") + chunk))
    assert difference(torch.cat(got), oracle.logits) < TOLERANCE
