"""``index_topk``: scores and every level of the selection, 64 heads of 128, top-k of 512 and 1024, plain and quantized keys."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from quire.kernels.common.arch import Arch

from . import NUM_SMS, StaticCase, meta

# Bytes become bf16 in the registers of the matrix instruction, 8 of them 16 bytes, and Triton copies them into shared memory in the same
# portions. Neighbouring threads still copy whole rows of 128 bytes.
FP8_COPY_BYTES = 8
SAMPLE = ("index-decode-k512-bf16", "index-decode-k512-fp8")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call of ``index_topk``."""

    name: str
    phase: str
    topk: int
    max_seq_len: int
    fp8: bool = False
    dtype: str = "bfloat16"
    num_heads: int = 64
    index_dim: int = 128
    rows: int = 64
    scores: bool = False


def cases() -> list[StaticCase]:
    """The shapes of V4-Flash (top-k 512) and V4-Pro (1024), at one million tokens and at few."""
    return [
        StaticCase(
            shape.name,
            shape.phase,
            functools.partial(launches, shape),
            shape.dtype,
            key_bytes=shape.index_dim * (1 if shape.fp8 else 4 if shape.dtype == "float32" else 2),
            scale_bytes=4 if shape.fp8 else 0,
            min_copy_bytes=FP8_COPY_BYTES if shape.fp8 else 16,
            sample=shape.name in SAMPLE,
            operator="index_topk",
            head_dim=shape.index_dim,
            pages="uint8" if shape.fp8 else shape.dtype,
            block_sizes=(shape.rows,),
        )
        for shape in shapes()
    ]


def shapes() -> list[Shape]:
    """The shapes of ``cases``."""
    table = []
    for phase in ("decode", "prefill"):
        for topk in (512, 1024):
            for fp8 in (False, True):
                name = f"index-{phase}-k{topk}-{'fp8' if fp8 else 'bf16'}"
                table.append(Shape(name, phase, topk, 1 << 20, fp8))
        table += [
            Shape(f"index-{phase}-small-pages", phase, 512, 1 << 15, rows=2),
            Shape(f"index-{phase}-small-pages-fp8", phase, 512, 1 << 15, fp8=True, rows=2),
            Shape(f"index-{phase}-scores", phase, 512, 1 << 20, scores=True),
            Shape(f"index-{phase}-all-picked", phase, 512, 1 << 11),
            Shape(f"index-{phase}-fp32", phase, 512, 1 << 13, dtype="float32"),
            Shape(f"index-{phase}-fp32-fp8", phase, 512, 1 << 13, dtype="float32", fp8=True),
            Shape(f"index-{phase}-fp16-8-heads", phase, 2048, 1 << 16, dtype="float16", num_heads=8, index_dim=64),
        ]  # fmt: skip
    return table


def launches(shape: Shape, arch: Arch) -> list[Any]:
    """The kernels that a shape launches for its first chunk of queries."""
    from quire.kernels.common.latent_pages import IndexPages, page_bytes
    from quire.kernels.indexer import triton_impl as indexer_triton
    from quire.kernels.indexer.call import IndexCall

    num_seqs, q_len = 16, 1024 if shape.phase == "prefill" else 1
    num_tokens = num_seqs * q_len
    if shape.fp8:
        data = meta(4096, page_bytes(shape.rows, shape.index_dim + 4), dtype="uint8")
    else:
        data = meta(4096, shape.rows, shape.index_dim, dtype=shape.dtype)
    call = IndexCall(
        meta(num_tokens, shape.num_heads, shape.index_dim, dtype=shape.dtype),
        meta(num_tokens, shape.num_heads, dtype="float32"),
        IndexPages(data, shape.rows, shape.index_dim),
        meta(num_seqs, shape.max_seq_len // 4 // shape.rows, dtype="int32"),
        meta(num_seqs, dtype="int32"),
        meta(num_seqs + 1, dtype="int32"),
        topk=shape.topk,
        compress_ratio=4,
        max_seqlen_q=q_len,
        max_seq_len=shape.max_seq_len,
        scores=meta(num_tokens, shape.topk, dtype="float32") if shape.scores else None,
    )
    made = indexer_triton.prepare(call, arch, NUM_SMS[arch.name])
    return made[: 1 + len(call.plan.num_blocks)]
