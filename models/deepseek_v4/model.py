"""DeepSeek-V4: embedding, layers over residual streams, their collapse, and drafters.

`models.deepseek_v4.layer` has the layer, `models.deepseek_v4.mtp` the drafters.

Source: transformers ``modeling_deepseek_v4``; DeepSeek-V4 report 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.hyper_connections.api import MAX_HIDDEN, MAX_STREAMS
from quire.kernels.indexer.api import MAX_HEADS, MAX_TOPK
from quire.kvcore.device import AttnMetadata

from ..engine.memory import ModelCache
from ..layers.basic import Embedding, Linear, RMSNorm
from ..layers.unpaged_attention import Stored
from ..parallel.group import Group
from .cache import V4PagePool
from .cache_plan import CacheFormat, plan_cache, ring_bytes
from .config import CSA, HCA, SLIDING, DeepseekV4Config
from .hyper_connections import HyperHead
from .layer import Attend, DecoderLayer
from .mtp import MTP
from .paged_attention import PagedAttend
from .rope import rope_frequencies, rope_table
from .unpaged_attention import UnpagedAttend


class DeepseekV4(nn.Module):
    """A DeepSeek-V4 model with uninitialized weights; `models.loading.weights` fills them.

    Args:
        config: shapes.
        device: of all weights.
        dtype: of matrices and activations; what the model keeps in fp32 (hyper-connections, norms,
            sinks, position and correction biases) is fp32 in any case.
        max_positions: rows of the rotary tables, 8 bytes for each rotated channel; default: all
            that the config allows.
        expert_format: "fp8" or "fp4" for routed experts that stay packed.
        group: as in `quire.models.families.decoder.Decoder`.

    Attributes:
        kv_cache_dtypes: values of `EngineConfig.kv_cache_dtype` that `make_cache` takes: "fp8" =
            latent rows of 584 bytes and quantized index keys, of the released head sizes.
        no_replay: why `EngineConfig.replay` is refused. The first rows of a replay lack a part of
            their windows, and do so for one window more in each layer. What compressors pool from
            such rows must not replace the entries and index keys that are cached.
    """

    kv_cache_dtypes = ("auto", "fp8")
    no_replay = (
        ", whose compressors would pool replayed rows, which are inexact, into entries "
        "that are cached"
    )

    def __init__(
        self,
        config: DeepseekV4Config,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        max_positions: int | None = None,
        expert_format: str | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config, self.group = config, group
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        self.embed_tokens = Embedding(
            vocab_size, hidden_size, device, dtype, scaled=False, group=group
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, kind, device, dtype, expert_format, group)
            for layer, kind in enumerate(config.mlp_layer_types)
        )
        self.hc_head = HyperHead(config, device)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device, torch.float32)
        num_ids = self.embed_tokens.vocabulary.num_rows
        self.lm_head = Linear(config.hidden_size, num_ids, device, dtype)
        self.mtp = nn.ModuleList(
            MTP(config, index, device, dtype, expert_format, group)
            for index in range(config.num_mtp_layers)
        )
        num_positions = max_positions or config.max_position_embeddings
        plain, compressed = (
            rope_table(rope_frequencies(config, compressed=kind).to(device), num_positions)
            for kind in (False, True)
        )
        self.rope = {SLIDING: plain, CSA: compressed, HCA: compressed}

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
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
        """One step of a ragged batch.

        Reads the context from ``pool``, writes the rows that somebody will read again.

        Args:
            input_ids, positions: [num_tokens] int64.
            attn: tables, lengths and slots of this step.
            pool: pages and rings of all layers, updated in place.
            logits_rows: [num_rows] int64, the rows to compute logits for; default: all.
            return_hidden: return the residual streams of all rows too, which drafters read.
            impl: "triton" or "torch" for the kernels; default: by device.

        Returns:
            [num_rows, vocab_size] fp32 logits; with return_hidden (logits, [num_tokens, hc_mult,
            hidden_size]).
        """
        streams = self.streams(input_ids, positions, PagedAttend(attn, pool, impl=impl))
        rows = streams if logits_rows is None else streams[logits_rows]
        logits = self.logits(rows, impl)
        return (logits, streams) if return_hidden else logits

    def expect_impl(self, impl: str) -> None:
        """Refuses sizes that the kernels are not made for, but those that pages refuse when made.

        Raises:
            NotImplementedError: naming the size.
        """
        config = self.config
        for name, most in (("index_num_heads", MAX_HEADS), ("index_topk", MAX_TOPK)):
            if CSA in config.layer_types and getattr(config, name) > most:
                raise NotImplementedError(
                    f"{name}: supported are up to {most}, {config.name!r} has "
                    f"{getattr(config, name)}"
                )
        for name, most in (("hc_mult", MAX_STREAMS), ("hidden_size", MAX_HIDDEN)):
            if getattr(config, name) > most:
                raise NotImplementedError(
                    f"{name}: supported are up to {most}, {config.name!r} has "
                    f"{getattr(config, name)}"
                )
        if config.rope_dim & (config.rope_dim - 1):
            raise NotImplementedError(
                f"rope_dim: supported are powers of two, {config.name!r} has {config.rope_dim}"
            )

    def make_cache(
        self,
        *,
        base_block_size: int | None,
        kv_cache_dtype: str,
        max_requests: int,
        max_draft_tokens: int,
        drafter_layers: bool,
        **_: Any,
    ) -> ModelCache:
        """Pages and rings; arguments as in `quire.models.engine.memory.model_cache`.

        Args:
            base_block_size: tokens of a page of entries.

        Raises:
            ValueError: a base_block_size that the ratios do not divide.
            NotImplementedError: "fp8" with other head sizes than the released ones, or a model in
                fp16.
        """
        if kv_cache_dtype == "fp8" and self.dtype == torch.float16:
            raise NotImplementedError(
                "kv_cache_dtype: 'fp8' is supported with models in bfloat16 and float32, this "
                "one is in float16"
            )
        fmt = CacheFormat(self.dtype, fp8=kv_cache_dtype == "fp8")
        plan = plan_cache(
            self.config,
            fmt,
            block_size=base_block_size,
            drafters=drafter_layers,
        )

        def allocate(num_pages: int) -> V4PagePool:
            return V4PagePool(
                self.config,
                plan,
                num_pages=num_pages,
                max_requests=max_requests,
                max_draft_tokens=max_draft_tokens,
                device=self.device,
            )

        # One ring more than requests, which no request owns.
        fixed_bytes = (max_requests + 1) * ring_bytes(self.config, max_draft_tokens)
        return ModelCache(plan.groups, plan.groups[0].page_bytes, allocate, fixed_bytes)

    @torch.inference_mode()
    def full_forward(
        self, input_ids: Tensor, *, logits_rows: Tensor | None = None, stored: Stored | None = None
    ) -> Tensor:
        """One whole sequence without any cache, in plain torch.

        What a paged run must agree with.

        Args:
            input_ids: [num_tokens] int64.
            logits_rows: [num_rows] int64, the rows to compute logits for; default: all.
            stored: as in `UnpagedAttend`.

        Returns:
            [num_rows, vocab_size] fp32 logits.
        """
        positions = torch.arange(len(input_ids), device=input_ids.device)
        streams = self.streams(input_ids, positions, UnpagedAttend(self.config, stored))
        return self.logits(streams if logits_rows is None else streams[logits_rows], "torch")

    def streams(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Residual streams after the last layer, not collapsed yet.

        [num_tokens, hc_mult, hidden_size].

        Args:
            input_ids, positions: [num_tokens] int64.
            attend: the attention operator of all layers.
        """
        x = self.embed_tokens(input_ids)[:, None].expand(-1, self.config.hc_mult, -1)
        for layer in self.layers:
            cos_sin = self.rope[layer.self_attn.kind]
            x = layer(x, input_ids, positions, cos_sin, attend)
        return x

    def logits(self, streams: Tensor, impl: str | None = None) -> Tensor:
        """Logits of residual streams.

        Args:
            streams: [num_rows, hc_mult, hidden_size].
            impl: "triton" or "torch"; default: by device.

        Returns:
            [num_rows, vocab_size] fp32.
        """
        return self._logits(self.hc_head(streams, self.norm, impl))

    def draft_streams(
        self, index: int, streams: Tensor, next_ids: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Streams of drafter ``index``: [num_tokens, hc_mult, hidden_size].

        Arguments of `MTP.draft`.
        """
        embeds, cos_sin = self.embed_tokens(next_ids), self.rope[SLIDING]
        return self.mtp[index].draft(streams, next_ids, embeds, positions, cos_sin, attend)

    def draft_logits(self, index: int, streams: Tensor, impl: str | None = None) -> Tensor:
        """Logits of the token after the next from `draft_streams`.

        [num_rows, vocab_size] fp32. impl as in `logits`.
        """
        return self._logits(self.mtp[index].hidden(streams, impl))

    def _logits(self, x: Tensor) -> Tensor:
        return self.embed_tokens.vocabulary.gather(self.lm_head(x)).float()
