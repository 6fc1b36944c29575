"""Building blocks of DeepSeek-V4: rotary embedding, hyper-connections, routers and experts.

Weights keep the names and shapes that they have in transformers; nothing is initialised here. Rows are tokens of a ragged batch.

Source: transformers ``modeling_deepseek_v4``; DeepSeek-V4 report 2.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.model import RopeConfig
from ..layers.basic import Linear, empty_parameter, inverse_frequencies
from ..layers.moe import run_experts
from ..layers.packed_experts import PackedExperts
from .config import HASH_MOE, DeepseekV4Config


def rope_frequencies(config: DeepseekV4Config, *, compressed: bool) -> Tensor:
    """Radians per position of each pair of adjacent rotated channels (2i, 2i + 1).

    compressed: of CSA and HCA layers, whose frequencies YaRN interpolates, without its factor of cosine and sine.

    Returns: [rope_dim // 2] fp32, CPU.
    """
    base, yarn = config.compress_rope_theta if compressed else config.rope_theta, config.yarn
    rope = RopeConfig("default", base)
    if compressed and yarn is not None:
        rope = RopeConfig(
            "yarn",
            base,
            factor=yarn.factor,
            original_max_positions=yarn.original_max_position_embeddings,
            low=yarn.beta_slow,
            high=yarn.beta_fast,
        )
    return inverse_frequencies(rope, config.rope_dim)


def rope_table(frequencies: Tensor, num_positions: int) -> Tensor:
    """Cosines, then sines, of every position's angles: [num_positions, rope_dim] fp32, as `quire.kernels` reads them."""
    if frequencies.is_meta:  # the first sum there makes torch load its decompositions, seconds
        return frequencies.new_empty(num_positions, 2 * len(frequencies))
    angles = torch.arange(num_positions, device=frequencies.device)[:, None].float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def apply_rope(x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Turns the trailing channels of every row, in adjacent pairs, by its angles (back, where ``inverse``).

    x: [num_tokens, ..., head_dim]. cos_sin: [num_tokens, rope_dim] fp32 rows of a :func:`rope_table`.

    Returns: the shape and dtype of x; the arithmetic is fp32.
    """
    num_tokens, rope_dim = cos_sin.shape
    cos, sin = cos_sin.view(num_tokens, *[1] * (x.ndim - 2), rope_dim).chunk(2, dim=-1)
    if inverse:
        sin = -sin
    even, odd = x[..., -rope_dim::2].float(), x[..., 1 - rope_dim :: 2].float()
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :-rope_dim], turned.to(x.dtype)), dim=-1)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T with an fp32 result, for what must not be rounded to the model's dtype: router and compressor projections.

    x: [num_tokens, in_size]. weight: [out_size, in_size] in the dtype of x.

    Returns: [num_tokens, out_size] fp32.
    """
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def _mixes(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Projection of all streams together, after one RMS norm without weight over all their channels: [num_tokens, rows] fp32."""
    flat = streams.flatten(1).float()
    return F.linear(F.rms_norm(flat, flat.shape[-1:], None, eps), fn)


class HyperConnection(nn.Module):
    """How one sub-block reads from and writes to the residual streams (mHC): three sets of weights, made from the streams.

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
        """What the sub-block reads, and the weights with which :meth:`expand` writes its result back.

        streams: [num_tokens, hc_mult, hidden_size].

        Returns: (input [num_tokens, hidden_size], post [num_tokens, hc_mult] fp32, comb [num_tokens, hc_mult, hc_mult] fp32).
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

        streams: [num_tokens, hc_mult, hidden_size]. y: [num_tokens, hidden_size]. post, comb: of :meth:`collapse`.
        """
        post, comb = post.to(y.dtype), comb.to(y.dtype)
        return post[..., None] * y[:, None] + comb.transpose(1, 2) @ streams


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Matrices with rows and columns that sum to about 1: a softmax of the rows, then columns and rows normalised in turn.

    Tokens are the last dimension while it works, as they are many and n is 4. One more row and column hold eps: a sum has it already.

    logits: [num_tokens, n, n] fp32. iterations: column normalisations; there is one row normalisation less, and columns come last.

    Returns: [num_tokens, n, n].
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
    """One row from the residual streams, weighted as in :class:`HyperConnection`, before the final norm."""

    def __init__(self, config: DeepseekV4Config, device: torch.device) -> None:
        super().__init__()
        self.config = config
        n = config.hc_mult
        fp32 = {"device": device, "dtype": torch.float32}
        self.hc_fn = empty_parameter(n, n * config.hidden_size, **fp32)
        self.hc_base = empty_parameter(n, **fp32)
        self.hc_scale = empty_parameter(1, **fp32)

    def forward(self, streams: Tensor) -> Tensor:
        """streams: [num_tokens, hc_mult, hidden_size]. Returns [num_tokens, hidden_size]."""
        mixes = _mixes(streams, self.hc_fn, self.config.rms_norm_eps)
        pre = torch.sigmoid(mixes * self.hc_scale + self.hc_base) + self.config.hc_eps
        return (pre[..., None] * streams).sum(dim=1).to(streams.dtype)


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit): the gate is bounded only from above, and before silu."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


class Router(nn.Module):
    """Which experts a token goes to: those of the best scores, or of a table by token id (hash layers), and their weights.

    score = sqrt(softplus(x W^T)). The correction bias takes part in the choice only, never in the weights.
    """

    def __init__(
        self, config: DeepseekV4Config, kind: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.scale = config.routed_scaling_factor
        self.weight = empty_parameter(
            config.num_experts, config.hidden_size, device=device, dtype=dtype
        )
        if kind == HASH_MOE:
            self.tid2eid = empty_parameter(
                config.vocab_size, self.top_k, device=device, dtype=torch.int64
            )
            self.e_score_correction_bias = None
        else:
            self.tid2eid = None
            self.e_score_correction_bias = empty_parameter(
                config.num_experts, device=device, dtype=torch.float32
            )

    def forward(self, x: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x: [num_tokens, hidden_size]. input_ids: [num_tokens] int64.

        Returns: (expert ids [num_tokens, top_k] int64, weights [num_tokens, top_k] fp32).
        """
        scores = F.softplus(linear_fp32(x, self.weight)).sqrt()
        if self.tid2eid is not None:
            ids = self.tid2eid[input_ids]
        else:
            ids = (scores + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        return ids, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * self.scale


class Experts(nn.Module):
    """The routed experts, stacked: gate_up_proj [num_experts, 2 * width, hidden_size], rows of the gate first, and down_proj."""

    def __init__(self, config: DeepseekV4Config, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        experts, width = config.num_experts, config.moe_intermediate_size
        hidden = config.hidden_size
        self.activation = partial(clamped_swiglu, limit=config.swiglu_limit)
        self.gate_up_proj = empty_parameter(experts, 2 * width, hidden, device=device, dtype=dtype)
        self.down_proj = empty_parameter(experts, hidden, width, device=device, dtype=dtype)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size]. ids, weights: of the router. Returns the shape of x."""
        return run_experts(x, ids, weights, self.gate_up_proj, self.down_proj, self.activation)


class SharedExpert(nn.Module):
    """The expert that every token goes to, with weight 1."""

    def __init__(self, config: DeepseekV4Config, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        width, hidden = config.moe_intermediate_size, config.hidden_size
        self.limit = config.swiglu_limit
        self.gate_proj = Linear(hidden, width, device, dtype)
        self.up_proj = Linear(hidden, width, device, dtype)
        self.down_proj = Linear(width, hidden, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size]. Returns the same shape."""
        return self.down_proj(clamped_swiglu(self.gate_proj(x), self.up_proj(x), self.limit))


class MoE(nn.Module):
    """Routed experts and the shared one, summed. expert_format: "fp8" or "fp4" for experts that stay packed, None for plain ones."""

    def __init__(
        self, config: DeepseekV4Config, kind: str, device: torch.device, dtype: torch.dtype,
        expert_format: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate = Router(config, kind, device, dtype)
        if expert_format is None:
            self.experts = Experts(config, device, dtype)
        else:
            self.experts = PackedExperts(
                expert_format, config.num_experts, config.hidden_size, config.moe_intermediate_size,
                partial(clamped_swiglu, limit=config.swiglu_limit), device,
            )  # fmt: skip
        self.shared_experts = SharedExpert(config, device, dtype)

    def forward(self, x: Tensor, input_ids: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size]. input_ids: [num_tokens] int64, for hash layers. Returns the shape of x."""
        return self.experts(x, *self.gate(x, input_ids)) + self.shared_experts(x)
