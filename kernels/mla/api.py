"""``mla_attention``: DeepSeek-V2/V3 attention in its latent form.

One key of 576 channels a token, whose first 512 are the value.

Next: `call`, the checks; then `triton_impl`, or `torch_impl` on a CPU.
"""

from __future__ import annotations

import torch

from ..common.impls import implementation
from .call import MlaCall


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
    """Causal attention of many query heads over one paged latent row a token.

        out_i = sum_j softmax_j(softmax_scale * q_i . row_j) row_j[:head_dim_v],   j <= p_i

    Queries are in latent form: q = (q_nope absorbed through the key up-projection, q_rope), and the
    value up-projection follows. Query i of sequence s stands at position
    p = seq_lens[s] - q_len + i. With ``kv`` the pages hold keys [0, seq_len - q_len), and ``kv``
    the last q_len keys; without it all keys are in the pages. Rows and table entries of keys that
    no query sees are never read.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16, fp16 or fp32, last stride 1; any number of heads,
            so also a tensor-parallel shard.
        pages: [num_pages, block_size, head_dim] q's dtype, any page and row stride, last stride 1.
        block_table: [num_seqs, width] int32, physical page ids; entry b holds block b; any row
            stride. Of a table shorter than seq_lens the last entry is looked up again.
        seq_lens: [num_seqs] int32, keys of each sequence including this step's; 0 for a padding
            row.
        cu_seqlens_q: [num_seqs + 1] int32, prefix sums of the new tokens.
        max_seqlen_q: host int, at least the new tokens of the longest sequence; trusted as in
            ``paged_attention``.
        softmax_scale: factor of q . row, in 2**-30 .. 2**16: of the model's uncompressed head size
            (192 ** -0.5 in V2 and V3, times YaRN's factor), so there is no default.
        head_dim_v: leading channels of a row that are its value; head_dim - head_dim_v further ones
            (the roped key) only score.
        kv: [num_tokens, head_dim] q's dtype, the step's own rows, ragged like q.
        max_seq_len: host int, upper bound of seq_lens; lets short batches skip the KV splits.
        num_decodes: host int, how many sequences at the front take the split-KV path, as in
            ``paged_attention``.
        out: [num_tokens, num_heads, head_dim_v] q's dtype, filled in place; None allocates.
        lse: [num_heads, num_tokens] fp32, filled in place with the natural-log sum of exp of the
            logits.
        workspace: [n] fp32 scratch of the KV splits, n >= ``quire.kernels.workspace_numel`` of
            num_kv_heads 1 and head_dim ``head_dim_v``; None allocates. Calls that may run at the
            same time need different ones.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        ``out``. A query that sees no key gets out 0 and lse -inf.

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above.
        NotImplementedError: head_dim_v is not a power of two in 16..512, or head_dim - head_dim_v
            not one in 16..128.

    Source: DeepSeek-V2 (arXiv 2405.04434) 2.1, decoupled RoPE and absorbed projections.
    """
    chosen = implementation(impl, q)
    call = MlaCall(
        q=q,
        pages=pages,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale,
        head_dim_v=head_dim_v,
        kv=kv,
        max_seq_len=max_seq_len,
        num_decodes=num_decodes,
        out=out,
        lse=lse,
        workspace=workspace,
    )
    if chosen == "triton":
        from .triton_impl import attention
    else:
        from .torch_impl import attention
    return attention(call)
