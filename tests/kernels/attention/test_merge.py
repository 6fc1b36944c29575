"""merge_partials, both implementations, against the oracle."""

import math

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels import merge_partials
from tests.kernels.oracles import attention as reference
from tests.support.helpers import (
    DEVICE,
    NAN,
    assert_within_budget,
)

IMPLS = pytest.mark.parametrize("impl", ["triton", "torch"])
MERGES = {
    "one-part": dict(num_parts=1),
    "two-parts": dict(num_parts=2),
    "many-parts": dict(num_parts=37, num_tokens=2),
    "bf16": dict(num_parts=3, dtype=torch.bfloat16),
    "d512": dict(num_parts=9, head_dim=512, num_tokens=2),
    "sinks": dict(num_parts=4, sinks=True),
    "fp16-sinks": dict(num_parts=4, sinks=True, dtype=torch.float16),
    "no-tokens": dict(num_parts=3, num_tokens=0),
}


@IMPLS
@pytest.mark.parametrize("name", MERGES)
def test_merge_partials(impl, name):
    shape = {"num_tokens": 7, "head_dim": 16, "dtype": torch.float32, "sinks": False} | MERGES[name]
    parts, tokens, heads = shape["num_parts"], shape["num_tokens"], 3
    partial_out = torch.randn(parts, tokens, heads, shape["head_dim"]).to(DEVICE, shape["dtype"])
    partial_lse = torch.randn(parts, heads, tokens, device=DEVICE) * 8
    if tokens:
        partial_lse[0, 1] = -math.inf  # an empty part, whose rows hold poison
        partial_out[0, :, 1] = NAN
        partial_lse[:, 2, 1] = -math.inf  # a row that no part has a key for
        partial_out[:, 1, 2] = NAN
    sinks = torch.randn(heads, device=DEVICE) if shape["sinks"] else None
    batch = {"partial_out": partial_out, "partial_lse": partial_lse, "sinks": sinks}
    lse = torch.full(partial_lse.shape[1:], NAN, device=DEVICE)
    out = merge_partials(**batch, lse=lse, impl=impl)
    assert out.dtype == partial_out.dtype
    for found, exact in zip((out, lse), merge_reference(batch), strict=True):
        assert_within_budget("merged", found, exact)


def merge_reference(batch):
    """Output and lse of the oracle with bounds."""
    with bounding():
        shape = batch["partial_lse"].shape[1:]
        lse = torch.full(shape, NAN, dtype=torch.float64, device=DEVICE)
        return reference.merge_partials(**batch, lse=lse), lse
