"""The checked arguments of one call of ``mla_attention``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..common import checks
from ..common.tile_shapes import MAX_ROWS

ROPE_DIMS = (16, 32, 64, 128)


@dataclass(frozen=True)
class MlaCall:
    """The checked arguments of one call; fields are named and shaped as in ``mla_attention``."""

    q: torch.Tensor
    pages: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    kv: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    workspace: torch.Tensor | None
    max_seqlen_q: int
    max_seq_len: int | None
    num_decodes: int
    softmax_scale: float

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return self.seq_lens.shape[0]

    @property
    def head_dim_v(self) -> int:
        """Channels of a value: the first ones of a latent row."""
        return self.out.shape[2]


def check(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    max_seqlen_q: int,
    softmax_scale: float,
    head_dim_v: int,
    kv: torch.Tensor | None,
    max_seq_len: int | None,
    num_decodes: int | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> MlaCall:
    """Check the arguments of a call and fill in the defaults."""
    checks.expect_tensor("q", q, (None, None, None), checks.MODEL_DTYPES)
    num_tokens, num_heads, head_dim = q.shape
    device = q.device
    checks.expect_int("q: num_heads", num_heads, 1)
    checks.expect_int("head_dim_v", head_dim_v, 1)
    checks.expect_head_dim("head_dim_v", head_dim_v)
    if head_dim - head_dim_v not in ROPE_DIMS:
        raise NotImplementedError(
            f"q: head_dim {head_dim} is not head_dim_v {head_dim_v} and one of {list(ROPE_DIMS)} more"
        )
    checks.expect_tensor("pages", pages, (None, None, head_dim), q.dtype, device=device)
    for axis, what in ((0, "num_pages"), (1, "block_size")):
        checks.expect_int(f"pages: {what}", pages.shape[axis], 1)
    # The kernels address rows within a page with 32 bits.
    if pages.shape[1] * max(1, pages.stride(1)) >= 2**31:
        raise ValueError(f"pages: expected pages of < 2**31 elements, got {pages.stride()}")
    checks.expect_tensor("seq_lens", seq_lens, (None,), torch.int32, device=device)
    num_seqs = seq_lens.shape[0]
    cu_shape = (num_seqs + 1,)
    checks.expect_tensor("cu_seqlens_q", cu_seqlens_q, cu_shape, torch.int32, device=device)
    checks.expect_tensor("block_table", block_table, (num_seqs, None), torch.int32, device=device)
    checks.expect_int("block_table: width", block_table.shape[1], 1)
    if kv is not None:
        checks.expect_tensor("kv", kv, (num_tokens, head_dim), q.dtype, device=device)
    out_shape = (num_tokens, num_heads, head_dim_v)
    if out is not None:
        checks.expect_tensor("out", out, out_shape, q.dtype, device=device)
        checks.expect_apart("out", out)
    if lse is not None:
        checks.expect_tensor("lse", lse, (num_heads, num_tokens), torch.float32, device=device)
        checks.expect_apart("lse", lse)
    if workspace is not None:
        checks.expect_tensor("workspace", workspace, (None,), torch.float32, device=device)
    checks.expect_int("max_seqlen_q", max_seqlen_q, 0)
    if max_seq_len is not None:
        checks.expect_int("max_seq_len", max_seq_len, 0)
    if num_decodes is None:
        num_decodes = num_seqs if max_seqlen_q <= 1 else 0
    checks.expect_int("num_decodes", num_decodes, 0, num_seqs)
    if num_decodes == num_seqs and num_seqs * max_seqlen_q < num_tokens:
        # No prefill kernel is launched for what the decode tile cannot hold.
        raise ValueError(
            f"max_seqlen_q: expected the longest of {num_seqs} sequences with {num_tokens} tokens, got {max_seqlen_q}"
        )
    checks.expect_positive("softmax_scale", softmax_scale, most=16)
    if out is None:
        out = torch.empty(out_shape, dtype=q.dtype, device=device)
    return MlaCall(
        q=q,
        pages=pages,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        kv=kv,
        out=out,
        lse=lse,
        workspace=workspace,
        max_seqlen_q=min(max_seqlen_q, max(num_tokens, MAX_ROWS)),
        max_seq_len=max_seq_len,
        num_decodes=num_decodes,
        softmax_scale=float(softmax_scale),
    )
