"""Least time of a step: bytes that decode must read and products that prefill must form, over
measured rates.

Decode reads every weight once and, in every layer, every visible row of the cache: of experts an
expectation as if tokens chose at random, of embedding tables only the rows of the tokens. Prefill
takes two operations per matrix element and token, and four per visible (query, key) pair, head and
channel. Drafters, norms, activations, the output projection and layers without K/V of their own in
prefill are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from quire.models.config.model import ModelConfig
from quire.models.deepseek_v4.config import CSA, SLIDING, DeepseekV4Config
from quire.models.families.decoder import Decoder
from quire.models.layers.kv_cache import token_bytes
from quire.models.loading.weights import build_model

from .rows import Rows
from .timing import time_calls

MAX_COPY_BYTES = 2**30
RATE_SECONDS = 0.1  # to measure a rate
LATENT_BYTES, SCALE_BYTES = 584, 4  # a quantized latent row; the scale of an index key


@dataclass(frozen=True)
class Rates:
    """Measured rates of a device.

    Attributes:
        copy_bytes_per_s: bytes read plus bytes written.
        copy_bytes: size of the buffer that was copied.
        matmul_flops_per_s: of a square product of matmul_size in the model's dtype.
    """

    copy_bytes_per_s: float
    copy_bytes: int
    matmul_flops_per_s: float
    matmul_size: int


def device_rates(
    device: torch.device, dtype: torch.dtype, *, copy_bytes: int | None = None
) -> Rates:
    """Copy rate and matmul rate in ``dtype`` of a device: the best of several repetitions.

    copy_bytes: size of the copied buffer, at most 1 GiB; default: 1 GiB, on a CPU 64 MiB.
    """
    on_gpu = device.type == "cuda"
    size = min(copy_bytes or (MAX_COPY_BYTES if on_gpu else 2**26), MAX_COPY_BYTES)
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = time_calls([lambda: target.copy_(source)], device, seconds=RATE_SECONDS)
    # CPUs without instructions for it take seconds for a large product in half precision.
    n = 8192 if on_gpu else 768 if dtype.itemsize == 4 else 256
    a = torch.randn(n, n, device=device).to(dtype)
    b = torch.randn(n, n, device=device).to(dtype)
    product = time_calls([lambda: a @ b], device, seconds=RATE_SECONDS)
    return Rates(2 * size / copying.least, size, 2 * n**3 / product.least, n)


def cached_rows(
    config: Any, dtype: torch.dtype = torch.bfloat16, kv_cache_dtype: str = "auto"
) -> Iterator[Rows]:
    """The rows of each layer of a model; layers without K/V of their own have no ``channels``."""
    fp8 = kv_cache_dtype == "fp8"
    if isinstance(config, ModelConfig):
        stored = dtype if kv_cache_dtype == "auto" else torch.float8_e4m3fn
        for layer in range(config.num_layers):
            shape = config.attention(layer)
            num_bytes = token_bytes(config, layer, stored, row_scales=fp8)
            channels = 2 * shape.num_heads * shape.head_dim if layer < config.num_kv_owners else 0
            yield Rows(shape.sliding_window, 1, num_bytes, channels)
        return
    latent = LATENT_BYTES if fp8 else config.head_dim * dtype.itemsize
    index = config.index_head_dim
    channels = 2 * config.num_heads * config.head_dim
    for kind in config.layer_types:
        yield Rows(config.sliding_window, 1, latent, channels)
        if kind == CSA:  # the indexer scores all entries
            key = index + SCALE_BYTES if fp8 else index * dtype.itemsize
            yield Rows(None, config.csa_ratio, key, config.index_num_heads * index)
            yield Rows(config.index_topk, config.csa_ratio, latent, channels)
        elif kind != SLIDING:
            yield Rows(None, config.hca_ratio, latent, channels)


def decode_bytes(model: Decoder, seq_lens: np.ndarray, kv_cache_dtype: str = "auto") -> int:
    """Bytes of weights and visible cache rows that one decode step must read.

    Args:
        seq_lens: [num_seqs] KV tokens of each sequence.
        kv_cache_dtype: dtype of the pages (`quire.models.engine.config.EngineConfig`).
    """
    total = _weight_bytes(model, len(seq_lens))
    for rows in cached_rows(model.config, model.dtype, kv_cache_dtype):
        total += rows.pairs(np.ones_like(seq_lens), seq_lens) * rows.num_bytes
    return round(total)


def _weight_bytes(model: Decoder, num_tokens: int) -> float:
    config, total = model.config, 0.0
    tables = ["embed_tokens_per_layer."]
    if not getattr(config, "tie_word_embeddings", False):
        tables.append("embed_tokens.")
    for name, weight in model.named_parameters():
        rows: float = len(weight)
        if name.startswith("mtp."):
            continue
        if ".experts." in name:
            rows *= 1 - (1 - _expert_share(config)) ** num_tokens
        elif name.startswith(tuple(tables)) or name.endswith("tid2eid"):
            rows = min(rows, num_tokens)
        total += rows * weight[0].numel() * weight.element_size()
    return total


def _expert_share(config: Any) -> float:
    if isinstance(config, DeepseekV4Config):
        return config.num_experts_per_tok / config.num_experts
    return 1.0 if config.moe is None else config.moe.top_k / config.moe.num_experts


def prefill_flops(config: Any, q_lens: np.ndarray, seq_lens: np.ndarray) -> int:
    """Operations of one step: matrices for all new tokens, and attention over visible pairs.

    Args:
        config: configuration of a model.
        q_lens: [num_seqs] new tokens.
        seq_lens: [num_seqs] KV tokens including them.
    """
    total = _weights_of_a_token(config) * int(q_lens.sum())
    for rows in cached_rows(config):
        total += rows.pairs(q_lens, seq_lens) * rows.channels
    return 2 * round(total)


@cache
def _weights_of_a_token(config: Any) -> float:
    """Elements of the matrices that a token is multiplied with, in layers with K/V of their own."""
    model: Any = build_model(config, device="meta", dtype=torch.bfloat16)
    owners = getattr(config, "num_kv_owners", len(model.layers))
    total = 0.0
    for layer in model.layers[:owners]:
        for name, weight in layer.named_parameters():
            if weight.ndim > 1 and "bias" not in name and not name.endswith("tid2eid"):
                total += weight.numel() * (
                    _expert_share(config) if ".experts." in f".{name}" else 1
                )
    projection = getattr(model, "per_layer_model_projection", None)
    if projection is not None:
        total += projection.weight.numel() * owners / len(model.layers)
    return total
