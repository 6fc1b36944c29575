"""Batches for ``compressed_attention`` with poison wherever nothing may be read: NaN rows, NaN bytes, page ids that no pool has."""

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import torch

from quire.bench.common.bounds import bounding
from quire.kernels import LatentPages
from tests.kernels.oracles.compressed_attention import compressed_attention
from tests.support.helpers import DEVICE, NAN, NO_PAGE
from tests.support.kernels.quantised import poisoned_pages

W = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """One ragged batch.

    ratio None: sliding only; topk None: every entry (HCA). rows, entry_rows: of a page of raw rows and of entries. ring: the window's table
    is a ring of just enough pages; else linear. arch, num_sms: what tiles are for, and
    multiprocessors that decode work is divided for, None: the device's; scattered: the top-k
    indices of a token are shuffled, with -1 and entries of the future between.
    """

    name: str
    seq_lens: Sequence[int]
    q_lens: Sequence[int]
    ratio: int | None = None
    topk: int | None = None
    num_heads: int = 2
    head_dim: int = 16
    rope_dim: int = 4
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    in_step: bool = True
    rows: int = 4
    entry_rows: int = 4
    sliding_window: int = W
    ring: bool = True
    scattered: bool = True
    lens: bool = True
    sinks: bool = True
    inverse_rope: bool = True
    num_decodes: int | None = None
    max_seq_len: int | None = None
    softmax_scale: float | None = None
    num_sms: int | None = None
    arch: str | None = None


class Pool:
    """Pages of latent rows, all poison, of which rows are filled one at a time."""

    def __init__(self, case, num_pages, rows, generator):
        self.case, self.generator = case, generator
        self.order = torch.randperm(num_pages, generator=generator).tolist()
        dtype = torch.uint8 if case.fp8 else case.dtype
        sizes = rows, case.head_dim, case.rope_dim
        self.pages = poisoned_pages(num_pages, *sizes, dtype, device="cpu")

    def fill(self, page, row):
        """Put random numbers into a row."""
        if not self.case.fp8:
            x = torch.randn(self.case.head_dim, generator=self.generator)
            self.pages.data[page, row] = x.to(self.case.dtype)
            return
        quantized = torch.randint(0, 127, (448,), generator=self.generator)
        quantized += 128 * torch.randint(0, 2, (448,), generator=self.generator)
        rope = torch.randn(64, generator=self.generator).bfloat16()
        scales = torch.randint(113, 123, (7,), generator=self.generator)
        n, data = self.pages.storage_block_size, self.pages.data[page]
        data[row * 576 : row * 576 + 448] = quantized.to(torch.uint8)
        data[row * 576 + 448 : row * 576 + 576] = rope.view(torch.uint8)
        data[n * 576 + row * 8 : n * 576 + row * 8 + 7] = scales.to(torch.uint8)
        data[n * 576 + row * 8 + 7] = 0

    def cell(self, table, s, entry, row):
        """Fill a row of the page of a table's entry, taking a page for it if it has none."""
        if table[s, entry] == NO_PAGE:
            table[s, entry] = self.order.pop()
        self.fill(int(table[s, entry]), row)


def make_batch(case, seed=42):
    """Arguments of ``compressed_attention`` for a case, on the test device."""
    generator = torch.Generator().manual_seed(seed)
    num_seqs, num_tokens = len(case.seq_lens), sum(case.q_lens)
    cu = [0, *accumulate(case.q_lens)]
    width = max(1, *(-(-n // case.rows) for n in case.seq_lens))
    if case.ring:
        own = 0 if case.in_step else max(case.q_lens)
        width = -(-(case.sliding_window - 1 + own) // case.rows) + 1
    window_table = _table(num_seqs, width)
    window = Pool(case, num_seqs * min(width, 999) + 1, case.rows, generator)
    kv = torch.randn(num_tokens, case.head_dim, generator=generator).to(case.dtype)
    topk_indices = lens = entries = entry_table = None
    if case.ratio is not None:
        blocks = [-(-(n // case.ratio) // case.entry_rows) for n in case.seq_lens]
        entry_table = _table(num_seqs, max(1, *blocks))
        pool_size = sum(blocks)
        if case.topk is not None:
            topk_indices, lens, named = _topk_indices(case, cu, generator)
            pool_size = len({(s, w // case.entry_rows) for s, w in named})
        else:
            named = [(s, w) for s, n in enumerate(case.seq_lens) for w in range(n // case.ratio)]
        entries = Pool(case, pool_size + 1, case.entry_rows, generator)
        for s, w in named:
            entries.cell(entry_table, s, w // case.entry_rows, w % case.entry_rows)
    for s, (seq_len, q_len) in enumerate(zip(case.seq_lens, case.q_lens, strict=True)):
        context = seq_len - q_len
        for j in range(
            max(0, context - case.sliding_window + 1), context if case.in_step else seq_len
        ):
            if q_len:
                window.cell(window_table, s, j // case.rows % width, j % case.rows)
        # The new rows of a padding sequence, of length 0, are keys of no query.
        kv[cu[s] : cu[s] + max(0, -context)] = NAN
    q = torch.randn(num_tokens, case.num_heads, case.head_dim, generator=generator).to(case.dtype)
    batch = {
        "q": q,
        "window_table": window_table,
        "seq_lens": torch.tensor(case.seq_lens, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor(cu, dtype=torch.int32),
        "kv": kv if case.in_step else None,
        "compressed_table": entry_table,
        "topk_indices": topk_indices,
        "topk_lens": lens,
        "sinks": torch.randn(case.num_heads, generator=generator) if case.sinks else None,
        "cos_sin": _angles(case) if case.inverse_rope else None,
    }
    batch = {name: x if x is None else x.to(DEVICE) for name, x in batch.items()}
    for name, pool, rows in (
        ("window_pages", window, case.rows),
        ("compressed_pages", entries, case.entry_rows),
    ):
        batch[name] = pool and LatentPages(
            pool.pages.data.to(DEVICE), rows, case.head_dim, case.rope_dim
        )
    return batch | {
        "sliding_window": case.sliding_window,
        "max_seqlen_q": max(case.q_lens, default=0),
        "compress_ratio": case.ratio,
        "num_decodes": case.num_decodes,
        "max_seq_len": case.max_seq_len,
        "softmax_scale": case.softmax_scale,
    }


def _table(num_seqs, width):
    # One column more than used, so that rows are strided as those of a shared table are.
    return torch.full((num_seqs, width + 1), NO_PAGE, dtype=torch.int32)[:, :width]


def _angles(case):
    """Cosines and sines of every position of the batch; NaN where no query stands."""
    table = torch.full((max([1, *case.seq_lens]), case.rope_dim), NAN)
    for seq_len, q_len in zip(case.seq_lens, case.q_lens, strict=True):
        position = torch.arange(max(0, seq_len - q_len), seq_len)
        inverse = 10.0 ** -torch.arange(case.rope_dim // 2)
        angle = position[:, None].double() * inverse
        table[position] = torch.cat([angle.cos(), angle.sin()], 1).float()
    return table


def _topk_indices(case, cu, generator):
    """Top-k indices of every token, their lengths, and the (sequence, entry) pairs that are named and visible."""
    topk_indices = torch.full((cu[-1], case.topk), NO_PAGE, dtype=torch.int32)
    lens, named = torch.zeros(cu[-1], dtype=torch.int32), set()
    for s, seq_len in enumerate(case.seq_lens):
        for token in range(cu[s], cu[s + 1]):
            visible = max(0, (seq_len - cu[s + 1] + token + 1) // case.ratio)
            chosen = torch.randint(0, max(1, visible), (4 * case.topk,), generator=generator)
            # The newest entry is always named: it is the one that an off-by-one loses.
            chosen = list(dict.fromkeys([visible - 1, *chosen.tolist()]))[: case.topk]
            chosen = [w for w in chosen if 0 <= w < visible]
            named |= {(s, w) for w in chosen}
            if case.scattered:
                chosen = chosen[: case.topk - 2]
                chosen = [visible, *chosen[:1], -1, *chosen[1:]][: case.topk]
            if not case.lens:
                chosen += [-1] * (case.topk - len(chosen))
            topk_indices[token, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
            lens[token] = len(chosen)
    return topk_indices, lens if case.lens else None, sorted(named)


def exactly(batch):
    """Output and lse of the oracle with bounds, on the host."""
    host = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    for name in ("window_pages", "compressed_pages"):
        pages = batch[name]
        if pages is not None:
            host[name] = dataclasses.replace(pages, data=pages.data.cpu())
    with bounding(weights=batch["q"].dtype):
        lse = torch.full((batch["q"].shape[1], batch["q"].shape[0]), NAN, dtype=torch.float64)
        out = compressed_attention(**host, lse=lse)
    return out, lse
