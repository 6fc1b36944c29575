"""Write models as Hugging Face checkpoints, which `load_model` and transformers read."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from quire.models.config.hf import to_hf


def save_checkpoint(model: nn.Module, path: str | Path) -> None:
    """Write ``config.json`` and ``model.safetensors``.

    Args:
        model: of any family; of DeepSeek-V4 its drafters too, which transformers ignores.
        path: directory, made if absent.
    """
    from safetensors.torch import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = to_hf(model.config) | {"dtype": str(model.dtype).removeprefix("torch.")}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {
        name if name.startswith(("lm_head.", "mtp.")) else f"model.{name}": weight.detach()
        for name, weight in model.named_parameters()
    }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
