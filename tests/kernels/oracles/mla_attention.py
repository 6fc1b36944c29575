"""Oracle of ``mla_attention``: attention of one KV head, whose values are the front of its keys.

Source: DeepSeek-V2 (arXiv 2405.04434) 2.1.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.kernels.attention.api import AttentionCall

from .attention import attention


def mla_attention(
    q: torch.Tensor,
    pages: torch.Tensor,
    *batch: Any,
    head_dim_v: int = 512,
    kv: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> torch.Tensor:
    """Attend token by token; arguments as in ``quire.kernels.mla_attention``, ``dtype`` as in
    ``attention``."""
    pages = pages.unsqueeze(2)
    kv = None if kv is None else kv.unsqueeze(1)
    out = attention(AttentionCall(q, pages, pages, *batch, k=kv, v=kv, **options), dtype)
    return out[..., :head_dim_v]
