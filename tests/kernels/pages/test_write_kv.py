"""write_kv, both implementations, against the oracle."""

import pytest
import torch

from quire.kernels import write_kv
from tests.kernels.oracles import write_kv as reference
from tests.support.helpers import (
    DEVICE,
    AttentionCase,
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
    reference.write_kv(k, v, *expected, slots)
    for got, want in zip(pages, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
