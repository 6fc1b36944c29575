"""Rows far into a large pool of e4m3 pages: addresses, conversions and tables in one call."""

import pytest
import torch

from quire.kernels import paged_attention
from tests.support.helpers import (
    DEVICE,
    AttentionCase,
    assert_attends,
    attention_reference,
    make_batch,
)

pytestmark = pytest.mark.gpu


def test_rows_behind_2_to_the_32_bytes():
    """Pages spread over 4.3 GB; on a CPU what is never touched costs nothing."""
    case = AttentionCase("far", [33, 20], [1, 3], head_dim=64, dtype=torch.bfloat16, num_decodes=1)
    batch = make_batch(case)
    num_pages, *page = batch["k_pages"].shape
    page_bytes = torch.Size(page).numel()
    last = int(batch["block_table"][batch["block_table"] < num_pages].max())
    stride = (2**32 // last // page_bytes + 1) * page_bytes  # page `last` begins behind 2**32
    pool = torch.empty(num_pages * stride, dtype=torch.uint8, device=DEVICE)
    far, near = {"k_scale": 1.0, "v_scale": 1.0}, {}
    for i, name in enumerate(("k_pages", "v_pages")):
        spread = pool[i * page_bytes :].as_strided((num_pages, page_bytes), (stride, 1))
        values = batch[name].to(torch.float8_e4m3fn)
        spread.copy_(values.view(torch.uint8).flatten(1))
        far[name] = spread.unflatten(1, page).view(torch.float8_e4m3fn)
        near[name] = values.to(case.dtype)
    assert_attends(paged_attention, batch | far, attention_reference(batch | near))
