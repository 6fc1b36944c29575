"""``mla_attention`` for CPU tensors: latent rows as one KV head, keys and values alike.

``kernels.attention.torch_impl`` does the work. The values that come out are as wide as the keys;
their leading channels are the result.

Source: as ``reference``.
"""

from __future__ import annotations

import torch

from ..attention import torch_impl
from ..attention.call import AttentionCall
from .call import MlaCall


@torch.no_grad()
def attention(call: MlaCall) -> torch.Tensor:
    """Compute one checked call; returns ``call.out``."""
    rows = call.pages.unsqueeze(2)
    new = None if call.kv is None else call.kv.unsqueeze(1)
    wide = torch_impl.attention(
        AttentionCall(
            q=call.q,
            k_pages=rows,
            v_pages=rows,
            block_table=call.block_table,
            seq_lens=call.seq_lens,
            cu_seqlens_q=call.cu_seqlens_q,
            k=new,
            v=new,
            sinks=None,
            out=torch.empty_like(call.q, memory_format=torch.contiguous_format),
            lse=call.lse,
            workspace=None,
            max_seqlen_q=call.max_seqlen_q,
            max_seq_len=call.max_seq_len,
            num_decodes=call.num_decodes,
            softmax_scale=call.softmax_scale,
            softcap=None,
            sliding_window=None,
        )
    )
    return call.out.copy_(wide[..., : call.head_dim_v])
