"""Tensor names of DeepSeek-V4 checkpoints.

From any of the three schemes to the model's own, and which part of which weight.

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

Source: the released checkpoints; transformers 5.23 ``conversion_mapping``.
"""

from __future__ import annotations

import re

from ..loading.match import GATE, UP, WHOLE, Target

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
# Drafters may bring copies of what they share with the trunk.
_IGNORED = re.compile(r"^mtp\.\d+\.(emb\.tok_emb|head)\.weight$")


def target(stored: str) -> Target | None:
    """Where the tensor stored as ``stored`` belongs; None = nowhere.

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
