"""residual_norm, both implementations, against the oracle."""

import dataclasses

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels import residual_norm
from quire.kernels.norms import reference
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


@IMPLS
def test_like_calls_are_prepared_once(impl):
    """Other tensors of the same shapes; the second call's results are its own."""
    first, second = make(CASES["gemma-4"]), make(CASES["gemma-4"], seed=1)
    a = residual_norm(**first, impl=impl)
    b = residual_norm(**second, impl=impl)
    assert not a.equal(b)
    assert b.equal(residual_norm(second["residual"], second["weight"], eps=EPS, impl=impl))


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


REFUSED = [
    ({"x": zeros(4, 80, dtype=torch.float64)}, r"x: expected .*, got float64 \[4, 80\]"),
    ({"x": zeros(4, 0)}, "x: size: expected an int >= 1, got 0"),
    ({"x": zeros(80, 4).T}, "x: expected stride 1 in the last dimension"),
    ({"weight": zeros(79)}, r"weight: expected .* \[80\], got float32 \[79\]"),
    ({"post_weight": zeros(81)}, r"post_weight: expected .* \[80\], got float32 \[81\]"),
    ({"scalar": zeros(2)}, r"scalar: expected .* \[1\], got float32 \[2\]"),
    ({"scalar": 1.5}, r"scalar: expected .* \[1\], got float"),
    ({"residual": zeros(3, 80)}, r"residual: expected float32 \[4, 80\], got float32 \[3, 80\]"),
    ({"residual": zeros(4, 80, dtype=BF16)}, r"residual: expected float32 .*, got bfloat16"),
    ({"residual": zeros(1, 80).expand(4, 80)}, "residual: expected elements that share no memory"),
    ({"residual": None}, "residual: expected a tensor with a post_weight, got None"),
    ({"residual": None, "post_weight": None}, "residual: expected a tensor with a scalar"),
    (
        {"residual": None, "post_weight": None, "scalar": None, "weight": None},
        "residual: expected a tensor without a weight, got None",
    ),
    ({"out": zeros(4, 81)}, r"out: expected float32 \[4, 80\], got float32 \[4, 81\]"),
    ({"weight": None, "out": zeros(4, 80)}, "out: expected None without a weight"),
    ({"eps": 0.0}, "eps: expected a finite number > 0, got 0.0"),
    ({"offset": NAN}, "offset: expected a finite number, got nan"),
    ({"offset": True}, "offset: expected a finite number, got True"),
    ({"impl": "cuda"}, "impl: expected 'triton', 'torch' or None, got 'cuda'"),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=[m[:50] for _, m in REFUSED])
def test_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        residual_norm(**make(CASES["gemma-4"]) | changes)


def test_rows_too_long_for_a_program_are_refused():
    rows = zeros(1, 16385)
    with pytest.raises(NotImplementedError, match="at most 16384 channels are supported"):
        residual_norm(rows, rows[0], eps=EPS, impl="triton")
    assert residual_norm(rows, rows[0], eps=EPS, impl="torch").eq(0).all()
