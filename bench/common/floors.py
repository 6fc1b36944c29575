"""Least time of a step: bytes that decode must read and products that prefill must form, over
rates measured on this machine.

Decode is bound by memory: every weight and, in every layer, every live key and value is read once a
step. Of tables of embeddings only the rows of the tokens are read, and of experts those that the
batch chooses: as many as uniform choices would touch.

Prefill is bound by arithmetic: two operations per weight of a matrix and token (of experts, those
of a token), and four per visible (query, key) pair, head and channel. What runs for one row a
prompt is left out: the output projection, and layers without keys and values of their own. So are
norms, activations and everything that attention reads twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from quire.models.config.model import ModelConfig
from quire.models.engine.memory import weight_bytes
from quire.models.families.decoder import Decoder
from quire.models.layers.kv_cache import token_bytes

from . import floors_v4
from .visible import visible_pairs

MAX_COPY_BYTES = 2**30
REPEATS = 7


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


def measure_rates(model: Decoder) -> Rates:
    """Copy and matmul rates where ``model`` is, in its dtype.

    The copied buffer is as large as the weights (at most 1 GiB), so that it lives where they live:
    a small model stays in a CPU's caches, and main memory would be no floor for it.
    """
    return device_rates(
        model.device, model.dtype, copy_bytes=min(weight_bytes(model), MAX_COPY_BYTES)
    )


def device_rates(
    device: torch.device, dtype: torch.dtype, *, copy_bytes: int | None = None
) -> Rates:
    """Copy and matmul rates of a device: the best of several repetitions, after one to warm up.

    Args:
        dtype: of the product.
        copy_bytes: size of the copied buffer; default: 1 GiB, on a CPU 64 MiB.
    """
    on_gpu = device.type == "cuda"
    size = copy_bytes or (MAX_COPY_BYTES if on_gpu else 2**26)
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = _best(lambda: target.copy_(source), on_gpu)
    # CPUs without instructions for it take seconds for a large product in half precision.
    n = 8192 if on_gpu else 768 if dtype.itemsize == 4 else 256
    a = torch.randn(n, n, device=device).to(dtype)
    b = torch.randn(n, n, device=device).to(dtype)
    matmul_seconds = _best(lambda: a @ b, on_gpu)
    return Rates(2 * size / copy_seconds, size, 2 * n**3 / matmul_seconds, n)


def decode_bytes(model: Decoder, seq_lens: np.ndarray, kv_cache_dtype: str = "auto") -> int:
    """Bytes that one decode step must read: weights, and K and V of all visible tokens in all
    layers.

    Args:
        seq_lens: [num_seqs] KV tokens of each sequence.
        kv_cache_dtype: of the pages (`quire.models.engine.config.EngineConfig`).
    """
    config = model.config
    if not isinstance(config, ModelConfig):
        return floors_v4.decode_bytes(model, seq_lens, kv_cache_dtype)
    stored = model.dtype if kv_cache_dtype == "auto" else torch.float8_e4m3fn
    total = read_weight_bytes(model, len(seq_lens))
    for kind in set(config.layer_types):
        num_layers, layer = config.layer_types.count(kind), config.layer_types.index(kind)
        window = config.attention(layer).sliding_window
        visible = int(np.minimum(seq_lens, window or seq_lens).sum())
        total += (
            num_layers
            * visible
            * token_bytes(config, layer, stored, row_scales=kv_cache_dtype == "fp8")
        )
    return total


def read_weight_bytes(model: Decoder, num_tokens: int) -> int:
    """Bytes of the weights that a step of ``num_tokens`` tokens reads; of experts an expectation,
    see the file's docstring.
    """
    config, total = model.config, 0
    for name, weight in model.named_parameters():
        rows = len(weight)
        if ".experts." in name and config.moe is not None:
            rows *= 1 - (1 - config.moe.top_k / config.moe.num_experts) ** num_tokens
        elif name.startswith("embed_tokens_per_layer") or (
            name.startswith("embed_tokens.") and not config.tie_word_embeddings
        ):
            rows = min(rows, num_tokens)
        total += round(rows * weight[0].numel()) * weight.element_size()
    return total


def prefill_flops(config: ModelConfig, q_lens: np.ndarray, seq_lens: np.ndarray) -> int:
    """Operations of one step: matrices of the layers for all new tokens, and attention over visible
    pairs.

    Args:
        q_lens, seq_lens: [num_seqs] new tokens, and KV tokens including them.
    """
    if not isinstance(config, ModelConfig):
        return floors_v4.prefill_flops(config, q_lens, seq_lens)
    num_tokens = int(q_lens.sum())
    weights = total = 0
    for layer in range(config.num_kv_owners):
        shape = config.attention(layer)
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        weights += config.hidden_size * (2 * q_size + (1 if shape.k_eq_v else 2) * kv_size)
        weights += config.hidden_size * 3 * config.mlp_size(layer)
        # Per-layer embeddings: into the gate, out of it, and the layer's part of the projection
        # that all share.
        weights += config.hidden_size * 3 * config.per_layer_input_size
        if config.moe is not None:
            chosen = 3 * config.moe.top_k * config.moe.intermediate_size
            weights += config.hidden_size * (config.moe.num_experts + chosen)
        total += 4 * q_size * visible_pairs(q_lens, seq_lens, shape.sliding_window)
    return total + 2 * weights * num_tokens


def _best(call: Callable[[], object], on_gpu: bool) -> float:
    """Fewest seconds of one call; on a GPU by its own clock, as the host's would count launch and
    synchronisation too.
    """
    seconds = []
    for _ in range(1 + REPEATS):
        if on_gpu:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call()
            last.record()
            torch.cuda.synchronize()
            seconds.append(first.elapsed_time(last) / 1e3)
        else:
            start = perf_counter()
            call()
            seconds.append(perf_counter() - start)
    return min(seconds[1:])
