"""Oracle of ``route_tokens`` and ``combine_experts``: one token at a time.

Source: DeepSeek-V4 report 2; transformers ``modeling_deepseek_v4``, ``modeling_gpt_oss``,
    ``modeling_gemma4``.
"""

import torch


def scores(logits):
    """sqrt(log(1 + exp(logits))) [num_experts] of one token."""
    return torch.sqrt(logits.clamp(min=0) + torch.log1p(torch.exp(-logits.abs())))


def best(scores, bias, top_k):
    """The ``top_k`` experts of the highest scores + bias, the lowest of equals first."""
    chosen = scores if bias is None else scores + bias
    values = chosen.tolist()
    return sorted(range(len(values)), key=lambda expert: (-values[expert], expert))[:top_k]


def weights(scores, ids, scale):
    """Weights [top_k] of one token's experts."""
    found = scores[ids]
    return found / (found.sum() + 1e-20) * scale


def logits_that_count(logits, factor, bias):
    """[num_experts] of one token, for a softmax."""
    scaled = logits * factor
    return scaled if bias is None else scaled + bias


def softmax_weights(logits, ids, scale, expert_scale):
    """Weights [top_k] of one token's experts, of its ``logits_that_count``."""
    found = torch.softmax(logits[ids], 0) * scale
    return found if expert_scale is None else found * expert_scale[ids]


def combined(rows, weights):
    """The sum [size] of one token's rows [k, size], in the dtype of the arithmetic."""
    return (rows * weights[:, None]).sum(0)
