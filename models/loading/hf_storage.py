"""How Hugging Face checkpoints of all families but DeepSeek-V4 name and store tensors.

Source: tensor names of transformers 5.23 and of the older multimodal repositories;
    ``weight_scale_inv`` (fine-grained fp8), ``weight_scale`` (compressed-tensors), ``_blocks`` and
    ``_scales`` (mxfp4 of gpt-oss).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import ClassVar

from torch import Tensor

from quire.kernels.common.dequantize import FP4_GROUP, block_size

from ..config.model import ModelConfig
from .checkpoint import FLOATS, FP8, Stored, differs
from .match import Form, Target

# Text tensors have one of these prefixes, longest first; the rest of the name is the same in every
# repository.
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
# Towers of multimodal checkpoints, tables that old checkpoints carry, scales of activations.
_IGNORED = re.compile(
    r"(model\.)?(vision_tower|audio_tower|multi_modal_projector"
    r"|vision_embedder|embed_vision|embed_audio)\."
    r"|.*\.rotary_emb\.inv_freq$|.*\.(input|activation)_scale$"
)


class HfStorage:
    """`Storage` of a model.

    Args:
        config: of the model.
        names: of its weights.
        fp8_block: rows and columns of fp8 weights that share a scale; None = what the scales'
            shapes say.
    """

    forms: ClassVar[dict[str, Form]] = {
        "plain": Form(FLOATS),
        "fp8": Form((FP8,), ("F32", "F16", "BF16", "F8_E8M0")),
        "mxfp4": Form(("U8",), ("U8",)),
    }

    def __init__(
        self, config: ModelConfig, names: Collection[str], fp8_block: Sequence[int] | None
    ) -> None:
        self._config, self._names, self._fp8_block = config, names, fp8_block

    def target(self, stored: str) -> Target | None:
        """See `Storage`."""
        name = text_name(stored, self._config)
        if name is None or name in self._names:  # some weights are called scales too
            return name and Target(name)
        if name.endswith("_blocks"):
            return Target(name.removesuffix("_blocks"))
        values, is_scale = re.subn(r"_(scale_inv|scale|scales)$", "", name)
        return Target(values, is_scale=bool(is_scale))

    def kind(self, stored: Stored, part: Tensor) -> str:
        """See `Storage`."""
        if stored.name.endswith("_blocks") and part.ndim == 3 and part.shape[1] % FP4_GROUP == 0:
            return "mxfp4"
        return "fp8" if stored.dtype == FP8 else "plain"

    def shape(self, kind: str, shape: Sequence[int]) -> tuple[int, ...]:
        """See `Storage`. Weights of mxfp4 are stored by output channel, in blocks of 16 bytes."""
        if kind != "mxfp4":
            return tuple(shape)
        num_experts, in_size, out_size = shape
        return num_experts, out_size, in_size // FP4_GROUP, FP4_GROUP // 2

    def scale_misfit(self, kind: str, scale: Stored, shape: Sequence[int]) -> list[str]:
        """See `Storage`."""
        if kind == "mxfp4":
            return differs(scale, scale.shape, self.shape(kind, shape)[:-1])
        if scale_fits(scale.shape, shape, self._fp8_block):
            return []
        of = f"{list(shape)} in blocks of {self._fp8_block or 'some size'}"
        return [f"{scale.name} {list(scale.shape)} (expected scales of {of}) in {scale.file.name}"]

    def scale_name(self, stored: Stored) -> str | None:
        """See `Storage`."""
        return None

    def parts(self, name: str, weight: Tensor) -> list[Target]:
        """See `Storage`."""
        return []


def text_name(stored: str, config: ModelConfig) -> str | None:
    """The model's name of a stored tensor.

    The stored name itself when no rule knows it; None = ignore.
    """
    if _IGNORED.match(stored):
        return None
    if stored.endswith("lm_head.weight"):
        return None if config.tie_word_embeddings else "lm_head.weight"
    prefix = next((p for p in _TEXT_PREFIXES if stored.startswith(p)), "")
    name = stored.removeprefix(prefix)
    # Some repositories ship keys and values of layers that use another layer's.
    shared = re.match(r"layers\.(\d{1,6})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.", name)
    return None if shared and int(shared[1]) >= config.num_kv_owners else name


def scale_fits(scale: Sequence[int], weight: Sequence[int], block: Sequence[int] | None) -> bool:
    """Whether fp8 scales of one shape are those of weights of another.

    As `quire.kernels.common.dequantize.dequantize_fp8` takes them.
    """
    if block is not None and len(weight) > 1:
        blocks = (-(-size // b) for size, b in zip(weight[-2:], block, strict=True))
        return tuple(scale) == (*weight[:-2], *blocks)
    if math.prod(scale) == 1 or len(scale) > len(weight):
        return len(scale) <= len(weight)
    return all(
        n in (1, size) or (0 < n < size and -(-size // block_size(size, n)) == n)
        for n, size in zip(scale, weight, strict=False)
    )
