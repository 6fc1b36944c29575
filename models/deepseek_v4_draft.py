"""More than one draft a step from one drafter layer: it reads its own streams and the draft before.

The first draft of a sequence comes from the rows of the step itself (`DeepseekV4.draft_streams`). Rows past it are guesses, so none is
written to a page: each further draft computes all guessed rows of its sequence again as fresh rows, a few rows of one layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.models.batch import AttnMetadata
from quire.models.deepseek_v4 import DeepseekV4
from quire.models.deepseek_v4_cache import V4PagePool
from quire.models.deepseek_v4_paged import PagedStep


@torch.inference_mode()
def chain_drafts(
    model: DeepseekV4,
    streams: Tensor,
    seq_lens: Tensor,
    block_tables: tuple[Tensor, ...],
    request_slots: Tensor,
    pool: V4PagePool,
    *,
    num_drafts: int,
    max_seq_len: int,
    impl: str | None = None,
) -> Tensor:
    """Greedy drafts of every sequence.

    streams: [num_seqs, hc_mult, hidden_size] of drafter 0 at each sequence's last computed row.
    seq_lens: [num_seqs] int32, computed tokens; block_tables: per group [num_seqs, width] int32, after the commit of that step.
    request_slots: [num_seqs] int32. pool: pages, only read. num_drafts: tokens to draft, >= 1.
    max_seq_len: host int, upper bound of seq_lens. impl: as in `DeepseekV4.forward`.

    Returns: [num_seqs, num_drafts] int64: guesses of the tokens at positions seq_lens + 1 and on; the token at seq_lens is not a
        guess, it was sampled.
    """
    num_seqs, device = len(seq_lens), seq_lens.device
    rows = streams[:, None]  # what each guessed row is made from
    ids = model.draft_logits(0, streams).argmax(dim=-1)[:, None]
    while (count := ids.shape[1]) < num_drafts:
        positions = seq_lens.long()[:, None] + torch.arange(count, device=device)
        nowhere = positions.new_full((num_seqs * count,), -1)
        attn = AttnMetadata(
            cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * count,
            seq_lens=seq_lens + count,
            block_tables=block_tables,
            slot_mappings=(nowhere,) * len(block_tables),
            max_seqlen_q=count,
            max_seq_len=max_seq_len + count,
            num_decodes=num_seqs if count == 1 else 0,
            request_slots=request_slots,
        )
        step = PagedStep(attn, pool, impl=impl)
        out = model.draft_streams(0, rows.flatten(0, 1), ids.flatten(), positions.flatten(), step)
        newest = out.unflatten(0, (num_seqs, count))[:, -1]
        rows = torch.cat([rows, newest[:, None]], dim=1)
        ids = torch.cat([ids, model.draft_logits(0, newest).argmax(dim=-1)[:, None]], dim=1)
    return ids
