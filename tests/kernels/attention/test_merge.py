"""merge_partials, both implementations, against the oracle."""

import math

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels import merge_partials, paged_attention
from tests.kernels.oracles import attention as reference
from tests.support.helpers import (
    DEVICE,
    NAN,
    AttentionCase,
    assert_within_budget,
    attention_reference,
    make_batch,
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
    assert_merged(partial_out, partial_lse, sinks, impl)


def assert_merged(partial_out, partial_lse, sinks, impl):
    """Output and lse of a merge are within the oracle's budget; returns the output."""
    with bounding():
        exact_lse = torch.full(partial_lse.shape[1:], NAN, dtype=torch.float64, device=DEVICE)
        exact = reference.merge_partials(
            partial_out, partial_lse, sinks=sinks, lse=exact_lse, dtype=torch.float64
        )
    lse = torch.full(partial_lse.shape[1:], NAN, device=DEVICE)
    out = merge_partials(partial_out, partial_lse, sinks=sinks, lse=lse, impl=impl)
    assert out.dtype == partial_out.dtype
    assert_within_budget("out", out, exact)
    assert_within_budget("lse", lse, exact_lse)
    return out


@IMPLS
def test_infinite_sinks(impl):
    partial_out = torch.randn(3, 4, 2, 16, device=DEVICE)
    partial_lse = torch.randn(3, 2, 4, device=DEVICE)
    sinks = torch.tensor([math.inf, -math.inf], device=DEVICE)
    assert not assert_merged(partial_out, partial_lse, sinks, impl)[:, 0].any()


@IMPLS
def test_merging_two_halves_gives_the_whole(impl):
    """Attention over the keys of two disjoint page ranges, merged, is attention over all of them."""
    case = AttentionCase("", [64], [1], num_heads=6, in_step=False, sinks=True)
    batch = make_batch(case)
    sinks = batch["sinks"]
    exact, _ = attention_reference(batch)
    outs, lses = [], []
    for half in (slice(0, 2), slice(2, 4)):
        lse = torch.full((6, 1), NAN, device=DEVICE)
        lengths = torch.tensor([32], dtype=torch.int32, device=DEVICE)
        part = dict(batch, block_table=batch["block_table"][:, half], seq_lens=lengths, sinks=None)
        outs.append(paged_attention(**part, lse=lse, impl=impl))
        lses.append(lse)
    out = torch.full((1, 6, 16), NAN, device=DEVICE)
    merged = merge_partials(torch.stack(outs), torch.stack(lses), sinks=sinks, out=out, impl=impl)
    assert merged is out
    assert_within_budget("merged", out, exact)
