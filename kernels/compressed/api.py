"""Attention of DeepSeek-V4: window, in-step rows and compressed entries under one softmax.

Next: `call`, the checks; then `triton_impl`, or `torch_impl` on a CPU.
Torch is imported here and Triton only by the functions that launch a kernel.
"""

from __future__ import annotations

import torch

from ..common import checks
from ..common.impls import implementation
from ..common.latent_pages import LatentPages
from ..common.tile_shapes import MAX_ROWS
from .call import CompressedCall


def compressed_attention(
    q: torch.Tensor,
    window_pages: LatentPages,
    window_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    sliding_window: int,
    max_seqlen_q: int,
    kv: torch.Tensor | None = None,
    compressed_pages: LatentPages | None = None,
    compressed_table: torch.Tensor | None = None,
    compress_ratio: int | None = None,
    topk_indices: torch.Tensor | None = None,
    topk_lens: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    cos_sin: torch.Tensor | None = None,
    max_seq_len: int | None = None,
    num_decodes: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Attention over latent rows that are key and value at once: raw rows and compressed entries.

    Query i of sequence s stands at position p = seq_lens[s] - q_len + i. It sees the raw rows of
    positions p - sliding_window + 1 .. p and, with ``compressed_pages``, the entries
    w < floor((p + 1) / compress_ratio): all of them (HCA), or those that ``topk_indices`` names
    (CSA). All share one softmax and one sink. Rows and table entries that no query sees are never
    read, and may hold anything.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16, fp16 or fp32, last stride 1, roped; the sequences
            one after another. Any number of heads.
        window_pages: raw rows, roped; q's dtype, or quantized (q bf16 or fp32).
        window_table: [num_seqs, width] int32, page of block b at entry b % width: a ring, or a
            linear table. Only the last width * storage_block_size positions in the pages are seen:
            a later row overwrites the one so many positions before. With width 0 and no ``kv`` a
            query sees entries alone.
        seq_lens: [num_seqs] int32, tokens of each sequence including this step's, fewer than 2**30;
            0 for a padding row.
        cu_seqlens_q: [num_seqs + 1] int32, prefix sums of the new tokens.
        sliding_window: raw rows that a query sees, its own included; >= 1, and from 2**30 on all
            that there are.
        max_seqlen_q: host int, at least the new tokens of the longest sequence. Where all sequences
            take the decode path, the call trusts it: rows of longer sequences stay unwritten.
            Elsewhere the result does not depend on it.
        kv: [num_tokens, head_dim] q's dtype, the step's own raw rows: then only positions before
            the step are read from the pages, whatever these hold of the step itself. Where the
            pages are quantized these should be what a reader of them would see (``write_latent``
            returns it). None: the pages hold all.
        compressed_pages: entries of all closed windows, those that this step closed included; the
            same format as ``window_pages``.
        compressed_table: [num_seqs, width] int32, page of entry w at w // storage_block_size.
            Entries behind its end are not there.
        compress_ratio: raw tokens of an entry, 1..2**30.
        topk_indices: [num_tokens, topk] int32, entries of the token's own sequence, each at most
            once, in any order. -1 = none; entries that the query does not see yet count nothing.
        topk_lens: [num_tokens] int32, how many of a row's first indices count: below 0 none, above
            topk all; None = all.
        sinks: [num_heads] fp32 logits that join the denominator only; +inf gives 0, -inf changes
            nothing.
        softmax_scale: factor of q . k, in 2**-30 .. 2**16; default head_dim ** -0.5.
        cos_sin: [max_position, rope_dim] fp32, cosines then sines: the inverse RoPE of the query's
            position is applied to the trailing rope_dim channels of the output: rows are values
            too, which carry the rotation of their own positions. None leaves them.
        max_seq_len: host int, upper bound of seq_lens; lets short batches skip the KV splits.
        num_decodes: host int, how many sequences at the front take the split-KV path made for few
            new tokens; the others take the prefill path. Default: all if max_seqlen_q <= 1, else
            none. Any choice gives the right result.
        out: [num_tokens, num_heads, head_dim] q's dtype, filled in place; None allocates.
        lse: [num_heads, num_tokens] fp32, filled in place with the natural-log sum of exp of the
            logits, without the sink.
        workspace: [n] fp32, n >= ``compressed_attention_workspace_numel(...)``, scratch of the KV
            splits; None allocates. Calls that may run at the same time need different ones.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        ``out``. A query that sees no key gets out 0 and lse -inf.

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above, or
            num_seqs * max_seqlen_q < num_tokens on the decode path.
        NotImplementedError: quantized beside plain pages, quantized pages with fp16 queries, a
            rope_dim that is no power of two, or a pool of 2**31 rows or more.

    Source: DeepSeek-V4 report 2.3; transformers models/deepseek_v4.
    """
    chosen = implementation(impl, q)
    call = CompressedCall(
        q=q,
        window_pages=window_pages,
        window_table=window_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        sliding_window=sliding_window,
        max_seqlen_q=max_seqlen_q,
        kv=kv,
        compressed_pages=compressed_pages,
        compressed_table=compressed_table,
        compress_ratio=compress_ratio,
        topk_indices=topk_indices,
        topk_lens=topk_lens,
        sinks=sinks,
        softmax_scale=softmax_scale,
        cos_sin=cos_sin,
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


def compressed_attention_workspace_numel(*, head_dim: int, num_sms: int) -> int:
    """How many fp32 elements ``workspace`` needs for any batch, any heads and any lengths.

    Args:
        head_dim: channels of a row.
        num_sms: streaming multiprocessors,
            ``torch.cuda.get_device_properties(device).multi_processor_count``.

    Returns:
        Elements: two partial rows of head_dim + 1 values for each of 64 query rows of a program on
        each multiprocessor.

    Raises:
        ValueError: a value is not a positive int.

    Source: ``configs.plan_decode``: KV splits are no more than twice the multiprocessors.
    """
    checks.expect_int("head_dim", head_dim, 1)
    checks.expect_int("num_sms", num_sms, 1)
    return 2 * num_sms * MAX_ROWS * (head_dim + 1)
