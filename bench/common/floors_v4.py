"""Floors of DeepSeek-V4 (`bench.common.floors` says what a floor is): narrow latents, compressed
entries, and experts of which a token runs few.

A query sees a window of raw rows, which are key and value at once, and entries of ``ratio`` tokens
each: all of them in HCA layers, the indexer's top-k in CSA layers, where it scores the keys of all.
Drafter layers are not counted: they are what speculation costs.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from quire.models.deepseek_v4.config import CSA, SLIDING, DeepseekV4Config
from quire.models.deepseek_v4.model import DeepseekV4

from .visible import visible_pairs

LATENT_BYTES = 584  # of a quantised latent row, scales included
SCALE_BYTES = 4  # of an index key


def decode_bytes(model: DeepseekV4, seq_lens: np.ndarray, kv_cache_dtype: str = "auto") -> int:
    """Bytes that one decode step must read; of experts an expectation, as if every token chose at
    random.

    Args:
        seq_lens: [num_seqs] tokens of each sequence.
        kv_cache_dtype: of the pages.
    """
    config, fp8, itemsize = model.config, kv_cache_dtype == "fp8", model.dtype.itemsize
    latent_bytes = LATENT_BYTES if fp8 else config.head_dim * itemsize
    index_bytes = config.index_head_dim + SCALE_BYTES if fp8 else config.index_head_dim * itemsize
    chosen = 1 - (1 - config.num_experts_per_tok / config.num_experts) ** len(seq_lens)
    total = 0.0
    for name, weight in model.named_parameters():
        if name.startswith("mtp."):
            continue
        rows: float = len(weight)
        if ".mlp.experts." in name:
            rows *= chosen
        elif name.startswith("embed_tokens.") or name.endswith("tid2eid"):
            rows = min(rows, len(seq_lens))
        total += rows * weight[0].numel() * weight.element_size()
    for kind in config.layer_types:
        rows = np.minimum(seq_lens, config.sliding_window)
        if kind != SLIDING:
            entries = seq_lens // (config.csa_ratio if kind == CSA else config.hca_ratio)
            if kind == CSA:
                total += int(entries.sum()) * index_bytes
                entries = np.minimum(entries, config.index_topk)
            rows = rows + entries
        total += int(rows.sum()) * latent_bytes
    return round(total)


def prefill_flops(config: DeepseekV4Config, q_lens: np.ndarray, seq_lens: np.ndarray) -> int:
    """Operations of one step: matrices of the layers for all new tokens, attention and index scores
    over visible pairs.

    Args:
        q_lens, seq_lens: [num_seqs] new tokens, and tokens including them.
    """
    total = 2 * _weights_of_a_token(config) * int(q_lens.sum())
    for kind in config.layer_types:
        pairs = visible_pairs(q_lens, seq_lens, config.sliding_window)
        if kind != SLIDING:
            ratio = config.csa_ratio if kind == CSA else config.hca_ratio
            limit = config.index_topk if kind == CSA else None
            pairs += visible_pairs(q_lens, seq_lens, limit, ratio)
        if kind == CSA:
            scored = visible_pairs(q_lens, seq_lens, None, config.csa_ratio)
            total += 2 * scored * config.index_num_heads * config.index_head_dim
        total += 4 * pairs * config.num_heads * config.head_dim
    return round(total)


@cache
def _weights_of_a_token(config: DeepseekV4Config) -> float:
    """Elements of the matrices that every token is multiplied with, in the layers of the trunk."""
    model = DeepseekV4(config, device="meta", dtype=torch.bfloat16)
    share = config.num_experts_per_tok / config.num_experts
    total = 0.0
    for name, weight in model.layers.named_parameters():
        if ".mlp.experts." in name:
            total += share * weight.numel()
        elif weight.ndim == 2 and not name.endswith(("tid2eid", "position_bias")):
            total += weight.numel()
    return total
