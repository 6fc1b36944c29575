"""``write_latent`` and ``compress`` at DeepSeek-V4 shapes."""

from __future__ import annotations

import functools
from typing import Any

from quire.kernels.common.arch import Arch

from . import StaticCase, meta

NUM_ROWS = 8192
HEAD_DIM, ROPE_DIM, INDEX_DIM = 512, 64, 128
SAMPLE = ("fp8-p64", "heads", "csa-fp8-prefill")
NUM_HEADS = 64


def cases() -> list[StaticCase]:
    """Each kind of page, in both page geometries where the layout depends on it; each dtype of rows; each optional step left out. The rows of ``compress`` are fp32, as a model's projections are."""
    writes = {
        "bf16": {"kind": "bfloat16"},
        "fp16": {"kind": "float16", "dtype": "float16"},
        "fp32": {"kind": "float32", "dtype": "float32"},
        "fp8-p64": {"kind": "uint8"},
        "fp8-p2": {"kind": "uint8", "block_size": 2},
        "fp8-fp32-rows": {"kind": "uint8", "dtype": "float32"},
        "fp8-only-write": {"kind": "uint8", "fused": False, "out": False},
    }
    heads = {
        "heads": {"dim": HEAD_DIM, "norm": True},
        "index-heads": {"dim": INDEX_DIM, "norm": False},
        "heads-fp32": {"dim": HEAD_DIM, "norm": True, "dtype": "float32"},
    }
    csa = {"ratio": 4, "block_size": 64}
    hca = {"ratio": 128, "block_size": 2}
    pools = {
        "csa-bf16-decode": {**csa, "kind": "bfloat16"},
        "csa-fp8-prefill": {**csa, "kind": "uint8", "q_len": 8192},
        "csa-fp32-decode": {**csa, "kind": "float32"},
        "csa-fp8-bf16-rows": {**csa, "kind": "uint8", "dtype": "bfloat16"},
        "hca-bf16-decode": {**hca, "kind": "bfloat16"},
        "hca-fp8-prefill": {**hca, "kind": "uint8", "q_len": 8192},
        "index-bf16-prefill": {**csa, "kind": "bfloat16", "index": True, "q_len": 8192},
        "index-fp8-decode": {**csa, "kind": "uint8", "index": True},
    }
    return [
        StaticCase(
            f"{name}-{case}",
            name,
            functools.partial(launches, **options),
            sample=case in SAMPLE,
            operator=operator,
            head_dim=INDEX_DIM if "index" in case else HEAD_DIM,
            pages=options.get("kind", ""),
            block_sizes=(options.get("block_size", 64),) if "kind" in options else (),
        )
        for name, operator, launches, table in (
            ("latent", "write_latent", write_launches, writes),
            ("latent", "write_latent", heads_launches, heads),
            ("compress", "compress", compress_launches, pools),
        )
        for case, options in table.items()
    ]


def latent_pages(kind: str, block_size: int) -> Any:
    """Pages of latents whose data is of a dtype by name; uint8 is the quantised layout."""
    from quire.kernels.common.latent_pages import LatentPages, page_bytes

    if kind == "uint8":
        return LatentPages(meta(512, page_bytes(block_size), dtype="uint8"), block_size)
    return LatentPages(meta(512, block_size, HEAD_DIM, dtype=kind), block_size)


def write_launches(
    arch: Arch,
    kind: str,
    dtype: str = "bfloat16",
    block_size: int = 64,
    fused: bool = True,
    out: bool = True,
) -> list[Any]:
    """The launch of one ``write_latent``; fused: with norm and RoPE."""
    from quire.kernels.latent_write import api as latent
    from quire.kernels.latent_write import triton_impl as latent_triton

    call = latent.LatentCall(
        meta(NUM_ROWS, HEAD_DIM, dtype=dtype),
        latent_pages(kind, block_size),
        meta(NUM_ROWS, dtype="int64"),
        meta(NUM_ROWS, dtype="int64") if fused else None,
        meta(1 << 20, ROPE_DIM, dtype="float32") if fused else None,
        meta(HEAD_DIM, dtype="float32") if fused else None,
        1e-6,
        meta(NUM_ROWS, HEAD_DIM, dtype=dtype) if out else None,
    )
    return [latent_triton.prepare(call)]


def heads_launches(arch: Arch, dim: int, norm: bool, dtype: str = "bfloat16") -> list[Any]:
    """The launch that rotates the heads of queries, or of the indexer, in place."""
    from quire.kernels.latent_write import api as latent
    from quire.kernels.latent_write import triton_impl as latent_triton

    x = meta(NUM_ROWS * NUM_HEADS, dim, dtype=dtype)
    positions, cos_sin = meta(NUM_ROWS, dtype="int64"), meta(1 << 20, ROPE_DIM, dtype="float32")
    weight = meta(dim, dtype="float32") if norm else None
    return [
        latent_triton.prepare(latent.LatentCall(x, None, None, positions, cos_sin, weight, 1e-6, x))
    ]


def compress_launches(
    arch: Arch,
    ratio: int,
    block_size: int,
    kind: str,
    q_len: int = 1,
    dtype: str = "float32",
    index: bool = False,
) -> list[Any]:
    """The launches of one ``compress``, with a ring that a decode step of one token needs no second launch for."""
    from quire.kernels.common.latent_pages import IndexPages, page_bytes
    from quire.kernels.compressor import api as compressor
    from quire.kernels.compressor import triton_impl as compress_triton

    num_seqs, overlap = 16, ratio == 4
    dim = INDEX_DIM if index else HEAD_DIM
    num_tokens, channels = num_seqs * q_len, dim * (1 + overlap)
    if not index:
        pages = latent_pages(kind, block_size)
    elif kind == "uint8":
        width = page_bytes(block_size, INDEX_DIM + 4)
        pages = IndexPages(meta(512, width, dtype="uint8"), block_size)
    else:
        pages = IndexPages(meta(512, block_size, INDEX_DIM, dtype=kind), block_size)
    # Projected side by side, as a model does.
    kv, gate = meta(num_tokens, 2, channels, dtype=dtype).unbind(1)
    return compress_triton.prepare(
        compressor.CompressCall(
            kv,
            gate,
            meta(ratio, channels, dtype="float32"),
            meta(num_seqs, ratio * (1 + overlap), 2, channels, dtype="float32"),
            meta(num_seqs, dtype="int32"),
            meta(num_seqs, dtype="int32"),
            meta(num_seqs + 1, dtype="int32"),
            ratio,
            overlap,
            meta(dim, dtype="float32"),
            1e-6,
            meta(1 << 20, ROPE_DIM, dtype="float32"),
            pages,
            meta(num_tokens, dtype="int64"),
            q_len,
        )
    )
