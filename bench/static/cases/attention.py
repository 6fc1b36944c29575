"""Paged and sliding-window attention, ``merge_partials`` and ``write_kv``."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from quire.kernels.attention import call as attention_call
from quire.kernels.common.arch import Arch

from . import NUM_SMS, StaticCase, meta

SAMPLE = (
    "decode-d128-p128-q1",
    "prefill-d128-p128",
    "merge-d128",
    "write-d128",
    "decode-fp8-d128-p128-q1",
    "prefill-fp8-d128-p128",
    "write-fp8-d128",
)
E4M3 = "float8_e4m3fn"


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention call, or the ``merge_partials`` / ``write_kv`` of the same shape.

    scales: None, or what the scales of e4m3 pages are: "rows", "tensor" or "number".
    apart: whether values lie in a pool of their own, whose rows are further apart than those of keys.
    """

    name: str
    head_dim: int
    block_size: int
    phase: str
    dtype: str = "bfloat16"
    group: int = 4
    num_kv_heads: int = 4
    table_width: int = 256
    q_len: int = 1
    in_step: bool = True
    context_only: bool = False
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scales: str | None = None
    apart: bool = False

    @property
    def operator(self) -> str:
        """The public function that is called."""
        if self.phase in ("merge", "write"):
            return {"merge": "merge_partials", "write": "write_kv"}[self.phase]
        return "paged_attention" if self.sliding_window is None else "sliding_window_attention"

    @property
    def key_bytes(self) -> int:
        """Bytes of a key and its value in the pages."""
        return 2 * self.head_dim * (1 if self.scales else 4 if self.dtype == "float32" else 2)


def cases() -> list[StaticCase]:
    """Every tile shape of ``select_config`` in both ways of addressing pages, and each feature at least once."""
    return [
        StaticCase(
            shape.name,
            shape.phase,
            functools.partial(launches, shape),
            # fp32 is for checks more than for speed, whatever pages hold: the rules of its cases are those of fp32.
            E4M3 if shape.scales and shape.dtype != "float32" else shape.dtype,
            key_bytes=shape.key_bytes,
            # Of a key's scale, and of its value's: copies of 4 bytes where rows are not side by side.
            scale_bytes=4 if shape.scales == "rows" else 0,
            # The layout that mma.sync wants of V^T, in which Triton keeps the codes, holds 8 channels of a row side by side.
            min_copy_bytes=(4 if shape.dtype == "float32" else 8) if shape.scales else 16,
            sample=shape.name in SAMPLE,
            operator=shape.operator,
            head_dim=shape.head_dim,
            pages=E4M3 if shape.scales else shape.dtype,
            block_sizes=() if shape.phase == "merge" else (shape.block_size,),
        )
        for shape in shapes()
    ]


def shapes() -> list[Shape]:
    """The shapes of ``cases``."""
    table = []
    for head_dim in (16, 32, 64, 128, 256, 512):
        for block_size in (16, 128) if head_dim >= 64 else (16,):
            for q_len in (1, 8, 16) if head_dim >= 64 else (1,):
                table.append(
                    Shape(f"decode-d{head_dim}-p{block_size}-q{q_len}", head_dim, block_size, "decode", q_len=q_len)
                )  # fmt: skip
            table.append(
                Shape(f"prefill-d{head_dim}-p{block_size}", head_dim, block_size, "prefill")
            )
        table.append(
            Shape(f"prefill-d{head_dim}-window", head_dim, 128, "prefill", sliding_window=1024)
        )
        for phase in ("decode", "prefill"):
            table.append(
                Shape(f"{phase}-d{head_dim}-fp32", head_dim, 64, phase, dtype="float32", q_len=16)
            )
        table.append(Shape(f"merge-d{head_dim}", head_dim, 64, "merge"))
        table.append(Shape(f"write-d{head_dim}", head_dim, 64, "write"))
    for phase in ("decode", "prefill"):
        table += [
            Shape(f"{phase}-pages-only", 128, 64, phase, in_step=False),
            Shape(f"{phase}-context-only", 128, 64, phase, in_step=False, context_only=True),
            Shape(f"{phase}-pages-only-window", 128, 64, phase, in_step=False, sliding_window=512),
            *(Shape(f"{phase}-d{d}-apart", d, 64, phase, sliding_window=512, apart=True) for d in (64, 128, 256, 512)),
            Shape(f"{phase}-window-ring", 256, 64, phase, sliding_window=512),
            *(Shape(f"{phase}-d{d}-p16-window", d, 16, phase, sliding_window=1024) for d in (64, 128, 256)),
            Shape(f"{phase}-softcap-sinks", 64, 64, phase, softcap=50.0, sinks=True, sliding_window=128),
            Shape(f"{phase}-group-5-odd-pages", 128, 48, phase, group=5),
            Shape(f"{phase}-fp16", 128, 64, phase, dtype="float16"),
            Shape(f"{phase}-mqa-ones", 64, 64, phase, num_kv_heads=1, table_width=1, sliding_window=1),
        ]  # fmt: skip
    return table + fp8_shapes()


def fp8_shapes() -> list[Shape]:
    """Those with e4m3 pages: every tile shape of their table, both ways of addressing pages, and each kind of scales."""
    table = []
    for head_dim in (64, 128, 256, 512):
        for block_size in (16, 128) if head_dim == 128 else (128,):
            for q_len in (1, 8, 16):
                name = f"decode-fp8-d{head_dim}-p{block_size}-q{q_len}"
                table.append(
                    Shape(name, head_dim, block_size, "decode", q_len=q_len, scales="rows")
                )
            name = f"prefill-fp8-d{head_dim}-p{block_size}"
            table.append(Shape(name, head_dim, block_size, "prefill", scales="rows"))
    for phase in ("decode", "prefill"):
        table += [
            Shape(f"{phase}-fp8-d32", 32, 64, phase, scales="rows"),
            Shape(f"{phase}-fp8-window", 256, 64, phase, sliding_window=512, scales="rows"),
            Shape(f"{phase}-fp8-pages-only", 128, 64, phase, in_step=False, scales="rows"),
            Shape(f"{phase}-fp8-softcap-sinks", 64, 64, phase, softcap=50.0, sinks=True, sliding_window=128, scales="tensor"),
            Shape(f"{phase}-fp8-number", 128, 64, phase, scales="number"),
            *(Shape(f"{phase}-fp8-number-d{d}", d, 64, phase, q_len=16, scales="number") for d in (64, 256, 512)),
            Shape(f"{phase}-fp8-fp16", 128, 64, phase, dtype="float16", scales="rows"),
            Shape(f"{phase}-fp8-fp32", 128, 64, phase, dtype="float32", q_len=16, scales="rows"),
        ]  # fmt: skip
    table += [
        Shape(f"write-fp8-d{head_dim}", head_dim, 64, "write", scales="rows")
        for head_dim in (16, 128, 512)
    ]
    return [*table, Shape("write-fp8-d128-number", 128, 64, "write", scales="number")]


def launches(shape: Shape, arch: Arch) -> list[Any]:
    """The kernels that a shape launches, as ``Launch`` values over tensors without storage."""
    from quire.kernels.attention import merge
    from quire.kernels.attention import triton_impl as paged
    from quire.kernels.cache_write import triton_impl as cache_write

    num_kv_heads, num_seqs = shape.num_kv_heads, 16
    q_len = 1024 if shape.phase == "prefill" else shape.q_len
    num_heads, num_tokens = num_kv_heads * shape.group, num_seqs * q_len
    empty = functools.partial(meta, dtype=shape.dtype)
    rows = (empty(num_tokens, num_kv_heads, shape.head_dim) for _ in range(2))
    page_dtype = E4M3 if shape.scales else shape.dtype
    pool = meta(512, shape.block_size, 2, num_kv_heads, shape.head_dim, dtype=page_dtype)
    k_pages, v_pages = pool.unbind(2)
    if shape.apart:
        v_pages = meta(512, shape.block_size, 3, num_kv_heads, shape.head_dim, dtype=page_dtype)[
            :, :, 1
        ]
    k_scale, v_scale = _scales(shape)
    lse = meta(num_heads, num_tokens, dtype="float32")
    sinks = meta(num_heads, dtype="float32") if shape.sinks else None
    if shape.phase == "write":
        slots = meta(num_tokens, dtype="int64")
        if k_scale is None or v_scale is None:
            return [cache_write.prepare(*rows, k_pages, v_pages, slots)]
        return [cache_write.prepare_e4m3(*rows, k_pages, v_pages, slots, k_scale, v_scale)]
    if shape.phase == "merge":
        parts = empty(4, num_tokens, num_heads, shape.head_dim)
        part_lse = meta(4, num_heads, num_tokens, dtype="float32")
        out = empty(num_tokens, num_heads, shape.head_dim)
        return [merge.prepare(parts, part_lse, sinks, out, lse)]
    k, v = rows if shape.in_step else (None, None)
    call = attention_call.AttentionCall(
        empty(num_tokens, num_heads, shape.head_dim),
        k_pages,
        v_pages,
        meta(num_seqs, shape.table_width, dtype="int32"),
        meta(num_seqs, dtype="int32"),
        meta(num_seqs + 1, dtype="int32"),
        max_seqlen_q=q_len,
        k=k,
        v=v,
        context_only=shape.context_only,
        num_decodes=num_seqs if shape.phase == "decode" else 0,
        softcap=shape.softcap,
        sinks=sinks,
        lse=lse,
        sliding_window=shape.sliding_window,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return paged.prepare(attention_call.check_attention(call), arch, NUM_SMS[arch.name])


def _scales(shape: Shape) -> tuple[Any, Any]:
    """k_scale and v_scale; those of rows lie as in the runner's pool, a head's rows side by side."""
    if shape.scales == "rows":
        scales = meta(512, 2, shape.num_kv_heads, shape.block_size, dtype="float32")
        found = scales.transpose(2, 3).unbind(1)
    elif shape.scales == "tensor":
        found = meta(dtype="float32"), meta(dtype="float32")
    else:
        found = (0.5, 0.25) if shape.scales else (None, None)
    return found[0], found[1]
