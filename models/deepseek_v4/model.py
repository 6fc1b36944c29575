"""DeepSeek-V4: layers of attention and experts between residual streams, embedding and logits.

Hyper-connections (mHC): a layer reads from and writes to n residual streams, which start as copies
of the embedding. With m = fn rms(streams), one norm over all channels of a token's streams::

    pre  = sigmoid(scale[0] m[:n] + base[:n]) + eps
    post = 2 sigmoid(scale[1] m[n:2n] + base[n:2n])
    comb = Sinkhorn of the softmax over k of scale[2] m[2n:] + base[2n:], row-major [n (j), n (k)]
    y    = attention, or experts, of the norm of sum_i pre[i] streams[i]
    stream k = post[k] y + sum_j comb[j, k] streams[j]

Source: transformers ``modeling_deepseek_v4``; DeepSeek-V4 report 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels import (
    collapse_streams,
    combine_experts,
    expand_streams,
    expert_mlp,
    route_tokens,
)
from quire.kernels.hyper_connections import MAX_HIDDEN, MAX_STREAMS
from quire.kernels.indexer.api import MAX_HEADS, MAX_TOPK
from quire.kvcore.device import AttnMetadata

from ..engine.memory import ModelCache
from ..layers.basic import MLP, Embedding, Linear, RMSNorm, WeightPlacement, linear_fp32
from ..layers.moe import PackedExperts
from ..layers.rotary import inverse_frequencies
from ..layers.unpaged_attention import Stored, V4UnpagedAttend
from ..parallel.group import Group
from .attention import Attention, LatentAttend, PagedLatentAttend, rope_table
from .cache import CacheFormat, V4PagePool, plan_cache, ring_bytes
from .config import CSA, HASH_MOE, HCA, MOE, SLIDING, DeepseekV4Config


class HyperConnection(nn.Module):
    """Weights of one sub-block's `pre`, `post` and `comb`."""

    def __init__(self, config: DeepseekV4Config, place: WeightPlacement) -> None:
        super().__init__()
        self.config, n = config, config.hc_mult
        fp32 = torch.float32
        self.fn = place.empty((2 + n) * n, n * config.hidden_size, dtype=fp32)
        self.base = place.empty((2 + n) * n, dtype=fp32)
        self.scale = place.empty(3, dtype=fp32)

    def forward(
        self, streams: Tensor, norm: RMSNorm, impl: str | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(x, post, comb) of streams [num_tokens, hc_mult, hidden_size], as of `collapse_streams`.

        norm is that of x [num_tokens, hidden_size].
        """
        config = self.config
        return collapse_streams(
            streams, self.fn, self.base, self.scale, norm_weight=norm.weight,
            norm_eps=config.rms_norm_eps, eps=config.hc_eps, iterations=config.hc_sinkhorn_iters,
            impl=impl,
        )  # fmt: skip


class HyperHead(nn.Module):
    """Weights of the row that is read from the streams after the last layer."""

    def __init__(self, config: DeepseekV4Config, place: WeightPlacement) -> None:
        super().__init__()
        self.config, n = config, config.hc_mult
        fp32 = torch.float32
        self.hc_fn = place.empty(n, n * config.hidden_size, dtype=fp32)
        self.hc_base = place.empty(n, dtype=fp32)
        self.hc_scale = place.empty(1, dtype=fp32)

    def forward(self, streams: Tensor, norm: RMSNorm, impl: str | None) -> Tensor:
        """[num_tokens, hidden_size] of streams [num_tokens, hc_mult, hidden_size], normed."""
        return collapse_streams(
            streams, self.hc_fn, self.hc_base, self.hc_scale, norm_weight=norm.weight,
            norm_eps=self.config.rms_norm_eps, eps=self.config.hc_eps, impl=impl,
        )[0]  # fmt: skip


class Router(nn.Module):
    """Weights that choose experts: the best scores, or a table by token id (hash layers).

    score = sqrt(softplus(x W^T)); weight = scale * score / sum of the chosen scores. The correction
    bias takes part in the choice, not in the weights.
    """

    def __init__(self, config: DeepseekV4Config, kind: str, place: WeightPlacement) -> None:
        super().__init__()
        num_experts, top_k = config.num_experts, config.num_experts_per_tok
        self.weight = place.empty(num_experts, config.hidden_size)
        self.tid2eid = self.e_score_correction_bias = None
        if kind == HASH_MOE:
            self.tid2eid = place.empty(config.vocab_size, top_k, dtype=torch.int64)
        else:
            self.e_score_correction_bias = place.empty(num_experts, dtype=torch.float32)


class Experts(nn.Module):
    """The routed experts, stacked; in gate_up_proj rows of the gate come first."""

    def __init__(self, config: DeepseekV4Config, place: WeightPlacement) -> None:
        super().__init__()
        experts, width = config.num_experts, config.moe_intermediate_size
        hidden, self.limit = config.hidden_size, config.swiglu_limit
        self.gate_up_proj = place.empty(experts, 2 * width, hidden)
        self.down_proj = place.empty(experts, hidden, width)

    def forward(self, x: Tensor, ids: Tensor, impl: str | None = None) -> Tensor:
        """Rows [num_tokens * k, hidden_size] of x and ids [num_tokens, k], as of `expert_mlp`."""
        gate_up = self.gate_up_proj.unflatten(1, (2, -1))
        return expert_mlp(
            x, ids, gate_up, self.down_proj, activation="silu", limit=self.limit, impl=impl
        )


class MoE(nn.Module):
    """Routed experts and the shared one; ``gate`` is the router, as in checkpoints.

    expert_format: "fp8" or "fp4" for experts that stay packed, None for plain ones.
    """

    def __init__(
        self, config: DeepseekV4Config, kind: str, place: WeightPlacement, expert_format: str | None
    ) -> None:
        super().__init__()
        self.config, self.group = config, place.group
        hidden, width, limit = config.hidden_size, config.moe_intermediate_size, config.swiglu_limit
        self.gate = Router(config, kind, place)
        if expert_format is None:
            self.experts = Experts(config, place)
        else:
            self.experts = PackedExperts(
                expert_format, config.num_experts, hidden, width, place, limit=limit
            )
        self.shared_experts = MLP(hidden, width, place, activation="silu", limit=limit)

    def forward(
        self, x: Tensor, input_ids: Tensor, impl: str | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """experts(x) + shared_experts(x) as terms that `expand_streams` adds up.

        Returns:
            (y [num_tokens, hidden_size], rows [num_tokens * k, hidden_size], weights [num_tokens,
            k] fp32): y + the sum over a token's weight * row. With a group (sum, None, None).
        """
        gate = self.gate
        ids, weights = route_tokens(
            linear_fp32(x, gate.weight),
            top_k=self.config.num_experts_per_tok,
            scale=self.config.routed_scaling_factor,
            bias=gate.e_score_correction_bias,
            table=gate.tid2eid,
            token_ids=None if gate.tid2eid is None else input_ids,
            impl=impl,
        )
        shared = self.shared_experts(x, impl)
        rows = self.experts(x, ids, impl)
        if self.group is None:
            return shared, rows, weights
        return self.group.sum(combine_experts(rows, weights, addend=shared, impl=impl)), None, None


class DecoderLayer(nn.Module):
    """Attention, then experts, each read from and written to the residual streams."""

    def __init__(
        self, config: DeepseekV4Config, layer: int, mlp_kind: str, place: WeightPlacement,
        expert_format: str | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.self_attn = Attention(config, layer, place)
        self.mlp = MoE(config, mlp_kind, place, expert_format)
        self.attn_hc = HyperConnection(config, place)
        self.ffn_hc = HyperConnection(config, place)
        self.input_layernorm = _norm(config, place)
        self.post_attention_layernorm = _norm(config, place)

    def forward(
        self,
        streams: Tensor,
        input_ids: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        attend: LatentAttend,
    ) -> Tensor:
        """Streams [num_tokens, hc_mult, hidden_size] after the layer; input_ids for hash layers."""
        impl = attend.impl
        x, post, comb = self.attn_hc(streams, self.input_layernorm, impl)
        y = self.self_attn(x, positions, cos_sin, attend)
        streams = expand_streams(streams, y, post, comb, impl=impl)
        x, post, comb = self.ffn_hc(streams, self.post_attention_layernorm, impl)
        y, rows, weights = self.mlp(x, input_ids, impl)
        return expand_streams(streams, y, post, comb, rows=rows, weights=weights, impl=impl)


class MTP(DecoderLayer):
    """Drafter layer ``index``, a sliding one; embedding and output projection are the trunk's::

        streams[n] = h_proj(hnorm(streams[n])) + e_proj(enorm(embed(next token)))

    These are streams of the trunk, or of the layer before.

    Source: DeepSeek-V4 checkpoints (``mtp.*``); vLLM 0.33 ``models/deepseek_v4``.
    """

    def __init__(
        self, config: DeepseekV4Config, index: int, place: WeightPlacement,
        expert_format: str | None,
    ) -> None:  # fmt: skip
        super().__init__(config, config.num_layers + index, MOE, place, expert_format)
        hidden = config.hidden_size
        self.enorm = _norm(config, place)
        self.hnorm = _norm(config, place)
        self.norm = _norm(config, place)
        self.e_proj = Linear(hidden, hidden, place)
        self.h_proj = Linear(hidden, hidden, place)
        self.hc_head = HyperHead(config, place)


class MarkovHead(nn.Module):
    """Weights of the term that the token before adds to logits: markov_w2 markov_w1[token]."""

    def __init__(self, config: DeepseekV4Config, rank: int, place: WeightPlacement) -> None:
        super().__init__()
        self.markov_w1 = nn.ParameterDict({"weight": place.empty(config.vocab_size, rank)})
        self.markov_w2 = Linear(rank, config.vocab_size, place)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[num_rows, vocab_size] of token_ids [num_rows] int64."""
        return self.markov_w2(self.markov_w1["weight"][token_ids])


class DSparkStage(DecoderLayer):
    """Stage ``index`` of DSpark, a sliding layer; see `quire.models.deepseek_v4.drafters`.

    The first one has the projection of what it reads of the trunk, the last one the heads.
    """

    def __init__(
        self, config: DeepseekV4Config, index: int, place: WeightPlacement,
        expert_format: str | None,
    ) -> None:  # fmt: skip
        super().__init__(config, config.num_layers + index, MOE, place, expert_format)
        dspark, hidden = config.dspark, config.hidden_size
        if index == 0:
            self.main_proj = Linear(len(dspark.target_layer_ids) * hidden, hidden, place)
            self.main_norm = _norm(config, place)
        if index == dspark.num_stages - 1:
            self.norm = _norm(config, place)
            self.hc_head = HyperHead(config, place)
            self.markov_head = MarkovHead(config, dspark.markov_rank, place)


def _norm(config: DeepseekV4Config, place: WeightPlacement) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, place, dtype=torch.float32)


class DeepseekV4(nn.Module):
    """A DeepSeek-V4 model with uninitialized weights; `models.loading.weights` fills them.

    Args:
        dtype: of matrices and activations; norms, hyper-connections, sinks and biases are fp32.
        expert_format: "fp8" or "fp4" for routed experts that stay packed.

    Attributes:
        kv_cache_dtypes: supported values of `EngineConfig.kv_cache_dtype`.
    """

    kv_cache_dtypes = ("auto", "fp8")

    def __init__(
        self,
        config: DeepseekV4Config,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        expert_format: str | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        place = WeightPlacement(torch.device(device), dtype, group)
        self.config, self.group = config, group
        self.num_ids = config.num_experts  # `models.loading.dequantize` checks tid2eid
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, place)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, kind, place, expert_format)
            for layer, kind in enumerate(config.mlp_layer_types)
        )
        self.hc_head = HyperHead(config, place)
        self.norm = _norm(config, place)
        self.lm_head = Linear(config.hidden_size, self.embed_tokens.num_rows, place)
        drafter_layer = MTP if config.dspark is None else DSparkStage
        self.mtp = nn.ModuleList(
            drafter_layer(config, index, place, expert_format)
            for index in range(config.num_drafter_layers)
        )
        plain, compressed = (
            rope_table(
                inverse_frequencies(rope, config.rope_dim).to(place.device),
                config.max_position_embeddings,
            )
            for rope in (config.rope, config.compress_rope)
        )
        self.rope = {SLIDING: plain, CSA: compressed, HCA: compressed}

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of matrices and activations."""
        return self.embed_tokens.weight.dtype

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attn: AttnMetadata,
        pool: V4PagePool,
        *,
        logits_rows: Tensor | None = None,
        return_hidden: bool = False,
        impl: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One step of a ragged batch; rows that later steps need are written to ``pool``.

        Arguments and result as in `quire.models.families.decoder.Decoder.forward`. Hidden states
        are residual streams [num_tokens, hc_mult, hidden_size], or the taps of `drafters`.
        """
        taps: list[Tensor] = []
        attend = PagedLatentAttend(attn, pool, impl=impl)
        streams = self.streams(input_ids, positions, attend, taps if return_hidden else None)
        logits = self.logits(streams if logits_rows is None else streams[logits_rows], impl)
        if not return_hidden:
            return logits
        return logits, torch.cat(taps, dim=-1) if taps else streams

    @torch.inference_mode()
    def full_forward(
        self, input_ids: Tensor, *, logits_rows: Tensor | None = None, stored: Stored | None = None
    ) -> Tensor:
        """One whole sequence in plain torch without a cache: the reference of `forward`.

        stored: as in `UnpagedAttend`.
        """
        positions = torch.arange(len(input_ids), device=input_ids.device)
        streams = self.streams(input_ids, positions, V4UnpagedAttend(self.config, stored))
        return self.logits(streams if logits_rows is None else streams[logits_rows], "torch")

    def streams(
        self, input_ids: Tensor, positions: Tensor, attend: LatentAttend,
        taps: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Residual streams [num_tokens, hc_mult, hidden_size] after the last layer.

        taps: takes the mean of the streams after each of DSpark's target layers.
        """
        config = self.config
        means: dict[int, Tensor] = {}
        wanted = () if taps is None or config.dspark is None else config.dspark.target_layer_ids
        x = self.embed_tokens(input_ids)[:, None].expand(-1, config.hc_mult, -1)
        for i, layer in enumerate(self.layers):
            x = layer(x, input_ids, positions, self.rope[layer.self_attn.kind], attend)
            if i in wanted:
                means[i] = x.mean(dim=1)
        if wanted:
            taps.extend(means[i] for i in wanted)
        return x

    def logits(
        self, streams: Tensor, impl: str | None = None, *, of: nn.Module | None = None
    ) -> Tensor:
        """Logits [num_rows, vocab_size] fp32 of streams [num_rows, hc_mult, hidden_size].

        of: module with the ``hc_head`` and ``norm`` to use; default: this model.
        """
        head = self if of is None else of
        x = head.hc_head(streams, head.norm, impl)
        return self.embed_tokens.logits(x, self.lm_head)

    def draft_streams(
        self, index: int, streams: Tensor, next_ids: Tensor, positions: Tensor, attend: LatentAttend
    ) -> Tensor:
        """Streams [num_tokens, hc_mult, hidden_size] of drafter layer ``index``.

        streams: of the trunk, or of the layer before; next_ids: [num_tokens] int64, one token on.
        """
        mtp = self.mtp[index]
        # As trained, a sequence's first row is given no token.
        embeds = self.embed_tokens(next_ids).masked_fill((positions == 0)[:, None], 0.0)
        streams = mtp.h_proj(mtp.hnorm(streams)) + mtp.e_proj(mtp.enorm(embeds))[:, None]
        return mtp(streams, next_ids, positions, self.rope[SLIDING], attend)

    def expect_impl(self, impl: str) -> None:
        """Raise NotImplementedError for sizes that the kernels do not support."""
        config = self.config
        limits = {"hc_mult": MAX_STREAMS, "hidden_size": MAX_HIDDEN}
        if CSA in config.layer_types:
            limits |= {"index_num_heads": MAX_HEADS, "index_topk": MAX_TOPK}
        for name, most in limits.items():
            if (size := getattr(config, name)) > most:
                raise NotImplementedError(
                    f"{name}: supported are up to {most}, {config.name!r} has {size}"
                )
        if config.rope_dim & (config.rope_dim - 1):
            raise NotImplementedError(
                f"rope_dim: supported are powers of two, {config.name!r} has {config.rope_dim}"
            )

    def make_cache(
        self,
        *,
        kv_cache_dtype: str,
        max_requests: int,
        max_draft_tokens: int,
        drafter_layers: bool,
        **_: Any,
    ) -> ModelCache:
        """Pages and rings; arguments as in `quire.models.engine.memory.model_cache`.

        Raises:
            NotImplementedError: "fp8" with other head sizes than the released ones, or in fp16.
        """
        fp8 = kv_cache_dtype == "fp8"
        if fp8 and self.dtype == torch.float16:
            raise NotImplementedError(
                "kv_cache_dtype: 'fp8' is supported with models in bfloat16 and float32, this "
                "one is in float16"
            )
        fmt = CacheFormat(self.dtype, fp8=fp8)
        plan = plan_cache(self.config, fmt, drafters=drafter_layers)

        def allocate(num_pages: int) -> V4PagePool:
            return V4PagePool(
                self.config,
                plan,
                num_pages=num_pages,
                max_requests=max_requests,
                max_draft_tokens=max_draft_tokens,
                device=self.device,
            )

        # One ring more than requests, for unwanted writes.
        fixed_bytes = (max_requests + 1) * ring_bytes(self.config, max_draft_tokens)
        return ModelCache(plan.groups, plan.groups[0].page_bytes, allocate, fixed_bytes)
