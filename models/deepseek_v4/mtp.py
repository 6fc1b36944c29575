"""Drafts of DeepSeek-V4's own drafter layers (`model.MTP`).

Draft i comes from layer i; drafts past the last layer come from the last layer. Layer i stores, at
position t + i, a row made from the streams at t and the token at t + 1 + i. So a step computes the
rows of all layers at its positions, and their pages look ahead by one token. Rows of layer i > 0
without streams of the layer before are made from zeros: that changes drafts, never the output.

Source: DeepSeek-V3 report 2.2 (arXiv 2412.19437); vLLM 0.33 for chained drafts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.kvcore.device import AttnMetadata, Batch, BatchBuilder

from ..engine.device_drafter import DeviceDrafter
from .attention import PagedLatentAttend
from .cache import V4PagePool
from .model import DeepseekV4


class MTPDrafter(DeviceDrafter):
    """Drafts of the model's MTP layers, greedy or drawn: a `DeviceDrafter`.

    Raises:
        ValueError: a model without MTP layers, or max_draft_tokens below 1.
    """

    def __init__(self, model: DeepseekV4, max_draft_tokens: int = 1) -> None:
        if not getattr(model.config, "num_mtp_layers", 0):
            raise ValueError(f"model: expected one with MTP layers, got {model.config.name!r}")
        super().__init__(model, max_draft_tokens)

    def attach(
        self, pool: V4PagePool, builder: BatchBuilder, *, max_requests: int, impl: str | None
    ) -> None:
        """As `quire.models.engine.device_drafter.DeviceDrafter.attach`."""
        super().attach(pool, builder, max_requests=max_requests, impl=impl)
        config, device = self.model.config, self.model.device
        num_layers = min(len(self.model.mtp), self.max_draft_tokens)
        # By slot: streams of each layer at the last row that stays, and the position after it.
        shape = (max_requests, num_layers, config.hc_mult, config.hidden_size)
        self._streams = torch.zeros(shape, dtype=self.model.dtype, device=device)
        self._ends = torch.zeros(max_requests, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def observe(
        self, batch: Batch, hidden: Tensor, next_ids: np.ndarray, last_rows: np.ndarray,
        slots: np.ndarray,
    ) -> None:  # fmt: skip
        """As `quire.models.engine.device_drafter.DeviceDrafter.observe`."""
        ids, rows, request_slots = self._receive(next_ids, last_rows, slots)
        attend = PagedLatentAttend(batch.attn, self._pool, impl=self._impl)
        firsts = batch.attn.cu_seqlens_q[:-1].long()
        starts = batch.positions[firsts]
        known = (starts > 0) & (starts == self._ends[request_slots])
        before = torch.where(known[:, None, None, None], self._streams[request_slots], 0)
        out = [self.model.draft_streams(0, hidden, ids, batch.positions, attend)]
        for index in range(1, before.shape[1]):
            shifted = out[-1].roll(1, dims=0)
            shifted[firsts] = before[:, index - 1]
            out.append(self.model.draft_streams(index, shifted, ids, batch.positions, attend))
        self._streams[request_slots] = torch.stack(out, dim=1)[rows]
        self._ends[request_slots] = batch.positions[rows] + 1

    def _drafts(
        self, request_slots: Tensor, seq_lens: Tensor, block_tables: tuple[Tensor, ...], *,
        num_drafts: int, max_seq_len: int, choose: Callable[[Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        """The first draft is of the step's own rows. Each later one computes all guessed rows of its
        sequence as new rows of one layer, and writes nothing.
        """
        model, streams = self.model, self._streams[request_slots]
        (num_seqs, num_layers), device = streams.shape[:2], seq_lens.device
        out = streams[:, :0]  # of the layer before, at the guessed rows
        ids = choose(model.draft_logits(0, streams[:, 0], self._impl))[:, None]
        while (count := ids.shape[1]) < num_drafts:
            before, index = (min(i, num_layers - 1) for i in (count - 1, count))
            rows = torch.cat([streams[:, before : before + 1], out], dim=1)
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
                request_slots=request_slots.int(),
            )
            attend = PagedLatentAttend(attn, self._pool, impl=self._impl)
            out = model.draft_streams(
                index, rows.flatten(0, 1), ids.flatten(), positions.flatten(), attend
            ).unflatten(0, (num_seqs, count))
            draft = choose(model.draft_logits(index, out[:, -1], self._impl))
            ids = torch.cat([ids, draft[:, None]], dim=1)
        return ids
