"""Names and storage of tensors in DeepSeek-V4 checkpoints.

Names of any of three schemes become the model's own, and say which part of which weight::

    release       layers.0.attn.wq_a.weight
                  layers.0.ffn.experts.3.w1.weight
                  layers.0.hc_attn_fn
    transformers  model.layers.0.self_attn.q_a_proj.weight
                  model.layers.0.mlp.experts.gate_up_proj
                  model.layers.0.attn_hc.fn
    hybrid        model.layers.0.attn.wq_a.weight
                  model.layers.0.ffn.experts.3.w1.weight
                  model.layers.0.hc_attn_fn

The hybrid is what transformers' ``save_pretrained`` writes by default; there ``attn.norm`` is the
release's ``attn.kv_norm``. The model's own names are those of transformers without ``model.``. A
quantized matrix ``x.weight`` has its scales in ``x.scale``.

Matrices are plain, fp8 in blocks of 128 x 128, or fp4 in groups of 32 columns; experts are stored
one by one, or as the stacks that the model has.

Source: the released checkpoints; transformers 5.23 ``conversion_mapping``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from ..layers.moe import packed_shapes
from ..loading.checkpoint import FLOATS, FP8, Stored, differs
from ..loading.names import GATE, UP, WHOLE, Form, Storage, Target

_KINDS = {FP8: "fp8", "I8": "fp4", "U8": "fp4"}

# Applied in this order; each leaves names alone that are right already.
_RENAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^model\.", ""),
        (r"^embed\.weight$", "embed_tokens.weight"),
        (r"^head\.weight$", "lm_head.weight"),
        (r"\bhc_head_(fn|base|scale)$", r"hc_head.hc_\1"),
        (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.self_attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
        (r"\.self_attn\.indexer\.", ".self_attn.compressor.indexer."),
        (r"\.indexer\.weights_proj\.", ".indexer.scorer.weights_proj."),
        (r"(\.self_attn\..*|\.self_attn)\.norm\.", r"\1.kv_norm."),
        (r"\.self_attn\.q_norm\.", ".self_attn.q_a_norm."),
        (r"\.attn_sink$", ".sinks"),
        (r"\.ape$", ".position_bias"),
        (r"\.wq_a\.", ".q_a_proj."),
        (r"\.wq_b\.", ".q_b_proj."),
        (r"\.wkv\.", ".kv_proj."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.wo_a\.", ".o_a_proj."),
        (r"\.wo_b\.", ".o_b_proj."),
        (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
        (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
        (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    )
]
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d{1,6})\.(w[123])\.(weight|scale)$")
# Drafters may bring copies of what they share with the trunk. DSpark's confidence is not used.
_IGNORED = re.compile(r"^(model\.)?mtp\.\d+\.(emb\.tok_emb|head|confidence_head\.proj)\.weight$")


def target(stored: str) -> Target | None:
    """Target of the tensor with this name; None = it is not read.

    A name that no rule knows stays as it is.
    """
    if _IGNORED.match(stored):
        return None
    name = stored
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    if match := _EXPERT.match(name):
        stack, expert, matrix, leaf = match.groups()
        part = {"w1": GATE, "w3": UP, "w2": WHOLE}[matrix]
        parameter = f"{stack}.{'down_proj' if matrix == 'w2' else 'gate_up_proj'}"
        return Target(parameter, int(expert), part, leaf == "scale")
    # hc scales are weights of their own: `.attn_hc.scale`.
    if name.endswith(".scale") and not name.endswith("_hc.scale"):
        return Target(name.removesuffix("scale") + "weight", is_scale=True)
    return Target(name)


class V4Storage(Storage):
    """`Storage` of DeepSeek-V4."""

    forms: ClassVar[Mapping[str, Form]] = {
        "plain": Form(FLOATS),
        "plain or fp8": Form((*FLOATS, FP8)),  # what a matrix may be that is stored as neither
        "ids": Form(("I64", "I32")),  # experts by token id
        "fp8": Form((FP8,), ("F32", "F8_E8M0", "U8")),
        "fp4": Form(("I8", "U8"), ("F8_E8M0", "U8")),
    }

    def __init__(self) -> None:
        super().__init__(None, ())

    def target(self, stored: str) -> Target | None:
        """See `Storage`."""
        return target(stored)

    def kind(self, stored: Stored, part: Tensor) -> str:
        """See `Storage`."""
        if not part.is_floating_point():
            return "ids"
        kind = _KINDS.get(stored.dtype, "plain")
        if kind == "plain" or part.ndim != 2:
            return "plain"
        return "plain or fp8" if kind == "fp4" and part.shape[1] % 32 else kind

    def shape(self, kind: str, shape: Sequence[int]) -> tuple[int, ...]:
        """See `Storage`."""
        return packed_shapes(kind, *shape)[0] if kind in ("fp8", "fp4") else tuple(shape)

    def scale_misfit(self, kind: str, scale: Stored, shape: Sequence[int]) -> list[str]:
        """See `Storage`."""
        return differs(scale, scale.shape, packed_shapes(kind, *shape)[2])

    def scale_name(self, stored: Stored) -> str | None:
        """See `Storage`."""
        return f"{stored.name.removesuffix('weight')}scale"

    def parts(self, name: str, weight: Tensor) -> list[Target]:
        """See `Storage`."""
        if ".mlp.experts." not in name:
            return []
        parts = (GATE, UP) if name.endswith("gate_up_proj") else (WHOLE,)
        return [Target(name, expert, part) for expert in range(len(weight)) for part in parts]


def format_of_experts(found: Mapping[Target, Stored]) -> str | None:
    """Format of the routed experts: "fp8", "fp4" or None.

    Raises:
        NotImplementedError: they are not all the same.
    """
    formats: dict[str | None, Stored] = {}
    for where, stored in found.items():
        if ".mlp.experts." in where.parameter and not where.is_scale:
            formats.setdefault(_KINDS.get(stored.dtype), stored)
    if len(formats) > 1:
        of = " and ".join(f"{stored.dtype} of {stored}" for stored in formats.values())
        raise NotImplementedError(f"experts: expected one format for all, got {of}")
    return next(iter(formats), None)
