"""The sum over a token's experts; what each gives is tested in `tests/kernels/layers/test_experts.py`."""

import pytest
import torch

from quire.models.layers.moe import run_experts


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_order_of_the_sum_is_the_order_of_the_router(impl):
    """Terms of 2^24, 1 and -2^24 in fp32: their sum depends on its order, which is that of expert_ids."""
    big = 2.0**24
    gate, up = torch.full((3, 4, 4), 16.0), torch.full((3, 4, 4), 2.0**-8)
    inputs = {
        "x": torch.ones(1, 4),
        "gate_up": torch.stack((gate, up), dim=1),  # silu(64) = 64 in fp32, and 64 / 64 = 1
        "down": torch.ones(3, 4, 4) / 4,
        "activation": "silu",
        "impl": impl,
    }
    for weights, total in (
        ([big, 1.0, -big], 0.0),
        ([big, -big, 1.0], 1.0),
        ([1.0, big, -big], 0.0),
    ):
        for ids in ([0, 1, 2], [2, 0, 1]):
            got = run_experts(
                expert_ids=torch.tensor([ids]), expert_weights=torch.tensor([weights]), **inputs
            )
            assert got.eq(total).all()
