"""``compress``: check once, choose the implementation by name.

Next: `call`, the checks; then `triton_impl`, or `torch_impl` on a CPU.

The state is the rows themselves, the last ``ring`` tokens of a sequence by position, also at ratio
128, where running sums (a maximum, a sum and a weighted sum for each channel) would be 85 times
smaller. Rows, because

* rejected drafts need no undoing: the next step writes the same rows again, and older rows are
  still there if the ring is as much longer;
* a snapshot is right at any position, not only where it was planned, and what a step makes of its
  tokens does not depend on how they were split;
* rows move fewer bytes: a token writes 2 values a channel and has them read once when its window
  closes; running sums are 3 values a channel that each decode step reads and writes.

The price is that all reading falls on the token that closes a window, and 512 KiB a sequence and
layer at ratio 128 (dim 512).
"""

from __future__ import annotations

import torch

from ..common.impls import implementation
from ..common.latent_pages import IndexPages, LatentPages
from .call import CompressCall


def compress(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    state_index: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    ratio: int,
    overlap: bool,
    norm_weight: torch.Tensor,
    eps: float = 1e-6,
    cos_sin: torch.Tensor,
    pages: LatentPages | IndexPages,
    slot_mapping: torch.Tensor,
    max_seqlen_q: int,
    impl: str | None = None,
) -> None:
    """Pool each window of ``ratio`` tokens that closes in this step into one entry.

    The entry is written to its slot, and the last rows of each sequence are kept in ``state``.

    Entry w of a sequence covers the tokens w * ratio .. w * ratio + ratio - 1; with ``overlap``
    also those of the window before, by channels of their own. Per channel it is the softmax of
    gate + ape[position % ratio] over these tokens, applied to kv; then RMS norm, and RoPE at
    position w * ratio. All in fp32. A sequence may be split into steps anywhere; the entries are
    the same bit for bit.

    A step may be taken back: call again with a smaller context, and the rows are replaced. That is
    right while at most ``ring`` - (ratio * (1 + overlap) - 1) tokens are taken back.

    Args:
        kv, gate: [num_tokens, channels] bf16, fp16 or fp32, last stride 1, the step's rows, ragged.
            channels = dim of the pages; twice that with overlap: first series a, which the next
            window pools, then series b, which the token's own window pools.
        ape: [ratio, channels] fp32, the position bias, added to the gate of a token by its position
            modulo ratio.
        state: [num_states, ring, 2, channels] fp32, any strides with last stride 1. Row
            position % ring holds kv and gate + ape of a token. ring >= ratio * (1 + overlap) - 1,
            and longer by the tokens that may be taken back. Only rows that a closing window pools
            are read, none of positions below 0: a state need not be cleared for a new sequence. The
            step is one launch where ring >= max_seqlen_q + ratio * (1 + overlap) - 1, else two.
        state_index: [num_seqs] int32, the state of each sequence; no two alike. -1 = none: a
            padding row, of which nothing is read, made or kept, whatever its other arguments say.
        seq_lens: [num_seqs] int32, tokens of each sequence including this step's; 0 for a padding
            row.
        cu_seqlens_q: [num_seqs + 1] int32, prefix sums of the new tokens.
        ratio: tokens of a window, 1..2**30.
        overlap: whether an entry pools the window before its own too.
        norm_weight: [dim] bf16, fp16 or fp32.
        eps: added to the mean square, in 2**-100 .. 2**30.
        cos_sin: [max_position, rope_dim] fp32 as in ``write_latent``.
        pages: where entries go: LatentPages, or IndexPages for the keys of the indexer.
        slot_mapping: [num_tokens] int64: the entry that a token closes goes to that token's slot,
            page * storage_block_size + row of ``pages``; -1 = it is not made. Slots of other tokens
            are not looked at.
        max_seqlen_q: host int, at least the new tokens of the longest sequence. It sizes the grid:
            too small a value leaves entries out.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above, or
            num_seqs * max_seqlen_q < num_tokens.

    Source: DeepSeek-V4, compressed sparse and heavily compressed attention.
    """
    chosen = implementation(impl, kv)
    call = CompressCall(
        kv=kv,
        gate=gate,
        ape=ape,
        state=state,
        state_index=state_index,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        ratio=ratio,
        overlap=overlap,
        norm_weight=norm_weight,
        eps=eps,
        cos_sin=cos_sin,
        pages=pages,
        slot_mapping=slot_mapping,
        max_seqlen_q=max_seqlen_q,
    )
    if chosen == "triton":
        from .triton_impl import compress as run
    else:
        from .torch_impl import compress as run
    run(call)
