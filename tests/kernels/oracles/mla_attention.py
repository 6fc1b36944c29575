"""Oracle of ``mla_attention``: attention of one KV head, whose values are the front of its keys.

Source: DeepSeek-V2 (arXiv 2405.04434) 2.1.
"""

from quire.kernels.attention.api import AttentionCall

from .attention import attention


def mla_attention(q, pages, *batch, head_dim_v=512, kv=None, **options):
    """Attend token by token; arguments as in ``quire.kernels.mla_attention``."""
    pages = pages.unsqueeze(2)
    kv = None if kv is None else kv.unsqueeze(1)
    out = attention(AttentionCall(q, pages, pages, *batch, k=kv, v=kv, **options))
    return out[..., :head_dim_v]
