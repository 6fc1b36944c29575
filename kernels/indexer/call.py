"""The checked arguments of one call of ``index_topk``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..common import checks
from ..common.latent_pages import IndexPages
from .plan import IndexPlan, plan

MAX_TOPK = 4096
MAX_HEADS = 128


@dataclass(frozen=True)
class IndexCall:
    """The checked arguments of one call; fields are named and shaped as in ``index_topk``."""

    q: torch.Tensor
    weights: torch.Tensor
    pages: IndexPages
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    out: torch.Tensor
    lens: torch.Tensor
    workspace: torch.Tensor | None
    plan: IndexPlan
    compress_ratio: int
    max_seqlen_q: int


def check(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: IndexPages,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    topk: int,
    compress_ratio: int,
    max_seqlen_q: int,
    max_seq_len: int,
    out: torch.Tensor | None,
    lens: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> IndexCall:
    """Check the arguments of a call and fill in the defaults."""
    if not isinstance(pages, IndexPages):
        raise ValueError(f"pages: expected IndexPages, got {type(pages).__name__}")
    dtypes = checks.MODEL_DTYPES if pages.fp8 else pages.data.dtype
    checks.expect_tensor("q", q, (None, None, pages.index_dim), dtypes)
    num_tokens, num_heads, _ = q.shape
    device = q.device
    if pages.data.device != device:
        raise ValueError(f"pages: expected data on {device}, got data on {pages.data.device}")
    checks.expect_int("q: index_heads", num_heads, 1)
    if num_heads > MAX_HEADS:
        raise NotImplementedError(f"q: {num_heads} index heads, supported are up to {MAX_HEADS}")
    checks.expect_tensor("weights", weights, (num_tokens, num_heads), torch.float32, device=device)
    checks.expect_tensor("seq_lens", seq_lens, (None,), torch.int32, device=device)
    num_seqs = seq_lens.shape[0]
    cu_shape = (num_seqs + 1,)
    checks.expect_tensor("cu_seqlens_q", cu_seqlens_q, cu_shape, torch.int32, device=device)
    checks.expect_tensor("block_table", block_table, (num_seqs, None), torch.int32, device=device)
    expect_sizes(topk, compress_ratio, max_seq_len)
    checks.expect_int("max_seqlen_q", max_seqlen_q, 0)
    if num_seqs * max_seqlen_q < num_tokens:
        raise ValueError(
            f"max_seqlen_q: expected the longest of {num_seqs} sequences with {num_tokens} tokens, got {max_seqlen_q}"
        )
    if (num_heads - 1) * q.stride(1) >= 2**31:
        # The kernel addresses the heads of a token with 32 bits.
        raise ValueError(f"q: expected heads within 2**31 elements, got {q.stride()}")
    if out is not None:
        checks.expect_tensor("out", out, (num_tokens, topk), torch.int32, device=device)
        checks.expect_apart("out", out)
    if lens is not None:
        checks.expect_tensor("lens", lens, (num_tokens,), torch.int32, device=device)
    if workspace is not None:
        checks.expect_tensor("workspace", workspace, (None,), torch.float32, device=device)
    # Entries behind the end of the table are not there.
    room = block_table.shape[1] * pages.storage_block_size
    cut = plan(
        num_tokens=num_tokens,
        topk=topk,
        compress_ratio=compress_ratio,
        max_seq_len=min(max_seq_len, room * compress_ratio),
        available=None if workspace is None else workspace.numel(),
    )
    if workspace is not None and num_tokens and not cut.chunk:
        raise ValueError(
            f"workspace: expected float32 [>= {cut.query_numel}], got float32 [{workspace.numel()}]"
        )
    if out is None:
        out = torch.empty(num_tokens, topk, dtype=torch.int32, device=device)
    if lens is None:
        lens = torch.empty(num_tokens, dtype=torch.int32, device=device)
    return IndexCall(
        q=q,
        weights=weights,
        pages=pages,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        out=out,
        lens=lens,
        workspace=workspace,
        plan=cut,
        compress_ratio=compress_ratio,
        max_seqlen_q=max_seqlen_q,
    )


def expect_sizes(topk: int, compress_ratio: int, max_seq_len: int) -> None:
    """Require sizes in their ranges; ValueError or NotImplementedError otherwise."""
    checks.expect_int("topk", topk, 1)
    if topk > MAX_TOPK:
        raise NotImplementedError(f"topk: {topk} is not in 1..{MAX_TOPK}")
    checks.expect_int("compress_ratio", compress_ratio, 1, checks.MAX_TOKENS)
    checks.expect_int("max_seq_len", max_seq_len, 0, 2**31 - 1)
