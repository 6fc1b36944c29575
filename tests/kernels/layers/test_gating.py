"""gated_product, both implementations, against the oracle."""

import dataclasses
import math

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels import gated_product
from quire.kernels.layers import gating
from tests.kernels.oracles import gating as reference
from tests.support.helpers import DEVICE, NAN, assert_within_budget

IMPLS = pytest.mark.parametrize("impl", ["triton", "torch"])
BF16 = torch.bfloat16
GPT_OSS = {"activation": "silu", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    layout: "merged" halves of a product's rows; "interleaved" even and odd columns; "apart" two
        tensors, that of ``up`` transposed.
    scale: standard deviation of what goes in.
    """

    num_rows: int
    width: int
    options: dict
    dtype: torch.dtype = torch.float32
    layout: str = "merged"
    scale: float = 2.0


SILU, GELU = {"activation": "silu"}, {"activation": "gelu_tanh"}
CASES = {
    "silu": Case(3, 40, SILU),
    "silu-bf16": Case(3, 40, SILU, BF16),
    "gelu": Case(3, 40, GELU),
    "gelu-bf16": Case(3, 40, GELU, BF16),
    "gelu-fp16": Case(3, 40, GELU, torch.float16),
    "gpt-oss": Case(3, 24, GPT_OSS, layout="interleaved", scale=6.0),
    "gpt-oss-bf16": Case(3, 24, GPT_OSS, BF16, layout="interleaved", scale=6.0),
    "limit": Case(3, 24, SILU | {"limit": 1.5}),
    "gelu-limit-offset": Case(3, 24, GELU | {"limit": 1.5, "up_offset": -0.25}, BF16),
    "apart": Case(5, 7, GELU, layout="apart"),
    "tails-of-silu": Case(4, 64, SILU, scale=40.0),
    "tails-of-gelu": Case(4, 64, GELU, scale=40.0),
    "one": Case(1, 1, SILU),
    "more-than-a-program-takes": Case(2, 1030, SILU, BF16),
    "no-rows": Case(0, 8, SILU),
}


def make(case, seed=0):
    """Gate and up of a case, as views of the memory that a product leaves."""
    generator = torch.Generator().manual_seed(seed)
    merged = torch.randn(case.num_rows, 2 * case.width, generator=generator) * case.scale
    merged = merged.to(DEVICE, case.dtype)
    if case.layout == "interleaved":
        return merged[:, 0::2], merged[:, 1::2]
    gate, up = merged.chunk(2, dim=1)
    return (gate, up.T.contiguous().T) if case.layout == "apart" else (gate, up)


@IMPLS
@pytest.mark.parametrize("name", CASES)
def test_gated_product(impl, name):
    case = CASES[name]
    gate, up = make(case)
    before = gate.clone(), up.clone()
    with bounding():
        exact = reference.gated_product(gate, up, **case.options)
    out = gated_product(gate, up, **case.options, impl=impl)
    assert gate.equal(before[0]) and up.equal(before[1])
    assert out.dtype == case.dtype and out.is_contiguous()
    assert_within_budget("out", out, exact)


@IMPLS
def test_only_the_result_is_written(impl, monkeypatch):
    """Rows of ``out`` with other memory between them; pieces of rows that end within a program."""
    monkeypatch.setattr(gating, "BLOCK", 16)
    gate, up = make(CASES["silu"])
    wide = torch.full((3, 45), NAN, device=DEVICE)
    out = gated_product(gate, up, **SILU, out=wide[:, :40], impl=impl)
    assert out.data_ptr() == wide.data_ptr() and wide[:, 40:].isnan().all()
    assert out.equal(gated_product(gate, up, **SILU, impl=impl))


@IMPLS
def test_numbers_that_overflow_an_exponential(impl):
    """Gates far below zero give zeros, those far above themselves; a NaN stays one, also under a limit."""
    gate = torch.tensor([[-1e4, -90.0, 0.0, 1e4, NAN, 3.0]], device=DEVICE)
    up = torch.tensor([[3.0, 3.0, 3.0, 3.0, 3.0, NAN]], device=DEVICE)
    for options in (SILU, GELU):
        out = gated_product(gate, up, **options, impl=impl)[0].tolist()
        assert math.isclose(out[0], 0.0, abs_tol=1e-30) and math.isclose(out[1], 0, abs_tol=1e-30)
        assert out[2] == 0 and out[3] == 3e4 and math.isnan(out[4]) and math.isnan(out[5])
    out = gated_product(gate, up, **GPT_OSS, impl=impl)[0]
    assert out.isnan().tolist() == [False] * 4 + [True] * 2
