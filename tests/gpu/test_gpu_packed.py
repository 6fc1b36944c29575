"""Products that are computed in another way on a device: fp32 results of bf16 factors, and experts that stay packed."""

import pytest
import torch

from quire.bench.common.bounds import UNIT
from quire.models.layers.basic import linear_fp32
from quire.models.layers.packed_experts import PackedExperts
from tests.gpu.conftest import DRY_RUN
from tests.support.helpers import DEVICE

pytestmark = pytest.mark.gpu

ROWS, WIDTH = (3, 64) if DRY_RUN else (33, 4096)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_two_bytes_have_results_of_four(dtype):
    """``mm(out_dtype=)`` on a device: off by the additions in fp32 alone, as products of two such numbers are exact in fp32."""
    x, weight = normal(ROWS, WIDTH).to(dtype), normal(64, WIDTH, seed=1).to(dtype)
    got = linear_fp32(x.to(DEVICE), weight.to(DEVICE))
    assert got.dtype == torch.float32
    exact = x.double() @ weight.double().T
    bound = WIDTH * UNIT * (x.double().abs() @ weight.double().abs().T)
    assert bool(((got.cpu().double() - exact).abs() <= bound).all())


def packed(kind, experts, hidden, width, device):
    """The same random experts on any device; scales of some powers of two."""
    made = PackedExperts(kind, experts, hidden, width, lambda gate, up: gate * up, torch.device(device))  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    for matrices in (made.gate_up_proj, made.down_proj):
        values = torch.randint(0, 256, matrices.weight.shape, generator=generator).to(torch.uint8)
        if kind == "fp8":
            values[values % 128 == 127] = 0  # NaN
        matrices.weight.view(torch.uint8).copy_(values)
        exponents = torch.randint(-9, -5, matrices.scale.shape, generator=generator)
        scales = exponents.float().exp2() if kind == "fp8" else (exponents + 127).to(torch.uint8)
        matrices.scale.copy_(scales)
    return made


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
@torch.inference_mode()
def test_packed_experts(kind):
    """Gate times up in place of the activation, so that the bound is that of two sums of products one after the other."""
    experts, hidden, width, k = (5, 64, 32, 2) if DRY_RUN else (64, 1024, 512, 6)
    x, weights = normal(ROWS, hidden), normal(ROWS, k, seed=1).abs()
    order = torch.rand(ROWS, experts, generator=torch.Generator().manual_seed(3))
    ids = order.argsort(1)[:, :k]
    made = packed(kind, experts, hidden, width, DEVICE)
    got = made(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)).cpu().double()
    every = torch.arange(experts, device=DEVICE)
    gate, up = made.gate_up_proj.dequantize(every, torch.float32).cpu().double().unbind(1)
    down = made.down_proj.dequantize(every, torch.float32).cpu().double()
    exact = torch.zeros(ROWS, hidden, dtype=torch.float64)
    size = exact.clone()
    for row in range(ROWS):
        for expert, weight in zip(ids[row].tolist(), weights[row].double(), strict=True):
            one = x[row].double()
            exact[row] += weight * (down[expert] @ ((gate[expert] @ one) * (up[expert] @ one)))
            one = one.abs()
            both = (gate[expert].abs() @ one) * (up[expert].abs() @ one)
            size[row] += weight * (down[expert].abs() @ both)
    # Twice the first sums, as two are multiplied; the second; and the experts with their weights.
    bound = (2 * hidden + width + 2 * k + 2) * UNIT * (1 + 1e-3) * size
    assert bool(((got - exact).abs() <= bound).all())
    assert got.abs().max() > 0
