"""Forward passes at start that nobody waits for: what they compile, no later step has to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kvcore.device import AttnMetadata, BatchBuilder

if TYPE_CHECKING:
    from .config import EngineConfig
    from .graphs import Forward

# Tokens, or a length, below which all steps take the same kernels.
FEWEST = 64


def warm_up(
    forward: Forward,
    builder: BatchBuilder,
    config: EngineConfig,
    max_seq_len: int,
    device: torch.device,
) -> None:
    """Runs steps of padding: prompts alone and beside decodes, of short and of long sequences.

    Kernels depend on what there is in a step, and on powers of two of tokens and of lengths: the
    tiles of experts on the rows that one has, blocks of a top-k on what it selects from. So each of
    these is run once. Padding has no pages: no row is written, and none is read.

    Args:
        forward: the model.
        builder: whose tables it reads.
        config: of the engine.
        max_seq_len: the longest sequence.
    """
    most = config.max_num_batched_tokens
    for num_decodes in {0, min(1, config.max_num_seqs - 1), min(config.max_num_seqs, most) - 1}:
        if num_decodes >= most:
            continue
        for longest in (1, max_seq_len):
            num_tokens = min(max_seq_len, most - num_decodes)
            forward(*_padding(builder, num_decodes, num_tokens, longest, device))
    size = FEWEST
    while size < max(most, max_seq_len):
        longest = min(size, max_seq_len)
        forward(*_padding(builder, 0, min(longest, most), longest, device))
        size *= 2


def _padding(
    builder: BatchBuilder, num_decodes: int, num_tokens: int, max_seq_len: int, device: torch.device
) -> tuple[Tensor, Tensor, AttnMetadata, Tensor]:
    """A step of padding rows: decodes of one token, and one sequence of ``num_tokens``."""
    num_seqs, total = num_decodes + 1, num_decodes + num_tokens

    def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    slots = integers(num_seqs)
    cu_seqlens_q = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    cu_seqlens_q[-1] = total
    attn = AttnMetadata(
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=integers(num_seqs, dtype=torch.int32),
        block_tables=builder.gather(slots, max_seq_len),
        slot_mappings=(integers(total) - 1,) * builder.num_groups,
        max_seqlen_q=num_tokens,
        max_seq_len=max_seq_len,
        num_decodes=num_decodes,
        request_slots=slots.to(torch.int32),
    )
    return integers(total), integers(total), attn, cu_seqlens_q[1:].long() - 1
