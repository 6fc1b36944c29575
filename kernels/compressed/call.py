"""The checked arguments of one call of ``compressed_attention`` or of ``flash_mla_with_kvcache``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..common import checks
from ..common.latent_pages import LatentPages
from ..common.tile_shapes import MAX_ROWS


@dataclass(frozen=True, eq=False)
class CompressedCall:
    """Checked arguments with the defaults filled in; named and shaped as in ``compressed.compressed_attention``.

    With ``slots`` every token is a sequence, seq_lens and cu_seqlens_q are None, and keys come as lists of physical rows: window_table
    [num_tokens, width] and topk_indices, of which the first ``window_lens`` and ``topk_lens`` count (-1 = none), each for
    ``tokens_per_len`` tokens.
    """

    q: torch.Tensor
    window_pages: LatentPages
    window_table: torch.Tensor
    seq_lens: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    sliding_window: int
    max_seqlen_q: int
    kv: torch.Tensor | None
    compressed_pages: LatentPages | None
    compressed_table: torch.Tensor | None
    compress_ratio: int | None
    topk_indices: torch.Tensor | None
    topk_lens: torch.Tensor | None
    sinks: torch.Tensor | None
    softmax_scale: float
    cos_sin: torch.Tensor | None
    max_seq_len: int | None
    num_decodes: int
    out: torch.Tensor
    lse: torch.Tensor | None
    workspace: torch.Tensor | None
    slots: bool = False
    window_lens: torch.Tensor | None = None
    tokens_per_len: int = 1

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return self.q.shape[0] if self.seq_lens is None else self.seq_lens.shape[0]

    @property
    def picked(self) -> bool:
        """Whether every token has keys of its own, so that a query tile holds one token."""
        return self.slots or self.topk_indices is not None

    @property
    def bounded(self) -> bool:
        """Whether a token's keys stay few at any context length."""
        return self.compressed_pages is None or self.topk_indices is not None

    @property
    def window_room(self) -> int:
        """Raw rows that the pages of a sequence hold: a later one overwrites the one so many positions before."""
        room = self.window_table.shape[1] * self.window_pages.storage_block_size
        return min(room, checks.MAX_TOKENS)

    @property
    def entry_room(self) -> int:
        """Entries that the pages of a sequence hold: those behind the end of the table are not there."""
        if self.compressed_table is None or self.compressed_pages is None:
            return 0
        room = self.compressed_table.shape[1] * self.compressed_pages.storage_block_size
        return min(room, checks.MAX_TOKENS)

    def max_keys(self, block_q: int) -> int | None:
        """Upper bound of the keys of a query tile of ``block_q`` tokens; None if unknown."""
        raw = self.window_table.shape[1] if self.slots else self.sliding_window + block_q - 1
        if self.compressed_pages is None:
            return raw
        if self.topk_indices is not None:
            return raw + self.topk_indices.shape[1]
        if self.max_seq_len is None or self.compress_ratio is None:
            return None
        return raw + self.max_seq_len // self.compress_ratio


def check(
    q: torch.Tensor,
    window_pages: LatentPages,
    window_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    sliding_window: int,
    max_seqlen_q: int,
    kv: torch.Tensor | None,
    compressed_pages: LatentPages | None,
    compressed_table: torch.Tensor | None,
    compress_ratio: int | None,
    topk_indices: torch.Tensor | None,
    topk_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    softmax_scale: float | None,
    cos_sin: torch.Tensor | None,
    max_seq_len: int | None,
    num_decodes: int | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> CompressedCall:
    """Check the arguments of ``compressed_attention`` and fill in the defaults; see there for shapes and errors."""
    check_rows(q, window_pages, compressed_pages, sinks, out)
    num_tokens, num_heads, head_dim = q.shape
    device = q.device
    checks.expect_tensor("seq_lens", seq_lens, (None,), torch.int32, device=device)
    num_seqs = seq_lens.shape[0]
    checks.expect_tensor("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), torch.int32, device=device)
    checks.expect_tensor("window_table", window_table, (num_seqs, None), torch.int32, device=device)
    checks.expect_int("window_table: width", window_table.shape[1], 1)
    sliding_window = checks.window_tokens(sliding_window)
    checks.expect_int("max_seqlen_q", max_seqlen_q, 0)
    if kv is not None:
        checks.expect_tensor("kv", kv, (num_tokens, head_dim), q.dtype, device=device)
    given = (compressed_pages is not None, compressed_table is not None, compress_ratio is not None)
    if any(given) and not all(given):
        raise ValueError(
            f"compressed_pages: expected compressed_pages, compressed_table and compress_ratio together or none, got {given}"
        )
    if compressed_table is not None:
        checks.expect_tensor(
            "compressed_table", compressed_table, (num_seqs, None), torch.int32, device=device
        )
        checks.expect_int("compressed_table: width", compressed_table.shape[1], 1)
        checks.expect_int("compress_ratio", compress_ratio, 1, checks.MAX_TOKENS)
    if topk_indices is not None:
        if compressed_pages is None:
            raise ValueError("topk_indices: expected None without compressed_pages, got a tensor")
        shape = (num_tokens, None)
        checks.expect_tensor("topk_indices", topk_indices, shape, torch.int32, device=device)
    if topk_lens is not None:
        if topk_indices is None:
            raise ValueError("topk_lens: expected None without topk_indices, got a tensor")
        checks.expect_tensor("topk_lens", topk_lens, (num_tokens,), torch.int32, device=device)
    if cos_sin is not None:
        shape = (None, window_pages.rope_dim)
        checks.expect_tensor("cos_sin", cos_sin, shape, torch.float32, device=device)
    if lse is not None:
        checks.expect_tensor("lse", lse, (num_heads, num_tokens), torch.float32, device=device)
        checks.expect_apart("lse", lse)
    if workspace is not None:
        checks.expect_tensor("workspace", workspace, (None,), torch.float32, device=device)
    if max_seq_len is not None:
        checks.expect_int("max_seq_len", max_seq_len, 0)
    if num_decodes is None:
        num_decodes = num_seqs if max_seqlen_q <= 1 else 0
    checks.expect_int("num_decodes", num_decodes, 0, num_seqs)
    if num_decodes == num_seqs and num_seqs * max_seqlen_q < num_tokens:
        # No prefill kernel is launched for sequences longer than that.
        raise ValueError(
            f"max_seqlen_q: expected the longest of {num_seqs} sequences with {num_tokens} tokens, got {max_seqlen_q}"
        )
    return CompressedCall(
        q=q,
        window_pages=window_pages,
        window_table=window_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        sliding_window=sliding_window,
        # Grids are sized by it. A tile never holds more tokens than rows, so its shape stays what it is.
        max_seqlen_q=min(max_seqlen_q, max(num_tokens, MAX_ROWS)),
        kv=kv,
        compressed_pages=compressed_pages,
        compressed_table=compressed_table,
        compress_ratio=compress_ratio,
        topk_indices=topk_indices,
        topk_lens=topk_lens,
        sinks=sinks,
        softmax_scale=checks.softmax_factor(softmax_scale, head_dim),
        cos_sin=cos_sin,
        max_seq_len=max_seq_len,
        num_decodes=num_decodes,
        out=torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out,
        lse=lse,
        workspace=workspace,
    )


def check_rows(
    q: torch.Tensor,
    window_pages: LatentPages,
    compressed_pages: LatentPages | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    names: tuple[str, str, str] = ("window_pages", "compressed_pages", "sinks"),
) -> None:
    """Require queries and pages that go together; ValueError and NotImplementedError as in ``compressed_attention``.

    names: what the caller calls window_pages, compressed_pages and sinks.
    """
    checks.expect_tensor("q", q, (None, None, None), checks.MODEL_DTYPES)
    num_heads, head_dim = q.shape[1:]
    checks.expect_int("q: num_heads", num_heads, 1)
    for name, pages in ((names[0], window_pages), (names[1], compressed_pages)):
        if pages is None and name != names[0]:
            continue
        if not isinstance(pages, LatentPages):
            raise ValueError(f"{name}: expected LatentPages, got {type(pages).__name__}")
        if pages.head_dim != head_dim or pages.rope_dim != window_pages.rope_dim:
            raise ValueError(
                f"{name}: expected head_dim {head_dim} and rope_dim {window_pages.rope_dim}, "
                f"got {pages.head_dim} and {pages.rope_dim}"
            )
        if pages.fp8 != window_pages.fp8:
            raise NotImplementedError(
                f"{name}: quantised and plain pages in one call are not supported"
            )
        if pages.fp8 and q.dtype == torch.float16:
            raise NotImplementedError(
                "q: float16 with quantised pages; supported are bfloat16, float32"
            )
        if not pages.fp8 and pages.data.dtype != q.dtype:
            raise ValueError(f"{name}: expected {q.dtype} pages, got {pages.data.dtype}")
        if pages.data.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, got {pages.data.device}")
        checks.expect_int(f"{name}: num_pages", pages.data.shape[0], 1)
        if pages.data.shape[0] * pages.storage_block_size >= 2**31:
            # A row of the pool is one int32 (``query_tile``).
            raise NotImplementedError(
                f"{name}: {pages.data.shape[0] * pages.storage_block_size} rows in one pool; supported are < 2**31"
            )
    rope_dim = window_pages.rope_dim
    if rope_dim < 2 or rope_dim & (rope_dim - 1):
        raise NotImplementedError(f"{names[0]}: rope_dim {rope_dim} is not a power of two >= 2")
    if sinks is not None:
        checks.expect_tensor(names[2], sinks, (num_heads,), torch.float32, device=q.device)
    if out is not None:
        checks.expect_tensor("out", out, tuple(q.shape), q.dtype, device=q.device)
        checks.expect_apart("out", out)
