"""Checked arguments of a call of ``compressed_attention`` or ``flash_mla_with_kvcache``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..common import checks
from ..common.latent_pages import LatentPages
from ..common.tile_shapes import MAX_ROWS

OWN_NAMES = ("window_pages", "compressed_pages", "sinks")


@dataclass(frozen=True, eq=False)
class CompressedCall:
    """The arguments of one call, checked when it is made, with the defaults filled in.

    With ``slots`` every token is a sequence, and keys come as lists of flat indices
    (page * rows of a page + row): ``window_table`` and ``topk_indices``.

    Args:
        q ... workspace: named and shaped as in ``compressed_attention``, which says what is raised.
            With ``slots`` window_table is [num_tokens, width], and seq_lens, cu_seqlens_q and the
            compressed table are None.
        slots: whether this is a call of ``flash_mla_with_kvcache``.
        window_lens, topk_lens: with ``slots`` how many entries of a list count (-1 = none), each
            for ``tokens_per_len`` tokens.
    """

    q: torch.Tensor
    window_pages: LatentPages
    window_table: torch.Tensor
    seq_lens: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    sliding_window: int
    max_seqlen_q: int
    kv: torch.Tensor | None = None
    compressed_pages: LatentPages | None = None
    compressed_table: torch.Tensor | None = None
    compress_ratio: int | None = None
    topk_indices: torch.Tensor | None = None
    topk_lens: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    softmax_scale: float | None = None
    cos_sin: torch.Tensor | None = None
    max_seq_len: int | None = None
    num_decodes: int | None = None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    workspace: torch.Tensor | None = None
    slots: bool = False
    window_lens: torch.Tensor | None = None
    tokens_per_len: int = 1

    def __post_init__(self) -> None:
        names = ("k_cache", "extra_k_cache", "attn_sink") if self.slots else OWN_NAMES
        check_rows(self.q, self.window_pages, self.compressed_pages, self.sinks, self.out, names)
        filled: dict[str, Any] = {}
        if not self.slots:
            filled = self._check_sequences()
        if self.workspace is not None:
            checks.expect_tensor(
                "workspace", self.workspace, (None,), torch.float32, device=self.q.device
            )
        filled["softmax_scale"] = checks.softmax_factor(self.softmax_scale, self.q.shape[2])
        if self.out is None:
            filled["out"] = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        for name, value in filled.items():
            object.__setattr__(self, name, value)

    def _check_sequences(self) -> dict[str, Any]:
        """Check what only calls without ``slots`` have; returns the host values to fill in."""
        num_tokens, num_heads, head_dim = self.q.shape
        device = self.q.device

        def expect(name: str, shape: tuple[int | None, ...], dtype: torch.dtype) -> None:
            checks.expect_tensor(name, getattr(self, name), shape, dtype, device=device)

        expect("seq_lens", (None,), torch.int32)
        assert self.seq_lens is not None
        num_seqs = self.seq_lens.shape[0]
        expect("cu_seqlens_q", (num_seqs + 1,), torch.int32)
        expect("window_table", (num_seqs, None), torch.int32)
        sliding_window = checks.window_tokens(self.sliding_window)
        checks.expect_int("max_seqlen_q", self.max_seqlen_q, 0)
        if self.kv is not None:
            expect("kv", (num_tokens, head_dim), self.q.dtype)
        given = tuple(
            x is not None
            for x in (self.compressed_pages, self.compressed_table, self.compress_ratio)
        )
        if any(given) and not all(given):
            raise ValueError(
                "compressed_pages: expected compressed_pages, compressed_table and "
                f"compress_ratio together or none, got {given}"
            )
        if self.compressed_table is not None:
            expect("compressed_table", (num_seqs, None), torch.int32)
            checks.expect_int("compressed_table: width", self.compressed_table.shape[1], 1)
            checks.expect_int("compress_ratio", self.compress_ratio, 1, checks.MAX_TOKENS)
        if self.topk_indices is not None:
            if self.compressed_pages is None:
                raise ValueError(
                    "topk_indices: expected None without compressed_pages, got a tensor"
                )
            expect("topk_indices", (num_tokens, None), torch.int32)
        if self.topk_lens is not None:
            if self.topk_indices is None:
                raise ValueError("topk_lens: expected None without topk_indices, got a tensor")
            expect("topk_lens", (num_tokens,), torch.int32)
        if self.cos_sin is not None:
            expect("cos_sin", (None, self.window_pages.rope_dim), torch.float32)
        if self.lse is not None:
            expect("lse", (num_heads, num_tokens), torch.float32)
            checks.expect_apart("lse", self.lse)
        if self.max_seq_len is not None:
            checks.expect_int("max_seq_len", self.max_seq_len, 0)
        num_decodes = self.num_decodes
        if num_decodes is None:
            num_decodes = num_seqs if self.max_seqlen_q <= 1 else 0
        checks.expect_int("num_decodes", num_decodes, 0, num_seqs)
        if num_decodes == num_seqs and num_seqs * self.max_seqlen_q < num_tokens:
            # No prefill kernel is launched for sequences longer than that.
            raise ValueError(
                f"max_seqlen_q: expected the longest of {num_seqs} sequences with {num_tokens} "
                f"tokens, got {self.max_seqlen_q}"
            )
        return {
            "sliding_window": sliding_window,
            # Grids are sized by it. A tile never holds more tokens than rows, so its shape stays.
            "max_seqlen_q": min(self.max_seqlen_q, max(num_tokens, MAX_ROWS)),
            "num_decodes": num_decodes,
        }

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return self.q.shape[0] if self.seq_lens is None else self.seq_lens.shape[0]

    @property
    def has_topk(self) -> bool:
        """Whether every token has keys of its own, so that a query tile holds one token."""
        return self.slots or self.topk_indices is not None

    @property
    def bounded(self) -> bool:
        """Whether a token's keys stay few at any context length."""
        return self.compressed_pages is None or self.topk_indices is not None

    @property
    def ratio(self) -> int:
        """Raw tokens of an entry; without entries more than a sequence has."""
        return checks.MAX_TOKENS if self.compress_ratio is None else self.compress_ratio

    @property
    def window_room(self) -> int:
        """Raw rows that the pages of a sequence hold; a later one overwrites the oldest."""
        room = self.window_table.shape[1] * self.window_pages.storage_block_size
        return min(room, checks.MAX_TOKENS)

    @property
    def entry_room(self) -> int:
        """Entries that the pages of a sequence hold; behind the end of the table there are none."""
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


def check_rows(
    q: torch.Tensor,
    window_pages: LatentPages,
    compressed_pages: LatentPages | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    names: tuple[str, str, str],
) -> None:
    """Require queries and pages that go together.

    Args:
        q, window_pages, compressed_pages, sinks, out: as in ``compressed_attention``.
        names: what the caller calls window_pages, compressed_pages and sinks.

    Raises:
        ValueError, NotImplementedError: as in ``compressed_attention``.
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
                f"{name}: quantized and plain pages in one call are not supported"
            )
        if pages.fp8 and q.dtype == torch.float16:
            raise NotImplementedError(
                "q: float16 with quantized pages; supported are bfloat16, float32"
            )
        if not pages.fp8 and pages.data.dtype != q.dtype:
            raise ValueError(f"{name}: expected {q.dtype} pages, got {pages.data.dtype}")
        if pages.data.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device}, got {pages.data.device}")
        checks.expect_int(f"{name}: num_pages", pages.data.shape[0], 1)
        if pages.data.shape[0] * pages.storage_block_size >= 2**31:
            # Lists of physical rows are int32 (``flash_mla_with_kvcache``).
            raise NotImplementedError(
                f"{name}: {pages.data.shape[0] * pages.storage_block_size} rows in one pool; "
                "supported are < 2**31"
            )
    rope_dim = window_pages.rope_dim
    if rope_dim < 2 or rope_dim & (rope_dim - 1):
        raise NotImplementedError(f"{names[0]}: rope_dim {rope_dim} is not a power of two >= 2")
    if sinks is not None:
        checks.expect_tensor(names[2], sinks, (num_heads,), torch.float32, device=q.device)
    if out is not None:
        checks.expect_tensor("out", out, tuple(q.shape), q.dtype, device=q.device)
        checks.expect_apart("out", out)
