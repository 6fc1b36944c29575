"""The checked arguments of one call of ``mla_attention``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..common import checks
from ..common.tile_shapes import MAX_ROWS

ROPE_DIMS = (16, 32, 64, 128)


@dataclass(frozen=True, eq=False)
class MlaCall:
    """The arguments of one call, checked when it is made, with the defaults filled in.

    Named and shaped as in ``mla_attention``, which says what is raised.
    """

    q: torch.Tensor
    pages: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    softmax_scale: float
    head_dim_v: int = 512
    kv: torch.Tensor | None = None
    max_seq_len: int | None = None
    num_decodes: int | None = None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    workspace: torch.Tensor | None = None

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return self.seq_lens.shape[0]

    def __post_init__(self) -> None:
        checks.expect_tensor("q", self.q, (None, None, None), checks.MODEL_DTYPES)
        num_tokens, num_heads, head_dim = self.q.shape
        dtype = self.q.dtype

        def expect(name: str, shape: tuple[int | None, ...], dtype: torch.dtype) -> None:
            checks.expect_tensor(name, getattr(self, name), shape, dtype, device=self.q.device)

        checks.expect_int("q: num_heads", num_heads, 1)
        checks.expect_int("head_dim_v", self.head_dim_v, 1)
        checks.expect_head_dim("head_dim_v", self.head_dim_v)
        if head_dim - self.head_dim_v not in ROPE_DIMS:
            raise NotImplementedError(
                f"q: head_dim {head_dim} is not head_dim_v {self.head_dim_v} and one of "
                f"{list(ROPE_DIMS)} more"
            )
        expect("pages", (None, None, head_dim), dtype)
        for axis, what in ((0, "num_pages"), (1, "block_size")):
            checks.expect_int(f"pages: {what}", self.pages.shape[axis], 1)
        # The kernels address rows within a page with 32 bits.
        if self.pages.shape[1] * max(1, self.pages.stride(1)) >= 2**31:
            raise ValueError(
                f"pages: expected pages of < 2**31 elements, got {self.pages.stride()}"
            )
        expect("seq_lens", (None,), torch.int32)
        expect("cu_seqlens_q", (self.num_seqs + 1,), torch.int32)
        expect("block_table", (self.num_seqs, None), torch.int32)
        checks.expect_int("block_table: width", self.block_table.shape[1], 1)
        if self.kv is not None:
            expect("kv", (num_tokens, head_dim), dtype)
        out_shape = (num_tokens, num_heads, self.head_dim_v)
        if self.out is not None:
            expect("out", out_shape, dtype)
            checks.expect_apart("out", self.out)
        if self.lse is not None:
            expect("lse", (num_heads, num_tokens), torch.float32)
            checks.expect_apart("lse", self.lse)
        if self.workspace is not None:
            expect("workspace", (None,), torch.float32)
        checks.expect_int("max_seqlen_q", self.max_seqlen_q, 0)
        if self.max_seq_len is not None:
            checks.expect_int("max_seq_len", self.max_seq_len, 0)
        num_decodes = self.num_decodes
        if num_decodes is None:
            num_decodes = self.num_seqs if self.max_seqlen_q <= 1 else 0
        checks.expect_int("num_decodes", num_decodes, 0, self.num_seqs)
        if num_decodes == self.num_seqs and self.num_seqs * self.max_seqlen_q < num_tokens:
            # No prefill kernel is launched for what the decode tile cannot hold.
            raise ValueError(
                f"max_seqlen_q: expected the longest of {self.num_seqs} sequences with "
                f"{num_tokens} tokens, got {self.max_seqlen_q}"
            )
        checks.expect_positive("softmax_scale", self.softmax_scale, most=16)
        filled = {
            "max_seqlen_q": min(self.max_seqlen_q, max(num_tokens, MAX_ROWS)),
            "num_decodes": num_decodes,
            "softmax_scale": float(self.softmax_scale),
        }
        if self.out is None:
            filled["out"] = torch.empty(out_shape, dtype=dtype, device=self.q.device)
        for name, value in filled.items():
            object.__setattr__(self, name, value)
