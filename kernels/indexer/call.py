"""The checked arguments of one call of ``index_topk``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..common import checks
from ..common.latent_pages import IndexPages
from .plan import IndexPlan, plan

MAX_TOPK = 4096
MAX_HEADS = 128


@dataclass(frozen=True, eq=False)
class IndexCall:
    """The arguments of one call, checked when it is made, with the defaults filled in.

    Named and shaped as in ``index_topk``, which says what is raised.

    Attributes:
        plan: how the call is divided.
    """

    q: torch.Tensor
    weights: torch.Tensor
    pages: IndexPages
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    topk: int
    max_seqlen_q: int
    max_seq_len: int
    compress_ratio: int = 4
    out: torch.Tensor | None = None
    lens: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    workspace: torch.Tensor | None = None
    plan: IndexPlan = field(init=False)

    def __post_init__(self) -> None:
        pages = self.pages
        if not isinstance(pages, IndexPages):
            raise ValueError(f"pages: expected IndexPages, got {type(pages).__name__}")
        dtypes = checks.MODEL_DTYPES if pages.fp8 else pages.data.dtype
        checks.expect_tensor("q", self.q, (None, None, pages.index_dim), dtypes)
        num_tokens, num_heads, _ = self.q.shape
        device = self.q.device

        def expect(name: str, shape: tuple[int | None, ...], dtype: torch.dtype) -> None:
            checks.expect_tensor(name, getattr(self, name), shape, dtype, device=device)

        if pages.data.device != device:
            raise ValueError(f"pages: expected data on {device}, got data on {pages.data.device}")
        checks.expect_int("q: index_heads", num_heads, 1)
        if num_heads > MAX_HEADS:
            raise NotImplementedError(
                f"q: {num_heads} index heads, supported are up to {MAX_HEADS}"
            )
        expect("weights", (num_tokens, num_heads), torch.float32)
        expect("seq_lens", (None,), torch.int32)
        num_seqs = self.seq_lens.shape[0]
        expect("cu_seqlens_q", (num_seqs + 1,), torch.int32)
        expect("block_table", (num_seqs, None), torch.int32)
        expect_sizes(self.topk, self.compress_ratio, self.max_seq_len)
        checks.expect_int("max_seqlen_q", self.max_seqlen_q, 0)
        if num_seqs * self.max_seqlen_q < num_tokens:
            raise ValueError(
                f"max_seqlen_q: expected the longest of {num_seqs} sequences with {num_tokens} "
                f"tokens, got {self.max_seqlen_q}"
            )
        if (num_heads - 1) * self.q.stride(1) >= 2**31:
            # The kernel addresses the heads of a token with 32 bits.
            raise ValueError(f"q: expected heads within 2**31 elements, got {self.q.stride()}")
        if self.out is not None:
            expect("out", (num_tokens, self.topk), torch.int32)
            checks.expect_apart("out", self.out)
        if self.lens is not None:
            expect("lens", (num_tokens,), torch.int32)
        if self.scores is not None:
            expect("scores", (num_tokens, self.topk), torch.float32)
            checks.expect_apart("scores", self.scores)
        if self.workspace is not None:
            expect("workspace", (None,), torch.float32)
        # Entries behind the end of the table are not there.
        room = self.block_table.shape[1] * pages.storage_block_size
        divided = plan(
            num_tokens=num_tokens,
            topk=self.topk,
            compress_ratio=self.compress_ratio,
            max_seq_len=min(self.max_seq_len, room * self.compress_ratio),
            score_all=self.scores is not None,
            available=None if self.workspace is None else self.workspace.numel(),
        )
        if self.workspace is not None and num_tokens and not divided.chunk:
            raise ValueError(
                f"workspace: expected float32 [>= {divided.query_numel}], "
                f"got float32 [{self.workspace.numel()}]"
            )
        filled: dict[str, Any] = {"plan": divided}
        if self.out is None:
            filled["out"] = torch.empty(num_tokens, self.topk, dtype=torch.int32, device=device)
        if self.lens is None:
            filled["lens"] = torch.empty(num_tokens, dtype=torch.int32, device=device)
        for name, value in filled.items():
            object.__setattr__(self, name, value)


def expect_sizes(topk: int, compress_ratio: int, max_seq_len: int) -> None:
    """Require sizes in their ranges; ValueError or NotImplementedError otherwise."""
    checks.expect_int("topk", topk, 1)
    if topk > MAX_TOPK:
        raise NotImplementedError(f"topk: {topk} is not in 1..{MAX_TOPK}")
    checks.expect_int("compress_ratio", compress_ratio, 1, checks.MAX_TOKENS)
    checks.expect_int("max_seq_len", max_seq_len, 0, 2**31 - 1)
