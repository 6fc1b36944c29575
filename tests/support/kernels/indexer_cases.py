"""Batches of ``index_topk`` with poison wherever nothing may be read.

Values are small integers by default, so that every score is exact in fp32, many are equal, and selected entries are compared one by one.
"""

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import torch

from quire.kernels import IndexPages
from tests.kernels.oracles import indexer as reference_indexer
from tests.support.helpers import DEVICE, NO_PAGE
from tests.support.kernels.quantised import poisoned_pages


@dataclasses.dataclass(frozen=True)
class IndexCase:
    """One ragged batch; the fields are the arguments of ``index_topk`` and what shapes them.

    values: "integers", "zeros" (every weight 0), "negative" (every weight below 0) or "normal".
    """

    name: str
    seq_lens: Sequence[int]
    q_lens: Sequence[int]
    topk: int = 8
    num_heads: int = 4
    index_dim: int = 16
    rows: int = 4
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    compress_ratio: int = 4
    max_seq_len: int | None = None
    values: str = "integers"


def make_index_batch(case, seed=42):
    """Arguments of ``index_topk`` for a case; pages permuted, and NaN or NO_PAGE in all that no query sees."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        if case.values == "normal":
            return torch.randn(shape, generator=generator)
        return torch.randint(-2, 3, shape, generator=generator).float()

    num_seqs, num_tokens, rows = len(case.seq_lens), sum(case.q_lens), case.rows
    entries = [
        max(0, n) // case.compress_ratio if q_len else 0
        for n, q_len in zip(case.seq_lens, case.q_lens, strict=True)
    ]
    width = max([1, *(-(-n // rows) for n in entries)])
    num_pages = num_seqs * width + 3
    order = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    dtype = torch.uint8 if case.fp8 else case.dtype
    pages = poisoned_pages(num_pages, rows, case.index_dim, dtype=dtype, device="cpu")
    # One column more than used, so that rows are strided as those of a shared table are.
    table = torch.full((num_seqs, width + 1), NO_PAGE, dtype=torch.int32)
    for s, count in enumerate(entries):
        for w in range(count):
            if w % rows == 0:
                table[s, w // rows] = order.pop()
            page, row = table[s, w // rows].item(), w % rows
            key = draw(case.index_dim)
            if case.fp8:
                pages.values[page, row] = key.to(torch.float8_e4m3fn).view(torch.uint8)
                pages.scales[page, row] = 0.375 if case.values == "normal" else 2.0 ** (w % 3 - 7)
            else:
                pages.data[page, row] = key.to(case.dtype)
    weights = draw(num_tokens, case.num_heads)
    # One head counts for every query: where all weights are below 0, the best scores are zeros, and those of the first entries.
    weights[:, 0] = 2
    if case.values == "zeros":
        weights.zero_()
    if case.values == "negative":
        weights = -weights.abs() - 1
    longest = max(case.seq_lens, default=0)
    return {
        "q": draw(num_tokens, case.num_heads, case.index_dim).to(DEVICE, case.dtype),
        "weights": weights.to(DEVICE),
        "pages": IndexPages(pages.data.to(DEVICE), rows, case.index_dim),
        "block_table": table.to(DEVICE)[:, :width],
        "seq_lens": torch.tensor(case.seq_lens, dtype=torch.int32, device=DEVICE),
        "cu_seqlens_q": torch.tensor([0, *accumulate(case.q_lens)], dtype=torch.int32, device=DEVICE),
        "topk": case.topk,
        "compress_ratio": case.compress_ratio,
        "max_seqlen_q": max(case.q_lens, default=0),
        "max_seq_len": longest if case.max_seq_len is None else case.max_seq_len,
    }  # fmt: skip


def exact_scores(batch):
    """The oracle's scores of each query's visible entries, computed on the host."""
    pages = batch["pages"]
    names = ("block_table", "seq_lens", "cu_seqlens_q")
    return reference_indexer.index_scores(
        batch["q"].cpu(),
        batch["weights"].cpu(),
        pages.data.cpu(),
        pages.storage_block_size,
        *(batch[name].cpu() for name in names),
        compress_ratio=batch["compress_ratio"],
    )
