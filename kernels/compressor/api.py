"""``compress``: checks, and the choice between ``kernel`` and ``torch_impl``.

The state holds the last ``ring`` rows of a sequence by position, not running sums. So rejected
drafts need no undo, and a snapshot is valid at any position. Results do not depend on the split of
a sequence into steps.
"""

from __future__ import annotations

import torch

from ..common import checks
from ..common.latent_pages import IndexPages, LatentPages
from ..latent_write.api import check_cos_sin, check_device, check_norm
from .torch_impl import live_tokens


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

    The entry is written to its slot. The last rows of each sequence are kept in ``state``.

    Entry w covers tokens w * ratio .. w * ratio + ratio - 1, with ``overlap`` also the window
    before, in channels of its own. Per channel it is kv weighted by the softmax of
    gate + ape[position % ratio] over these tokens; then RMS norm, and RoPE at position w * ratio,
    all in fp32. Any split of a sequence into steps gives the same entries bit for bit.

    A later call with a smaller context takes a step back (rejected drafts): its rows replace the
    old ones. At most ``ring`` - (ratio * (1 + overlap) - 1) tokens may be taken back.

    Args:
        kv, gate: [num_tokens, channels] bf16, fp16 or fp32, last stride 1, the step's ragged rows.
            channels = dim of the pages; with overlap twice that: series a, pooled by the next
            window, then series b, pooled by the token's own window.
        ape: [ratio, channels] fp32, position bias, added to the gate at position % ratio.
        state: [num_states, ring, 2, channels] fp32, any strides with last stride 1. Row
            position % ring holds kv and gate + ape of a token. ring >= ratio * (1 + overlap) - 1,
            and longer by the tokens that may be taken back. Only rows that a closing window pools
            are read, none of positions below 0: a new sequence needs no cleared state. One launch
            if ring >= max_seqlen_q + ratio * (1 + overlap) - 1, else two.
        state_index: [num_seqs] int32, the state of each sequence, each once. A negative one is
            padding: nothing of the sequence is read or written.
        seq_lens: [num_seqs] int32, tokens of each sequence including this step's; 0 for a padding
            row.
        cu_seqlens_q: [num_seqs + 1] int32, prefix sums of the new tokens.
        ratio: tokens of a window, 1..2**30.
        overlap: True = an entry also pools the window before its own.
        norm_weight: [dim] bf16, fp16 or fp32.
        eps: added to the mean square, in 2**-100 .. 2**30.
        cos_sin: [max_position, rope_dim] fp32 as in ``write_latent``.
        pages: destination: LatentPages, or IndexPages for the keys of the indexer.
        slot_mapping: [num_tokens] int64, page * storage_block_size + row for the entry that a token
            closes; -1 = no entry. Slots of other tokens are not read.
        max_seqlen_q: host int, at least the new tokens of the longest sequence.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above;
            num_seqs * max_seqlen_q < num_tokens; a value of CPU tensors is out of range.

    Source: DeepSeek-V4, compressed sparse and heavily compressed attention.
    """
    chosen = checks.implementation(impl, kv)
    _check(
        kv, gate, ape, state, state_index, seq_lens, cu_seqlens_q,
        ratio, overlap, norm_weight, eps, cos_sin, pages, slot_mapping, max_seqlen_q,
    )  # fmt: skip
    if chosen == "torch" or checks.is_readable(kv):
        # Padding may have any state, and tokens that close no window any slot.
        checks.expect_offsets("cu_seqlens_q", cu_seqlens_q.tolist(), len(kv))
        seq, token, position = live_tokens(state_index, seq_lens, cu_seqlens_q)
        checks.expect_ids("state_index", state_index[seq], state.shape[0])
        closes = ((position + 1) % ratio == 0) & (slot_mapping[token] >= 0)
        num_slots = pages.data.shape[0] * pages.storage_block_size
        checks.expect_ids("slot_mapping", slot_mapping[token[closes]], num_slots)
        checks.expect_ids("cos_sin", position[closes] + 1 - ratio, cos_sin.shape[0], "positions")
    if chosen == "triton":
        from .kernel import compress as run
    else:
        from .torch_impl import compress as run
    run(
        kv, gate, ape, state, state_index, seq_lens, cu_seqlens_q,
        ratio, overlap, norm_weight, eps, cos_sin, pages, slot_mapping, max_seqlen_q,
    )  # fmt: skip


def _check(
    kv: torch.Tensor,
    gate: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    state_index: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    ratio: int,
    overlap: bool,
    norm_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    pages: LatentPages | IndexPages,
    slot_mapping: torch.Tensor,
    max_seqlen_q: int,
) -> None:
    if not isinstance(pages, LatentPages | IndexPages):
        raise ValueError(f"pages: expected LatentPages or IndexPages, got {type(pages).__name__}")
    checks.expect_int("ratio", ratio, 1, checks.MAX_TOKENS)
    if not isinstance(overlap, bool):
        raise ValueError(f"overlap: expected a bool, got {overlap!r}")
    channels, slots = pages.dim * (1 + overlap), ratio * (1 + overlap)
    checks.expect_tensor("kv", kv, (None, channels), checks.MODEL_DTYPES)
    num_tokens, device = kv.shape[0], kv.device
    checks.expect_tensor("gate", gate, (num_tokens, channels), checks.MODEL_DTYPES, device=device)
    checks.expect_tensor("ape", ape, (ratio, channels), torch.float32, device=device)
    checks.expect_tensor("state", state, (None, None, 2, channels), torch.float32, device=device)
    checks.expect_apart("state", state)
    checks.expect_int("state: ring", state.shape[1], max(1, slots - 1))
    num_seqs = checks.expect_batch(seq_lens, cu_seqlens_q, max_seqlen_q, device)
    checks.expect_longest(num_tokens, num_seqs, max_seqlen_q)
    checks.expect_tensor("state_index", state_index, (num_seqs,), torch.int32, device=device)
    check_norm(norm_weight, eps, pages.dim, device)
    rope_dim = pages.rope_dim if isinstance(pages, LatentPages) else None
    check_cos_sin(cos_sin, pages.dim, rope_dim, device)
    check_device("pages", pages.data, device)
    checks.expect_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, device=device)
