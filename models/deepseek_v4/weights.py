"""Weights of DeepSeek-V4: read from a directory in any naming scheme (`models.deepseek_v4.names`), fp8 and fp4 weights dequantised
or kept packed; or drawn at random.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..config.hf import load_config
from ..engine.memory import fits, free_memory
from .config import DeepseekV4Config
from .load import check, fill, format_of_experts, read_headers
from .model import DeepseekV4


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    max_positions: int | None = None,
    experts: str = "auto",
) -> DeepseekV4:
    """Builds the model of a directory, one tensor at a time on its final device.

    path: directory with config.json and model.safetensors, or shards with their index. Drafters that the config counts but the
    files do not hold are left out.
    dtype: of matrices and activations. max_positions: as of `DeepseekV4`.
    experts: what to do with quantised routed experts: "dequantize" them once, here; "keep" them as they are stored, a half (fp8) or a
        quarter (fp4) of bf16, and dequantise those that a step needs; "auto": keep them where all of the model in ``dtype`` would
        not fit the free memory. Other quantised matrices are dequantised.

    Returns: DeepseekV4.
    Raises: ValueError naming every missing, unexpected and misshaped tensor at once, before any is read, and when experts are to be
        kept that are not quantised; NotImplementedError for unsupported models.
    """
    if experts not in ("auto", "keep", "dequantize"):
        raise ValueError(f"experts: expected 'auto', 'keep' or 'dequantize', got {experts!r}")
    path = Path(path)
    config = load_config(path)
    tables = 2 * 4 * config.rope_dim * (max_positions or config.max_position_embeddings)
    if tables > (free := free_memory(torch.device(device))):
        raise ValueError(
            f"max_position_embeddings: expected rotary tables of at most the free {free} bytes, got {tables} bytes "
            f"for {max_positions or config.max_position_embeddings} tokens"
        )
    stored = read_headers(path)
    if not any(tensor.target.parameter.startswith("mtp.") for tensor in stored):
        config = replace(config, num_mtp_layers=0)
    kept = format_of_experts(stored)
    if experts == "keep" and kept is None:
        raise ValueError("experts: expected 'dequantize', those of this checkpoint are not quantised")  # fmt: skip
    whole = DeepseekV4(config, device="meta", dtype=dtype, max_positions=1)
    if experts == "dequantize" or (experts == "auto" and fits(whole, torch.device(device))):
        kept = None
    shapes = DeepseekV4(config, device="meta", dtype=dtype, max_positions=1, expert_format=kept)
    check(path, stored, shapes)
    model = DeepseekV4(
        config, device=device, dtype=dtype, max_positions=max_positions, expert_format=kept
    )
    fill(model, stored)
    return model


def random_model(
    config: DeepseekV4Config,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_positions: int | None = None,
) -> DeepseekV4:
    """A model with random weights drawn on its device: logits of order one, and no weight at a value that hides it.

    Norm weights and hyper-connection scales are 1 + 0.3 N(0, 1), sinks and position biases N(0, 1), correction biases 0.2 N(0, 1),
    hyper-connection bases 0.5 N(0, 1), their projections 0.05 N(0, 1), router weights 0.3 N(0, 1), the embedding N(0, 1), other
    matrices N(0, 1 / in_size); hash tables name distinct experts. The same seed gives the same weights on the same kind of device.
    """
    model = DeepseekV4(config, device=device, dtype=dtype, max_positions=max_positions)
    generator = torch.Generator(device=model.device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith("tid2eid"):
            order = torch.rand(config.vocab_size, config.num_experts, generator=generator, device=weight.device)  # fmt: skip
            weight.copy_(order.argsort(dim=1)[:, : weight.shape[1]])
            continue
        mean, std = _distribution(name, weight)
        weight.normal_(mean, std, generator=generator)
    return model


def _distribution(name: str, weight: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of a random weight."""
    leaf = name.split(".")[-1]
    if leaf in ("scale", "hc_scale") or (leaf == "weight" and weight.ndim == 1):
        return 1.0, 0.3
    if leaf in ("sinks", "position_bias") or name == "embed_tokens.weight":
        return 0.0, 1.0
    known = {
        "fn": 0.05, "hc_fn": 0.05, "base": 0.5, "hc_base": 0.5, "e_score_correction_bias": 0.2,
    }  # fmt: skip
    if leaf in known:
        return 0.0, known[leaf]
    return 0.0, 0.3 if name.endswith("mlp.gate.weight") else weight.shape[-1] ** -0.5
