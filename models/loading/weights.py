"""Weights of a model, read from a Hugging Face directory.

Headers first: every tensor's name, shape and dtype is compared with the model's (`match`) before
any is read. Then tensor by tensor into its place, dequantized unless it stays quantized, and
checked to be finite.

safetensors is imported where files are read, so that random weights need nothing but torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from quire.kernels.common.dequantize import (
    DEQUANTIZE,
    FP4_GROUP,
    dequantize_mxfp4,
    scale_values,
)

from ..config.fields import naming, read_fields, shown
from ..config.files import read_json
from ..config.hf import load_config
from ..config.hf_common import QuantizationKeys
from ..config.model import ModelConfig
from ..deepseek_v4.config import DeepseekV4Config
from ..deepseek_v4.model import DeepseekV4
from ..deepseek_v4.storage import V4Storage, format_of_experts
from ..engine.memory import fits, free_memory
from ..families.decoder import Decoder
from ..families.gemma import Gemma
from ..families.gpt_oss import Experts, GptOss
from ..families.llama import Llama
from ..layers.basic import Linear
from ..layers.moe import FP8_BLOCK
from ..parallel.group import Group
from ..parallel.shard import shard_config
from .checkpoint import Stored, read_headers
from .finite import expect_finite, expect_finite_packed, expect_ids
from .hf_storage import HfStorage
from .match import UP, WHOLE, Source, Target, match, part_of, unique
from .slices import WHOLE as ALL
from .slices import Piece, fill_up, piece_of, read, shared_columns

_MODELS: dict[str, type[Decoder]] = {
    "gemma3": Gemma,
    "gemma4": Gemma,
    "llama": Llama,
    "gpt_oss": GptOss,
}
Keep = Callable[[Tensor, Tensor], None]
"""Gives a layer the values of its weight and their scales, both on its device."""
FP8_MODES = ("auto", "keep", "dequantize")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def build_model(
    config: ModelConfig | DeepseekV4Config,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    group: Group | None = None,
    unit: int = 1,
) -> Decoder | DeepseekV4:
    """The model of ``config`` with uninitialized weights, or what one of several ranks has of it.

    Args:
        group: the ranks; None = one has it all.
        unit: as in `quire.models.parallel.shard.shard_config`.
    """
    if group is not None:
        config = shard_config(config, group.size, unit)
    if isinstance(config, DeepseekV4Config):
        return DeepseekV4(config, device=device, dtype=dtype, group=group)
    return _MODELS[config.family](config, device=device, dtype=dtype, group=group)


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    fp8: str = "auto",
    group: Group | None = None,
) -> Decoder | DeepseekV4:
    """Builds the model of a Hugging Face directory, one tensor at a time on its final device.

    The host holds no more than one tensor of the files at a time, or what a rank reads of it.

    Args:
        path: directory with config.json and model.safetensors, or shards with their index. Drafters
            that the config of a DeepSeek-V4 counts but the files do not hold are left out.
        device: of the weights.
        dtype: of the model; None = that of config.json, else bfloat16. Tensors of other dtypes are
            converted.
        fp8: what becomes of matrices stored in fp8 and of experts of gpt-oss in MXFP4; of
            DeepSeek-V4, of the routed experts, in fp8 or fp4, while its other quantized matrices
            are dequantized. "dequantize": once, here. "keep": held as they are stored, and
            dequantized anew in every forward pass, layer by layer, or those experts that a step
            needs. "auto": kept only if the dequantized model would fill more than 80 % of the free
            memory; experts of gpt-oss are kept on a GPU in any case, whose kernel reads their
            values as they are stored.
        group: the ranks of which this one is to have a part; it reads no more than that. None = all
            of the model.

    Raises:
        ValueError: naming at once every tensor that is missing, unexpected, there twice, without
            its scales, or of another shape or dtype, or each file that is missing or cut off,
            before any tensor is read; naming the first tensor with a weight that is NaN or
            infinite, or becomes so in ``dtype``; experts of a DeepSeek-V4 that are to be kept and
            are not quantized.
        NotImplementedError: unsupported models.
    """
    if fp8 not in FP8_MODES:
        raise ValueError(f"fp8: expected one of {FP8_MODES}, got {fp8!r}")
    path, device = Path(path), torch.device(device)
    config = load_config(path)
    keys = _storage_keys(path)
    dtype = dtype or keys.find_dtype()
    if isinstance(config, DeepseekV4Config):
        return _load_deepseek_v4(path, config, device, dtype, fp8, group)
    # Shapes are checked, and it is decided what stays in fp8, before anything is allocated.
    whole = build_model(config, device="meta", dtype=dtype)
    parameters = dict(whole.named_parameters())
    storage = HfStorage(config, parameters.keys(), keys.fp8_block)
    found = unique(path, storage, read_headers(path))
    sources = match(path, found, parameters, storage)
    model, pieces = whole, {}
    if group is not None:
        unit = max(shared_columns(source, part_of(parameters, source.target)) for source in sources)
        model = build_model(config, device="meta", dtype=dtype, group=group, unit=unit)
        pieces = _pieces(sources, parameters, dict(model.named_parameters()), group)
    kept = kept_as_stored(model, sources, fp8, device)
    for source in sources:
        if not pieces.get(source.target, ALL).is_whole_blocks and source.target.parameter in kept:
            raise ValueError(
                f"fp8: expected 'dequantize' for {group.size} ranks, between which blocks of scales "
                f"of {source.value} are cut"
            )
    model.allocate(device, except_for=kept)
    _fill(model, sources, kept, pieces)
    return model


def _pieces(
    sources: list[Source], whole: Mapping[str, Tensor], part: Mapping[str, Tensor], group: Group
) -> dict[Target, Piece]:
    """What the rank reads for each part of a weight of which it has no more than a part."""
    pieces = {}
    for source in sources:
        target = source.target
        both = [part_of(weights, target) for weights in (whole, part)]
        pieces[target] = piece_of(source, *both, group)
    return {target: piece for target, piece in pieces.items() if piece is not ALL}


def _load_deepseek_v4(
    path: Path, config: DeepseekV4Config, device: torch.device, dtype: torch.dtype, fp8: str,
    group: Group | None,
) -> DeepseekV4:  # fmt: skip
    tables = 2 * 4 * config.rope_dim * config.max_position_embeddings
    if tables > (free := free_memory(device)):
        raise ValueError(
            f"max_position_embeddings: expected rotary tables of at most the free {free} bytes, "
            f"got {tables} bytes for {config.max_position_embeddings} tokens"
        )
    storage = V4Storage()
    found = unique(path, storage, read_headers(path))
    if not any(target.parameter.startswith("mtp.") for target in found):
        config = replace(config, num_mtp_layers=0)
    kept = format_of_experts(found)
    if fp8 == "keep" and kept is None:
        raise ValueError("fp8: expected 'auto' or 'dequantize', the experts here are not quantized")
    whole = DeepseekV4(config, device="meta", dtype=dtype, max_positions=1)
    parameters = dict(whole.named_parameters())
    sources = match(path, found, parameters, storage)
    plain, pieces = whole, {}
    if group is not None:
        # Other matrices than experts are dequantized: they may be cut anywhere.
        unit = {"fp8": FP8_BLOCK, "fp4": FP4_GROUP}.get(kept, 1)
        config = shard_config(config, group.size, unit)
        plain = DeepseekV4(config, device="meta", dtype=dtype, max_positions=1, group=group)
        pieces = _pieces(sources, parameters, dict(plain.named_parameters()), group)
    if fp8 == "dequantize" or (fp8 == "auto" and fits(plain, device)):
        kept = None
    model = DeepseekV4(config, device=device, dtype=dtype, expert_format=kept, group=group)
    _fill(model, sources, {}, pieces)
    return model


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
        """Rows and columns of fp8 weights that share a scale.

        None where only the shapes of the scales say so.
        """
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


def kept_as_stored(
    model: Decoder, sources: list[Source], fp8: str, device: torch.device
) -> dict[str, Keep]:
    """The weights that stay quantized, by name: what takes their values and scales.

    Of experts both matrices stay, or none; stacks in fp8 are always converted.

    Args:
        model: not quantized, on the meta device.
        sources: of `match`.
        fp8, device: as in `load_model`.
    """
    if fp8 == "dequantize":
        return {}
    keeps = fp8 == "keep" or not fits(model, device)
    kinds = {source.target.parameter: source.kind for source in sources}
    kept: dict[str, Keep] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Linear) and keeps and kinds.get(f"{prefix}.weight") == "fp8":
            kept[f"{prefix}.weight"] = module.keep_fp8
        elif isinstance(module, Experts) and (keeps or device.type == "cuda"):
            names = {name: f"{prefix}.{name}" for name in ("gate_up_proj", "down_proj")}
            if all(kinds.get(name) == "mxfp4" for name in names.values()):
                kept |= {full: partial(module.keep_mxfp4, name) for name, full in names.items()}
    return kept


def _fill(
    model: nn.Module, sources: list[Source], kept: Mapping[str, Keep],
    pieces: Mapping[Target, Piece],
) -> None:  # fmt: skip
    """Reads tensors file by file, each into its place, and checks it.

    Of a file no more than one tensor, with its scales, is in use at a time.

    Args:
        model: with all its weights allocated, but for those of ``kept``.
        sources: of `match`.
        kept: of `kept_as_stored`.
        pieces: what is read for parts of weights of which a rank has a part; of others, all.
    """
    from safetensors import safe_open

    by_file: dict[Path, list[Source]] = defaultdict(list)
    for source in sources:
        by_file[source.value.file].append(source)
    parameters = dict(model.named_parameters())
    for file, members in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for source in members:
                piece = pieces.get(source.target, ALL)
                value, scale = read(tensors, source.value.name, piece.value), None
                if source.scale is not None and source.scale.file == file:
                    scale = read(tensors, source.scale.name, piece.scale)
                elif source.scale is not None:
                    with safe_open(source.scale.file, framework="pt") as others:
                        scale = read(others, source.scale.name, piece.scale)
                if source.target.parameter in kept:
                    place = parameters[source.target.parameter]
                    value, scale = piece.filled_up(value, scale, place.shape)
                    _keep(kept[source.target.parameter], source, value, scale, model)
                elif source.target.parameter in parameters:
                    _dequantize(parameters, source, value, scale, model, piece)
                else:
                    _pack(parameters, source, value, scale, model)


def _of(source: Source) -> tuple[Stored, Stored]:
    assert source.scale is not None
    return source.value, source.scale


def _keep(
    keep: Keep, source: Source, value: Tensor, scale: Tensor | None, model: nn.Module
) -> None:
    """Hands a layer its weight as it is stored."""
    assert scale is not None
    value, scale = value.to(model.device, copy=True), scale.to(model.device, copy=True)
    kind = source.kind
    if kind == "mxfp4":  # its blocks of columns lie one behind the other
        kind, value = "fp4", value.flatten(-2)
    expect_finite_packed(kind, value, scale, _of(source), model.dtype)
    keep(value, scale)


def _pack(
    parameters: Mapping[str, Tensor], source: Source, value: Tensor, scale: Tensor | None,
    model: nn.Module,
) -> None:  # fmt: skip
    """Copies an expert that stays quantized to its place in `PackedMatrices`."""
    target, kind = source.target, source.kind
    assert scale is not None and target.expert is not None
    at = (target.expert,) if target.part == WHOLE else (target.expert, int(target.part == UP))
    packed = parameters[f"{target.parameter}.weight"][at]
    packed_scale = parameters[f"{target.parameter}.scale"][at]
    fill_up(packed, value.view(packed.dtype))
    fill_up(packed_scale, scale_values(scale) if kind == "fp8" else scale.view(torch.uint8))
    expect_finite_packed(kind, packed, packed_scale, _of(source), model.dtype)


def _dequantize(
    parameters: Mapping[str, Tensor], source: Source, value: Tensor, scale: Tensor | None,
    model: nn.Module, piece: Piece,
) -> None:  # fmt: skip
    """Copies values to their place, in the dtype that the weight has."""
    weight = part_of(parameters, source.target)
    assert weight is not None
    device = weight.device
    if piece.is_empty:
        weight.zero_()
        return
    if source.kind == "ids":
        weight.copy_(value)
        expect_ids(weight, model.config.num_experts, source.value)
        return
    if scale is None:
        piece.fill(weight, piece.of(value))
    elif source.kind == "mxfp4":
        for i in range(len(weight)):  # expert by expert
            each = dequantize_mxfp4(value[i].to(device), scale[i].to(device)).T
            piece.fill(weight[i : i + 1], piece.of(each[None]))
    else:
        dequantize = DEQUANTIZE[source.kind]
        whole = dequantize(value.to(device), scale.to(device), weight.dtype)
        piece.fill(weight, piece.of(whole))
    expect_finite(weight, source.value)
