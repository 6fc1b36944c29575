"""Match stored tensors with the weights of a model, by name, shape and dtype.

Source: tensor names of transformers 5.23 and of the older multimodal repositories;
    ``weight_scale_inv`` (fine-grained fp8), ``weight_scale`` (compressed-tensors), ``_blocks`` and
    ``_scales`` (mxfp4 of gpt-oss).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from quire.kernels.common.dequantize import FP4_GROUP, block_size

from .checkpoint import FLOATS, FP8, Stored, differs, refuse_misfits

GATE, UP, WHOLE = "gate", "up", "whole"
MISFITS = ("missing", "unexpected", "misshaped", "mistyped", "unscaled", "doubled")


# Text tensors have one of these prefixes, longest first; the rest of the name is the same in every
# repository.
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
# Towers of multimodal checkpoints, tables that old checkpoints carry, scales of activations.
_IGNORED = re.compile(
    r"(model\.)?(vision_tower|audio_tower|multi_modal_projector"
    r"|vision_embedder|embed_vision|embed_audio)\."
    r"|.*\.rotary_emb\.inv_freq$|.*\.(input|activation)_scale$"
)


def text_name(stored: str) -> str:
    """A tensor's name without the prefix that the text model has in its repository."""
    prefix = next((p for p in _TEXT_PREFIXES if stored.startswith(p)), "")
    return stored.removeprefix(prefix)


@dataclass(frozen=True)
class TensorTarget:
    """Part of a weight that a stored tensor fills.

    Attributes:
        expert: index in a stack of experts; None = the whole stack, or no stack.
        part: GATE or UP, the first and second half of an expert's rows in gate_up_proj; else WHOLE.
    """

    parameter: str
    expert: int | None = None
    part: str = WHOLE
    is_scale: bool = False

    def __str__(self) -> str:
        expert = "" if self.expert is None else f"[{self.expert}]"
        return f"{self.parameter}{expert}" + ("" if self.part == WHOLE else f".{self.part}")


@dataclass(frozen=True)
class Form:
    """Stored dtypes of values of one kind and of their scales, as safetensors calls them."""

    dtypes: tuple[str, ...]
    scale_dtypes: tuple[str, ...] = ()


class Storage:
    """Names and storage of tensors in a family's checkpoints.

    Args:
        names: of the model's weights.
        fp8_block: rows and columns of fp8 weights that share a scale; None = by the scales' shapes.
        weight_name: as in `quire.models.families.registry.Family`.
    """

    forms: ClassVar[Mapping[str, Form]] = {
        "plain": Form(FLOATS),
        "ids": Form(("I64", "I32")),  # of experts or tokens
        "fp8": Form((FP8,), ("F32", "F16", "BF16", "F8_E8M0")),
        "mxfp4": Form(("U8",), ("U8",)),
    }

    def __init__(
        self,
        config: Any,
        names: Collection[str],
        fp8_block: Sequence[int] | None = None,
        weight_name: Callable[[str, Any], str | None] | None = None,
    ) -> None:
        self._config, self._names, self._fp8_block = config, names, fp8_block
        self._weight_name = weight_name

    def target(self, stored: str) -> TensorTarget | None:
        """Target of the tensor with this name; None = it is not read.

        A name that no rule knows stays as it is.
        """
        name = self._text_name(stored)
        if name is None or name in self._names:  # some weights are called scales too
            return name and TensorTarget(name)
        if name.endswith("_blocks"):
            return TensorTarget(name.removesuffix("_blocks"))
        values, is_scale = re.subn(r"_(scale_inv|scale|scales)$", "", name)
        return TensorTarget(values, is_scale=bool(is_scale))

    def _text_name(self, stored: str) -> str | None:
        if _IGNORED.match(stored):
            return None
        if head := re.search(r"\blm_head\.weight(_scale|_scale_inv)?$", stored):
            return None if self._config.tie_word_embeddings else head[0]
        name = text_name(stored)
        return name if self._weight_name is None else self._weight_name(name, self._config)

    def kind(self, stored: Stored, part: Tensor) -> str:
        """Kind of the values stored for a part of a weight."""
        if not part.is_floating_point():
            return "ids"
        if stored.name.endswith("_blocks") and part.ndim == 3 and part.shape[1] % FP4_GROUP == 0:
            return "mxfp4"
        return "fp8" if stored.dtype == FP8 else "plain"

    def shape(self, kind: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The stored shape of values of a kind, for a part of a weight of ``shape``."""
        if kind != "mxfp4":
            return tuple(shape)
        num_experts, in_size, out_size = shape  # stored by output channel, in blocks of 16 bytes
        return num_experts, out_size, in_size // FP4_GROUP, FP4_GROUP // 2

    def scale_misfit(self, kind: str, scale: Stored, shape: Sequence[int]) -> list[str]:
        """Problems with the shape of the scales of a part of ``shape``."""
        if kind == "mxfp4":
            return differs(scale, scale.shape, self.shape(kind, shape)[:-1])
        if _scale_fits(scale.shape, shape, self._fp8_block):
            return []
        of = f"{list(shape)} in blocks of {self._fp8_block or 'some size'}"
        return [f"{scale.name} {list(scale.shape)} (expected scales of {of}) in {scale.file.name}"]

    def scale_name(self, stored: Stored) -> str | None:
        """The one name that scales of these values may have; None = there are several."""
        return None

    def parts(self, name: str, weight: Tensor) -> list[TensorTarget]:
        """The parts that a weight may be stored in one by one; empty = always whole."""
        return []


@dataclass(frozen=True)
class TensorSource:
    """Stored values of a part of a weight, and their scales."""

    target: TensorTarget
    kind: str
    value: Stored
    scale: Stored | None = None


def unique(path: Path, storage: Storage, stored: Iterable[Stored]) -> dict[TensorTarget, Stored]:
    """Tensors by where they belong, those for nowhere left out.

    Raises:
        ValueError: two tensors for the same target, naming both.
    """
    found: dict[TensorTarget, Stored] = {}
    doubled = []
    for one in stored:
        target = storage.target(one.name)
        if target is not None and (first := found.setdefault(target, one)) is not one:
            doubled.append(f"{first} and {one}")
    refuse_misfits(path, doubled=doubled)
    return found


def part_of(parameters: Mapping[str, Tensor], target: TensorTarget) -> Tensor | None:
    """The part of a model's weights that a target names; None = there is no such part."""
    weight = parameters.get(target.parameter)
    if weight is None or target.expert is None:
        return weight
    if target.expert >= len(weight):
        return None
    matrix = weight[target.expert]
    return matrix if target.part == WHOLE else matrix.chunk(2)[target.part == UP]


def match(
    path: Path,
    found: Mapping[TensorTarget, Stored],
    parameters: Mapping[str, Tensor],
    storage: Storage,
) -> list[TensorSource]:
    """Find the stored tensors of each part of the weights.

    Args:
        found: of `unique`.
        parameters: the model's weights, which may be on the meta device.

    Raises:
        ValueError: naming at once every tensor that is missing, unexpected, there twice, without
            its scales, or of another shape or dtype.
    """
    values = {target: stored for target, stored in found.items() if not target.is_scale}
    scales = {replace(t, is_scale=False): stored for t, stored in found.items() if t.is_scale}
    misfits: dict[str, list[str]] = {name: [] for name in MISFITS}
    for name, weight in parameters.items():
        if TensorTarget(name) not in values:
            parts = storage.parts(name, weight) or [TensorTarget(name)]
            misfits["missing"] += [str(part) for part in parts if part not in values]
    sources = []
    for target, stored in values.items():
        part, whole = part_of(parameters, target), values.get(TensorTarget(target.parameter))
        if target.expert is not None and whole is not None:
            misfits["doubled"].append(f"{whole} and {stored}")
        if part is None:
            misfits["unexpected"].append(str(stored))
            continue
        kind = storage.kind(stored, part)
        form = storage.forms[kind]
        misfits["misshaped"] += differs(stored, stored.shape, storage.shape(kind, part.shape))
        misfits["mistyped"] += differs(stored, stored.dtype, form.dtypes)
        if not form.scale_dtypes:
            sources.append(TensorSource(target, kind, stored))
            continue
        scale = scales.pop(target, None)
        sources.append(TensorSource(target, kind, stored, scale))
        if scale is not None:
            misfits["mistyped"] += differs(scale, scale.dtype, form.scale_dtypes)
            misfits["misshaped"] += storage.scale_misfit(kind, scale, part.shape)
        elif (name := storage.scale_name(stored)) is not None:
            misfits["missing"].append(name)
        else:
            misfits["unscaled"].append(str(stored))
    misfits["unexpected"] += [str(scale) for scale in scales.values()]
    refuse_misfits(path, **misfits)
    return sources


def _scale_fits(scale: Sequence[int], weight: Sequence[int], block: Sequence[int] | None) -> bool:
    """True if ``dequantize_fp8`` takes scales of one shape with weights of another."""
    if block is not None and len(weight) > 1:
        blocks = (-(-size // b) for size, b in zip(weight[-2:], block, strict=True))
        return tuple(scale) == (*weight[:-2], *blocks)
    if math.prod(scale) == 1 or len(scale) > len(weight):
        return len(scale) <= len(weight)
    return all(
        n in (1, size) or (0 < n < size and -(-size // block_size(size, n)) == n)
        for n, size in zip(scale, weight, strict=False)
    )
