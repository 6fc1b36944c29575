"""The public functions: choose the implementation by name, and never fall back to another.

Next: `triton_impl`, which launches `kernel`; `torch_impl` on a CPU.

Torch is imported here and Triton only by the functions that launch a kernel, so that
``impl="torch"`` works where Triton is missing.

Terms. A *page* holds ``block_size`` token rows of one layer. ``block_table[s, b % width]`` is the
page of block b of sequence s: a linear table has b < width, so the modulo changes nothing; a ring
table (window layers) reuses its entries. Without a window the table is taken for linear: where
``seq_lens`` reach past its last entry, that entry stands for all blocks behind. A sequence has fewer than 2**30 tokens.

Values in device memory are not looked at: a wrong page id reads what lies there. ``impl="torch"``
refuses it. Triton's own interpreter (TRITON_INTERPRET=1, impl="triton" on a CPU) multiplies bf16 as
bit patterns (seen in 3.7 to 3.9): give it fp32 or fp16.

What a call writes (``out``, ``lse``, ``workspace``, pages) may share memory with nothing else that
it is given. Nothing is differentiated: results have no gradient, whatever the arguments require.
Kernels run on the device of the tensors, whichever is the current one, and on its current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..common.checks import (
    MAX_TILE,
    MODEL_DTYPES,
    check_pages,
    check_scales,
    expect_apart,
    expect_head_dim,
    expect_int,
    expect_positive,
    expect_tensor,
    scale_kind,
    softmax_factor,
    window_tokens,
)
from ..common.impls import implementation
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
    """Causal attention of a ragged batch over paged keys and values, optionally with the step's own
    rows beside the pages.

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
            Where all sequences take the decode path, the call trusts it that none is too long for
            them: too small a value leaves rows of longer sequences unwritten. (Device values are
            not read; that the sequences cannot hold all of q's rows is refused.) Elsewhere the
            result does not depend on it.
        k, v: [num_tokens, num_kv_heads, head_dim] q's dtype, the step's new rows, ragged like q; both or
            neither. They are never quantized. Without them the pages must hold every row that a
            query sees: those of a kvcore window group do so only for one new token.
        context_only: the step's own keys are left out: every query sees the keys [0, seq_len -
            q_len), all of them in the pages. The other part is a call with ``k`` and ``v`` and
            seq_lens = q_len; ``merge_partials`` joins the two. Needs ``k`` and ``v`` None.
        k_scale, v_scale: of e4m3 pages, both of one kind; None with other pages. A key is its
            quantized values times its scale. A number in 2**-30 .. 2**30, or fp32 [] (or [1]): of all rows. fp32
            [num_pages, block_size, num_kv_heads], any strides: of each row, as ``write_kv`` leaves
            them.
        max_seq_len: host int, upper bound of seq_lens; lets short batches skip the split of decode
            work.
        num_decodes: host int, how many sequences at the front take the split-KV path made for few
            new tokens; the others take the prefill path. Default: all if max_seqlen_q <= 1, else
            none. Any choice gives the right result.
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
            max_seqlen_q < num_tokens on the decode path.
        NotImplementedError: with Triton, head_dim is not a power of two in 16..512.

    Source: PagedAttention (arXiv 2309.06180); FlashAttention-2 (arXiv 2307.08691) for the online
        softmax; gpt-oss for sinks.
    """
    call = AttentionCall(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        k=k,
        v=v,
        context_only=context_only,
        k_scale=k_scale,
        v_scale=v_scale,
        max_seq_len=max_seq_len,
        num_decodes=num_decodes,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        out=out,
        lse=lse,
        workspace=workspace,
    )
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
    """``paged_attention`` where query i sees only the last ``sliding_window`` keys: 0 <= p - j <
    sliding_window.

    Only tiles with a visible key are visited, so the cost does not grow with the context. The table
    may be a ring whose width * block_size covers the window and, without new rows, the step's own
    keys; a linear table serves as well.

    Args:
        sliding_window: tokens that a query sees, its own included; >= 1, and from 2**30 on all that
            there are.
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
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        k=k,
        v=v,
        k_scale=k_scale,
        v_scale=v_scale,
        max_seq_len=max_seq_len,
        num_decodes=num_decodes,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        out=out,
        lse=lse,
        workspace=workspace,
        sliding_window=sliding_window,
    )
    return _attention(call, impl)


def attention_for(sliding_window: int | None) -> Callable[..., torch.Tensor]:
    """``sliding_window_attention`` with this window, or ``paged_attention`` if it is None: one call
    for the layers of a model, whichever they are.

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
    -inf counts nothing, whatever its rows hold.

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
    chosen = implementation(impl, partial_out)
    out = check_merge(partial_out, partial_lse, sinks, out, lse)
    if chosen == "triton":
        from .triton_impl import merge_partials as merge
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
    """How many fp32 elements ``workspace`` needs for any batch of up to ``num_decodes`` sequences
    on the decode path.

    Args:
        num_decodes: sequences on the decode path, at most.
        max_seqlen_q: as passed to the attention call; 1 for batches that also hold prefill
            sequences.
        num_heads, num_kv_heads, head_dim: of the layer.
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
    chosen = implementation(impl, call.q)
    call = check_attention(call)
    if chosen == "triton":
        from .triton_impl import attention
    else:
        from .torch_impl import attention
    return attention(call)


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention call, as given or, by ``check_attention``, checked.

    Fields are named, shaped and None as in ``quire.kernels.paged_attention``. Of a checked call
    ``num_decodes``, ``softmax_scale`` and ``out`` are what was given or the default, and
    ``sliding_window`` is no longer than sequences are.
    """

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    context_only: bool = False
    k_scale: float | torch.Tensor | None = None
    v_scale: float | torch.Tensor | None = None
    max_seq_len: int | None = None
    num_decodes: int | None = None
    softmax_scale: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    workspace: torch.Tensor | None = None
    sliding_window: int | None = None

    @property
    def scales(self) -> str:
        """What k_scale and v_scale are: "none", "number", "tensor" (of one number) or "rows"."""
        return scale_kind(self.k_scale)

    @property
    def paged_context(self) -> bool:
        """Whether the keys in the pages are those before the step alone."""
        return self.k is not None or self.context_only

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return self.seq_lens.shape[0]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.k_pages.shape[2]


def check_merge(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Check the arguments of ``quire.kernels.merge_partials``, which says what they are and what is
    raised; ``out``, or new memory for it."""
    expect_tensor("partial_out", partial_out, (None,) * 4, MODEL_DTYPES)
    num_parts, num_tokens, num_heads, head_dim = partial_out.shape
    device = partial_out.device
    expect_head_dim("partial_out", head_dim)
    expect_int("partial_out: num_parts", num_parts, 1)
    lse_shape = (num_heads, num_tokens)
    expect_tensor("partial_lse", partial_lse, (num_parts, *lse_shape), torch.float32, device=device)
    if sinks is not None:
        expect_tensor("sinks", sinks, (num_heads,), torch.float32, device=device)
    if lse is not None:
        expect_tensor("lse", lse, lse_shape, torch.float32, device=device)
        expect_apart("lse", lse)
    if out is None:
        return torch.empty(partial_out.shape[1:], dtype=partial_out.dtype, device=device)
    expect_tensor("out", out, (num_tokens, num_heads, head_dim), MODEL_DTYPES, device=device)
    expect_apart("out", out)
    return out


def check_attention(call: AttentionCall) -> AttentionCall:
    """Check a call and fill in its defaults; see ``quire.kernels.paged_attention``.

    Raises:
        ValueError: as there.
    """
    q, k_pages, k, v = call.q, call.k_pages, call.k, call.v
    expect_tensor("q", q, (None, None, None), MODEL_DTYPES)
    num_tokens, num_heads, head_dim = q.shape
    device = q.device
    check_pages(k_pages, call.v_pages, q.dtype, device)
    check_scales(call.k_scale, call.v_scale, k_pages)
    num_kv_heads = k_pages.shape[2]
    if k_pages.shape[3] != head_dim:
        raise ValueError(f"k_pages: expected head_dim {head_dim}, got {k_pages.shape[3]}")
    if num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"q: expected num_heads to be a multiple of num_kv_heads {num_kv_heads}, got {num_heads}"
        )
    expect_tensor("seq_lens", call.seq_lens, (None,), torch.int32, device=device)
    num_seqs = call.seq_lens.shape[0]
    expect_tensor("cu_seqlens_q", call.cu_seqlens_q, (num_seqs + 1,), torch.int32, device=device)
    expect_tensor("block_table", call.block_table, (num_seqs, None), torch.int32, device=device)
    expect_int("block_table: width", call.block_table.shape[1], 1)
    if (k is None) != (v is None):
        missing = "k" if k is None else "v"
        raise ValueError(f"{missing}: expected new rows of both k and v or of neither, got None")
    if not isinstance(call.context_only, bool):
        raise ValueError(f"context_only: expected a bool, got {call.context_only!r}")
    if call.context_only and k is not None:
        raise ValueError("context_only: expected False with new rows k and v, got True")
    if k is not None and v is not None:
        rows_shape = (num_tokens, num_kv_heads, head_dim)
        expect_tensor("k", k, rows_shape, q.dtype, device=device)
        expect_tensor("v", v, rows_shape, q.dtype, device=device)
        for name, rows in (("k", k), ("v", v)):
            if num_tokens > 1 and MAX_TILE * rows.stride(0) >= 2**31:
                raise ValueError(
                    f"{name}: expected tokens < 2**24 elements apart, got {rows.stride()}"
                )
    if call.sinks is not None:
        expect_tensor("sinks", call.sinks, (num_heads,), torch.float32, device=device)
    if call.out is not None:
        expect_tensor("out", call.out, (num_tokens, num_heads, head_dim), q.dtype, device=device)
        expect_apart("out", call.out)
    if call.lse is not None:
        expect_tensor("lse", call.lse, (num_heads, num_tokens), torch.float32, device=device)
        expect_apart("lse", call.lse)
    if call.workspace is not None:
        expect_tensor("workspace", call.workspace, (None,), torch.float32, device=device)
    expect_int("max_seqlen_q", call.max_seqlen_q, 0)
    if call.max_seq_len is not None:
        expect_int("max_seq_len", call.max_seq_len, 0)
    num_decodes = call.num_decodes
    if num_decodes is None:
        num_decodes = num_seqs if call.max_seqlen_q <= 1 else 0
    expect_int("num_decodes", num_decodes, 0, num_seqs)
    if num_decodes == num_seqs and num_seqs * call.max_seqlen_q < num_tokens:
        # No prefill kernel is launched for what the decode tile cannot hold.
        raise ValueError(
            f"max_seqlen_q: expected the longest of {num_seqs} sequences with {num_tokens} tokens,"
            f" got {call.max_seqlen_q}"
        )
    softcap, sliding_window, out = call.softcap, call.sliding_window, call.out
    if softcap is not None:
        expect_positive("softcap", softcap)
        softcap = float(softcap)
    if sliding_window is not None:
        sliding_window = window_tokens(sliding_window)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_scale, v_scale = call.k_scale, call.v_scale
    return replace(
        call,
        num_decodes=num_decodes,
        softmax_scale=softmax_factor(call.softmax_scale, head_dim),
        softcap=softcap,
        sliding_window=sliding_window,
        out=out,
        k_scale=float(k_scale) if isinstance(k_scale, int) else k_scale,
        v_scale=float(v_scale) if isinstance(v_scale, int) else v_scale,
    )
