"""The arguments of one call of ``mla_attention``, ``compressed_attention`` or
``flash_mla_with_kvcache``, and checks of pages and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..common import checks
from ..common.latent_pages import LatentPages, RowPages


@dataclass(eq=False)
class LatentCall:
    """The arguments of one call; those without a comment are as in ``compressed_attention``."""

    q: torch.Tensor
    pages: RowPages  # of raw rows
    table: torch.Tensor  # ``window_table``; with ``slots`` [num_tokens, width] flat indices
    seq_lens: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    max_seqlen_q: int
    head_dim_v: int | None = None  # leading channels of a row that are its value; None: all
    softmax_scale: float | None = None
    num_decodes: int | None = None
    out: torch.Tensor | None = None
    sliding_window: int | None = None  # None: a query sees all raw rows before it
    kv: torch.Tensor | None = None
    entries: LatentPages | None = None  # ``compressed_pages``
    entry_table: torch.Tensor | None = None  # ``compressed_table``
    ratio: int | None = None  # ``compress_ratio``
    topk_indices: torch.Tensor | None = None  # with ``slots`` flat indices of entries
    topk_lens: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    cos_sin: torch.Tensor | None = None
    max_seq_len: int | None = None
    lse: torch.Tensor | None = None
    workspace: torch.Tensor | None = None
    # True for keys as lists of flat indices, page * rows of a page + row: every token is a
    # sequence; there are no lengths, and entries have no table.
    slots: bool = False
    window_lens: torch.Tensor | None = None  # elements of a list of raw rows that count
    tokens_per_len: int = 1  # tokens that share an element of window_lens and topk_lens

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return self.q.shape[0] if self.seq_lens is None else self.seq_lens.shape[0]

    @property
    def lists(self) -> bool:
        """True if every token has its own list of keys; a query tile then holds one token."""
        return self.slots or self.topk_indices is not None

    def lists_of_rows(self) -> list[tuple[RowPages, torch.Tensor, torch.Tensor | None]]:
        """Pages, flat indices and lengths of each kind of rows, with ``slots``."""
        found: list[tuple[RowPages, torch.Tensor, torch.Tensor | None]] = []
        found.append((self.pages, self.table, self.window_lens))
        if self.entries is not None and self.topk_indices is not None:
            found.append((self.entries, self.topk_indices, self.topk_lens))
        return found

    @property
    def bounded(self) -> bool:
        """True if a query has few keys at any context length: a window, top-k or slots."""
        if self.slots:
            return True
        return self.sliding_window is not None and (
            self.entries is None or self.topk_indices is not None
        )

    def raw_range(self, first: int, last: int, seq_len: int, q_len: int) -> tuple[int, int]:
        """Positions [low, high) in the pages that the queries at positions seq_len + first to
        seq_len + last - 1 see between them."""
        context = seq_len - q_len
        high = seq_len + last if self.kv is None else min(seq_len + last, context)
        low = 0
        if self.sliding_window is not None:
            # Of the rows in pages a later one has overwritten those before.
            oldest = (seq_len if self.kv is None else context) - self.page_room
            low = max(0, seq_len + first - self.sliding_window + 1, oldest)
        return low, max(low, high)

    def blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Columns of ``table`` for blocks of raw rows: of a ring, or at most the last one."""
        width = self.table.shape[1]
        if self.sliding_window is not None:
            return blocks % max(1, width)
        return blocks.clamp(max=width - 1)

    @property
    def page_room(self) -> int:
        """Raw rows that the pages of a sequence hold; in a ring new ones overwrite the oldest."""
        return min(self.table.shape[1] * self.pages.storage_block_size, checks.MAX_TOKENS)

    @property
    def entry_room(self) -> int:
        """Entries that the pages of a sequence hold; behind the end of the table there are none."""
        if self.entry_table is None or self.entries is None:
            return 0
        return min(self.entry_table.shape[1] * self.entries.storage_block_size, checks.MAX_TOKENS)

    @property
    def most_entries(self) -> int:
        """Entries that a query sees, at most; with ``slots`` all its keys."""
        topk = self.entry_room if self.topk_indices is None else self.topk_indices.shape[1]
        if self.slots:
            return self.table.shape[1] + (0 if self.topk_indices is None else topk)
        return min(topk, self.entry_room)

    @property
    def max_keys(self) -> int | None:
        """Upper bound of the keys of a query that are not of its step; None if unknown."""
        if self.slots:
            return self.most_entries
        known = [x for x in (self.max_seq_len, self.sliding_window) if x is not None]
        if not known:
            return None
        if self.ratio is None or self.topk_indices is not None:
            return min(known) + self.most_entries
        if self.max_seq_len is None:
            return None
        return min(known) + self.max_seq_len // self.ratio


def check_latent_pages(
    q: torch.Tensor,
    window_pages: LatentPages,
    compressed_pages: LatentPages | None,
    names: tuple[str, str] = ("window_pages", "compressed_pages"),
) -> None:
    """Check that queries and pages go together; ``names`` are those of both kinds of pages."""
    checks.expect_tensor("q", q, (None, None, None), checks.MODEL_DTYPES)
    checks.expect_int("q: num_heads", q.shape[1], 1)
    for name, pages in zip(names, (window_pages, compressed_pages), strict=True):
        if pages is None and name != names[0]:
            continue
        if not isinstance(pages, LatentPages):
            raise ValueError(f"{name}: expected LatentPages, got {type(pages).__name__}")
        if pages.head_dim != q.shape[2] or pages.rope_dim != window_pages.rope_dim:
            raise ValueError(
                f"{name}: expected head_dim {q.shape[2]} and rope_dim {window_pages.rope_dim}, "
                f"got {pages.head_dim} and {pages.rope_dim}"
            )
        if pages.fp8 != window_pages.fp8:
            raise NotImplementedError(
                f"{name}: quantized and plain pages in one call are not supported"
            )
        if pages.fp8 and q.dtype == torch.float16:
            raise NotImplementedError(
                "q: float16 with quantized pages; supported are bfloat16, float32"
            )
        if not pages.fp8 and pages.data.dtype != q.dtype:
            raise ValueError(f"{name}: expected {q.dtype} pages, got {pages.data.dtype}")
        checks.expect_device(name, pages.data, q.device)
        checks.expect_int(f"{name}: num_pages", pages.data.shape[0], 1)
        num_rows = pages.data.shape[0] * pages.storage_block_size
        if num_rows >= 2**31:  # lists of physical rows are int32 (``flash_mla_with_kvcache``)
            raise NotImplementedError(f"{name}: {num_rows} rows in one pool; supported are < 2**31")
    rope_dim = window_pages.rope_dim
    if rope_dim < 2 or rope_dim & (rope_dim - 1):
        raise NotImplementedError(f"{names[0]}: rope_dim {rope_dim} is not a power of two >= 2")


def check_values(call: LatentCall) -> None:
    """Check the ids of pages, rows and positions, in CPU tensors, wherever a query looks."""
    if call.seq_lens is None or call.cu_seqlens_q is None:
        for name, (pages, indices, lens) in zip(
            ("indices", "extra_indices_in_kvcache"), call.lists_of_rows(), strict=False
        ):
            count = pages.data.shape[0] * pages.storage_block_size
            checks.expect_ids(
                name, indices[listed(indices, lens, call.tokens_per_len)], count, "rows"
            )
        return
    lengths, bounds = checks.read_batch(call.seq_lens, call.cu_seqlens_q, call.q.shape[0])
    rows, device = call.pages.storage_block_size, call.q.device
    for s, seq_len in enumerate(lengths):
        first, last = bounds[s], bounds[s + 1]
        if first == last or seq_len == 0:
            continue
        if call.cos_sin is not None:
            position = torch.tensor([seq_len - 1], device=device)
            checks.expect_ids("cos_sin", position, call.cos_sin.shape[0], "positions")
        low, high = call.raw_range(first - last, 0, seq_len, last - first)
        stop = -(-high // rows) if low < high else low // rows
        blocks = torch.arange(low // rows, stop, device=device)
        name = "block_table" if call.sliding_window is None else "window_table"
        checks.expect_ids(name, call.table[s, call.blocks(blocks)], call.pages.data.shape[0])
        if call.entries is None or call.entry_table is None or call.ratio is None:
            continue
        count = min(seq_len // call.ratio, call.entry_room)
        entry = torch.arange(count, device=device)
        if call.topk_indices is not None:
            lens = None if call.topk_lens is None else call.topk_lens[first:last]
            entry = call.topk_indices[first:last]
            position = torch.arange(first, last, device=device) - last + seq_len
            visible = (position + 1).clamp(min=0) // call.ratio
            entry = entry[listed(entry, lens) & (entry < visible.clamp(max=count)[:, None])]
        ids = call.entry_table[s, entry // call.entries.storage_block_size]
        checks.expect_ids("compressed_table", ids, call.entries.data.shape[0])


def listed(lists: torch.Tensor, lens: torch.Tensor | None, tokens_per_len: int = 1) -> torch.Tensor:
    """Mask [n, width] of list elements that count: the first ``lens``, without -1."""
    live = lists >= 0
    if lens is not None:
        rank = torch.arange(lists.shape[1], device=lists.device)
        live = live & (rank < lens.repeat_interleave(tokens_per_len)[:, None])
    return live
