"""Our attention under transformers' own continuous batching (``generate_batch``); its extra.

::

    register()
    model.set_attn_implementation("paged|eager")
    model.generate_batch(prompts, generation_config)

transformers keeps its own allocator, pages and scheduler there and refuses attention of other names,
so this replaces ``paged|eager`` in the process. transformers gathers the rows that a step sees, one
request after another, and makes masks that nobody reads here: this runs the kernels, but not fast.
CUDA graphs and compilation are not tested.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.kernels import attention_for

from .transformers import AttentionInterface

NAME = "paged|eager"


def register() -> Any:
    """Replace ``paged|eager`` for all models of this process.

    Returns:
        What it was, for ``AttentionInterface.register("paged|eager", ...)``.
    """
    before = AttentionInterface()[NAME]
    AttentionInterface.register(NAME, _attention)
    return before


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    cache, sinks, window = given.get("cache"), given.get("s_aux"), given.get("sliding_window")
    if cache is None or given.get("dropout"):
        raise NotImplementedError("attention 'paged|eager' of quire: supported is generate_batch")
    # transformers writes the rows; all that a request sees comes back, its new rows last.
    k, v = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=given
    )
    cu_q, cu_k = given["cu_seq_lens_q"], given["cu_seq_lens_k"]
    pages = [x.squeeze(0).transpose(0, 1).unsqueeze(1) for x in (k, v)]  # of one row each
    rows = torch.arange(int(given["max_length_k"]), dtype=torch.int32, device=cu_k.device)
    table = (cu_k[:-1, None] + rows).clamp_(max=len(pages[0]) - 1)
    out = attention_for(window)(
        query.squeeze(0).transpose(0, 1).contiguous(), *pages, table, cu_k.diff(), cu_q,
        max_seqlen_q=int(given["max_length_q"]), sinks=None if sinks is None else sinks.float(),
        softmax_scale=given.get("scaling"), softcap=given.get("softcap"),
    )  # fmt: skip
    return out.unsqueeze(0), None
