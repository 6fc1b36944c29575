"""``mla_attention`` at the sizes of DeepSeek-V2 and V3 (512 + 64 channels): 8 to 128 heads, whole models and tensor-parallel shards."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from quire.kernels.common.arch import Arch

from . import NUM_SMS, StaticCase, meta

SAMPLE = ("mla-decode-h16", "mla-prefill-h128")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call of ``mla_attention``."""

    name: str
    phase: str
    num_heads: int
    block_size: int = 64
    in_step: bool = True
    dtype: str = "bfloat16"
    q_len: int = 1
    head_dim_v: int = 512
    rope_dim: int = 64


def cases() -> list[StaticCase]:
    """Every tile of query rows, both ways of addressing pages, with and without in-step rows."""
    return [
        StaticCase(
            shape.name,
            shape.phase,
            functools.partial(launches, shape),
            shape.dtype,
            key_bytes=(shape.head_dim_v + shape.rope_dim) * (4 if shape.dtype == "float32" else 2),
            sample=shape.name in SAMPLE,
            operator="mla_attention",
            head_dim=shape.head_dim_v,
            pages=shape.dtype,
            block_sizes=(shape.block_size,),
        )
        for shape in shapes()
    ]


def shapes() -> list[Shape]:
    """The shapes of ``cases``."""
    table = []
    for num_heads in (8, 16, 32, 64, 128):
        table += [
            Shape(f"mla-decode-h{num_heads}", "decode", num_heads),
            Shape(
                f"mla-decode-h{num_heads}-p16-pages-only", "decode", num_heads, 16, in_step=False
            ),
            Shape(f"mla-prefill-h{num_heads}", "prefill", num_heads),
        ]
    return [
        *table,
        Shape("mla-decode-h16-q2", "decode", 16, q_len=2),
        Shape("mla-decode-h40", "decode", 40),
        Shape("mla-decode-h16-pages-only", "decode", 16, in_step=False),
        Shape("mla-decode-h128-fp16", "decode", 128, dtype="float16"),
        Shape("mla-decode-h16-narrow", "decode", 16, head_dim_v=256),
        Shape("mla-decode-h16-fp32", "decode", 16, dtype="float32"),
        Shape("mla-prefill-h16-p16-pages-only", "prefill", 16, 16, in_step=False),
        Shape("mla-prefill-h16-fp32", "prefill", 16, dtype="float32"),
    ]


def launches(shape: Shape, arch: Arch) -> list[Any]:
    """The kernels that a shape launches, as ``Launch`` values over tensors without storage."""
    from quire.kernels.mla import triton_impl as mla_triton
    from quire.kernels.mla.call import MlaCall

    num_seqs, q_len = 16, 1024 if shape.phase == "prefill" else shape.q_len
    num_tokens, head_dim = num_seqs * q_len, shape.head_dim_v + shape.rope_dim
    empty = functools.partial(meta, dtype=shape.dtype)
    call = MlaCall(
        empty(num_tokens, shape.num_heads, head_dim),
        empty(512, shape.block_size, head_dim),
        meta(num_seqs, 256, dtype="int32"),
        meta(num_seqs, dtype="int32"),
        meta(num_seqs + 1, dtype="int32"),
        max_seqlen_q=q_len,
        softmax_scale=0.1,
        head_dim_v=shape.head_dim_v,
        kv=empty(num_tokens, head_dim) if shape.in_step else None,
        num_decodes=num_seqs if shape.phase == "decode" else 0,
        lse=meta(shape.num_heads, num_tokens, dtype="float32"),
    )
    return mla_triton.prepare(call, arch, NUM_SMS[arch.name])
