"""The arguments of one call of the attention functions, and their checks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..common import checks
from ..common.checks import MODEL_DTYPES, expect_apart, expect_int, expect_tensor


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention call, as given or, by ``check_attention``, checked.

    Fields are named, shaped and None as in ``paged_attention``. In a checked call ``num_decodes``,
    ``softmax_scale`` and ``out`` are set, and ``sliding_window`` is at most 2**30.
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
        return checks.scale_kind(self.k_scale)

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


def check_attention(call: AttentionCall) -> AttentionCall:
    """Check all of a call but values in memory, and fill in its defaults.

    Raises:
        ValueError: as in ``paged_attention``.
    """
    q, k, v = call.q, call.k, call.v
    expect_tensor("q", q, (None, None, None), MODEL_DTYPES)
    (num_tokens, num_heads, head_dim), device = q.shape, q.device
    checks.check_pages(call.k_pages, call.v_pages, q.dtype, device)
    checks.check_scales(call.k_scale, call.v_scale, call.k_pages)
    num_kv_heads = call.k_pages.shape[2]
    if call.k_pages.shape[3] != head_dim:
        raise ValueError(f"k_pages: expected head_dim {head_dim}, got {call.k_pages.shape[3]}")
    if num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"q: expected num_heads to be a multiple of num_kv_heads {num_kv_heads}, got {num_heads}"
        )
    num_seqs = checks.expect_batch(call.seq_lens, call.cu_seqlens_q, call.max_seqlen_q, device)
    num_decodes = checks.expect_decodes(
        num_tokens, num_seqs, call.max_seqlen_q, call.max_seq_len, call.num_decodes
    )
    expect_tensor("block_table", call.block_table, (num_seqs, None), torch.int32, device=device)
    expect_int("block_table: width", call.block_table.shape[1], 1)
    if (k is None) != (v is None):
        missing = "k" if k is None else "v"
        raise ValueError(f"{missing}: expected new rows of both k and v or of neither, got None")
    if not isinstance(call.context_only, bool):
        raise ValueError(f"context_only: expected a bool, got {call.context_only!r}")
    if call.context_only and k is not None:
        raise ValueError("context_only: expected False with new rows k and v, got True")
    for name, rows in (("k", k), ("v", v)):
        if rows is None:
            continue
        expect_tensor(name, rows, (num_tokens, num_kv_heads, head_dim), q.dtype, device=device)
        if num_tokens > 1 and checks.MAX_TILE * rows.stride(0) >= 2**31:
            raise ValueError(f"{name}: expected tokens < 2**24 elements apart, got {rows.stride()}")
    checks.check_outputs(num_heads, num_tokens, device, call.sinks, call.lse, call.workspace)
    out = call.out
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    else:
        expect_tensor("out", out, tuple(q.shape), q.dtype, device=device)
        expect_apart("out", out)
    softcap, window = call.softcap, call.sliding_window
    if softcap is not None:
        checks.expect_positive("softcap", softcap)
    return replace(
        call,
        num_decodes=num_decodes,
        softmax_scale=checks.softmax_factor(call.softmax_scale, head_dim),
        softcap=None if softcap is None else float(softcap),
        sliding_window=None if window is None else checks.window_tokens(window),
        out=out,
    )


def check_values(call: AttentionCall) -> None:
    """Check values in CPU tensors: lengths, prefix sums, and the ids of pages that queries see.

    Raises:
        ValueError: as in ``paged_attention``.
    """
    checks.expect_lengths("seq_lens", call.seq_lens.tolist())
    checks.expect_offsets("cu_seqlens_q", call.cu_seqlens_q.tolist(), call.q.shape[0])
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
    block = first[:, None] + torch.arange(max([0, *(last - first).tolist()]))
    pages = call.block_table.gather(1, block.long() % width)
    checks.expect_ids("block_table", pages[block < last[:, None]], call.k_pages.shape[0])
