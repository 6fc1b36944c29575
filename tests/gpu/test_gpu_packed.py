"""Products that are computed in another way on a device: fp32 results of bf16 factors, and experts that stay packed."""

import pytest
import torch

from quire.bench.common.bounds import UNIT, bounding, rounded
from quire.models.layers.basic import linear_fp32
from quire.models.layers.moe import PackedExperts
from tests.gpu.conftest import DRY_RUN
from tests.kernels.oracles import experts as reference
from tests.kernels.oracles.gating import gated_product
from tests.support.helpers import DEVICE, assert_within_budget

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
    made = PackedExperts(kind, experts, hidden, width, torch.device(device))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
@torch.inference_mode()
def test_packed_experts(kind, dtype):
    experts, hidden, width, k = (5, 64, 32, 2) if DRY_RUN else (64, 1024, 512, 6)
    x = normal(ROWS, hidden).to(dtype)
    order = torch.rand(ROWS, experts, generator=torch.Generator().manual_seed(3))
    ids = order.argsort(1)[:, :k]
    made = packed(kind, experts, hidden, width, DEVICE)
    got = made(x.to(DEVICE), ids.to(DEVICE)).cpu()
    stacks = [
        [reference.values(*pair).cpu() for pair in zip(part.weight.flatten(0, -3), part.scale.flatten(0, -3), strict=True)]
        for part in (made.gate_up_proj, made.down_proj)
    ]  # fmt: skip
    with bounding():
        gate_up, down = (rounded(torch.stack(stack), dtype) for stack in stacks)
        rows = []
        for row in range(ROWS):
            one = x[row].double()[:, None]
            for expert in ids[row].tolist():
                gate, up = (reference.product(gate_up[2 * expert + i], one, None) for i in range(2))
                h = rounded(gated_product(gate, up, activation="silu"), dtype)
                rows.append(reference.product(down[expert], h, None)[:, 0])
        exact = torch.stack(rows)
    assert_within_budget("out", got, exact)
    assert got.dtype == dtype and got.abs().max() > 0
