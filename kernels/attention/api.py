"""Paged and sliding-window attention: the public functions, and the checks of their arguments.

A *page* holds ``block_size`` token rows of one layer. ``block_table[s, b % width]`` is the page of
block b of sequence s: a ring table (window layers) reuses its entries. Without a window the table
is linear, and its last entry stands for all later blocks. Sequences have fewer than 2**30 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ..common import checks
from ..common.checks import MODEL_DTYPES, expect_apart, expect_int, expect_tensor
from ..common.tile_shapes import tile_heads, tile_rows
from .tiles import target_splits


@dataclass(eq=False)
class AttentionCall:
    """The arguments of one call, as in ``paged_attention``."""

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
    def paged_context(self) -> bool:
        """True if the pages hold only the keys before the step."""
        return self.k is not None or self.context_only

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return self.seq_lens.shape[0]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.k_pages.shape[2]


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
    q_len keys; without them all keys are in the pages. Page rows of keys that no query sees are
    never read. Their table entries may hold anything too.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16, fp16 or fp32, sequence after sequence.
        k_pages, v_pages: [num_pages, block_size, num_kv_heads, head_dim] q's dtype or
            torch.float8_e4m3fn; may be two views of one pool. num_heads is a multiple of
            num_kv_heads.
        block_table: [num_seqs, width] int32, physical page ids.
        seq_lens: [num_seqs] int32, keys of each sequence including this step's, so at least its new
            tokens; 0: padding, whose queries see no key.
        cu_seqlens_q: [num_seqs + 1] int32, prefix sums of the new tokens, from 0 to num_tokens.
        max_seqlen_q: host int, at least the new tokens of the longest sequence. Trusted where all
            sequences take the decode path: further rows of longer ones stay unwritten. Elsewhere
            the result does not depend on it.
        k, v: [num_tokens, num_kv_heads, head_dim] q's dtype, the step's new rows, never quantized;
            both or neither.
        context_only: True = every query sees the keys [0, seq_len - q_len), all in the pages, and
            none of the step's own. ``merge_partials`` joins the result with that of a call over
            ``k`` and ``v`` with seq_lens = q_len. Needs ``k`` and ``v`` None.
        k_scale, v_scale: scales of e4m3 pages, of one kind; None with other pages. A number in
            2**-30 .. 2**30, or fp32 [] or [1], for all rows; or fp32 [num_pages, block_size,
            num_kv_heads], any strides, one a row.
        max_seq_len: host int, upper bound of seq_lens; lets short batches skip the KV splits.
        num_decodes: host int, sequences at the front that take the split-KV path, which is for few
            new tokens. Default: all if max_seqlen_q <= 1, else none. Any choice is right.
        softmax_scale: factor of q . k, in 2**-30 .. 2**16; default head_dim ** -0.5.
        softcap: logits become softcap * tanh(logit / softcap), in 2**-30 .. 2**30; None = no cap.
        sinks: [num_heads] fp32 logits that join the denominator only; +inf gives 0, -inf changes
            nothing.
        out: [num_tokens, num_heads, head_dim] q's dtype, filled in place; None allocates.
        lse: [num_heads, num_tokens] fp32, filled in place with the natural-log sum of exp of the
            logits, without the sink.
        workspace: [n] fp32, n >= ``workspace_numel(...)``, for the KV splits; None allocates.
            Calls that may run at the same time need different ones.
        impl: see ``quire.kernels``, also for errors.

    Returns:
        ``out``. A query that sees no key gets out 0 and lse -inf.

    Raises:
        NotImplementedError: with Triton, head_dim is not a power of two in 16..512.

    Source: PagedAttention (arXiv 2309.06180); FlashAttention-2 (arXiv 2307.08691) for the online
        softmax; gpt-oss for sinks.
    """
    call = AttentionCall(
        q, k_pages, v_pages, block_table, seq_lens, cu_seqlens_q, max_seqlen_q,
        k=k, v=v, context_only=context_only, k_scale=k_scale, v_scale=v_scale,
        max_seq_len=max_seq_len, num_decodes=num_decodes, softmax_scale=softmax_scale,
        softcap=softcap, sinks=sinks, out=out, lse=lse, workspace=workspace,
    )  # fmt: skip
    return _check_and_attend(call, impl)


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
    is a ring or linear. Its width * block_size must cover the window and, without new rows, the
    step's own keys.

    Args:
        sliding_window: tokens that a query sees, its own included; >= 1. From 2**30 on all.
        Others, returns and raises: as in ``paged_attention``.

    Source: Longformer (arXiv 2004.05150) 3.1; Gemma 3 report (arXiv 2503.19786) 2 for local layers.
    """
    call = AttentionCall(
        q, k_pages, v_pages, block_table, seq_lens, cu_seqlens_q, max_seqlen_q,
        k=k, v=v, k_scale=k_scale, v_scale=v_scale, max_seq_len=max_seq_len,
        num_decodes=num_decodes, softmax_scale=softmax_scale, softcap=softcap, sinks=sinks,
        out=out, lse=lse, workspace=workspace, sliding_window=sliding_window,
    )  # fmt: skip
    return _check_and_attend(call, impl)


def attention_for(sliding_window: int | None) -> Callable[..., torch.Tensor]:
    """``sliding_window_attention`` with this window, or ``paged_attention`` if it is None."""
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
    """Merge attention results over disjoint sets of keys into the result over their union.

    out = sum_p exp(lse_p - z) out_p with z = log(sum_p exp(lse_p) + exp(sink)). A part with lse
    -inf counts nothing; its rows may hold anything.

    Args:
        partial_out: [num_parts, num_tokens, num_heads, head_dim] bf16, fp16 or fp32, each part
            normalised, without sinks.
        partial_lse: [num_parts, num_heads, num_tokens] fp32, natural log.
        sinks, impl: as in ``paged_attention``.
        out: [num_tokens, num_heads, head_dim] bf16, fp16 or fp32; None allocates in partial_out's
            dtype.
        lse: [num_heads, num_tokens] fp32, filled in place with the merged natural-log lse, without
            the sink.

    Returns:
        ``out``; where no part has a key, out is 0 and lse -inf.

    Raises:
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
    expect_tensor("out", out, (num_tokens, num_heads, head_dim), MODEL_DTYPES, device=device)
    expect_apart("out", out)
    if chosen == "triton":
        from ..common.merging import merge_dense as merge
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

    It holds a row of head_dim + 1 values for each KV split, token and head.

    Args:
        num_decodes: most sequences on the decode path.
        max_seqlen_q: as in the attention call; 1 for batches that also hold prefill sequences.
        num_heads, num_kv_heads, head_dim: sizes of the layer.
        num_sms: ``torch.cuda.get_device_properties(device).multi_processor_count``.

    Raises:
        ValueError: a value is not a positive int, or num_heads is not a multiple of num_kv_heads.
    """
    sizes = {
        "num_decodes": num_decodes,
        "max_seqlen_q": max_seqlen_q,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "num_sms": num_sms,
    }
    for name, value in sizes.items():
        expect_int(name, value, 1)
    _expect_multiple("num_heads", num_heads, num_kv_heads)
    group = num_heads // num_kv_heads
    tokens, _, head_tiles = tile_heads(group, tile_rows(group, max_seqlen_q))
    splits = target_splits(num_sms, num_kv_heads, head_tiles)
    return splits * tokens * num_heads * (head_dim + 1)


def _check_and_attend(call: AttentionCall, impl: str | None) -> torch.Tensor:
    """Check a call, fill in its defaults, and compute it."""
    chosen = checks.complete(call, check_attention, impl)
    if call.out is None:
        call.out = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)
    if chosen == "torch":  # reads lengths and page ids, and checks them
        from .torch_impl import attend_in_torch as attend
    else:
        from .launch import launch_attention as attend

        if checks.is_readable(call.q):
            _check_values(call)
    return attend(call)


def check_attention(call: AttentionCall) -> None:
    """Check all of a call but values in memory."""
    q, k, v = call.q, call.k, call.v
    expect_tensor("q", q, (None, None, None), MODEL_DTYPES)
    (num_tokens, num_heads, head_dim), device = q.shape, q.device
    checks.check_pages(call.k_pages, call.v_pages, q.dtype, device)
    checks.check_scales(call.k_scale, call.v_scale, call.k_pages)
    num_kv_heads = call.k_pages.shape[2]
    if call.k_pages.shape[3] != head_dim:
        raise ValueError(f"k_pages: expected head_dim {head_dim}, got {call.k_pages.shape[3]}")
    _expect_multiple("q: num_heads", num_heads, num_kv_heads)
    checks.check_batch(call, "block_table", call.block_table, head_dim)
    expect_int("block_table: width", call.block_table.shape[1], 1)
    if (k is None) != (v is None):
        missing = "k" if k is None else "v"
        raise ValueError(f"{missing}: expected new rows of both k and v or of neither, got None")
    if not isinstance(call.context_only, bool):
        raise ValueError(f"context_only: expected a bool, got {call.context_only!r}")
    if call.context_only and k is not None:
        raise ValueError("context_only: expected False with new rows k and v, got True")
    if k is not None and v is not None:
        for name, rows in (("k", k), ("v", v)):
            expect_tensor(name, rows, (num_tokens, num_kv_heads, head_dim), q.dtype, device=device)
            if num_tokens > 1 and checks.MAX_TILE * rows.stride(0) >= 2**31:
                raise ValueError(
                    f"{name}: expected tokens < 2**24 elements apart, got {rows.stride()}"
                )
    if call.softcap is not None:
        checks.expect_positive("softcap", call.softcap)
    if call.sliding_window is not None:
        expect_int("sliding_window", call.sliding_window, 1)


def _check_values(call: AttentionCall) -> None:
    """Check values in CPU tensors: lengths, prefix sums, and the ids of pages that queries see."""
    batch = checks.read_batch(call.seq_lens, call.cu_seqlens_q, call.q.shape[0])
    q_lens = call.cu_seqlens_q.diff()
    context = call.seq_lens - q_lens
    end = context if call.paged_context else call.seq_lens
    block_size, width = call.k_pages.shape[1], call.block_table.shape[1]
    lowest = torch.zeros_like(end)
    if call.sliding_window is not None:
        checks.expect_ring(width, block_size, call.sliding_window, *batch, call.paged_context)
        lowest = (context - call.sliding_window + 1).clamp(min=0)
    first, last = lowest // block_size, (end + block_size - 1) // block_size
    if call.sliding_window is None:
        last = last.clamp(max=width)
    last = torch.where((q_lens > 0) & (lowest < end), last, first)
    block = first[:, None] + torch.arange(max([0, *(last - first).tolist()]))
    pages = call.block_table.gather(1, block.long() % width)
    checks.expect_ids("block_table", pages[block < last[:, None]], call.k_pages.shape[0])


def _expect_multiple(name: str, num_heads: int, num_kv_heads: int) -> None:
    if num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"{name}: expected a multiple of num_kv_heads {num_kv_heads}, got {num_heads}"
        )
