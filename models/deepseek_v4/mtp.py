"""The drafter that DeepSeek-V4 checkpoints bring along.

One more layer, which predicts the token after the next (MTP).

From the trunk's residual streams at position t, before they are collapsed, and the token at t + 1::

    streams[n] = h_proj(hnorm(streams[n])) + e_proj(enorm(embed(token at t + 1)))    n < hc_mult
    streams = layer(streams)                      sliding attention, main RoPE, position t
    logits of the token at t + 2 = lm_head(norm(hc_head(streams)))

Further layers read the streams of the layer before and the token after
(`models.deepseek_v4.mtp_drafter`). A layer's KV row of position t depends on the token at t + 1: a
cached prefix may be shared only by requests that agree on one token more (``lookahead=1`` of its
cache group).

Source: DeepSeek-V4 checkpoints (``mtp.*``); vLLM 0.33 ``models/deepseek_v4``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layers.basic import Linear, RMSNorm
from ..parallel.group import Group
from .config import MOE, DeepseekV4Config
from .hyper_connections import HyperHead
from .layer import Attend, DecoderLayer


class MTP(DecoderLayer):
    """Drafter layer ``index`` (0 is the first); embedding and output projection are the trunk's."""

    def __init__(
        self, config: DeepseekV4Config, index: int, device: torch.device, dtype: torch.dtype,
        expert_format: str | None = None, group: Group | None = None,
    ) -> None:  # fmt: skip
        layer = config.num_layers + index
        super().__init__(config, layer, MOE, device, dtype, expert_format, group)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(hidden, eps, device, torch.float32)
        self.hnorm = RMSNorm(hidden, eps, device, torch.float32)
        self.norm = RMSNorm(hidden, eps, device, torch.float32)
        self.e_proj = Linear(hidden, hidden, device, dtype)
        self.h_proj = Linear(hidden, hidden, device, dtype)
        self.hc_head = HyperHead(config, device)

    def draft(
        self, streams: Tensor, next_ids: Tensor, next_embeds: Tensor, positions: Tensor,
        cos_sin: Tensor, attend: Attend,
    ) -> Tensor:  # fmt: skip
        """Streams of the drafter.

        Args:
            streams: [num_tokens, hc_mult, hidden_size] of the trunk, or of an earlier draft.
            next_ids, next_embeds: [num_tokens] and [num_tokens, hidden_size], the token after each
                row's.
            positions: [num_tokens] int64, of the rows, not of next_ids.
            cos_sin: [max_positions, rope_dim], the table of sliding layers.

        Returns:
            [num_tokens, hc_mult, hidden_size].
        """
        # As trained: a sequence's first row is given no token.
        embeds = next_embeds.masked_fill((positions == 0)[:, None], 0.0)
        embeds = self.e_proj(self.enorm(embeds))
        streams = self.h_proj(self.hnorm(streams)) + embeds[:, None]
        return self(streams, next_ids, positions, cos_sin, attend)

    def hidden(self, streams: Tensor, impl: str | None) -> Tensor:
        """What the output projection reads.

        [num_tokens, hidden_size] from the streams of `draft`.
        """
        return self.hc_head(streams, self.norm, impl)
