"""``compressed_attention`` at the shapes of DeepSeek-V4: Flash has 64 heads and top-k 512, Pro 128 and 1024; 8 and 16 are tensor-parallel shards."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from quire.kernels.common.arch import Arch

from . import NUM_SMS, StaticCase, meta

HEAD_DIM, ROPE_DIM, SLIDING_WINDOW = 512, 64, 128
ROW_BYTES = {"bfloat16": 2 * HEAD_DIM, "uint8": 576, "float32": 4 * HEAD_DIM}
SAMPLE = (
    "compressed-decode-csa-h16-k512",
    "compressed-decode-csa-h64-k512-fp8-pages",
    "compressed-prefill-csa-h64-k512",
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call: kind "csa" (top-k entries, pages of 64), "hca" (all entries, pages of 2), "window", or "slots" (FlashMLA's lists).

    q_len: new tokens of a decode sequence. in_step: whether the step's own rows come beside the pages.
    """

    phase: str
    kind: str
    num_heads: int
    dtype: str = "bfloat16"
    topk: int = 512
    q_len: int = 1
    in_step: bool = True

    @property
    def name(self) -> str:
        """compressed-phase-kind-heads-..."""
        parts = ["compressed", self.phase, self.kind, f"h{self.num_heads}"]
        parts += [f"k{self.topk}"] if self.kind in ("csa", "slots") else []
        parts += {"bfloat16": [], "uint8": ["fp8"], "float32": ["fp32"]}[self.dtype]
        parts += [f"q{self.q_len}"] if self.q_len > 1 else []
        return "-".join(parts + ([] if self.in_step else ["pages"]))


def shapes() -> list[Shape]:
    """Every tile shape of ``compressed_configs`` in both page formats, 8 to 128 heads.

    Where a query tile is of one token, windows alone and all entries ("hca") take the kernels of lists ("csa").
    """
    fp8 = "uint8"
    return [
        Shape("decode", "csa", 8),
        Shape("decode", "csa", 16),
        Shape("decode", "csa", 64),
        Shape("decode", "csa", 128, topk=1024),
        Shape("decode", "csa", 16, fp8, in_step=False),
        Shape("decode", "csa", 64, fp8, in_step=False),
        Shape("decode", "csa", 128, fp8, topk=1024, in_step=False),
        Shape("decode", "hca", 8, fp8, q_len=2),
        Shape("decode", "hca", 16, q_len=2),
        Shape("decode", "hca", 16, fp8, q_len=2),
        Shape("decode", "slots", 16, in_step=False),
        Shape("decode", "slots", 64, fp8, in_step=False),
        Shape("decode", "csa", 16, "float32"),
        Shape("prefill", "csa", 16),
        Shape("prefill", "csa", 16, fp8),
        Shape("prefill", "csa", 64),
        Shape("prefill", "csa", 64, fp8),
        Shape("prefill", "csa", 128, fp8, topk=1024),
        Shape("prefill", "hca", 8),
        Shape("prefill", "hca", 16, fp8),
        Shape("prefill", "hca", 64, "float32"),
    ]


def cases() -> list[StaticCase]:
    """The shapes above."""
    return [
        StaticCase(
            shape.name,
            shape.phase,
            functools.partial(launches, shape),
            shape.dtype,
            key_bytes=ROW_BYTES[shape.dtype],
            scale_bytes=8 if shape.dtype == "uint8" else 0,
            sample=shape.name in SAMPLE,
            operator="compressed_attention",
            head_dim=HEAD_DIM,
            pages=shape.dtype,
            block_sizes=(64, 2) if shape.kind == "hca" else (64,),
        )
        for shape in shapes()
    ]


def launches(shape: Shape, arch: Arch) -> list[Any]:
    """The kernels that a shape launches, as ``Launch`` values over tensors without storage."""
    from quire.kernels import LatentPages
    from quire.kernels.common.latent_pages import page_bytes
    from quire.kernels.compressed import triton_impl as compressed_triton
    from quire.kernels.compressed.call import CompressedCall

    num_seqs, q_len = 16, 1024 if shape.phase == "prefill" else shape.q_len
    num_tokens = num_seqs * q_len
    model_dtype = "float32" if shape.dtype == "float32" else "bfloat16"

    def pages(rows: int) -> LatentPages:
        if shape.dtype == "uint8":
            data = meta(512, page_bytes(rows), dtype="uint8")
        else:
            data = meta(512, rows, HEAD_DIM, dtype=shape.dtype)
        return LatentPages(data, rows)

    q = meta(num_tokens, shape.num_heads, HEAD_DIM, dtype=model_dtype)
    lse = meta(shape.num_heads, num_tokens, dtype="float32")
    sinks = meta(shape.num_heads, dtype="float32")
    if shape.kind == "slots":
        call = CompressedCall(
            q,
            pages(64),
            meta(num_tokens, SLIDING_WINDOW, dtype="int32"),
            None,
            None,
            sliding_window=SLIDING_WINDOW,
            max_seqlen_q=1,
            compressed_pages=pages(64),
            topk_indices=meta(num_tokens, shape.topk, dtype="int32"),
            topk_lens=meta(num_tokens, dtype="int32"),
            sinks=sinks,
            num_decodes=num_tokens,
            lse=lse,
            slots=True,
            window_lens=meta(num_tokens, dtype="int32"),
        )
        return compressed_triton.prepare(call, arch, NUM_SMS[arch.name])
    entries = (
        {}
        if shape.kind == "window"
        else {"compressed_pages": pages(2 if shape.kind == "hca" else 64)}
    )
    if entries:
        entries |= {
            "compressed_table": meta(num_seqs, 4096, dtype="int32"),
            "compress_ratio": 128 if shape.kind == "hca" else 4,
        }
    if shape.kind == "csa":
        entries |= {
            "topk_indices": meta(num_tokens, shape.topk, dtype="int32"),
            "topk_lens": meta(num_tokens, dtype="int32"),
        }
    call = CompressedCall(
        q,
        pages(64),
        meta(num_seqs, 4, dtype="int32"),
        meta(num_seqs, dtype="int32"),
        meta(num_seqs + 1, dtype="int32"),
        sliding_window=SLIDING_WINDOW,
        max_seqlen_q=q_len,
        kv=meta(num_tokens, HEAD_DIM, dtype=model_dtype) if shape.in_step else None,
        **entries,
        sinks=sinks,
        cos_sin=meta(1 << 20, ROPE_DIM, dtype="float32"),
        num_decodes=num_seqs if shape.phase == "decode" else 0,
        lse=lse,
    )
    return compressed_triton.prepare(call, arch, NUM_SMS[arch.name])
