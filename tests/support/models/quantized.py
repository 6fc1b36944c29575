"""Checkpoints in fp8 and mxfp4."""

import json
from dataclasses import replace

import torch
from safetensors.torch import load_file, save_file

from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.models.config.named import get_config
from quire.models.loading.random_weights import random_model

FP8 = torch.float8_e4m3fn


# Rows and columns that share a scale, where not all do.
BLOCKS = {"tensor": (None, None), "channel": (1, None), "rows": (32, None), "block": (32, 32)}


def write_fp8(path, name, suffix, method, scales="block", is_flat=False):
    """A checkpoint whose layer matrices are fp8 with a scale for each of BLOCKS; returns what they stand for."""
    save_checkpoint(random_model(get_config(name)), path)
    tensors = load_file(path / "model.safetensors")
    exact = {}
    for stored in list(tensors):
        weight = tensors[stored]
        if ".layers." not in stored or weight.ndim < 2:
            continue
        rows, columns = weight.shape[-2:]
        block = [b or n for b, n in zip(BLOCKS[scales], (rows, columns), strict=True)]
        grid = (-(-n // b) for n, b in zip((rows, columns), block, strict=True))
        scale = torch.rand(*weight.shape[:-2], *grid) / 100 + 0.01
        whole = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
        whole = whole[..., :rows, :columns]
        tensors[stored] = (weight / whole).to(FP8)
        tensors[f"{stored}{suffix}"] = scale.flatten() if is_flat else scale
        exact[stored.removeprefix("model.")] = tensors[stored].float() * whole
    tensors["model.layers.0.self_attn.q_proj.input_scale"] = torch.ones(1)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    quantization = config["quantization_config"] = {"quant_method": method}
    if method == "compressed-tensors":
        weights = {"num_bits": 8, "type": "float"}
        groups = {"group_0": {"weights": weights}, "group_1": {"weights": None}}
        quantization["config_groups"] = groups
    elif scales == "block":
        quantization["weight_block_size"] = [32, 32]
    (path / "config.json").write_text(json.dumps(config))
    return exact


def write_mxfp4(path, width=64):
    """Experts packed as in released gpt-oss files: [E, out, in / 32, 16] bytes."""
    config = get_config("gpt-oss-tiny")
    moe = replace(config.moe, intermediate_size=width)
    save_checkpoint(random_model(replace(config, moe=moe)), path)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for stored in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, in_size, out_size = tensors.pop(stored).shape
        blocks = torch.randint(0, 256, (experts, out_size, in_size // 32, 16), generator=generator)
        scales = torch.randint(120, 126, (experts, out_size, in_size // 32), generator=generator)
        tensors |= {f"{stored}_blocks": blocks.byte(), f"{stored}_scales": scales.byte()}
    save_file(tensors, path / "model.safetensors")
