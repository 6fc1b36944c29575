"""Copies of pages to and from pinned memory, which only a device has: by a kernel and by copy engines, without waiting."""

import pytest
import torch

from quire.kernels import PoolPages, gather_pages, scatter_pages
from tests.gpu.conftest import without_waiting

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_pages_come_back_from_pinned_memory(cuda, impl):
    generator = torch.Generator().manual_seed(4)
    made = torch.randint(256, (3, 64, 9 * 576), generator=generator, dtype=torch.uint8)
    pages = PoolPages(list(made.to(cuda).unbind()))
    host = torch.zeros(40, pages.num_bytes, dtype=torch.uint8).pin_memory()
    page_ids, rows = (torch.randperm(n, generator=generator)[:32] for n in (64, 40))
    ids = [i.to(cuda) if impl == "triton" else i for i in (page_ids, rows)]
    torch.cuda.synchronize()
    with without_waiting():
        gather_pages(pages, ids[0], host, ids[1], impl=impl)
    torch.cuda.synchronize()
    assert host[rows].equal(made[:, page_ids].transpose(0, 1).flatten(1))
    for tensor in pages.tensors:
        tensor.zero_()
    scatter_pages(pages, ids[0], host, ids[1], impl=impl)
    back = torch.stack(pages.tensors).cpu()
    assert back[:, page_ids].equal(made[:, page_ids])
    assert back.sum(dtype=torch.int64) == made[:, page_ids].sum(dtype=torch.int64)


def test_memory_that_the_device_cannot_reach(cuda):
    pages = PoolPages([torch.zeros(4, 64, dtype=torch.uint8, device=cuda)])
    ids = torch.zeros(1, dtype=torch.int64, device=cuda)
    with pytest.raises(ValueError, match=r"^buffer: expected a tensor on cuda:0 or in pinned host"):
        gather_pages(pages, ids, torch.zeros(2, 64, dtype=torch.uint8))
