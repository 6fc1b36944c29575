"""write_kv and merge_partials, both implementations, against the oracles."""

import math

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels import merge_partials, paged_attention, write_kv
from tests.kernels.oracles import attention as reference
from tests.kernels.oracles import write_kv as reference_write
from tests.support.helpers import (
    DEVICE,
    NAN,
    AttentionCase,
    assert_within_budget,
    attention_reference,
    make_batch,
    make_pages,
)

IMPLS = pytest.mark.parametrize("impl", ["triton", "torch"])
WRITES = {
    "no-rows": (0, AttentionCase("", [], [])),
    "one-row": (1, AttentionCase("", [], [], block_size=1)),
    "odd-heads": (11, AttentionCase("", [], [], num_kv_heads=5, block_size=7)),
    "many-heads": (5, AttentionCase("", [], [], num_kv_heads=20, head_dim=512)),
    "interleaved-bf16": (9, AttentionCase("", [], [], layout="interleaved", dtype=torch.bfloat16)),
    "head-major-fp16": (9, AttentionCase("", [], [], layout="hnd", dtype=torch.float16)),
}


@IMPLS
@pytest.mark.parametrize("name", WRITES)
def test_write_kv(impl, name):
    num_rows, case = WRITES[name]
    num_pages = 4 if case.block_size > 1 else 32
    shape = (num_rows, case.num_kv_heads, case.head_dim)
    # Rows of one fused projection, as a model has them.
    fused = torch.randn(num_rows, 2 * case.num_kv_heads, case.head_dim).to(DEVICE, case.dtype)
    k, v = fused[:, : case.num_kv_heads], fused[:, case.num_kv_heads :]
    assert k.shape == shape
    slots = torch.randperm(num_pages * case.block_size)[:num_rows].to(DEVICE)
    slots[1::3] = -1
    pages, expected = make_pages(case, num_pages), make_pages(case, num_pages)
    write_kv(k, v, *pages, slots, impl=impl)
    reference_write.write_kv(k, v, *expected, slots)
    for got, want in zip(pages, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@IMPLS
def test_written_keys_are_what_attention_reads(impl):
    """The runner's order: attention over the context and new K/V, then the write; the next step reads them from the pages."""
    batch = make_batch(AttentionCase("", [37], [12], in_step=False))
    exact, _ = attention_reference(batch)
    paged = paged_attention(**batch, impl=impl)
    assert_within_budget("paged", paged, exact)
    positions = torch.arange(25, 37, device=DEVICE)
    page, row = batch["block_table"][0, positions // 16].long(), positions % 16
    k, v = batch["k_pages"][page, row], batch["v_pages"][page, row]
    batch["k_pages"][page, row] = NAN
    batch["v_pages"][page, row] = NAN
    in_step = paged_attention(**batch | {"k": k, "v": v}, impl=impl)
    assert_within_budget("in-step", in_step, exact)
    write_kv(k, v, batch["k_pages"], batch["v_pages"], page * 16 + row, impl=impl)
    assert paged_attention(**batch, impl=impl).equal(paged)


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
