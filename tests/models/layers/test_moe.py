"""Experts over sorted rows against a loop over tokens in fp64."""

import pytest
import torch

from quire.bench.common.bounds import bounding, rounded
from quire.models.layers import moe
from quire.models.layers.moe import grouped_matmul, run_experts
from tests.support.helpers import assert_within_budget

# num_tokens, num_experts, k, hidden_size, intermediate_size
CASES = {
    "one token": (1, 4, 2, 16, 8),
    "k = 1": (9, 4, 1, 16, 8),
    "all experts": (5, 3, 3, 16, 8),
    "more experts than rows": (3, 64, 2, 16, 8),
    "many rows of each": (60, 4, 2, 32, 24),
    "sizes that grouped_mm refuses": (17, 5, 2, 18, 9),
    "no token": (0, 4, 2, 16, 8),
}


def make(case, dtype=torch.float32, bias=False, seed=0):
    num_tokens, num_experts, k, hidden, width = case
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    ids = torch.rand(num_tokens, num_experts, generator=generator).topk(k).indices
    inputs = {
        "x": normal(num_tokens, hidden),
        "expert_ids": ids,
        "expert_weights": torch.rand(num_tokens, k, generator=generator),
        "gate_up": normal(num_experts, 2 * width, hidden) * hidden**-0.5,
        "down": normal(num_experts, hidden, width) * width**-0.5,
    }
    if bias:
        inputs["gate_up_bias"] = normal(num_experts, 2 * width)
        inputs["down_bias"] = normal(num_experts, hidden)
    return inputs


def activation(gate, up):
    return gate.relu() * up


def naive(x, expert_ids, expert_weights, gate_up, down, gate_up_bias, down_bias, dtype):
    """One token and one of its experts at a time; all but the sum over experts is kept in ``dtype``."""
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(expert_ids[token], expert_weights[token], strict=True):
            h = rounded(gate_up[expert] @ x[token], dtype)
            if gate_up_bias is not None:
                h = rounded(h + gate_up_bias[expert], dtype)
            gate, up = h.chunk(2)
            y = rounded(down[expert] @ rounded(gate.relu() * up, dtype), dtype)
            if down_bias is not None:
                y = rounded(y + down_bias[expert], dtype)
            out[token] += weight * y
    return out


def exact(inputs):
    """The sums in fp64, with bounds."""
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    wide = {"gate_up_bias": None, "down_bias": None} | wide
    with bounding():
        return naive(**wide, dtype=inputs["x"].dtype)


@pytest.fixture(params=["torch's grouped_mm", "loop over experts"])
def implementation(request, monkeypatch):
    if request.param == "loop over experts":
        monkeypatch.setattr(moe, "_has_grouped_mm", lambda x, weights: False)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_run_experts_equals_a_loop_over_tokens(implementation, case, dtype, bias):
    inputs = make(case, dtype, bias)
    got = run_experts(**inputs, activation=activation)
    assert got.dtype == dtype
    assert_within_budget("out", got, exact(inputs))


def test_grouped_matmul_skips_empty_groups(implementation):
    x, weights = torch.randn(5, 8), torch.randn(6, 4, 8)
    offsets = torch.tensor([0, 2, 2, 2, 5, 5], dtype=torch.int32)
    with bounding():
        wide = weights.double()
        expected = torch.cat([x[:2].double() @ wide[1].T, x[2:].double() @ wide[4].T])
    assert_within_budget("out", grouped_matmul(x, weights, offsets), expected)


def test_a_token_does_not_depend_on_its_neighbours(implementation):
    """The same call again gives the same bits; other row counts of an expert may change a matmul, and nothing else."""
    inputs = make((40, 6, 3, 32, 16))
    first = run_experts(**inputs, activation=activation)
    assert torch.equal(first, run_experts(**inputs, activation=activation))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    moved = {k: v[order] if len(v) == 40 else v for k, v in inputs.items()}
    expected = exact(inputs)
    assert_within_budget("first", first, expected)
    assert_within_budget("moved", run_experts(**moved, activation=activation), expected[order])


def test_order_of_the_sum_is_the_order_of_the_router():
    """Terms of 2^24, 1 and -2^24 in fp32: their sum depends on its order, which is that of expert_ids."""
    big = 2.0**24
    inputs = {
        "x": torch.ones(1, 4),
        "gate_up": torch.ones(3, 8, 4) / 4,
        "down": torch.ones(3, 4, 4) / 4,
        "activation": lambda gate, up: gate * up,
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
