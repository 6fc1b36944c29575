"""``mla_attention``: DeepSeek-V2/V3 attention in its latent form, one key of 576 channels a token whose first 512 are the value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..attention.api import _implementation
from ..common import checks
from ..compressed.configs import MAX_ROWS

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


def mla_attention(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    max_seqlen_q: int,
    softmax_scale: float,
    head_dim_v: int = 512,
    kv: torch.Tensor | None = None,
    max_seq_len: int | None = None,
    num_decodes: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Causal attention of many query heads over one paged latent a token, optionally with the step's own rows beside the pages.

        out_i = sum_j softmax_j(softmax_scale * q_i . row_j) row_j[:head_dim_v]   over the keys j <= p_i

    Queries are in latent form: q = (q_nope absorbed through the key up-projection, q_rope), and the value up-projection follows. Query i
    of sequence s stands at position p = seq_lens[s] - q_len + i. With ``kv`` the pages hold keys [0, seq_len - q_len) and the fresh rows
    are the last q_len keys; without it all keys are in the pages. Rows and table entries of keys that no query sees are never read.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16, fp16 or fp32, last stride 1; any number of heads, so also a tensor-parallel shard.
        pages: [num_pages, block_size, head_dim] q's dtype, any page and row stride, last stride 1.
        block_table: [num_seqs, width] int32, physical page ids; entry b holds block b; any row stride. Of a table shorter than seq_lens the last
            entry is looked up again.
        seq_lens: [num_seqs] int32, keys of each sequence including this step's; 0 for a padding row.
        cu_seqlens_q: [num_seqs + 1] int32, prefix sums of the new tokens.
        max_seqlen_q: host int, at least the new tokens of the longest sequence; trusted as in ``paged_attention``.
        softmax_scale: factor of q . row, in 2**-30 .. 2**16: of the model's uncompressed head size (192 ** -0.5 in V2 and V3, times YaRN's factor), so
            there is no default.
        head_dim_v: leading channels of a row that are its value; head_dim - head_dim_v further ones (the roped key) only score.
        kv: [num_tokens, head_dim] q's dtype, the fresh rows, ragged like q.
        max_seq_len: host int, upper bound of seq_lens; lets short batches skip the split of decode work.
        num_decodes: host int, how many sequences at the front take the split-KV path, as in ``paged_attention``.
        out: [num_tokens, num_heads, head_dim_v] q's dtype, filled in place; None allocates.
        lse: [num_heads, num_tokens] fp32, filled in place with the natural-log sum of exp of the logits.
        workspace: [n] fp32 scratch of the split, n >= ``quire.kernels.workspace_numel`` of num_kv_heads 1 and head_dim ``head_dim_v``; None
            allocates. Calls that may run at the same time need different ones.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        ``out``. A query that sees no key gets out 0 and lse -inf.

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above.
        NotImplementedError: head_dim_v is not a power of two in 16..512, or head_dim - head_dim_v not one in 16..128.

    Source: DeepSeek-V2 (arXiv 2405.04434) 2.1, decoupled RoPE and absorbed projections.
    """
    arguments = locals()  # all of them, by name
    if _implementation(arguments.pop("impl"), q) == "triton":
        from . import triton_impl as dense_triton

        return dense_triton.attention(arguments)
    from . import torch_impl as dense_torch

    return dense_torch.attention(_checked(**arguments))


def _checked(
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
