"""Writes models as Hugging Face checkpoints: ``config.json`` and safetensors files.

Benchmarks and tests read them back, and let transformers read them.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor, nn

from quire.models.config.hf import to_hf
from quire.models.loading.checkpoint import INDEX_FILE


def save_checkpoint(
    model: nn.Module, path: str | Path, *, max_shard_bytes: int = 5 * 2**30
) -> None:
    """Writes files that `load_model` and transformers' ``from_pretrained`` read.

    Args:
        model: of any family; of DeepSeek-V4 its drafters too, which transformers ignores.
        path: directory, made if absent.
        max_shard_bytes: a file closes before it would grow past this.
    """
    from safetensors.torch import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    dtype = str(model.dtype).removeprefix("torch.")
    (path / "config.json").write_text(
        json.dumps(to_hf(model.config) | {"dtype": dtype}, indent=2) + "\n"
    )
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, weight in model.named_parameters():
        num_bytes = weight.numel() * weight.element_size()
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        stored = name if name.startswith(("lm_head.", "mtp.")) else f"model.{name}"
        shards[-1][stored] = weight.detach()
        size += num_bytes
    if len(shards) == 1:
        save_file(shards[0], path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (path / INDEX_FILE).write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n"
    )
