"""Drives a model over pages without `quire.kvcore`, and compares logits."""

import torch

from quire.kvcore.device import AttnMetadata
from quire.models.families.decoder import Decoder
from quire.models.layers.kv_cache import PageTensors, cache_groups


class HandPaged:
    """Pages of a few sequences under hand-made tables with shuffled page ids, made without `quire.kvcore`.

    ring False: linear tables, every row is written; the step's table has page 0 for the blocks that the step starts. True: window groups have the smallest ring that can serve a decode, and of
    a chunk only the last W - 1 rows are written, some of them over rows that its first queries still see.
    """

    def __init__(
        self, model: Decoder, num_seqs: int, max_len: int, ring: bool = False, impl="torch"
    ):
        self.model, self.ring, self.impl = model, ring, impl
        self.groups, placement = cache_groups(model.config, model.dtype)
        self.widths = [
            1 - (1 - group.sliding_window) // group.block_size
            if ring and group.kind == "window"
            else -(-max_len // group.block_size)
            for group in self.groups
        ]
        num_pages = 1 + num_seqs * sum(self.widths)
        ids = 1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0))
        tables = ids.to(torch.int32).view(num_seqs, -1).split(self.widths, dim=1)
        self.tables = [table.contiguous() for table in tables]
        self.pool = PageTensors(
            model.config,
            self.groups,
            placement,
            num_pages=num_pages,
            dtype=model.dtype,
            device="cpu",
        )
        for slot in self.pool.tensors:
            slot.view(model.dtype).fill_(float("nan"))
        self.context = torch.zeros(num_seqs, dtype=torch.int64)

    def step(self, chunks: dict[int, torch.Tensor], logits_rows=None) -> torch.Tensor:
        """chunks: {sequence: its next tokens}, those with one token first. Logits of all rows, or of ``logits_rows``."""
        seqs = torch.tensor(list(chunks))
        q_lens = torch.tensor([len(chunk) for chunk in chunks.values()])
        rows = [torch.arange(self.context[s], self.context[s] + len(chunks[s])) for s in chunks]
        positions = torch.cat(rows)
        owner = torch.repeat_interleave(seqs, q_lens)
        seq_lens = self.context[seqs] + q_lens
        slots = []
        for group, width, table in zip(self.groups, self.widths, self.tables, strict=True):
            pages = table[owner, positions // group.block_size % width].long()
            slot = pages * group.block_size + positions % group.block_size
            if self.ring and group.kind == "window":
                last = torch.repeat_interleave(seq_lens, q_lens)
                slot[positions < last - (group.sliding_window - 1)] = -1
            slots.append(slot)
        attn = AttnMetadata(
            cu_seqlens_q=torch.nn.functional.pad(q_lens.cumsum(0), (1, 0)).int(),
            seq_lens=seq_lens.int(),
            block_tables=tuple(
                self._known(group, table[seqs], self.context[seqs])
                for group, table in zip(self.groups, self.tables, strict=True)
            ),
            slot_mappings=tuple(slots),
            max_seqlen_q=int(q_lens.max()),
            max_seq_len=int(seq_lens.max()),
            num_decodes=int((q_lens == 1).sum()),
        )
        self.context[seqs] = seq_lens
        return self.model(
            torch.cat(list(chunks.values())),
            positions,
            attn,
            self.pool,
            logits_rows=logits_rows,
            impl=self.impl,
        )

    def _known(self, group, table, context):
        """The table as it is before the step."""
        if self.ring and group.kind == "window":
            return table
        block = torch.arange(table.shape[1])
        return torch.where(block * group.block_size < context[:, None], table, 0)


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape and got.isfinite().all()
    return (got - expected).abs().max().item()
