"""Match stored tensors with the weights of a model, by name, shape and dtype.

Source: tensor names of transformers 5.23 and of the older multimodal repositories;
    ``weight_scale_inv`` (fine-grained fp8), ``weight_scale`` (compressed-tensors), ``_blocks`` and
    ``_scales`` (mxfp4 of gpt-oss).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from quire.kernels.common.dequantize import FP4_GROUP, block_size

from .checkpoint import FLOATS, FP8, Stored, differs, refuse_misfits

GATE, UP, WHOLE = "gate", "up", "whole"
MISFITS = ("missing", "unexpected", "misshaped", "mistyped", "unscaled", "doubled")

# Text tensors have one of these prefixes, longest first; the rest of a name is always the same.
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


# Stored dtypes of values of a kind and of their scales, as safetensors calls them.
FORMS = {
    "plain": (FLOATS, ()),
    "ids": (("I64", "I32"), ()),  # of experts or tokens
    "fp8": ((FP8,), ("F32", "F16", "BF16", "F8_E8M0", "U8")),
    "fp4": (("I8", "U8"), ("F8_E8M0", "U8")),
    "mxfp4": (("U8",), ("U8",)),
}
TEXT_KINDS = {FP8: "fp8", "U8": "mxfp4"}


@dataclass(frozen=True)
class Storage:
    """Names and formats of the tensors in a family's checkpoints.

    Attributes:
        target: (stored name) -> what it fills; None = it is not read.
        kinds: kinds of values by their stored dtype; others are "plain".
        fp8_block: rows and columns of fp8 weights that share a scale; None = by the scales' shapes.
    """

    target: Callable[[str], TensorTarget | None]
    kinds: Mapping[str, str] = field(default_factory=lambda: TEXT_KINDS)
    fp8_block: Sequence[int] | None = None

    def kind(self, stored: Stored, part: Tensor) -> str:
        if not part.is_floating_point():
            return "ids"
        kind = self.kinds.get(stored.dtype, "plain")
        ndim = {"fp4": 2, "mxfp4": 3}.get(kind)
        if ndim is not None and (part.ndim != ndim or part.shape[1] % FP4_GROUP):
            return "plain"
        return kind


def text_target(
    stored: str,
    names: Collection[str],
    config: Any,
    weight_name: Callable[[str, Any], str | None] | None = None,
) -> TensorTarget | None:
    """`Storage.target` of a `Decoder`: a name that no rule knows stays as it is.

    names: of the model's weights; weight_name: as in `Family`.
    """
    if _IGNORED.match(stored):
        return None
    name: str | None = text_name(stored)
    if head := re.search(r"\blm_head\.weight(_scale|_scale_inv)?$", stored):
        name = None if config.tie_word_embeddings else head[0]
    elif weight_name is not None:
        name = weight_name(text_name(stored), config)
    if name is None or name in names:  # some weights are called scales too
        return name and TensorTarget(name)
    if name.endswith("_blocks"):
        return TensorTarget(name.removesuffix("_blocks"))
    values, is_scale = re.subn(r"_(scale_inv|scale|scales)$", "", name)
    return TensorTarget(values, is_scale=bool(is_scale))


@dataclass(frozen=True)
class TensorSource:
    """Stored values of a part of a weight, and their scales."""

    target: TensorTarget
    kind: str
    value: Stored
    scale: Stored | None = None


def part_of(parameters: Mapping[str, Tensor], target: TensorTarget) -> Tensor | None:
    """The part of a model's weights that a target names; None = there is none."""
    weight = parameters.get(target.parameter)
    if weight is None or target.expert is None:
        return weight
    if target.expert >= len(weight):
        return None
    matrix = weight[target.expert]
    return matrix if target.part == WHOLE else matrix.chunk(2)[target.part == UP]


def match(
    path: Path, stored: Iterable[Stored], parameters: Mapping[str, Tensor], storage: Storage
) -> list[TensorSource]:
    """Find the stored tensors of each part of the weights, which may be on the meta device.

    Raises:
        ValueError: naming at once the tensors of each of `MISFITS`.
    """
    misfits: dict[str, list[str]] = {name: [] for name in MISFITS}
    found: dict[TensorTarget, Stored] = {}
    for one in stored:
        target = storage.target(one.name)
        if target is not None and (first := found.setdefault(target, one)) is not one:
            misfits["doubled"].append(f"{first} and {one}")
    values = {target: one for target, one in found.items() if not target.is_scale}
    scales = {replace(t, is_scale=False): one for t, one in found.items() if t.is_scale}
    stacks = {target.parameter for target in values if target.expert is not None}
    for name, weight in parameters.items():
        parts = [TensorTarget(name)]
        if name in stacks and parts[0] not in values:
            halves = (GATE, UP) if name.endswith("gate_up_proj") else (WHOLE,)
            parts = [TensorTarget(name, i, half) for i in range(len(weight)) for half in halves]
        misfits["missing"] += [str(part) for part in parts if part not in values]
    sources = []
    for target, one in values.items():
        part, whole = part_of(parameters, target), values.get(TensorTarget(target.parameter))
        if target.expert is not None and whole is not None:
            misfits["doubled"].append(f"{whole} and {one}")
        if part is None:
            misfits["unexpected"].append(str(one))
            continue
        kind = storage.kind(one, part)
        dtypes, scale_dtypes = FORMS[kind]
        shape, scale_shape = _stored_shapes(kind, tuple(part.shape))
        misfits["misshaped"] += differs(one, one.shape, shape)
        misfits["mistyped"] += differs(one, one.dtype, dtypes)
        scale = scales.pop(target, None) if scale_dtypes else None
        sources.append(TensorSource(target, kind, one, scale))
        if scale is not None:
            misfits["mistyped"] += differs(scale, scale.dtype, scale_dtypes)
            if kind != "fp8":
                misfits["misshaped"] += differs(scale, scale.shape, scale_shape)
            elif not _scale_fits(scale.shape, part.shape, storage.fp8_block):
                of = f"{list(part.shape)} in blocks of {storage.fp8_block or 'some size'}"
                misfits["misshaped"].append(
                    f"{scale} {list(scale.shape)} (expected scales of {of})"
                )
        elif scale_dtypes:
            misfits["unscaled"].append(str(one))
    misfits["unexpected"] += [str(scale) for scale in scales.values()]
    refuse_misfits(path, **misfits)
    return sources


def _stored_shapes(kind: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if kind == "fp4":
        rows, columns = shape
        return (rows, columns // 2), (rows, columns // FP4_GROUP)
    if kind == "mxfp4":  # by output channel, in blocks of 16 bytes
        num_experts, columns, rows = shape
        scales = (num_experts, rows, columns // FP4_GROUP)
        return (*scales, FP4_GROUP // 2), scales
    return shape, ()


def _scale_fits(scale: Sequence[int], weight: Sequence[int], block: Sequence[int] | None) -> bool:
    """True if ``dequantize_fp8`` takes scales of one shape with weights of another."""
    if block is not None and len(weight) > 1:
        blocks = (-(-size // b) for size, b in zip(weight[-2:], block, strict=True))
        return tuple(scale) == (*weight[:-2], *blocks)
    return len(scale) <= len(weight) and all(
        n in (1, size) or (0 < n < size and -(-size // block_size(size, n)) == n)
        for n, size in zip(scale, weight, strict=False)
    )
