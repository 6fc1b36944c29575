"""residual_norm, both implementations, against the oracle."""

import dataclasses

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels import residual_norm
from tests.kernels.oracles import norm as reference
from tests.support.helpers import DEVICE, NAN, assert_within_budget
from tests.support.oracles import once

IMPLS = pytest.mark.parametrize("impl", ["triton", "torch"])
EPS = 1e-2  # large enough to be seen


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    padding: channels that lie between two rows in memory.
    weight_dtype: of the weights; None = that of the rows.
    """

    num_rows: int
    size: int
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None
    weight: bool = True
    residual: bool = True
    post: bool = False
    scalar: bool = False
    offset: float = 0.0
    padding: int = 0


BF16 = torch.bfloat16
CASES = {
    "norm": Case(3, 64, residual=False),
    "norm-offset-bf16": Case(3, 48, BF16, residual=False, offset=1.0),
    "llama": Case(4, 96),
    "llama-bf16": Case(4, 96, BF16, padding=8),
    "gemma-3": Case(4, 80, post=True, offset=1.0, padding=3),
    "gemma-3-bf16": Case(4, 80, BF16, post=True, offset=1.0),
    "gemma-4": Case(4, 80, post=True, scalar=True),
    "gemma-4-bf16": Case(4, 80, BF16, post=True, scalar=True),
    "gemma-4-fp16": Case(4, 80, torch.float16, post=True, scalar=True, padding=1),
    "scaled-sum": Case(2, 33, BF16, scalar=True),
    "only-the-sum": Case(3, 64, BF16, weight=False, post=True),
    "only-the-scaled-sum": Case(3, 64, weight=False, scalar=True),
    "fp32-weights": Case(3, 64, BF16, weight_dtype=torch.float32, post=True, offset=1.0),
    "one-channel": Case(2, 1, post=True),
    "odd-size": Case(2, 1153, post=True),
    "many-warps": Case(2, 5376, BF16, post=True, offset=1.0),
    "no-rows": Case(0, 64),
}


def make(case, seed=0):
    """Arguments of a call; channels between the rows are poison."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def rows():
        wide = torch.full((case.num_rows, case.size + case.padding), NAN)
        wide[:, : case.size] = 3 * normal(case.num_rows, case.size)
        return wide.to(DEVICE, case.dtype)[:, : case.size]

    def weight(size):
        return (1 - case.offset + 0.3 * normal(size)).to(DEVICE, case.weight_dtype or case.dtype)

    return {
        "x": rows(),
        "weight": weight(case.size) if case.weight else None,
        "eps": EPS,
        "offset": case.offset,
        "residual": rows() if case.residual else None,
        "post_weight": weight(case.size) if case.post else None,
        "scalar": weight(1) + case.offset if case.scalar else None,
    }


@IMPLS
@pytest.mark.parametrize("name", CASES)
def test_residual_norm(impl, name):
    arguments = make(CASES[name])
    x, weight, residual = (arguments[key] for key in ("x", "weight", "residual"))
    before, normed = x.clone(), x
    options = {key: arguments[key] for key in ("eps", "offset")}
    if residual is not None:
        branch = {key: arguments[key] for key in ("post_weight", "scalar")}
        exact = once(reference.new_residual, x, residual, **options, **branch)
        normed = residual
    out = residual_norm(**arguments, impl=impl)
    assert x.equal(before)
    if residual is not None:
        assert_within_budget("residual", residual, exact)
    if weight is None:
        assert out is residual
        return
    assert out.dtype == x.dtype and out.is_contiguous()
    exact = once(reference.norm, normed, weight, **options)
    assert_within_budget("out", out, exact)


@IMPLS
def test_only_the_rows_are_written(impl):
    """Neither the channels between two rows of the residual, nor those between two of ``out``."""
    case = Case(3, 40, padding=5, post=True)
    arguments = make(case)
    wide = torch.full((3, 45), NAN, device=DEVICE)
    residual = arguments["residual"]
    out = residual_norm(**arguments, out=wide[:, :40], impl=impl)
    assert out.data_ptr() == wide.data_ptr()
    assert wide[:, 40:].isnan().all() and not wide[:, :40].isnan().any()
    gaps = torch.as_strided(residual, (2, 5), residual.stride(), 40)
    assert gaps.isnan().all() and not residual.isnan().any()


@IMPLS
def test_the_result_may_take_the_place_of_x(impl):
    for name in ("llama-bf16", "gemma-4"):
        arguments, same = make(CASES[name]), make(CASES[name])
        expected = residual_norm(**arguments, impl=impl)
        out = residual_norm(**same, out=same["x"], impl=impl)
        assert out is same["x"] and out.equal(expected)
        assert same["residual"].equal(arguments["residual"])


@IMPLS
def test_the_norm_is_that_of_the_rounded_residual(impl):
    """In bf16, 256 + 0.75 is stored as 256: the norm must not see the 0.75."""
    residual = torch.full((1, 2), 256.0, dtype=BF16, device=DEVICE)
    x = torch.tensor([[0.75, 0.0]], dtype=BF16, device=DEVICE)
    weight = torch.full((2,), 2.0**20, device=DEVICE)
    out = residual_norm(x, weight, eps=EPS, residual=residual, impl=impl)
    assert residual.eq(256).all() and out[0, 0] == out[0, 1]


@IMPLS
def test_a_result_of_fp32(impl):
    """It is not rounded to the dtype of x."""
    call = make(CASES["llama-bf16"]) | {"residual": None}
    with bounding():
        exact = reference.norm(call["x"].double(), call["weight"], eps=call["eps"], offset=0.0)
    out = residual_norm(**call, out=torch.empty_like(call["x"], dtype=torch.float32), impl=impl)
    assert_within_budget("out", out, exact)


def test_rows_too_long_for_a_program_are_refused():
    rows = torch.zeros(1, 16385, device=DEVICE)
    with pytest.raises(NotImplementedError, match="at most 16384 channels are supported"):
        residual_norm(rows, rows[0], eps=EPS, impl="triton")
    assert residual_norm(rows, rows[0], eps=EPS, impl="torch").eq(0).all()
