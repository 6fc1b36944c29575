"""How fast a step could be: bytes that decode must read and products that prefill must form, over rates measured on this machine.

Decode is bound by memory: every weight and every live key and value is read once a step. Prefill is bound by arithmetic: two
operations per weight of a matrix and token, and four per visible (query, key) pair, head and channel. Both are lower bounds. Norms,
activations, the output projection of prefill (one row a prompt) and everything that attention reads twice are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from quire.models.configs import FULL, ModelConfig
from quire.models.gemma import Gemma

MAX_COPY_BYTES = 2**30
REPEATS = 7


@dataclass(frozen=True)
class Rates:
    """Measured rates of a device.

    copy_bytes_per_s: bytes read plus bytes written. copy_bytes: size of the buffer that was copied.
    matmul_flops_per_s: of a square product of matmul_size in the model's dtype.
    """

    copy_bytes_per_s: float
    copy_bytes: int
    matmul_flops_per_s: float
    matmul_size: int


def measure_rates(model: Gemma) -> Rates:
    """Copy and matmul rates where ``model`` is, in its dtype.

    The copied buffer is as large as the weights (at most 1 GiB), so that it lives where they live: a small model stays in a CPU's
    caches, and main memory would be no floor for it.
    """
    return device_rates(
        model.device, model.dtype, copy_bytes=min(weight_bytes(model), MAX_COPY_BYTES)
    )


def device_rates(
    device: torch.device, dtype: torch.dtype, *, copy_bytes: int | None = None
) -> Rates:
    """Copy and matmul rates of a device: the best of several repetitions, after one to warm up.

    dtype: of the product. copy_bytes: size of the copied buffer; default: 1 GiB, on a CPU 64 MiB.
    """
    on_gpu = device.type == "cuda"
    size = copy_bytes or (MAX_COPY_BYTES if on_gpu else 2**26)
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = _best(lambda: target.copy_(source), on_gpu)
    n = 8192 if on_gpu else 768
    a = torch.randn(n, n, device=device).to(dtype)
    b = torch.randn(n, n, device=device).to(dtype)
    matmul_seconds = _best(lambda: a @ b, on_gpu)
    return Rates(2 * size / copy_seconds, size, 2 * n**3 / matmul_seconds, n)


def weight_bytes(model: Gemma) -> int:
    """Bytes of all weights; the embedding is tied and counts once, read as the output projection."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def decode_bytes(model: Gemma, seq_lens: np.ndarray) -> int:
    """Bytes that one decode step must read: weights, and K and V of all visible tokens in all layers.

    seq_lens: [num_seqs] KV tokens of each sequence.
    """
    config = model.config
    itemsize = model.dtype.itemsize
    total = weight_bytes(model)
    for kind, num_layers in _layer_counts(config):
        shape = config.full if kind == FULL else config.sliding
        visible = int(np.minimum(seq_lens, shape.sliding_window or seq_lens).sum())
        total += num_layers * visible * 2 * shape.num_kv_heads * shape.head_dim * itemsize
    return total


def prefill_flops(config: ModelConfig, q_lens: np.ndarray, seq_lens: np.ndarray) -> int:
    """Operations of one step: matrices of all layers for all new tokens, and attention over visible pairs.

    q_lens, seq_lens: [num_seqs] new tokens, and KV tokens including them.
    """
    num_tokens = int(q_lens.sum())
    total = 0
    for kind, num_layers in _layer_counts(config):
        shape = config.full if kind == FULL else config.sliding
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        weights = config.hidden_size * (2 * q_size + (1 if shape.k_eq_v else 2) * kv_size)
        weights += 3 * config.hidden_size * config.intermediate_size
        pairs = visible_pairs(q_lens, seq_lens, shape.sliding_window)
        total += num_layers * (2 * weights * num_tokens + 4 * pairs * q_size)
    return total


def visible_pairs(q_lens: np.ndarray, seq_lens: np.ndarray, sliding_window: int | None) -> int:
    """(query, key) pairs of causal attention: the query at position p sees min(p + 1, sliding_window) keys."""
    last, first = seq_lens.astype(np.int64), (seq_lens - q_lens).astype(np.int64)
    return int((_seen(last, sliding_window) - _seen(first, sliding_window)).sum())


def _seen(length: np.ndarray, sliding_window: int | None) -> np.ndarray:
    """Pairs of a whole sequence: sum over p < length of min(p + 1, sliding_window)."""
    ramp = length if sliding_window is None else np.minimum(length, sliding_window)
    return ramp * (ramp + 1) // 2 + (length - ramp) * ramp


def _layer_counts(config: ModelConfig) -> list[tuple[str, int]]:
    return [(kind, config.layer_types.count(kind)) for kind in dict.fromkeys(config.layer_types)]


def _best(call: Callable[[], object], on_gpu: bool) -> float:
    """Fewest seconds of one call; on a GPU by its own clock, as the host's would count launch and synchronisation too."""
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
