"""FlashInfer's norms and gated products against the oracles; where there is no GPU, its stand-in's."""

import pytest
import torch

from quire.bench.common.bounds import bounded, bounding
from quire.kernels import gated_product, residual_norm
from quire.kernels.gating import reference as gating
from quire.kernels.norms import reference as norms
from tests.gpu.conftest import DRY_RUN
from tests.kernels.common.test_flashinfer import EPS, arguments, rows
from tests.support import flashinfer_stand_in
from tests.support.helpers import DEVICE, assert_within_budget

pytestmark = pytest.mark.gpu

ROWS, SIZE = (2, 64) if DRY_RUN else (33, 1152)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@pytest.fixture(autouse=True)
def package(monkeypatch):
    if DRY_RUN:
        flashinfer_stand_in.install(monkeypatch)
    else:
        pytest.importorskip("flashinfer")


@DTYPES
@pytest.mark.parametrize("offset", [0, 1.0])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("padding", [0, 8])
def test_residual_norm(dtype, offset, residual, padding):
    given = arguments(ROWS, SIZE, dtype, offset=offset, padding=padding, residual=residual)
    exact = given["x"].double()
    with bounding():
        if residual:
            exact = norms.new_residual(given["x"], given["residual"], eps=EPS)
        normed = norms.norm(exact, given["weight"], eps=EPS, offset=offset)
    given |= {name: t.to(DEVICE) for name, t in given.items() if isinstance(t, torch.Tensor)}
    out = residual_norm(**given, impl="flashinfer")
    assert_within_budget("out", out.cpu(), normed)
    if residual:
        assert_within_budget("residual", given["residual"].cpu(), exact)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_product(dtype, activation):
    merged = rows(ROWS, 2 * SIZE, dtype)
    with bounding():
        exact = gating.gated_product(*merged.chunk(2, dim=1), activation=activation)
    if activation == "gelu_tanh":  # tanh.approx.f32: relative errors up to 2**-11
        gate, up = merged.double().chunk(2, dim=1)
        exact = bounded(exact, exact.error + (gate * up).abs() * 2.0**-12)
    out = gated_product(
        *merged.to(DEVICE).chunk(2, dim=1), activation=activation, impl="flashinfer"
    )
    assert_within_budget("out", out.cpu(), exact)
