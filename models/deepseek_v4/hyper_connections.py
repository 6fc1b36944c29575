"""Hyper-connections (mHC): how the blocks of a layer read from and write to the residual streams.

Source: transformers ``modeling_deepseek_v4``; DeepSeek-V4 report 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.basic import empty_parameter
from .config import DeepseekV4Config


def _mixes(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Projection of all streams together: [num_tokens, rows] fp32.

    Before it, one RMS norm without weight over all their channels.
    """
    flat = streams.flatten(1).float()
    return F.linear(F.rms_norm(flat, flat.shape[-1:], None, eps), fn)


class HyperConnection(nn.Module):
    """How one sub-block reads from and writes to the residual streams (mHC).

    Three sets of weights, made from the streams.

    Source: DeepSeek-V4 report 2.2 (manifold-constrained hyper-connections).
    """

    def __init__(self, config: DeepseekV4Config, device: torch.device) -> None:
        super().__init__()
        self.config = config
        n = config.hc_mult
        fp32 = {"device": device, "dtype": torch.float32}
        self.fn = empty_parameter((2 + n) * n, n * config.hidden_size, **fp32)
        self.base = empty_parameter((2 + n) * n, **fp32)
        self.scale = empty_parameter(3, **fp32)

    def collapse(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the sub-block reads, and the weights with which `expand` writes its result back.

        Args:
            streams: [num_tokens, hc_mult, hidden_size].

        Returns:
            (input [num_tokens, hidden_size], post [num_tokens, hc_mult] fp32, comb [num_tokens,
            hc_mult, hc_mult] fp32).
        """
        config, n = self.config, self.config.hc_mult
        mixes = _mixes(streams, self.fn, config.rms_norm_eps)
        pre, post, comb = mixes.split([n, n, n * n], dim=-1)
        pre_base, post_base, comb_base = self.base.split([n, n, n * n])
        pre = torch.sigmoid(pre * self.scale[0] + pre_base) + config.hc_eps
        post = 2 * torch.sigmoid(post * self.scale[1] + post_base)
        comb = (comb * self.scale[2] + comb_base).unflatten(-1, (n, n))
        collapsed = (pre[..., None] * streams).sum(dim=1).to(streams.dtype)
        return collapsed, post, sinkhorn(comb, config.hc_sinkhorn_iters, config.hc_eps)

    @staticmethod
    def expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Streams after the sub-block: stream k is post[k] y + sum_j comb[j, k] streams[j].

        Args:
            streams: [num_tokens, hc_mult, hidden_size].
            y: [num_tokens, hidden_size].
            post, comb: of `collapse`.
        """
        post, comb = post.to(y.dtype), comb.to(y.dtype)
        return post[..., None] * y[:, None] + comb.transpose(1, 2) @ streams


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Matrices with rows and columns that sum to about 1.

    A softmax of the rows, then columns and rows normalized in turn.

    Tokens are the last dimension while it works, as they are many and n is 4. One more row and
    column hold eps: a sum has it already.

    Args:
        logits: [num_tokens, n, n] fp32.
        iterations: column normalizations; there is one row normalization less, and columns come
            last.

    Returns:
        [num_tokens, n, n].
    """
    num_tokens, n, _ = logits.shape
    padded = logits.new_full((n + 1, n + 1, num_tokens), eps)
    matrix, rows, columns = padded[:n, :n], padded[:n], padded[:, :n]
    torch.add(logits.softmax(dim=-1).permute(1, 2, 0), eps, out=matrix)
    matrix.div_(columns.sum(dim=0))
    for _ in range(iterations - 1):
        matrix.div_(rows.sum(dim=1, keepdim=True))
        matrix.div_(columns.sum(dim=0))
    return matrix.permute(2, 0, 1).contiguous()  # else a batched product takes it matrix by matrix


class HyperHead(nn.Module):
    """One row from the residual streams, weighted as in `HyperConnection`, for the final norm."""

    def __init__(self, config: DeepseekV4Config, device: torch.device) -> None:
        super().__init__()
        self.config = config
        n = config.hc_mult
        fp32 = {"device": device, "dtype": torch.float32}
        self.hc_fn = empty_parameter(n, n * config.hidden_size, **fp32)
        self.hc_base = empty_parameter(n, **fp32)
        self.hc_scale = empty_parameter(1, **fp32)

    def forward(self, streams: Tensor) -> Tensor:
        """One row from the streams of each token.

        Args:
            streams: [num_tokens, hc_mult, hidden_size].

        Returns:
            [num_tokens, hidden_size].
        """
        mixes = _mixes(streams, self.hc_fn, self.config.rms_norm_eps)
        pre = torch.sigmoid(mixes * self.hc_scale + self.hc_base) + self.config.hc_eps
        return (pre[..., None] * streams).sum(dim=1).to(streams.dtype)
