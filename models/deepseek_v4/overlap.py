"""Series a of the last tokens before a block's end: CSA layers need it to resume a sequence there
(series a: what `models.deepseek_v4.layer.GatedPooling` pools into the entry of the next window).

Source: `models.deepseek_v4.cache_plan`, the group "overlap".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import copy_overlap
from quire.kvcore.device import AttnMetadata


@dataclass(frozen=True)
class OverlapCopies:
    """What a step copies between the rings and the pages of the group "overlap".

    Save: each of the last ``ratio`` tokens of a block has its series a copied to its row of the
    block's page by the step that computes it, one chunk or several decode steps. Load: a sequence
    whose step starts at a block's end copies that block's page to its ring. After a prefix hit the
    ring holds nothing of the sequence; a sequence that has computed the block has the same rows
    there, and the load changes nothing. That page exists, since its last rows are in the window of
    the group "overlap" (`cache_plan`). No step waits for the host: there are as many copies as
    shapes allow for, and those that are not wanted have page 0, or the ring -1.

    Attributes:
        tokens: [num_copies] int64, rows of the step, ``ratio`` of a block one after the other.
        pages: [num_copies] int64, where each goes; 0 = it is not saved.
        from_pages, rings: [num_seqs] int64, page to load, and ring that it goes to; -1 = none.
        ring_rows: [num_seqs, ratio] int64, rows of the ring that they go to.
    """

    tokens: Tensor
    pages: Tensor
    from_pages: Tensor
    rings: Tensor
    ring_rows: Tensor

    @classmethod
    def of_step(
        cls, attn: AttnMetadata, group: int, block_size: int, ratio: int, ring: int
    ) -> OverlapCopies:
        """The copies of a step.

        Args:
            attn: the step.
            group: index of the group.
            block_size: tokens of its pages.
            ratio: tokens of a compression window.
            ring: rows of a ring.
        """
        slots, table = attn.slot_mappings[group], attn.block_tables[group]
        ends = attn.seq_lens.long()
        starts = ends - attn.cu_seqlens_q.diff().long()
        device = slots.device

        # Of every block that the longest chunk may touch, the last tokens.
        num_blocks = (attn.max_seqlen_q + block_size - 2) // block_size + 1
        block_starts = (starts // block_size * block_size)[:, None]
        block_ends = block_starts + torch.arange(1, num_blocks + 1, device=device) * block_size
        back = torch.arange(-ratio, 0, device=device)
        positions = block_ends[:, :, None] + back  # [num_seqs, num_blocks, ratio]
        first, end = starts[:, None, None], ends[:, None, None]
        in_step = (positions >= first) & (positions < end)
        tokens = positions - first + attn.cu_seqlens_q[:-1, None, None]
        tokens = torch.where(in_step, tokens, 0).flatten()
        kept = in_step.flatten() & (slots[tokens] >= 0)
        pages = torch.where(kept, slots[tokens] // block_size, 0)

        at_boundary = (starts > 0) & (starts % block_size == 0)
        before = (starts // block_size - 1).clamp(min=0) % table.shape[1]
        from_pages = table.gather(1, before[:, None])[:, 0]
        from_pages = torch.where(at_boundary, from_pages, 0).long()
        rings = torch.where(at_boundary, attn.request_slots, -1).long()
        ring_rows = (starts[:, None] + back) % ring
        return cls(tokens, pages, from_pages, rings, ring_rows)

    def run(
        self,
        kv: Tensor,
        gate: Tensor,
        position_bias: Tensor,
        overlap: Tensor,
        ring: Tensor,
        impl: str | None,
    ) -> None:
        """Copies series a from pages into rings, and that of the step into pages.

        Args:
            kv, gate: [num_tokens, 2 * width] fp32 of the step.
            position_bias: [ratio, 2 * width], added to the gate.
            overlap, ring: of a `CompressorCache`.
            impl: "triton" or "torch"; None = by device.
        """
        copy_overlap(
            kv,
            gate,
            position_bias,
            ring,
            overlap,
            from_pages=self.from_pages,
            state_index=self.rings,
            state_rows=self.ring_rows,
            tokens=self.tokens,
            to_pages=self.pages,
            impl=impl,
        )
