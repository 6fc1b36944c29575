"""Forward pass of all text models: embed, run the layers, norm, project.

A layer, such as `llama.DecoderLayer`, computes q, k and v of the step's rows, rotates q and k, and
calls ``attend(layer, q, k, v)``. Only ``attend`` knows pages and requests.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.common.checks import HEAD_DIMS, one_step
from quire.kvcore.device import AttnMetadata

from ..config.model import FULL, SLIDING, ModelConfig
from ..engine.memory import ModelCache
from ..layers.attention import Attend, PagedAttend
from ..layers.basic import Embedding, Linear, RMSNorm, Stacked, WeightPlacement
from ..layers.kv_cache import E4M3, PageTensors, cache_groups, num_tensors
from ..layers.rotary import inverse_frequencies, rotary_angles
from ..layers.shared_layers import SharedAttend
from ..layers.unpaged_attention import Stored, UnpagedAttend
from ..parallel.group import Group

BASE_BLOCK_SIZE = 16
# Rows before its window that a drafter of `families.gemma4_assistant` reads.
DRAFTER_ROWS = 2
Rotary = tuple[Tensor, Tensor]


def rope_frequencies(config: ModelConfig, device: torch.device) -> dict[str, Tensor]:
    """RoPE of each kind of layer: base, scaling and head_dim all may differ."""
    shapes = ((SLIDING, config.sliding), (FULL, config.full))
    return {
        kind: inverse_frequencies(shape.rope, shape.head_dim).to(device)
        for kind, shape in shapes
        if shape is not None
    }


def rotary_of(
    config: ModelConfig, frequencies: dict[str, Tensor], positions: Tensor
) -> dict[str, Rotary]:
    """Cosines and sines of each kind of layer at positions [num_rows] int64."""
    amplitude = config.full.rope.amplitude
    return {kind: rotary_angles(positions, own, amplitude) for kind, own in frequencies.items()}


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
            head_dim = self.config.attention(self.config.layer_types.index(kind)).head_dim
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
            hidden = self.run_layers(input_ids, positions, attend)
        else:
            # Where each sequence has one token, choosing rows saves nothing.
            rows = None if return_hidden or attn.max_seqlen_q == 1 else logits_rows
            attend = SharedAttend(config, attn, pool, positions=positions, rows=rows, impl=impl)
            hidden = self.run_layers(input_ids, positions, attend)
            attend.finish()
        chosen = hidden if logits_rows is None or attend.rows is not None else hidden[logits_rows]
        logits = self.logits(chosen)
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
        hidden = self.run_layers(input_ids, positions, attend)
        return self.logits(
            hidden if logits_rows is None or rows is not None else hidden[logits_rows]
        )

    @torch.inference_mode()
    def run_layers(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [num_tokens, hidden_size] after all layers and the last norm.

        From the first layer without its own keys and values on, only ``attend.rows`` of them.
        """
        x, inputs, layers = self.embed_tokens(input_ids), None, list(self.layers)
        rotary = rotary_of(self.config, self.frequencies, positions)
        if self.config.per_layer_input_size:
            inputs = self.per_layer_inputs(input_ids, x)
        branch = layers[0].input_layernorm.after(x, impl=attend.impl)
        num_owners = self.config.num_kv_owners
        for i, layer in enumerate(layers):
            if i == num_owners and (rows := attend.rows) is not None:
                branch, x = branch[rows], x[rows]
                if len(rows) == 0:
                    return branch
                rotary = {kind: (cos[rows], sin[rows]) for kind, (cos, sin) in rotary.items()}
                inputs = None if inputs is None else inputs[rows]
            norm = self.norm if i + 1 == len(layers) else layers[i + 1].input_layernorm
            own = () if inputs is None else (inputs[:, i],)
            branch = layer(branch, x, rotary[layer.kind], attend, norm, *own)
        return branch

    def per_layer_inputs(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """Inputs of layers beside x, [num_tokens, num_layers, per_layer_input_size]."""
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        """Logits [num_rows, vocab_size] fp32 of normed rows [num_rows, hidden_size]."""
        logits = self.embed_tokens.logits(x, self.lm_head)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)
