"""merge_partials, both implementations, against the oracle."""

import math

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels import merge_partials
from tests.kernels.oracles import attention as reference
from tests.support.helpers import DEVICE, NAN, assert_within_budget, drawing

# Arguments of `make`.
MERGES = {
    "one-part": dict(num_parts=1),
    "two-parts": dict(num_parts=2),
    "many-parts": dict(num_parts=37, num_tokens=2),
    "bf16": dict(dtype=torch.bfloat16),
    "d512": dict(num_parts=9, head_dim=512, num_tokens=2),
    "sinks": dict(num_parts=4, sinks=True),
    "fp16-sinks": dict(num_parts=4, sinks=True, dtype=torch.float16),
    "no-tokens": dict(num_tokens=0),
}


def make(num_parts=3, num_tokens=7, num_heads=3, head_dim=16, dtype=torch.float32, sinks=False):
    """Arguments of a call with memory for the results; rows of empty parts are poison."""
    _, normal = drawing(3)
    parts = normal(num_parts, num_tokens, num_heads, head_dim).to(dtype)
    part_lse = normal(num_parts, num_heads, num_tokens) * 8
    if num_tokens:
        part_lse[0, 1], parts[0, :, 1] = -math.inf, NAN
        part_lse[:, 2, 1], parts[:, 1, 2] = -math.inf, NAN  # a row without any keys
    return {
        "partial_out": parts,
        "partial_lse": part_lse,
        "sinks": normal(num_heads) if sinks else None,
        "out": torch.full_like(parts[0], NAN),
        "lse": torch.full(part_lse.shape[1:], NAN, device=DEVICE),
    }


@pytest.mark.parametrize("name", MERGES)
def test_merge_partials(impl, name):
    call = make(**MERGES[name])
    assert merge_partials(**call, impl=impl) is call["out"]
    for result, exact in zip(("out", "lse"), merge_reference(call), strict=True):
        assert_within_budget(result, call[result], exact)


def merge_reference(call):
    """Output and lse of the oracle with bounds."""
    given = {name: call[name] for name in ("partial_out", "partial_lse", "sinks")}
    with bounding():
        shape = call["partial_lse"].shape[1:]
        lse = torch.full(shape, NAN, dtype=torch.float64, device=DEVICE)
        return reference.merge_partials(**given, lse=lse), lse
