"""The checked arguments of one call of the attention functions and of ``merge_partials``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..common.checks import (
    MAX_TILE,
    MAX_TOKENS,
    MODEL_DTYPES,
    check_pages,
    check_scales,
    expect_apart,
    expect_batch,
    expect_decodes,
    expect_head_dim,
    expect_ids,
    expect_int,
    expect_offsets,
    expect_positive,
    expect_tensor,
    expect_values,
    scale_kind,
    softmax_factor,
    window_tokens,
)


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
        """Kind of k_scale and v_scale: "none", "number", "tensor" (of one number) or "rows"."""
        return scale_kind(self.k_scale)

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
    num_seqs = expect_batch(call.seq_lens, call.cu_seqlens_q, call.max_seqlen_q, device)
    num_decodes = expect_decodes(
        num_tokens, num_seqs, call.max_seqlen_q, call.max_seq_len, call.num_decodes
    )
    expect_values("seq_lens", call.seq_lens, -MAX_TOKENS, MAX_TOKENS - 1)
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


def check_values(call: AttentionCall) -> None:
    """Check what the tensors of a checked call on a CPU hold: prefix sums, and the pages that
    queries see.

    Raises:
        ValueError: as ``quire.kernels.paged_attention``.
    """
    expect_offsets("cu_seqlens_q", call.cu_seqlens_q.tolist(), call.q.shape[0])
    q_lens = call.cu_seqlens_q.diff()
    context = call.seq_lens - q_lens
    end = context if call.paged_context else call.seq_lens
    block_size, width = call.k_pages.shape[1], call.block_table.shape[1]
    lowest = torch.zeros_like(end)
    if call.sliding_window is not None:
        lowest = (context - call.sliding_window + 1).clamp(min=0)
    first, last = lowest // block_size, (end + block_size - 1) // block_size
    if call.sliding_window is None:
        last = last.clamp(max=width)
    last = torch.where((q_lens > 0) & (lowest < end), last, first)
    span = torch.arange(max([0, *(last - first).tolist()]))
    block = first[:, None] + span
    pages = call.block_table.gather(1, block.long() % width)
    expect_ids("block_table", pages[block < last[:, None]], call.k_pages.shape[0])
