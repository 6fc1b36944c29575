"""DSpark: the drafter of DeepSeek-V4-Flash-0731 and V4-Pro-0813, which drafts a block at once.

The trunk hands over, for each token, the mean of its residual streams after some layers (taps)::

    main_x = main_norm(main_proj(taps))                              one row a token
    context row of stage s = RoPE(kv_norm_s(kv_proj_s(main_x)))      into the stage's window pages

A block is the newest token and noise tokens. Its rows go through the stages, where all see the
context rows of the last ``sliding_window`` tokens, and each other. Draft i comes from
lm_head(norm(hc_head(row i))) + markov_w2 markov_w1[draft i - 1]. The confidence head is not read.

Source: DeepSeek-V4-Flash-DSpark's checkpoint; vLLM 0.33 ``models/deepseek_v4/nvidia/dspark``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.kernels import write_latent
from quire.kvcore.device import Batch

from ..engine.device_drafter import DeviceDrafter
from ..layers.rotary import apply_rope
from .attention import Attention, AttentionInputs
from .cache import V4PagePool
from .config import SLIDING
from .model import DeepseekV4


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
        """As `LatentAttend.__call__`."""
        pages, slots = self.pool.layers[attention.layer].window, self._slots(attention.layer)
        own = write_latent(
            inputs.kv,
            None,
            None,
            positions=inputs.positions,
            cos_sin=inputs.cos_sin,
            norm_weight=attention.kv_norm.weight,
            eps=attention.eps,
            out=torch.empty_like(inputs.kv, memory_format=torch.contiguous_format),
            impl=self.impl,
        )
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
                attention.kv_proj(main_x),
                cache.window,
                batch.attn.slot_mappings[cache.window_group],
                positions=batch.positions,
                cos_sin=self.model.rope[SLIDING],
                norm_weight=attention.kv_norm.weight,
                eps=attention.eps,
                impl=self._impl,
            )

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
