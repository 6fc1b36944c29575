"""Weights of a model: read from a Hugging Face directory or drawn at random.

safetensors is imported where files are read, so that random weights need nothing but torch. DeepSeek-V4, whose config is
of another class and whose checkpoints have other forms, goes on to `models.deepseek_v4.weights`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..config.fields import naming, read_fields, shown
from ..config.hf import load_config
from ..config.hf_common import QuantizationKeys
from ..config.named import ModelConfig
from ..deepseek_v4 import weights as deepseek_v4
from ..engine.memory import fits
from ..families.decoder import Decoder
from ..families.gemma import Gemma
from ..families.gpt_oss import GptOss
from ..families.llama import Llama
from ..layers.basic import Linear, dequantize
from ..layers.mxfp4 import dequantize_mxfp4
from .checkpoint import Source, catalogue, match, read_json
from .finite import expect_finite, expect_finite_packed

_MODELS: dict[str, type[Decoder]] = {
    "gemma3": Gemma,
    "gemma4": Gemma,
    "llama": Llama,
    "gpt_oss": GptOss,
}
FP8_MODES = ("auto", "keep", "dequantize")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def build_model(config: ModelConfig, *, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    """The model of ``config`` with uninitialised weights."""
    if not isinstance(config, ModelConfig):
        from ..deepseek_v4.model import DeepseekV4

        return DeepseekV4(config, device=device, dtype=dtype)
    return _MODELS[config.family](config, device=device, dtype=dtype)


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    fp8: str = "auto",
) -> Decoder:
    """Builds the model of a Hugging Face directory, one tensor at a time on its final device.

    path: directory with config.json and model.safetensors or shards with their index.
    dtype: of the model; default: that of config.json, else bfloat16. Tensors of other dtypes are converted.
    fp8: what becomes of matrices stored in fp8. "dequantize": converted on load. "keep": held in fp8 and converted anew in every
        forward pass, layer by layer. "auto": kept only if the converted model would fill more than 80 % of the free memory.

        Of DeepSeek-V4 it is about the routed experts, in fp8 or fp4.

    Returns: Decoder.
    Raises: ValueError naming at once every tensor that is missing, unexpected, there twice, without its scales, or of another shape or
        dtype, or each file that is missing or cut off, before any tensor is read; ValueError naming the first tensor with a weight
        that is NaN or infinite, or becomes so in ``dtype``; NotImplementedError for unsupported models.
    """
    if fp8 not in FP8_MODES:
        raise ValueError(f"fp8: expected one of {FP8_MODES}, got {fp8!r}")
    path, device = Path(path), torch.device(device)
    config = load_config(path)
    keys = _storage_keys(path)
    dtype = dtype or keys.find_dtype()
    if not isinstance(config, ModelConfig):
        return deepseek_v4.load_model(path, device=device, dtype=dtype, experts=fp8)
    found = catalogue(path, config)
    # Shapes are checked, and it is decided what stays in fp8, before anything is allocated.
    model = build_model(config, device="meta", dtype=dtype)
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    sources = match(path, found, shapes, keys.fp8_block)
    kept = _kept_in_fp8(model, sources, fp8, device)
    model.allocate(device, except_for=kept)
    _fill(model, sources, kept)
    return model


def random_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """A model with random weights drawn on its device: outputs of order one, and no weight at a value that hides it.

    Matrices are N(0, 1 / in_size), the embeddings 0.15 N(0, 1), norm weights 1 + 0.3 N(0, 1) in effect, layer scalars uniform in
    0.8 .. 1.2, biases and sinks N(0, 1). The same seed gives the same weights on the same kind of device.
    """
    if not isinstance(config, ModelConfig):
        return deepseek_v4.random_model(config, seed=seed, device=device, dtype=dtype)
    model = build_model(config, device=device, dtype=dtype)
    generators: dict[torch.device, torch.Generator] = {}
    for name, weight in model.named_parameters():
        if weight.device not in generators:
            generators[weight.device] = torch.Generator(device=weight.device).manual_seed(seed)
        _draw(name, weight, config, generators[weight.device])
    return model


def _draw(name: str, weight: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
    if name.endswith("layer_scalar"):
        weight.uniform_(0.8, 1.2, generator=generator)
    elif name.startswith("embed_tokens"):
        weight.normal_(0.0, 0.15, generator=generator)
    elif name.endswith(("bias", "sinks")):
        # Some gates of gpt-oss must pass the limit of their clamp.
        weight.normal_(0.0, 4.0 if name.endswith("gate_up_proj_bias") else 1.0, generator=generator)
    elif weight.ndim == 1:
        weight.normal_(1.0 - config.norm_offset, 0.3, generator=generator)
    else:
        in_axis = 1 if config.family == "gpt_oss" and weight.ndim == 3 else -1
        weight.normal_(0.0, weight.shape[in_axis] ** -0.5, generator=generator)


@dataclass(frozen=True)
class StorageKeys:
    """What ``config.json`` says of how weights are stored."""

    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: QuantizationKeys | None = None

    def find_dtype(self) -> torch.dtype:
        """The dtype that the file names, by its newer or older key, else bfloat16."""
        return find_dtype(self.dtype or self.torch_dtype or "bfloat16")

    @property
    def fp8_block(self) -> tuple[int, ...] | None:
        """Rows and columns of fp8 weights that share a scale; None where only the shapes of the scales say so."""
        return self.quantization_config and self.quantization_config.weight_block_size


def _storage_keys(path: Path) -> StorageKeys:
    """Those of config.json, from its text_config where they are there too."""
    config = read_json(path / "config.json")
    with naming(path / "config.json"):
        return read_fields(StorageKeys, config | (config.get("text_config") or {}))


def find_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype of models by its name or itself; raises NotImplementedError for another."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise NotImplementedError(f"dtype: supported are {list(DTYPES)}, got {shown(dtype)}")
    return DTYPES[name]


def _kept_in_fp8(
    model: Decoder, sources: dict[str, Source], fp8: str, device: torch.device
) -> dict[str, Linear]:
    """The layers whose weights stay in fp8, by parameter name. Stacked experts are always converted."""
    if fp8 == "dequantize" or (fp8 == "auto" and fits(model, device)):
        return {}
    layers = {f"{name}.weight": m for name, m in model.named_modules() if isinstance(m, Linear)}
    return {n: m for n, m in layers.items() if sources[n].kind == "fp8"}


def _fill(model: nn.Module, sources: dict[str, Source], kept: dict[str, Linear]) -> None:
    """Reads tensors file by file, each into its place, and checks it. Of a file no more than one tensor is in use at a time."""
    from safetensors import safe_open

    by_file = defaultdict(list)
    for name, source in sources.items():
        by_file[source.value.file].append((name, source))
    parameters = dict(model.named_parameters())
    for file, members in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for name, source in members:
                value = tensors.get_tensor(source.value.name)
                scale = None if source.scale is None else source.scale.read()
                weight = parameters[name]
                if name in kept:
                    device = model.device
                    value, scale = value.to(device, copy=True), scale.to(device, copy=True)
                    expect_finite_packed(
                        "fp8", value, scale, (source.value, source.scale), model.dtype
                    )
                    kept[name].keep_fp8(value, scale)
                    continue
                if source.kind == "fp8":
                    value, scale = value.to(weight.device), scale.to(weight.device)
                    weight.copy_(dequantize(value, scale, weight.dtype))
                elif source.kind == "mxfp4":
                    for i in range(len(weight)):  # expert by expert
                        weight[i] = dequantize_mxfp4(
                            value[i].to(weight.device), scale[i].to(weight.device)
                        ).T
                else:
                    weight.copy_(value)
                expect_finite(weight, source.value)
