"""Gemma-4's drafters (``gemma4_assistant`` checkpoints): small models without keys and values.

With the token x behind the last computed position p, and the target's normed hidden state h at p::

    z = layers(pre_projection([embed(x), h]))        embed: of the target; layers have queries only
    u = norm(z);   logits = lm_head(u);   h = post_projection(u)

and again with the draft as x. A layer reads the pages of the target's last layer of its kind, at
queries of position p + 1; sliding ones see ``sliding_window + 1`` rows. Nothing is written.

Source: transformers ``modeling_gemma4_assistant``, whose later rounds also see keys of rejected
    drafts: only a first round agrees with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.kernels import attention_for
from quire.kvcore.device import Batch, BatchBuilder

from ..config import fields
from ..config.fields import naming, read_fields, read_object, shown
from ..config.hf import read_json
from ..config.model import SLIDING, ModelConfig
from ..engine.device_drafter import DeviceDrafter
from ..layers.basic import Embedding, Linear, RMSNorm, WeightPlacement
from ..layers.kv_cache import PageTensors
from ..loading.checkpoint import read_headers
from ..loading.dequantize import fill
from ..loading.names import Storage, match, text_target
from .decoder import Rotary, rope_frequencies, rotary_of
from .gemma import DecoderLayer
from .gemma4 import config_from_hf

MODEL_TYPE = "gemma4_assistant"


@dataclass(frozen=True, kw_only=True)
class AssistantKeys:
    backbone_hidden_size: fields.Width
    use_ordered_embeddings: fields.Flag = False
    num_centroids: fields.Width = 2048
    centroid_intermediate_top_k: fields.Width = 32


class MaskedEmbedding(nn.Module):
    """Clusters of the vocabulary: token_ordering has the tokens of one after those of another."""

    def __init__(self, keys: AssistantKeys, config: ModelConfig, place: WeightPlacement) -> None:
        super().__init__()
        if config.vocab_size % keys.num_centroids:
            raise ValueError(
                f"num_centroids: expected a divisor of vocab_size={config.vocab_size}, got "
                f"{keys.num_centroids}"
            )
        self.top_k = keys.centroid_intermediate_top_k
        self.centroids = Linear(config.hidden_size, keys.num_centroids, place)
        self.token_ordering = place.empty(config.vocab_size, dtype=torch.int64)

    def forward(self, u: Tensor, logits: Tensor) -> Tensor:
        """Logits [num_rows, vocab_size] with -inf for tokens of other than the best clusters."""
        best = self.centroids(u).topk(self.top_k, dim=-1).indices
        tokens = self.token_ordering.view(self.centroids.weight.shape[0], -1)[best].flatten(1)
        masked = torch.full_like(logits, -torch.inf)
        return masked.scatter(1, tokens, logits.gather(1, tokens))


class Assistant(nn.Module):
    """The drafter's model, with uninitialized weights; config: of the file's ``text_config``."""

    def __init__(
        self, keys: AssistantKeys, config: ModelConfig, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config, size, target_size = config, config.hidden_size, keys.backbone_hidden_size
        self.num_ids = config.vocab_size  # `models.loading.dequantize` checks token_ordering
        place = WeightPlacement(device, dtype)
        # The first half of the layers stands for the target's, which the second half shares.
        kinds = config.layer_types
        sharing = replace(config, layer_types=kinds * 2, num_kv_shared_layers=len(kinds))
        self.layers = nn.ModuleList(
            DecoderLayer(sharing, len(kinds) + i, place) for i in range(len(kinds))
        )
        self.embed_tokens = Embedding(config.vocab_size, size, place)
        self.norm = RMSNorm(size, config.rms_norm_eps, place)
        self.pre_projection = Linear(2 * target_size, size, place)
        self.post_projection = Linear(size, target_size, place)
        self.masked_embedding = None
        if keys.use_ordered_embeddings:
            self.masked_embedding = MaskedEmbedding(keys, config, place)
        self.frequencies = rope_frequencies(config, device)

    def forward(
        self, embeds: Tensor, hidden: Tensor, rotary: dict[str, Rotary], attend: TargetAttend
    ) -> tuple[Tensor, Tensor]:
        """Logits [num_rows, vocab_size] fp32 of the next token, and the hidden state that the draft
        behind it reads; embeds, hidden: [num_rows, backbone_hidden_size].
        """
        residual = self.pre_projection(torch.cat([embeds, hidden], dim=-1))
        branch = self.layers[0].input_layernorm.after(residual, impl=attend.impl)
        norms = [*(layer.input_layernorm for layer in self.layers[1:]), self.norm]
        for layer, norm in zip(self.layers, norms, strict=True):
            branch = layer(branch, residual, rotary[layer.kind], attend, norm)
        logits = self.embed_tokens.logits(branch)
        if self.masked_embedding is not None:
            logits = self.masked_embedding(branch, logits)
        return logits, self.post_projection(branch)


class TargetAttend:
    """Attention of one query a sequence over the target's pages; an `Attend`.

    Args:
        config: of the target.
        kinds: layer types of the drafter.
        block_tables, seq_lens, max_seq_len: as in `DeviceDrafter._drafts`.
    """

    rows: Tensor | None = None

    def __init__(
        self, config: ModelConfig, kinds: tuple[str, ...], pool: PageTensors,
        block_tables: tuple[Tensor, ...], seq_lens: Tensor, *, max_seq_len: int, impl: str | None,
    ) -> None:  # fmt: skip
        self._kinds, self._pool, self._block_tables = kinds, pool, block_tables
        self._seq_lens, self._max_seq_len, self.impl = seq_lens, max_seq_len, impl
        steps = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
        self._cu_seqlens_q = steps
        owners = config.layer_types[: config.num_kv_owners]
        self._layer_of = {kind: layer for layer, kind in enumerate(owners)}  # the last of its kind
        sliding = config.sliding
        self._window = {kind: None for kind in owners}
        if sliding is not None:
            self._window[SLIDING] = sliding.sliding_window + 1

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """Attention of q [num_seqs, num_heads, head_dim] in the drafter's layer, in that shape."""
        kind = self._kinds[layer - len(self._kinds)]
        cache = self._pool.layers[self._layer_of[kind]]
        return attention_for(self._window[kind])(
            q, cache.k_pages, cache.v_pages, self._block_tables[cache.group], self._seq_lens,
            self._cu_seqlens_q, max_seqlen_q=1, k_scale=cache.k_scale, v_scale=cache.v_scale,
            max_seq_len=self._max_seq_len, softmax_scale=1.0, impl=self.impl,
        )  # fmt: skip


class Gemma4Drafter(DeviceDrafter):
    """Drafts of a Gemma-4's assistant (`load_assistant`), greedy or drawn: a `DeviceDrafter`.

    Raises:
        ValueError: an assistant of another target, naming what differs; max_draft_tokens below 1.
        NotImplementedError: a model on several ranks.
    """

    def __init__(self, model: Any, assistant: Assistant, max_draft_tokens: int = 4) -> None:
        super().__init__(model, max_draft_tokens)
        if model.group is not None:
            raise NotImplementedError(
                "drafter: a Gemma-4 assistant is supported with tensor_parallel_size 1, got "
                f"{model.group.size}"
            )
        self.assistant = assistant
        expect_target(model.config, assistant)

    def attach(
        self, pool: PageTensors, builder: BatchBuilder, *, max_requests: int, impl: str | None
    ) -> None:
        super().attach(pool, builder, max_requests=max_requests, impl=impl)
        shape = (max_requests, self.model.config.hidden_size)
        # By slot: the hidden state of the last row that stays.
        self._hidden = torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)

    @torch.inference_mode()
    def observe(
        self, batch: Batch, hidden: Tensor, next_ids: np.ndarray, last_rows: np.ndarray,
        slots: np.ndarray,
    ) -> None:  # fmt: skip
        _, rows, request_slots = self._receive(next_ids, last_rows, slots)
        self._hidden[request_slots] = hidden[rows]

    def _drafts(
        self, request_slots: Tensor, seq_lens: Tensor, block_tables: tuple[Tensor, ...], *,
        num_drafts: int, max_seq_len: int, choose: Callable[[Tensor], Tensor],
    ) -> Tensor:  # fmt: skip
        model, assistant = self.model, self.assistant
        attend = TargetAttend(
            model.config, assistant.config.layer_types, self._pool, block_tables, seq_lens,
            max_seq_len=max_seq_len, impl=self._impl,
        )  # fmt: skip
        rotary = rotary_of(assistant.config, assistant.frequencies, seq_lens.long())
        hidden, ids = self._hidden[request_slots], [self._newest[request_slots]]
        for _ in range(num_drafts):
            embeds = model.embed_tokens(ids[-1])
            logits, hidden = assistant(embeds, hidden, rotary, attend)
            ids.append(choose(logits))
        return torch.stack(ids[1:], dim=1)


def expect_target(target: Any, assistant: Assistant) -> None:
    own = assistant.config
    size = assistant.post_projection.weight.shape[0]
    pairs: list[tuple[str, Any, Any]] = [
        ("family", "gemma4", target.family),
        ("hidden_size", size, target.hidden_size),
        ("vocab_size", own.vocab_size, target.vocab_size),
    ]
    for kind in sorted(set(own.layer_types)) if target.family == "gemma4" else ():
        if kind not in target.layer_types:
            pairs.append(("layer_types", kind, list(target.layer_types)))
            continue
        wanted, given = own.shapes[kind], target.shapes[kind]
        for name in ("num_kv_heads", "head_dim", "sliding_window"):
            pairs.append((f"{name} of {kind}", getattr(wanted, name), getattr(given, name)))
    for name, wanted, given in pairs:
        if wanted != given:
            raise ValueError(
                f"drafter: expected a target with {name} {shown(wanted)}, got {shown(given)}"
            )


def load_assistant(
    path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> Assistant:
    """Load the drafter of a Hugging Face directory (``gemma4_assistant``).

    Raises:
        ValueError: keys or tensors that are missing, unexpected, or of another shape or range.
        NotImplementedError: another ``model_type``; layers with experts or per-layer embeddings.
    """
    path = Path(path)
    keys, config = read_config(path)
    assistant = Assistant(keys, config, device=torch.device(device), dtype=dtype)
    parameters = dict(assistant.named_parameters())
    storage = Storage(partial(text_target, names=parameters, config=config))
    sources = match(path, read_headers(path), parameters, storage)
    fill(assistant, sources, {}, {})
    return assistant


def read_config(path: Path) -> tuple[AssistantKeys, ModelConfig]:
    data = read_json(path / "config.json")
    with naming(path / "config.json"):
        if data.get("model_type") != MODEL_TYPE:
            raise NotImplementedError(
                f"model_type: supported as a drafter is {MODEL_TYPE!r}, got "
                f"{shown(data.get('model_type'))}"
            )
        text: Mapping[str, Any] = read_object(data, "text_config")
        # That all layers share keys and values is what `Assistant` says.
        config = config_from_hf({**text, "num_kv_shared_layers": 0}, path.name)
        if config.moe is not None or config.per_layer_input_size:
            raise NotImplementedError(
                "text_config: supported are layers without experts and per-layer embeddings"
            )
        return read_fields(AssistantKeys, data), config
