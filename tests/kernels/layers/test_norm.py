"""residual_norm, both implementations, against the oracle."""

import dataclasses

import pytest
import torch

from quire.kernels import residual_norm
from tests.kernels.oracles import norm as reference
from tests.support.helpers import DEVICE, NAN, assert_within_budget
from tests.support.oracles import once

EPS = 1e-2  # large enough to be seen
BF16 = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    padding: channels that lie between two rows in memory.
    weight_dtype: of the weights; None = that of the rows.
    out: "new" memory, "x" itself, or "fp32" rows of wider ones.
    """

    num_rows: int = 4
    size: int = 80
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None
    weight: bool = True
    residual: bool = True
    post: bool = False
    scalar: bool = False
    offset: float = 0.0
    padding: int = 0
    out: str = "new"


CASES = {
    "norm": Case(3, 64, residual=False),
    "norm-offset-bf16": Case(3, 48, BF16, residual=False, offset=1.0),
    "norm-bf16-to-fp32": Case(3, 48, BF16, residual=False, out="fp32"),
    "llama": Case(4, 96),
    "llama-bf16": Case(4, 96, BF16, padding=8),
    "norm-of-the-rounded-sum": Case(4, 96, BF16, out="fp32"),
    "llama-bf16-in-place": Case(4, 96, BF16, out="x"),
    "gemma-3": Case(post=True, offset=1.0, padding=3, out="fp32"),
    "gemma-3-bf16": Case(dtype=BF16, post=True, offset=1.0),
    "gemma-4": Case(post=True, scalar=True, out="x"),
    "gemma-4-bf16": Case(dtype=BF16, post=True, scalar=True),
    "gemma-4-fp16": Case(dtype=torch.float16, post=True, scalar=True, padding=1),
    "scaled-sum": Case(2, 33, BF16, scalar=True),
    "only-the-sum": Case(3, 64, BF16, weight=False, post=True),
    "only-the-scaled-sum": Case(3, 64, weight=False, scalar=True),
    "fp32-weights": Case(3, 64, BF16, weight_dtype=torch.float32, post=True, offset=1.0),
    "one-channel": Case(2, 1, post=True),
    "odd-size": Case(2, 1153, post=True),
    "many-warps": Case(2, 5376, BF16, post=True, offset=1.0),
    "no-rows": Case(0, 64),
}


def wide_rows(case, values=None, dtype=None):
    """Rows of wider ones; the channels between them are poison."""
    wide = torch.full((case.num_rows, case.size + case.padding), NAN)
    if values is not None:
        wide[:, : case.size] = values
    return wide.to(DEVICE, dtype or case.dtype)[:, : case.size]


@pytest.mark.parametrize("name", CASES)
def test_residual_norm(impl, name):
    case = CASES[name]
    generator = torch.Generator().manual_seed(0)

    def weight(there, size=case.size):
        weight = 1 - case.offset + 0.3 * torch.randn(size, generator=generator)
        return weight.to(DEVICE, case.weight_dtype or case.dtype) if there else None

    x, residual = (
        wide_rows(case, 3 * torch.randn(case.num_rows, case.size, generator=generator))
        for _ in range(2)
    )
    scale, options = weight(case.weight), {"eps": EPS, "offset": case.offset}
    branch = {"post_weight": weight(case.post), "scalar": weight(case.scalar, 1)}
    before = x.clone()
    given = {"new": None, "x": x, "fp32": wide_rows(case, dtype=torch.float32)}[case.out]
    call = {"residual": residual, **branch} if case.residual else {}
    exact = once(reference.new_residual, x, residual, **options, **branch)
    out = residual_norm(x, scale, **options, **call, out=given, impl=impl)
    if case.residual:
        assert_within_budget("residual", residual, exact)
        gaps = torch.as_strided(residual, (max(0, case.num_rows - 1), case.padding),
                                residual.stride(), case.size)  # fmt: skip
        assert gaps.isnan().all()
    if scale is None:
        assert out is residual
        return
    # The norm reads the rounded residual.
    exact = once(reference.norm, residual if case.residual else before, scale, **options)
    assert_within_budget("out", out, exact)
    if given is None:
        assert out.dtype == x.dtype and out.is_contiguous()
    else:
        assert out is given
    if given is not x:
        assert x.equal(before)
