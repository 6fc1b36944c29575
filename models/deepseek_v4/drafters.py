"""Drafters of DeepSeek-V4: MTP layers, and DSpark of V4-Flash-0731 and V4-Pro-0813.

MTP: draft i comes from layer i; drafts past the last layer come from the last layer. Layer i
stores, at position t + i, a row made from the streams at t and the token at t + 1 + i. So a step
computes the rows of all layers at its positions, and their pages look ahead by one token. Rows of
layer i > 0 without streams of the layer before are made from zeros: that changes drafts, never the
output.

DSpark drafts a block at once. The trunk hands over, for each token, the mean of its residual
streams after some layers (taps)::

    main_x = main_norm(main_proj(taps))                              one row a token
    context row of stage s = RoPE(kv_norm_s(kv_proj_s(main_x)))      into the stage's window pages

A block is the newest token and noise tokens. Its rows go through the stages, where all see the
context rows of the last ``sliding_window`` tokens, and each other. Draft i comes from
lm_head(norm(hc_head(row i))) + markov_w2 markov_w1[draft i - 1]. The confidence head is not read.

Source: DeepSeek-V3 report 2.2 (arXiv 2412.19437); DeepSeek-V4-Flash-DSpark's checkpoint; vLLM 0.33
for chained drafts and ``models/deepseek_v4/nvidia/dspark``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.kernels import write_latent
from quire.kvcore.device import AttnMetadata, Batch, BatchBuilder

from ..engine.device_drafter import DeviceDrafter
from ..layers.rotary import apply_rope
from .attention import Attention, AttentionInputs, PagedLatentAttend
from .cache import V4PagePool
from .config import SLIDING
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
        # The first draft is of the step's own rows. Each later one computes all guessed rows of
        # its sequence as new rows of one layer, and writes nothing.
        model, streams = self.model, self._streams[request_slots]
        (num_seqs, num_layers), device = streams.shape[:2], seq_lens.device
        out = streams[:, :0]  # of the layer before, at the guessed rows
        ids = choose(model.logits(streams[:, 0], self._impl, of=model.mtp[0]))[:, None]
        while (count := ids.shape[1]) < num_drafts:
            before, index = (min(i, num_layers - 1) for i in (count - 1, count))
            rows = torch.cat([streams[:, before : before + 1], out], dim=1)
            positions = seq_lens.long()[:, None] + torch.arange(count, device=device)
            nowhere = positions.new_full((num_seqs * count,), -1)
            attn = AttnMetadata(
                cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * count,
                seq_lens=seq_lens + count, block_tables=block_tables,
                slot_mappings=(nowhere,) * len(block_tables), max_seqlen_q=count,
                max_seq_len=max_seq_len + count, num_decodes=num_seqs if count == 1 else 0,
                request_slots=request_slots.int(),
            )  # fmt: skip
            attend = PagedLatentAttend(attn, self._pool, impl=self._impl)
            out = model.draft_streams(
                index, rows.flatten(0, 1), ids.flatten(), positions.flatten(), attend
            ).unflatten(0, (num_seqs, count))
            draft = choose(model.logits(out[:, -1], self._impl, of=model.mtp[index]))
            ids = torch.cat([ids, draft[:, None]], dim=1)
        return ids


class BlockAttend:
    """Attention of the rows of a block over pages, which are only read; a `LatentAttend`.

    Args:
        block_tables: per group [num_seqs, width] int32.
        seq_lens: [num_seqs] int64, tokens with context rows; the block begins behind them.
    """

    def __init__(
        self, pool: V4PagePool, block_tables: tuple[Tensor, ...], seq_lens: Tensor,
        block_size: int, impl: str | None,
    ) -> None:  # fmt: skip
        self.pool, self.block_tables, self.seq_lens = pool, block_tables, seq_lens
        self.block_size, self.impl = block_size, impl

    def __call__(self, attention: Attention, inputs: AttentionInputs) -> Tensor:
        pages, slots = self.pool.layers[attention.layer].window, self._slots(attention.layer)
        own = write_latent(
            inputs.kv, None, None, positions=inputs.positions, cos_sin=inputs.cos_sin,
            norm_weight=attention.kv_norm.weight, eps=attention.eps, impl=self.impl,
            out=torch.empty_like(inputs.kv, memory_format=torch.contiguous_format),
        )  # fmt: skip
        own = own.unflatten(0, (-1, self.block_size)).float()
        rows = torch.cat([pages.read(slots), own], dim=1)  # [num_seqs, keys, head_dim]
        q = inputs.q.unflatten(0, (-1, self.block_size)).float()
        scores = torch.einsum("sqhd,skd->sqhk", q, rows) * attention.head_dim**-0.5
        scores[..., : slots.shape[1]].masked_fill_((slots < 0)[:, None, None], -torch.inf)
        sinks = attention.sinks[:, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        out = torch.einsum("sqhk,skd->sqhd", weights, rows).flatten(0, 1)
        cos_sin = inputs.cos_sin[inputs.positions]
        return apply_rope(out, cos_sin, inverse=True).to(inputs.q.dtype)

    def _slots(self, layer: int) -> Tensor:
        """[num_seqs, sliding_window] int64, the slots of the context rows; -1 = there is none."""
        group = self.pool.layers[layer].window_group
        table, size = self.block_tables[group], self.pool.plan.groups[group].block_size
        window = self.pool.config.sliding_window
        back = torch.arange(-window, 0, device=table.device)
        positions = self.seq_lens[:, None] + back
        pages = table.gather(1, positions.clamp_min(0) // size % table.shape[1]).long()
        exists = (positions >= 0) & (pages > 0)
        return torch.where(exists, pages * size + positions % size, -1)


class DSparkDrafter(DeviceDrafter):
    """Drafts of a DSpark model, greedy or drawn: a `DeviceDrafter`.

    Args:
        max_draft_tokens: drafts of a request in a step, at most the checkpoint's block size.

    Raises:
        ValueError: a model without DSpark, or max_draft_tokens out of range.
    """

    def __init__(self, model: DeepseekV4, max_draft_tokens: int | None = None) -> None:
        dspark = getattr(model.config, "dspark", None)
        if dspark is None:
            raise ValueError(f"model: expected one with DSpark, got {model.config.name!r}")
        most = dspark.block_size
        super().__init__(model, most if max_draft_tokens is None else max_draft_tokens)
        if self.max_draft_tokens > most:
            raise ValueError(
                f"max_draft_tokens: expected at most the block of {most} tokens that "
                f"{model.config.name!r} was trained for, got {max_draft_tokens}"
            )

    @torch.inference_mode()
    def observe(
        self, batch: Batch, hidden: Tensor, next_ids: np.ndarray, last_rows: np.ndarray,
        slots: np.ndarray,
    ) -> None:  # fmt: skip
        """As `quire.models.engine.device_drafter.DeviceDrafter.observe`; hidden: the taps.

        Rows of rejected drafts are written too. Later steps overwrite them before they are seen.
        """
        self._receive(next_ids, last_rows, slots)
        stages = self.model.mtp
        main_x = stages[0].main_norm(stages[0].main_proj(hidden))
        for stage in stages:
            attention = stage.self_attn
            cache = self._pool.layers[attention.layer]
            write_latent(
                attention.kv_proj(main_x), cache.window,
                batch.attn.slot_mappings[cache.window_group], positions=batch.positions,
                cos_sin=self.model.rope[SLIDING], norm_weight=attention.kv_norm.weight,
                eps=attention.eps, impl=self._impl,
            )  # fmt: skip

    def _drafts(
        self, request_slots: Tensor, seq_lens: Tensor, block_tables: tuple[Tensor, ...], *,
        num_drafts: int, max_seq_len: int, choose: Callable[[Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        ids = [self._newest[request_slots]]
        logits = self._block_logits(ids[0], seq_lens.long(), block_tables)
        markov_head = self.model.mtp[-1].markov_head
        for i in range(num_drafts):
            ids.append(choose(logits[:, i] + markov_head(ids[-1]).float()))
        return torch.stack(ids[1:], dim=1)

    def _block_logits(
        self, newest: Tensor, seq_lens: Tensor, block_tables: tuple[Tensor, ...]
    ) -> Tensor:
        """Logits [num_seqs, block_size, vocab_size] fp32 of the tokens behind ``newest``."""
        model, dspark = self.model, self.model.config.dspark
        num_seqs, size = len(newest), dspark.block_size
        ids = newest.new_full((num_seqs, size), dspark.noise_token_id)
        ids[:, 0] = newest
        # Rows past the last position give drafts that the engine does not take.
        positions = seq_lens[:, None] + torch.arange(size, device=ids.device)
        positions = positions.clamp_max(model.config.max_position_embeddings - 1).flatten()
        ids = ids.flatten()
        attend = BlockAttend(self._pool, block_tables, seq_lens, size, self._impl)
        streams = model.embed_tokens(ids)[:, None].expand(-1, model.config.hc_mult, -1)
        for stage in model.mtp:
            streams = stage(streams, ids, positions, model.rope[SLIDING], attend)
        logits = model.logits(streams, self._impl, of=model.mtp[-1])
        return logits.unflatten(0, (num_seqs, size))
