"""residual_norm, both implementations, against the oracle."""

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels import residual_norm
from tests.kernels.oracles import norm as reference
from tests.support.helpers import NAN, assert_within_budget, drawing, wider

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Arguments of `make`.
CASES = {
    "norm": dict(num_rows=3, size=64, residual=False),
    "norm-offset-bf16": dict(num_rows=3, size=48, dtype=BF16, residual=False, offset=1.0),
    "norm-bf16-to-fp32": dict(num_rows=3, size=48, dtype=BF16, residual=False, out="fp32"),
    "llama": dict(size=96),
    "llama-bf16": dict(size=96, dtype=BF16, padding=8),
    "norm-of-the-rounded-sum": dict(size=96, dtype=BF16, out="fp32"),
    "llama-bf16-in-place": dict(size=96, dtype=BF16, out="x"),
    "gemma-3": dict(post=True, offset=1.0, padding=3, out="fp32"),
    "gemma-3-bf16": dict(dtype=BF16, post=True, offset=1.0),
    "gemma-4": dict(post=True, scalar=True, out="x"),
    "gemma-4-bf16": dict(dtype=BF16, post=True, scalar=True),
    "gemma-4-fp16": dict(dtype=FP16, post=True, scalar=True, padding=1),
    "scaled-sum": dict(num_rows=2, size=33, dtype=BF16, scalar=True),
    "only-the-sum": dict(num_rows=3, size=64, dtype=BF16, weight=False, post=True),
    "only-the-scaled-sum": dict(num_rows=3, size=64, weight=False, scalar=True),
    "fp32-weights": dict(size=64, dtype=BF16, weight_dtype=FP32, post=True, offset=1.0),
    "one-channel": dict(num_rows=2, size=1, post=True),
    "odd-size": dict(num_rows=2, size=1153, post=True),
    "many-warps": dict(num_rows=2, size=5376, dtype=BF16, post=True, offset=1.0),
    "no-rows": dict(num_rows=0, size=64),
}


def make(
    num_rows=4, size=80, dtype=FP32, weight_dtype=None, weight=True, residual=True, post=False,
    scalar=False, offset=0.0, padding=0, out=None,
):  # fmt: skip
    """Arguments of a call.

    padding: channels between two rows. out: "x" itself, "fp32" rows, or None.
    """
    _, normal = drawing(0)

    def weights(there, size=size):
        values = 1 - offset + 0.3 * normal(size)
        return values.to(weight_dtype or dtype) if there else None

    rows = [wider(3 * normal(num_rows, size).to(dtype), after=padding) for _ in range(2)]
    into = {"x": rows[0], "fp32": torch.full_like(rows[0], NAN, dtype=FP32), None: None}
    # A large eps can be seen.
    call = {"x": rows[0], "weight": weights(weight), "eps": 1e-2, "offset": offset}
    if residual:
        call |= {"residual": rows[1], "post_weight": weights(post), "scalar": weights(scalar, 1)}
    return call | {"out": into[out]}


@pytest.mark.parametrize("name", CASES)
def test_residual_norm(impl, name):
    call = make(**CASES[name])
    x, residual, given, before = call["x"], call.get("residual"), call["out"], call["x"].clone()
    options = {name: call[name] for name in ("eps", "offset")}
    if residual is not None:
        branch = {name: call[name] for name in ("post_weight", "scalar")}
        with bounding():
            exact = reference.new_residual(x, residual, **options, **branch)
    out = residual_norm(**call, impl=impl)
    if residual is not None:
        assert_within_budget("residual", residual, exact)
        assert residual._base is None or residual._base[:, x.shape[1] :].isnan().all()
    if call["weight"] is None:
        assert out is residual
        return
    with bounding():  # the norm reads the rounded residual
        exact = reference.norm(before if residual is None else residual, call["weight"], **options)
    assert_within_budget("out", out, exact)
    assert out is given if given is not None else (out.dtype == x.dtype and out.is_contiguous())
    assert given is x or x.equal(before)
