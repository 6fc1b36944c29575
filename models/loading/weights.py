"""Weights of a model, read from a Hugging Face directory.

    locate       find the directory; `gguf.unpack` makes one for a GGUF file
    checkpoint   read the headers of its files
    kv_scales    read scales of an e4m3 cache
    names        compare each tensor's name, shape and dtype with the model's
    shards       choose the part of a tensor that a rank reads
    dequantize   fill the parameters, a tensor at a time

Quantized safetensors are dequantized with `kernels.common.dequantize`, GGUF files in `gguf`.
safetensors is imported where files are read, so that random weights need only torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config.fields import naming, read_fields, read_object, shown
from ..config.hf import load_config, read_json
from ..config.keys import QuantizationKeys
from ..engine.memory import fits
from ..families.registry import family_of
from ..parallel.group import Group
from .checkpoint import read_headers
from .dequantize import SetQuantized, fill
from .kv_scales import read_kv_scales
from .names import Storage, TensorSource, match, part_of, text_target
from .shards import pieces_of, shared_columns

FP8_MODES = ("auto", "keep", "dequantize")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def build_model(
    config: Any, *, device: torch.device | str, dtype: torch.dtype, group: Group | None = None,
    unit: int = 1,
) -> nn.Module:  # fmt: skip
    """The model of ``config`` with uninitialized weights, or a rank's part of it.

    unit: as in ``config.shard``.
    """
    if group is not None:
        config = config.shard(group.size, unit)
    return family_of(config).build(config, device=device, dtype=dtype, group=group)


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    fp8: str = "auto",
    group: Group | None = None,
) -> nn.Module:
    """Load the model of a Hugging Face directory, one tensor at a time on its final device.

    The host holds at most one tensor of the files at a time, or a rank's part of it.

    Args:
        path: directory with config.json and model.safetensors, or shards with their index. Drafters
            that the config of a DeepSeek-V4 counts but the files do not hold are left out.
        dtype: data type of the model; None = as in config.json, else bfloat16.
        fp8: treatment of fp8 matrices, of gpt-oss's experts in MXFP4 and of DeepSeek-V4's routed
            experts in fp8 or fp4; its other matrices are always dequantized. "dequantize" = once,
            here. "keep" = in every forward pass, layer by layer or for the experts of a step.
            "auto" = kept only if the dequantized model would fill more than 80 % of the free
            memory. On a GPU it also keeps gpt-oss's experts, which the kernel reads as stored.
        group: the ranks; this one keeps its part only. None = the whole model.

    Raises:
        ValueError: tensors that are missing, unexpected, duplicated, without scales or of another
            shape or dtype, all named before any is read; files that are missing or truncated; the
            first tensor with a NaN or an infinity, also after conversion to ``dtype``.
        NotImplementedError: unsupported models.
    """
    if fp8 not in FP8_MODES:
        raise ValueError(f"fp8: expected one of {FP8_MODES}, got {fp8!r}")
    path, device = Path(path), torch.device(device)
    config = load_config(path)
    load = family_of(config).load or load_decoder
    if dtype is None:
        keys = _storage_keys(path)
        dtype = find_dtype(keys.dtype or keys.torch_dtype or "bfloat16")
    return load(path, config, device, dtype, fp8, group)


def load_decoder(
    path: Path, config: Any, device: torch.device, dtype: torch.dtype, fp8: str,
    group: Group | None,
) -> nn.Module:  # fmt: skip
    # Shapes are checked, and it is decided what stays in fp8, before anything is allocated.
    whole = build_model(config, device="meta", dtype=dtype)
    parameters = dict(whole.named_parameters())
    rules = {"names": parameters, "config": config, "weight_name": family_of(config).weight_name}
    quantization = _storage_keys(path).quantization_config
    fp8_block = quantization and quantization.weight_block_size
    storage = Storage(partial(text_target, **rules), fp8_block=fp8_block)
    headers = read_headers(path)
    kv_scales, of_cache = read_kv_scales(path, headers, config.num_layers)
    weights = [one for one in headers if one not in of_cache]
    sources = match(path, weights, parameters, storage)
    model, pieces = whole, {}
    if group is not None:
        unit = max(shared_columns(source, part_of(parameters, source.target)) for source in sources)
        model = build_model(config, device="meta", dtype=dtype, group=group, unit=unit)
        pieces = pieces_of(sources, parameters, dict(model.named_parameters()), group)
    kept = kept_as_stored(model, sources, fp8, device)
    for source in sources:
        piece = pieces.get(source.target)
        if piece is not None and piece.value is None and source.target.parameter in kept:
            raise ValueError(
                f"fp8: expected 'dequantize' for {group.size} ranks, between which blocks of "
                f"scales of {source.value} are cut"
            )
    model.allocate(device, except_for=kept)
    fill(model, sources, kept, pieces)
    model.kv_scales = kv_scales
    return model


@dataclass(frozen=True)
class StorageKeys:
    dtype: str | None = None
    torch_dtype: str | None = None  # the older name
    quantization_config: QuantizationKeys | None = None


def _storage_keys(path: Path) -> StorageKeys:
    """Keys of config.json; those in its text_config win."""
    config = read_json(path / "config.json")
    with naming(path / "config.json"):
        return read_fields(StorageKeys, config | read_object(config, "text_config"))


def find_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype of that name; NotImplementedError for one that models cannot have."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise NotImplementedError(f"dtype: supported are {list(DTYPES)}, got {shown(dtype)}")
    return DTYPES[name]


def kept_as_stored(
    model: nn.Module, sources: list[TensorSource], fp8: str, device: torch.device
) -> dict[str, SetQuantized]:
    """The weights that stay quantized, by name, each with the method that takes it.

    A module has ``keep_fp8`` for a matrix "weight", or ``keep_mxfp4`` for both stacks of experts.
    """
    if fp8 == "dequantize":
        return {}
    keeps = fp8 == "keep" or not fits(model, device)
    kinds = {source.target.parameter: source.kind for source in sources}
    kept: dict[str, SetQuantized] = {}
    for prefix, module in model.named_modules():
        if keeps and hasattr(module, "keep_fp8") and kinds.get(f"{prefix}.weight") == "fp8":
            kept[f"{prefix}.weight"] = module.keep_fp8
        elif hasattr(module, "keep_mxfp4") and (keeps or device.type == "cuda"):
            names = {name: f"{prefix}.{name}" for name in ("gate_up_proj", "down_proj")}
            if all(kinds.get(name) == "mxfp4" for name in names.values()):
                kept |= {full: partial(module.keep_mxfp4, name) for name, full in names.items()}
    return kept
