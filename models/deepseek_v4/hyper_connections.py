"""Hyper-connections (mHC): how the sub-blocks of a layer read from and write to residual streams.

With n streams of a token, which start as n copies of its embedding, and m = fn rms(streams), one
RMS norm without weight over all n * hidden_size channels of the token::

    pre  = sigmoid(scale[0] m[:n] + base[:n]) + eps
    post = 2 sigmoid(scale[1] m[n:2n] + base[n:2n])
    comb = Sinkhorn of the softmax over k of scale[2] m[2n:] + base[2n:], row-major [n (j), n (k)]
    what a sub-block reads   its layer norm of the sum over i of pre[i] streams[i]
    streams after it         stream k = post[k] y + sum over j of comb[j, k] streams[j]

`quire.kernels.collapse_streams` and `quire.kernels.expand_streams` compute them.

Source: transformers ``modeling_deepseek_v4``; DeepSeek-V4 report 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.kernels import collapse_streams, expand_streams

from ..layers.basic import RMSNorm, empty_parameter
from .config import DeepseekV4Config


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

    def collapse(
        self, streams: Tensor, norm: RMSNorm, impl: str | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the sub-block reads, and the weights with which `expand` writes its result back.

        Args:
            streams: [num_tokens, hc_mult, hidden_size].
            norm: of what the sub-block reads.
            impl: "triton" or "torch"; None = by device.

        Returns:
            (input [num_tokens, hidden_size], post [num_tokens, hc_mult] fp32, comb [num_tokens,
            hc_mult, hc_mult] fp32).
        """
        x, post, comb = collapse_streams(
            streams,
            self.fn,
            self.base,
            self.scale,
            norm_weight=norm.weight,
            norm_eps=self.config.rms_norm_eps,
            eps=self.config.hc_eps,
            iterations=self.config.hc_sinkhorn_iters,
            impl=impl,
        )
        assert post is not None and comb is not None
        return x, post, comb

    @staticmethod
    def expand(
        streams: Tensor, y: Tensor, post: Tensor, comb: Tensor, rows: Tensor | None = None,
        weights: Tensor | None = None, impl: str | None = None,
    ) -> Tensor:  # fmt: skip
        """Streams after the sub-block: stream k is post[k] y + sum_j comb[j, k] streams[j].

        Args:
            streams: [num_tokens, hc_mult, hidden_size].
            y: [num_tokens, hidden_size].
            post, comb: of `collapse`.
            rows, weights: what is added to y, as of `quire.kernels.expand_streams`; None = nothing.
            impl: "triton" or "torch"; None = by device.
        """
        return expand_streams(streams, y, post, comb, rows=rows, weights=weights, impl=impl)


class HyperHead(nn.Module):
    """One row from the residual streams, weighted as in `HyperConnection`, and the final norm."""

    def __init__(self, config: DeepseekV4Config, device: torch.device) -> None:
        super().__init__()
        self.config = config
        n = config.hc_mult
        fp32 = {"device": device, "dtype": torch.float32}
        self.hc_fn = empty_parameter(n, n * config.hidden_size, **fp32)
        self.hc_base = empty_parameter(n, **fp32)
        self.hc_scale = empty_parameter(1, **fp32)

    def forward(
        self, streams: Tensor, norm: RMSNorm | None = None, impl: str | None = None
    ) -> Tensor:
        """One row from the streams of each token.

        Args:
            streams: [num_tokens, hc_mult, hidden_size].
            norm: of the row; None = none.
            impl: "triton" or "torch"; None = by device.

        Returns:
            [num_tokens, hidden_size].
        """
        return collapse_streams(
            streams,
            self.hc_fn,
            self.hc_base,
            self.hc_scale,
            norm_weight=None if norm is None else norm.weight,
            norm_eps=self.config.rms_norm_eps,
            eps=self.config.hc_eps,
            impl=impl,
        )[0]
