"""Paged and sliding-window attention: the public functions. Next: `call`, the checked arguments; then
`launch` and `kernel`, or `torch_impl`, chosen by name: no call falls back to another.

Triton is imported by the launches alone, so ``impl="torch"`` works without it.

A *page* holds ``block_size`` token rows of one layer. ``block_table[s, b % width]`` is the page of
block b of sequence s: a ring table (window layers) reuses its entries. Without a window the table is
linear, and its last entry stands for all later blocks. A sequence has fewer than 2**30 tokens.

Values in device memory are not checked: a wrong page id reads what is there. On a CPU, and with
``impl="torch"``, wrong page ids, lengths and prefix sums are refused. Triton's interpreter
(TRITON_INTERPRET=1, impl="triton" on a CPU) multiplies bf16 as bit patterns: give it fp32 or fp16.

Outputs (``out``, ``lse``, ``workspace``, pages) must share no memory with other arguments. Results
have no gradient. Kernels run on the device of the tensors, on its current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..common import checks
from ..common.checks import MODEL_DTYPES, expect_apart, expect_int, expect_tensor
from .call import AttentionCall, check_attention, check_values
from .tiles import plan_decode


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    max_seqlen_q: int,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    context_only: bool = False,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    max_seq_len: int | None = None,
    num_decodes: int | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch over paged keys and values, and the step's new rows.

    Query i of sequence s stands at position p = seq_lens[s] - q_len + i and sees the keys j <= p.
    With ``k`` and ``v`` the pages hold keys [0, seq_len - q_len) and the new rows are the last
    q_len keys; without them all keys are in the pages. Page rows and table entries of keys that no
    query sees are never read, and may hold anything.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16, fp16 or fp32, last stride 1; the sequences one
            after another.
        k_pages, v_pages: [num_pages, block_size, num_kv_heads, head_dim] q's dtype or
            torch.float8_e4m3fn, any strides with last stride 1 (two views of one pool, head-major
            pages). num_heads is a multiple of num_kv_heads.
        block_table: [num_seqs, width] int32, physical page ids; any row stride. Of a table shorter
            than seq_lens the last entry is looked up again.
        seq_lens: [num_seqs] int32, keys of each sequence including this step's; 0 for a padding
            row.
        cu_seqlens_q: [num_seqs + 1] int32, prefix sums of the new tokens.
        max_seqlen_q: host int, at least the new tokens of the longest sequence. It sizes tiles.
            Where all sequences take the decode path it is trusted: with too small a value, rows of
            longer sequences stay unwritten. (Device values are not read; only fewer than q's rows
            in all is refused.) Elsewhere the result does not depend on it.
        k, v: [num_tokens, num_kv_heads, head_dim] q's dtype, the step's new rows, ragged like q; both or
            neither. They are never quantized. Without them the pages must hold every row that a
            query sees, as those of a kvcore window group do with ``reads="pages"``.
        context_only: True = leave out the step's own keys: every query sees the keys [0, seq_len -
            q_len), all of them in the pages. The other part is a call with ``k`` and ``v`` and
            seq_lens = q_len; ``merge_partials`` joins the two. Needs ``k`` and ``v`` None.
        k_scale, v_scale: scales of e4m3 pages, both of one kind; None with other pages. A key is
            its quantized values times its scale. One scale of all rows is a number in 2**-30 ..
            2**30, or fp32 [] (or [1]). Scales of each row are fp32 [num_pages, block_size,
            num_kv_heads], any strides, as ``write_kv`` writes them.
        max_seq_len: host int, upper bound of seq_lens; lets short batches skip the split of decode
            work.
        num_decodes: host int, number of sequences at the front that take the split-KV path, which
            is for few new tokens; the others take the prefill path. Default: all if max_seqlen_q
            <= 1, else none. Any choice gives the right result.
        softmax_scale: factor of q . k, in 2**-30 .. 2**16; default head_dim ** -0.5.
        softcap: logits become softcap * tanh(logit / softcap), in 2**-30 .. 2**30; None = no cap.
        sinks: [num_heads] fp32 logits that join the denominator only; +inf gives 0, -inf changes
            nothing.
        out: [num_tokens, num_heads, head_dim] q's dtype, filled in place; None allocates.
        lse: [num_heads, num_tokens] fp32, filled in place with the natural-log sum of exp of the
            logits, without the sink.
        workspace: [n] fp32, n >= ``workspace_numel(...)``, scratch of the split; None allocates.
            Calls that may run at the same time need different ones.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        ``out``. A query that sees no key gets out 0 and lse -inf.

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above, or num_seqs *
            max_seqlen_q < num_tokens on the decode path; on a CPU and with torch, a page id, a
            length or prefix sums out of range.
        NotImplementedError: with Triton, head_dim is not a power of two in 16..512.

    Source: PagedAttention (arXiv 2309.06180); FlashAttention-2 (arXiv 2307.08691) for the online
        softmax; gpt-oss for sinks.
    """
    call = AttentionCall(
        q, k_pages, v_pages, block_table, seq_lens, cu_seqlens_q, max_seqlen_q,
        k=k, v=v, context_only=context_only, k_scale=k_scale, v_scale=v_scale, max_seq_len=max_seq_len,
        num_decodes=num_decodes, softmax_scale=softmax_scale, softcap=softcap, sinks=sinks,
        out=out, lse=lse, workspace=workspace,
    )  # fmt: skip
    return _attention(call, impl)


def sliding_window_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    sliding_window: int,
    max_seqlen_q: int,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    max_seq_len: int | None = None,
    num_decodes: int | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """``paged_attention`` over the last ``sliding_window`` keys only: 0 <= p - j < sliding_window.

    Only tiles with a visible key are visited, so the cost does not grow with the context. The table
    may be a ring. Its width * block_size must cover the window and, without new rows, the step's
    own keys. A linear table works as well.

    Args:
        sliding_window: tokens that a query sees, its own included; >= 1. From 2**30 on a query sees
            all.
        q, k_pages, v_pages, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, k, v, k_scale,
            v_scale, max_seq_len, num_decodes,
            softmax_scale, softcap, sinks, out, lse, workspace, impl: as in ``paged_attention``.

    Returns:
        ``out`` [num_tokens, num_heads, head_dim].

    Raises:
        ValueError, NotImplementedError: as in ``paged_attention``.

    Source: Longformer (arXiv 2004.05150) 3.1; Gemma 3 report (arXiv 2503.19786) 2 for local layers.
    """
    expect_int("sliding_window", sliding_window, 1)
    call = AttentionCall(
        q, k_pages, v_pages, block_table, seq_lens, cu_seqlens_q, max_seqlen_q,
        k=k, v=v, k_scale=k_scale, v_scale=v_scale, max_seq_len=max_seq_len,
        num_decodes=num_decodes, softmax_scale=softmax_scale, softcap=softcap, sinks=sinks,
        out=out, lse=lse, workspace=workspace, sliding_window=sliding_window,
    )  # fmt: skip
    return _attention(call, impl)


def attention_for(sliding_window: int | None) -> Callable[..., torch.Tensor]:
    """``sliding_window_attention`` with this window, or ``paged_attention`` if it is None.

    Args:
        sliding_window: as in ``sliding_window_attention``; None = no window.

    Returns:
        A function of ``paged_attention``'s arguments.
    """
    if sliding_window is None:
        return paged_attention
    return partial(sliding_window_attention, sliding_window=sliding_window)


def merge_partials(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Merge attention results over disjoint sets of keys into the result over their union; fold the
    sink in once.

    out = sum_p exp(lse_p - z) out_p with z = log(sum_p exp(lse_p) + exp(sink)). A part with lse
    -inf counts nothing; its rows may hold anything.

    Args:
        partial_out: [num_parts, num_tokens, num_heads, head_dim] bf16, fp16 or fp32, each part
            normalised, without sinks.
        partial_lse: [num_parts, num_heads, num_tokens] fp32, natural log.
        sinks: [num_heads] fp32 logits that join the denominator only; +inf gives 0, -inf changes
            nothing.
        out: [num_tokens, num_heads, head_dim] bf16, fp16 or fp32; None allocates in partial_out's
            dtype.
        lse: [num_heads, num_tokens] fp32, filled in place with the merged natural-log lse, without
            the sink.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        ``out``; where no part has a key, out is 0 and lse -inf.

    Raises:
        ValueError: a shape, dtype, stride or device is not as above.
        NotImplementedError: head_dim is not a power of two in 16..512.

    Source: FlashInfer (arXiv 2501.01005) 2.2, attention states and their merge; gpt-oss for sinks.
    """
    chosen = checks.implementation(impl, partial_out)
    expect_tensor("partial_out", partial_out, (None,) * 4, MODEL_DTYPES)
    num_parts, num_tokens, num_heads, head_dim = partial_out.shape
    device = partial_out.device
    checks.expect_head_dim("partial_out", head_dim)
    expect_int("partial_out: num_parts", num_parts, 1)
    lse_shape = (num_parts, num_heads, num_tokens)
    expect_tensor("partial_lse", partial_lse, lse_shape, torch.float32, device=device)
    checks.check_outputs(num_heads, num_tokens, device, sinks, lse)
    if out is None:
        out = torch.empty(partial_out.shape[1:], dtype=partial_out.dtype, device=device)
    else:
        expect_tensor("out", out, (num_tokens, num_heads, head_dim), MODEL_DTYPES, device=device)
        expect_apart("out", out)
    if chosen == "triton":
        from .launch import merge_partials as merge
    else:
        from .torch_impl import merge_partials as merge
    return merge(partial_out, partial_lse, sinks, out, lse)


def workspace_numel(
    *,
    num_decodes: int,
    max_seqlen_q: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_sms: int,
) -> int:
    """Elements (fp32) of ``workspace`` for any batch of at most ``num_decodes`` decode sequences.

    Args:
        num_decodes: most sequences on the decode path.
        max_seqlen_q: value passed to the attention call; 1 for batches that also hold prefill
            sequences.
        num_heads, num_kv_heads, head_dim: sizes of the layer.
        num_sms: streaming multiprocessors,
            ``torch.cuda.get_device_properties(device).multi_processor_count``.

    Returns:
        Elements, independent of the sequence lengths.

    Raises:
        ValueError: a value is not a positive int, or num_heads is not a multiple of num_kv_heads.

    Source: ``plan_decode``: one partial row of head_dim + 1 values for each KV split,
        token and head.
    """
    for name, value in (
        ("num_decodes", num_decodes),
        ("max_seqlen_q", max_seqlen_q),
        ("num_heads", num_heads),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
        ("num_sms", num_sms),
    ):
        expect_int(name, value, 1)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads: expected a multiple of num_kv_heads {num_kv_heads}, got {num_heads}"
        )
    return plan_decode(
        num_decodes=num_decodes,
        max_seqlen_q=max_seqlen_q,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_sms=num_sms,
    ).workspace_numel


def _attention(call: AttentionCall, impl: str | None) -> torch.Tensor:
    chosen = checks.implementation(impl, call.q)
    call = check_attention(call)
    if chosen == "torch":  # reads lengths and page ids, and checks them
        from .torch_impl import attention
    else:
        from .launch import attention

        if checks.is_readable(call.q):
            check_values(call)
    return attention(call)
