"""Forward pass of all text models: embed, run the layers, norm, project.

The attention branch of a layer computes q, k and v of the step's rows, rotates q and k, and calls
``attend(layer, q, k, v)``. Only ``attend`` knows pages and requests. The layers here are those of
Llama; families that differ in more than a little have their own.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quire.kernels import norm_rope
from quire.kernels.common.checks import HEAD_DIMS, one_step
from quire.kvcore.device import AttnMetadata

from ..config.model import ModelConfig
from ..engine.memory import ModelCache
from ..layers.attention import Attend, PagedAttend
from ..layers.basic import Embedding, Linear, RMSNorm, Stacked, WeightPlacement
from ..layers.kv_cache import E4M3, PageTensors, cache_groups, num_tensors
from ..layers.rotary import inverse_frequencies
from ..layers.shared_layers import SharedAttend
from ..layers.unpaged_attention import Stored, UnpagedAttend
from ..parallel.group import Group

BASE_BLOCK_SIZE = 16
# Rows before its window that a drafter of `families.gemma4_assistant` reads.
DRAFTER_ROWS = 2
Rotary = tuple[Tensor, Tensor]


def rope_frequencies(config: ModelConfig, device: torch.device) -> dict[str, Tensor]:
    """RoPE of each kind of layer: base, scaling and head_dim all may differ."""
    return {
        kind: inverse_frequencies(shape.rope, shape.head_dim).to(device)
        for kind, shape in config.shapes.items()
    }


def rotary_of(
    config: ModelConfig, frequencies: dict[str, Tensor], positions: Tensor
) -> dict[str, Rotary]:
    """Cosines and sines [num_rows, head_dim // 2] fp32 of each kind of layer at positions
    [num_rows] int64."""
    rotary, amplitude = {}, config.full.rope.amplitude
    for kind, own in frequencies.items():
        angles = positions.float()[:, None] * own
        cos, sin = angles.cos(), angles.sin()
        rotary[kind] = (cos, sin) if amplitude == 1.0 else (cos * amplitude, sin * amplitude)
    return rotary


class Attention(nn.Module):
    """Projections and RoPE around the attention operator of one layer.

    Attributes:
        has_sinks: True if every head has a logit that joins the denominator of its softmax only.
        q_norm, k_norm: norms of the heads of queries and keys, before RoPE; None, where a family
            sets none.
    """

    has_sinks: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, layer: int, place: WeightPlacement) -> None:
        super().__init__()
        shape, size, bias = config.attention(layer), config.hidden_size, config.attention_bias
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.layer = layer
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.q_proj = Linear(size, q_size, place, bias=bias)
        self.k_proj = Linear(size, kv_size, place, bias=bias)
        self.v_proj = Linear(size, kv_size, place, bias=bias)
        self.o_proj = Linear(q_size, size, place, bias=bias, group=place.group)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.eps = config.rms_norm_eps
        self.qkv = Stacked(self.q_proj, self.k_proj, self.v_proj)
        self.sinks = place.empty(shape.num_heads) if self.has_sinks else None

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """Attention of x [num_tokens, hidden_size], projections included."""
        sinks = None if self.sinks is None else self.sinks.float()
        qkv, count = self.qkv(x).view(x.shape[0], -1, self.head_dim), self.num_kv_heads
        qk = norm_rope(
            qkv,
            *rotary,
            num_kv_heads=count,
            q_weight=None if self.q_norm is None else self.q_norm.weight,
            k_weight=None if self.k_norm is None else self.k_norm.weight,
            eps=self.eps,
            impl=attend.impl,
        )
        q, k, v = qk[:, :-count], qk[:, -count:], qkv[:, -count:]
        out = attend(self.layer, q, k, v, sinks=sinks)
        return self.o_proj(out.flatten(1))


class DecoderLayer(nn.Module):
    """``attention`` and ``mlp`` branches of one layer, with a norm before each."""

    def __init__(
        self, config: ModelConfig, layer: int, place: WeightPlacement, attention: nn.Module,
        mlp: nn.Module,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kind = config.layer_types[layer]
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)

    def forward(
        self, x: Tensor, residual: Tensor, rotary: Rotary, attend: Attend, norm: RMSNorm
    ) -> Tensor:
        """The residual stream after the layer and ``norm``, the one that comes next.

        x: [num_tokens, hidden_size], normed; residual: in that shape, updated in place.
        """
        impl = attend.impl
        x = self.self_attn(x, rotary, attend)
        x = self.post_attention_layernorm.after(x, residual, impl=impl)
        return norm.after(self.mlp(x, impl), residual, impl=impl)


class Decoder(nn.Module):
    """A text model with uninitialized weights; `models.loading.weights` fills them.

    Families derive from it and set ``layers``: see docs/extend.md.

    Args:
        config: shapes, of this rank's part of the model.
        group: the ranks that run the model; None = one.

    Attributes:
        kv_cache_dtypes: supported values of `EngineConfig.kv_cache_dtype`.
        place: of the weights, for the layers that a family adds.
        kv_scales: [num_layers] pairs, the scale of a layer's keys and of its values, for
            "fp8_per_tensor": those of the checkpoint, else 1.0. Set them before an engine is made.
    """

    kv_cache_dtypes = ("auto", "fp8", "fp8_per_tensor")
    layers: nn.ModuleList

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        group: Group | None = None,
        embedding_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.place = WeightPlacement(torch.device(device), dtype, group)
        size = config.hidden_size
        self.config, self.group = config, group
        self.kv_scales = [(1.0, 1.0)] * config.num_layers
        self.embed_tokens = Embedding(config.vocab_size, size, self.place, scale=embedding_scale)
        self.norm = RMSNorm(size, config.rms_norm_eps, self.place, offset=config.norm_offset)
        self.frequencies = rope_frequencies(config, self.place.device)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(size, self.embed_tokens.num_rows, self.place)

    def allocate(self, device: torch.device, *, except_for: Container[str] = ()) -> None:
        """Give a model on the meta device weights on ``device``, except for these names."""
        kept = {id(w) for name, w in self.named_parameters() if name in except_for}
        for module in self.modules():
            for stacked in vars(module).values():
                if isinstance(stacked, Stacked):
                    weights = [w for layer in stacked.layers for w in layer.parameters()]
                    if kept.isdisjoint(map(id, weights)):
                        stacked.allocate(device)
        for prefix, module in self.named_modules():
            for name, weight in module.named_parameters(prefix, recurse=False):
                if name not in except_for and weight.is_meta:
                    where = getattr(module, "weight_device", lambda device: device)(device)
                    empty = nn.Parameter(
                        torch.empty_like(weight, device=where), requires_grad=False
                    )
                    setattr(module, name.rpartition(".")[2], empty)
        self.frequencies = rope_frequencies(self.config, device)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of weights and activations, and of the cache unless that has another."""
        return self.embed_tokens.weight.dtype

    def expect_impl(self, impl: str) -> None:
        """Raise NotImplementedError for a head size that the kernels do not support."""
        for kind in sorted(set(self.config.layer_types)):
            head_dim = self.config.shapes[kind].head_dim
            if impl == "triton" and head_dim not in HEAD_DIMS:
                raise NotImplementedError(
                    f"impl: 'triton' is supported with a head_dim in {list(HEAD_DIMS)}, "
                    f"{self.config.name!r} has {head_dim} in layers of "
                    f"{kind}; 'torch' takes any"
                )

    def make_cache(self, *, kv_cache_dtype: str, drafter_layers: bool, **_: Any) -> ModelCache:
        """Pages for keys and values of the attention layers."""
        dtype = self.dtype if kv_cache_dtype == "auto" else E4M3
        kv_scales = None
        if kv_cache_dtype == "fp8_per_tensor":
            kv_scales = list(self.kv_scales)
            if len(kv_scales) != self.config.num_layers:
                raise ValueError(
                    f"kv_scales: expected {self.config.num_layers} pairs, got {len(kv_scales)}"
                )
        groups, placement = cache_groups(
            self.config,
            dtype,
            base_block_size=BASE_BLOCK_SIZE,
            row_scales=kv_scales is None,
            more_window=DRAFTER_ROWS if drafter_layers else 0,
        )

        def allocate(num_pages: int) -> PageTensors:
            return PageTensors(
                self.config,
                groups,
                placement,
                num_pages=num_pages,
                dtype=dtype,
                device=self.device,
                kv_scales=kv_scales,
            )

        return ModelCache(groups, groups[0].page_bytes * num_tensors(placement), allocate)

    @one_step()
    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attn: AttnMetadata,
        pool: PageTensors,
        *,
        logits_rows: Tensor | None = None,
        return_hidden: bool = False,
        impl: str | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """One step of a ragged batch: reads the context from ``pool``, writes rows for later steps.

        Args:
            input_ids, positions: [num_tokens] int64.
            attn: tables, lengths and slots of this step.
            logits_rows: [num_rows] int64, the rows to compute logits for; default: all.
            return_hidden: return the normed hidden states of all rows too, which drafters read.
            impl: "triton" or "torch" for the kernels; default: by device.

        Returns:
            [num_rows, vocab_size] fp32 logits; with return_hidden (logits, [num_tokens,
            hidden_size]).
        """
        config = self.config
        if not config.num_kv_shared_layers:
            attend = PagedAttend(config, attn, pool, impl=impl)
        else:
            # Where each sequence has one token, choosing rows saves nothing.
            rows = None if return_hidden or attn.max_seqlen_q == 1 else logits_rows
            attend = SharedAttend(config, attn, pool, positions=positions, rows=rows, impl=impl)
        logits, hidden = self.run(input_ids, positions, attend, logits_rows)
        return (logits, hidden) if return_hidden else logits

    @torch.inference_mode()
    def full_forward(
        self, input_ids: Tensor, *, logits_rows: Tensor | None = None, stored: Stored | None = None
    ) -> Tensor:
        """One whole sequence in plain torch without a cache: the reference of `forward`.

        stored: as in `UnpagedAttend`.
        """
        positions = torch.arange(len(input_ids), device=input_ids.device)
        rows = logits_rows if self.config.num_kv_shared_layers > 0 else None
        attend = UnpagedAttend(self.config, rows=rows, stored=stored)
        return self.run(input_ids, positions, attend, logits_rows)[0]

    @torch.inference_mode()
    def run(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, logits_rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Logits [num_rows, vocab_size] fp32, and hidden states [num_tokens, hidden_size] after all
        layers and the last norm.

        From the first layer without its own keys and values on, only ``attend.rows`` of them, which
        are then those with logits.
        """
        config, layers = self.config, list(self.layers)
        x, inputs = self.embed_tokens(input_ids), None
        rotary = rotary_of(config, self.frequencies, positions)
        if config.per_layer_input_size:
            inputs = self.per_layer_inputs(input_ids, x)
        branch = layers[0].input_layernorm.after(x, impl=attend.impl)
        num_owners = config.num_kv_owners
        for i, layer in enumerate(layers):
            if i == num_owners and (rows := attend.rows) is not None:
                branch, x = branch[rows], x[rows]
                if len(rows) == 0:
                    break
                rotary = {kind: (cos[rows], sin[rows]) for kind, (cos, sin) in rotary.items()}
                inputs = None if inputs is None else inputs[rows]
            norm = self.norm if i + 1 == len(layers) else layers[i + 1].input_layernorm
            own = () if inputs is None else (inputs[:, i],)
            branch = layer(branch, x, rotary[layer.kind], attend, norm, *own)
        chosen = branch if logits_rows is None or attend.rows is not None else branch[logits_rows]
        softcap = config.final_logit_softcapping
        return self.embed_tokens.logits(chosen, self.lm_head, softcap=softcap), branch

    def per_layer_inputs(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """Inputs of layers beside x, [num_tokens, num_layers, per_layer_input_size]."""
        raise NotImplementedError
