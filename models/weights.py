"""Weights of a model: read from a Hugging Face directory, drawn at random, or written as a checkpoint that transformers reads.

safetensors is imported where files are read or written, so that random weights need nothing but torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import torch

from quire.models.configs import ModelConfig
from quire.models.gemma import Gemma
from quire.models.hf_config import from_hf, to_hf

INDEX_FILE = "model.safetensors.index.json"

# Text tensors have one of these prefixes, longest first; the rest of the name is the same in every repository.
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
# The output projection is tied to the embedding, and the towers of multimodal checkpoints are not the text model's.
_IGNORED = re.compile(
    r"(model\.)?(vision_tower|audio_tower|multi_modal_projector|embed_vision|embed_audio)\."
    r"|(language_model\.)?lm_head\.weight$"
)


def load_config(path: str | Path) -> ModelConfig:
    """Reads ``config.json``, and the stop ids of ``generation_config.json`` where there is one.

    Raises: ValueError when there is no config.json; NotImplementedError for unsupported models.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise ValueError(f"path: expected a directory with a config.json, got {str(path)!r}")
    config = from_hf(_read_json(path / "config.json"), name=path.name)
    generation = path / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    if eos is None:
        return config
    return replace(config, eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,))


def load_model(
    path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Gemma:
    """Builds the model of a Hugging Face directory, one tensor at a time on its final device.

    path: directory with config.json and model.safetensors or shards with their index.
    dtype: of the model; default: that of config.json, else bfloat16. Tensors of other dtypes are converted.

    Returns: Gemma.
    Raises: ValueError naming every missing, unexpected and misshaped tensor at once, before any is read;
        NotImplementedError for unsupported models.
    Source: tensor names of transformers 5.23 and of the older multimodal repositories.
    """
    from safetensors import safe_open

    path = Path(path)
    config = load_config(path)
    model = Gemma(config, device=device, dtype=dtype or _stored_dtype(path))
    parameters = dict(model.named_parameters())
    files = _weight_files(path)
    _check_names(path, files, parameters)
    for file in files:
        with safe_open(file, framework="pt", device=str(model.device)) as tensors:
            for stored in tensors.keys():  # noqa: SIM118 (not a dict: it has no iterator)
                if (name := _text_name(stored)) is not None:
                    parameters[name].copy_(tensors.get_tensor(stored))
    return model


def random_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Gemma:
    """A model with random weights drawn on its device: outputs of order one, and no weight at a value that hides it.

    Matrices are N(0, 1 / in_size), the embedding 0.15 N(0, 1), norm weights 1 + 0.3 N(0, 1) in effect, layer scalars
    uniform in 0.8 .. 1.2. The same seed gives the same weights on the same kind of device.
    """
    model = Gemma(config, device=device, dtype=dtype)
    generator = torch.Generator(device=model.device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith("layer_scalar"):
            weight.uniform_(0.8, 1.2, generator=generator)
        elif name == "embed_tokens.weight":
            weight.normal_(0.0, 0.15, generator=generator)
        elif weight.ndim == 1:
            weight.normal_(1.0 - config.norm_offset, 0.3, generator=generator)
        else:
            weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
    return model


def save_checkpoint(model: Gemma, path: str | Path, *, max_shard_bytes: int = 5 * 2**30) -> None:
    """Writes config.json and safetensors files that `load_model` and transformers' ``from_pretrained`` read.

    path: directory, made if absent. max_shard_bytes: a file closes before it would grow past this.
    """
    from safetensors.torch import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    dtype = str(model.dtype).removeprefix("torch.")
    (path / "config.json").write_text(
        json.dumps(to_hf(model.config) | {"dtype": dtype}, indent=2) + "\n"
    )
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, weight in model.named_parameters():
        num_bytes = weight.numel() * weight.element_size()
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][f"model.{name}"] = weight.detach()
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


def _read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def _stored_dtype(path: Path) -> torch.dtype:
    """The dtype that config.json names (``dtype``, earlier ``torch_dtype``), at the top or in text_config."""
    config = _read_json(path / "config.json")
    text = config.get("text_config") or {}
    for section in (text, config):
        for key in ("dtype", "torch_dtype"):
            if section.get(key):
                return getattr(torch, section[key])
    return torch.bfloat16


def _weight_files(path: Path) -> list[Path]:
    if (path / INDEX_FILE).is_file():
        names = sorted(set(_read_json(path / INDEX_FILE)["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    absent = [name for name in names if not (path / name).is_file()]
    if absent:
        raise ValueError(f"path: expected the files {absent} in {str(path)!r}")
    return [path / name for name in names]


def _text_name(stored: str) -> str | None:
    """The model's name of a stored tensor; the stored name itself when no rule knows it; None = ignore."""
    if _IGNORED.match(stored):
        return None
    for prefix in _TEXT_PREFIXES:
        if stored.startswith(prefix):
            return stored.removeprefix(prefix)
    return stored


def _check_names(path: Path, files: list[Path], parameters: dict[str, torch.nn.Parameter]) -> None:
    """Compares names and shapes of all files, read from their headers only, with the model's."""
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for stored in tensors.keys():  # noqa: SIM118
                if (name := _text_name(stored)) is not None:
                    shapes[name] = list(tensors.get_slice(stored).get_shape())
    problems = []
    if missing := sorted(set(parameters) - set(shapes)):
        problems.append(f"missing {missing}")
    if unexpected := sorted(set(shapes) - set(parameters)):
        problems.append(f"unexpected {unexpected}")
    misshaped = [
        f"{name} {shapes[name]} (expected {list(weight.shape)})"
        for name, weight in parameters.items()
        if name in shapes and shapes[name] != list(weight.shape)
    ]
    if misshaped:
        problems.append(f"misshaped {misshaped}")
    if problems:
        raise ValueError(
            f"path: tensors of {str(path)!r} do not fit its config.json: {'; '.join(problems)}"
        )
