"""Shapes of named models, and the batches that kernels are measured on.

A case is one call: a shape, a phase, and ``batch`` sequences of ``context`` keys with the new ones:

    decode   every sequence adds one token, or ``q_len``
    prefill  every sequence adds its last ``CHUNK`` or ``q_len`` tokens, or all if there are fewer
    mixed    decodes, then one sequence with a chunk of ``MIXED_CHUNK`` tokens (`AttentionShape` only)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ..common.rows import Rows

CHUNK = 8192
MIXED_CHUNK = 2048
PHASES = ("decode", "prefill", "mixed")
BATCHES = (1, 16, 128)
CONTEXTS = (4096, 32768, 131072)
LONGEST_CONTEXT = 1 << 20  # of DeepSeek-V4
BLOCK_SIZES = (16, 32, 64, 128, 256)
PARALLEL = (2, 4, 8)
USUAL_BATCH, USUAL_CONTEXT = 16, 32768
MAX_CACHE_BYTES = 40 * 2**30  # cases with more keys and values are left out


@dataclass(frozen=True)
class AttentionShape:
    """Attention over pages of K and V; fields as in ``quire.kernels.paged_attention``.

    Attributes:
        name: model/kind, then /fp8 for e4m3 pages, then /tpN for the share of one of N devices.
        scale: factor of the logits; None: head_dim ** -0.5.
        fp8: e4m3 pages, with a scale for each row.
    """

    op: ClassVar[str] = "attention"
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    scale: float | None = None
    sinks: bool = False
    block_size: int = 16
    fp8: bool = False

    @property
    def softmax_scale(self) -> float:
        """Factor of the logits."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def head_dim_v(self) -> int:
        """Channels of a value."""
        return self.head_dim

    @property
    def layout(self) -> str:
        """The last word of a case's name."""
        return f"p{self.block_size}"

    @property
    def bounded(self) -> bool:
        """True if a long context costs no more than a short one."""
        return self.sliding_window is not None

    @property
    def token_bytes(self) -> int:
        """Bytes of a new token's queries and results in bf16."""
        return 2 * self.num_heads * 2 * self.head_dim

    @property
    def seen(self) -> list[Rows]:
        """Keys and values, scales included."""
        num_bytes = 2 * self.num_kv_heads * (self.head_dim + 4 if self.fp8 else 2 * self.head_dim)
        return [Rows(self.sliding_window, 1, num_bytes, 2 * self.num_heads * self.head_dim)]

    def seq_bytes(self, context: int, q_len: int) -> int:
        """Bytes of the keys and values of one sequence that some query sees."""
        return self.seen[0].read(q_len, context)

    def shard(self, devices: int) -> AttentionShape | None:
        """The share of one of ``devices``; None if the KV heads do not divide."""
        if self.num_kv_heads % devices:
            return None
        heads, kv_heads = self.num_heads // devices, self.num_kv_heads // devices
        name = f"{self.name}/tp{devices}"
        return replace(self, name=name, num_heads=heads, num_kv_heads=kv_heads)


@dataclass(frozen=True)
class LatentShape:
    """One operator of DeepSeek-V3 or V4 on latent rows, each key and value of all query heads.

    Attributes:
        name: model/kind, then /tpN for the share of one of N devices.
        op: mla     attention to all rows (V3)
            window  attention to the last raw rows
            csa     the same, and to the top-k entries of 4 tokens each
            hca     the same, and to all entries of 128 tokens each
            index   scores of all entries of csa, and their top-k
        num_heads: query heads, or those of the indexer.
        head_dim, head_dim_v: channels of a row or index key, and of a value.
        rope_dim: trailing roped channels.
        ratio: raw tokens of an entry.
        rows, window_rows: rows of a page of entries, and of raw rows.
        scale: factor of the logits; None: head_dim ** -0.5.
        fp8: quantized pages; else bf16.
    """

    num_kv_heads: ClassVar[int] = 1
    name: str
    op: str
    num_heads: int
    head_dim: int = 512
    rope_dim: int = 64
    head_dim_v: int = 512
    sliding_window: int = 128
    ratio: int = 1
    topk: int = 0
    rows: int = 64
    window_rows: int = 64
    scale: float | None = None
    fp8: bool = True

    @property
    def softmax_scale(self) -> float:
        """Factor of the logits."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row with its scales."""
        if not self.fp8:
            return 2 * self.head_dim
        return self.head_dim + 4 if self.op == "index" else 584

    @property
    def layout(self) -> str:
        """The last word of a case's name."""
        return "fp8" if self.fp8 else "bf16"

    @property
    def bounded(self) -> bool:
        """True if a long context costs no more than a short one."""
        return self.op == "window"

    @property
    def token_bytes(self) -> int:
        """Bytes of a new token's queries and indices, and of results in bf16 or fp32 weights."""
        per_head = 2 * self.head_dim + (4 if self.op == "index" else 2 * self.head_dim_v)
        return self.num_heads * per_head + 4 * self.topk

    def entries(self, context: int) -> int:
        """Entries of one sequence; for "mla" all of its rows."""
        return 0 if self.op == "window" else context // self.ratio

    def seq_bytes(self, context: int, q_len: int) -> int:
        """Bytes of all entries of one sequence."""
        return self.entries(context) * self.row_bytes

    @property
    def seen(self) -> list[Rows]:
        """Entries, and raw rows of a window."""
        size, channels = self.row_bytes, self.num_heads * (self.head_dim + self.head_dim_v)
        if self.op == "index":
            return [Rows(None, self.ratio, size, self.num_heads * self.head_dim)]
        entries = Rows(self.topk if self.op == "csa" else None, self.ratio, size, channels)
        if self.op == "mla":
            return [entries]
        window = Rows(self.sliding_window, 1, size, channels)
        return [window] if self.op == "window" else [window, entries]

    def shard(self, devices: int) -> LatentShape | None:
        """The share of one of ``devices``; None for the indexer, which each runs in whole."""
        if self.op == "index":
            return None
        return replace(self, name=f"{self.name}/tp{devices}", num_heads=self.num_heads // devices)


@dataclass(frozen=True)
class Case:
    """One call; see the file's docstring."""

    shape: AttentionShape | LatentShape
    phase: str
    batch: int
    context: int
    q_len: int | None = None

    @property
    def name(self) -> str:
        """Unique name, readable in a table."""
        context = str(self.context)
        for unit, letter in ((1 << 10, "k"), (1 << 20, "M")):
            if self.context >= unit and self.context % unit == 0:
                context = f"{self.context // unit}{letter}"
        return f"{self.shape.name} {self.phase} b{self.batch} c{context} {self.shape.layout}"

    @property
    def q_lens(self) -> list[int]:
        """New tokens of each sequence; decodes come first."""
        if self.phase == "decode":
            return [self.q_len or 1] * self.batch
        if self.phase == "prefill":
            return [min(self.context, self.q_len or CHUNK)] * self.batch
        return [1] * (self.batch - 1) + [min(self.context, MIXED_CHUNK)]

    @property
    def num_tokens(self) -> int:
        """New tokens of the batch."""
        return sum(self.q_lens)

    @property
    def num_decodes(self) -> int:
        """Sequences that add one token."""
        return {"decode": self.batch, "prefill": 0, "mixed": self.batch - 1}[self.phase]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values, or entries, of the batch."""
        return sum(self.shape.seq_bytes(self.context, q_len) for q_len in self.q_lens)

    @property
    def num_bytes(self) -> int:
        """Least bytes that a call moves: visible rows once, queries and results."""
        seen = self.shape.seen
        read = sum(rows.read(q_len, self.context) for rows in seen for q_len in self.q_lens)
        return read + self.num_tokens * self.shape.token_bytes

    @property
    def flops(self) -> int:
        """Operations of the products of visible pairs."""
        q_lens, seq_lens = np.array(self.q_lens), np.full(self.batch, self.context)
        return 2 * sum(rows.pairs(q_lens, seq_lens) * rows.channels for rows in self.shape.seen)


# From config.json of the checkpoints. Gemma-4's q and k norms carry the scale. Pages of one model
# have equal bytes.
_PLAIN = (
    AttentionShape("gemma-4-31b/local", 32, 16, 256, 1024, 1.0),
    AttentionShape("gemma-4-31b/global", 32, 4, 512, None, 1.0, block_size=32),
    AttentionShape("gemma-4-26b/local", 16, 8, 256, 1024, 1.0),
    AttentionShape("gemma-4-26b/global", 16, 2, 512, None, 1.0, block_size=32),
    AttentionShape("gemma-4-e4b/local", 8, 2, 256, 512, 1.0, block_size=32),
    AttentionShape("gemma-4-e4b/global", 8, 2, 512, None, 1.0),
    AttentionShape("llama-3-70b", 64, 8, 128),
    AttentionShape("gpt-oss-120b/local", 64, 8, 64, 128, sinks=True),
    AttentionShape("gpt-oss-120b/full", 64, 8, 64, sinks=True),
    AttentionShape("gemma-3-27b/local", 32, 16, 128, 1024, 168**-0.5),
    AttentionShape("gemma-3-27b/global", 32, 16, 128, None, 168**-0.5),
)
_FP8 = [
    replace(shape, name=f"{shape.name}/fp8", fp8=True)
    for shape in _PLAIN
    if shape.name in ("gemma-4-31b/global", "gemma-4-31b/local", "llama-3-70b")
]
# A page of V4 covers 256 raw tokens. V3 scales by uncompressed heads of 128 + 64 channels.
_LATENTS = (
    LatentShape("v4-flash/csa", "csa", 64, ratio=4, topk=512),
    LatentShape("v4-flash/hca", "hca", 64, ratio=128, rows=2),
    LatentShape("v4-flash/sliding", "window", 64),
    LatentShape("v4-flash/index", "index", 64, 128, ratio=4, topk=512),
    LatentShape("v4-pro/csa", "csa", 128, ratio=4, topk=1024),
    LatentShape("v4-pro/hca", "hca", 128, ratio=128, rows=2),
    LatentShape("v4-pro/sliding", "window", 128),
    LatentShape("v4-pro/index", "index", 64, 128, ratio=4, topk=1024),
    LatentShape("v3/mla", "mla", 128, head_dim=576, scale=192**-0.5, fp8=False),
)
SHAPES = {shape.name: shape for shape in (*_PLAIN, *_FP8)}
LATENT_SHAPES = {shape.name: shape for shape in _LATENTS}

# Small enough for a CPU.
TINY_SHAPES = {
    shape.name: shape
    for shape in (
        AttentionShape("tiny/local", 4, 2, 16, 24, sinks=True),
        AttentionShape("tiny/global", 4, 2, 32, None, 1.0),
        AttentionShape("tiny/local/fp8", 4, 2, 16, 24, sinks=True, fp8=True),
    )
}
# Quantized latents have 512 channels in every model ("wide").
_SMALL = {"head_dim": 32, "rope_dim": 8, "sliding_window": 8, "window_rows": 4, "fp8": False}
_WIDE = {"sliding_window": 8, "window_rows": 4}
_INDEX = {"head_dim": 16, "rope_dim": 8, "ratio": 4, "topk": 4, "rows": 4}
_CSA, _HCA = {"ratio": 4, "topk": 4, "rows": 4}, {"ratio": 8, "rows": 2}
TINY_LATENT_SHAPES = {
    shape.name: shape
    for shape in (
        LatentShape("tiny/mla", "mla", 4, 48, 16, 32, rows=4, fp8=False),
        LatentShape("tiny/sliding", "window", 4, head_dim_v=32, **_SMALL),
        LatentShape("tiny/csa", "csa", 4, head_dim_v=32, **_SMALL, **_CSA),
        LatentShape("tiny/hca", "hca", 4, head_dim_v=32, **_SMALL, **_HCA),
        LatentShape("tiny/index", "index", 8, **_INDEX),
        LatentShape("tiny/index-bf16", "index", 8, **_INDEX, fp8=False),
        LatentShape("tiny-wide/csa", "csa", 2, **_WIDE, **_CSA),
        LatentShape("tiny-wide/hca", "hca", 2, **_WIDE, **_HCA),
    )
}


# The main cases, most important first: shapes, phase, batch, context.
_KV = "gemma-4-31b/global gemma-4-31b/local llama-3-70b gpt-oss-120b/full"
_V4 = "v4-flash/csa v4-pro/csa v4-flash/csa/tp8 v4-flash/hca"
MAIN = (
    (_KV, "decode", USUAL_BATCH, USUAL_CONTEXT),
    (_KV, "prefill", 1, USUAL_CONTEXT),
    (_KV, "decode", 1, USUAL_CONTEXT),
    (_V4, "decode", 128, USUAL_CONTEXT),
    (f"{_V4} v3/mla v3/mla/tp8 v4-flash/index", "decode", USUAL_BATCH, USUAL_CONTEXT),
    ("v4-flash/csa v4-flash/hca v4-flash/index v3/mla", "prefill", 1, USUAL_CONTEXT),
    ("v4-flash/hca v4-flash/index", "decode", USUAL_BATCH, LONGEST_CONTEXT),
    ("v4-flash/csa", "decode", 1, USUAL_CONTEXT),
    ("v4-flash/sliding", "decode", 128, USUAL_CONTEXT),
)


def case_of(name: str, phase: str, batch: int, context: int) -> Case:
    """The case of a named shape, or of the share of one ("v3/mla/tp8")."""
    whole, _, devices = name.partition("/tp")
    shape = (SHAPES | LATENT_SHAPES)[whole]
    share = shape.shard(int(devices)) if devices else shape
    if share is None:
        raise ValueError(f"name: expected a shape that can be divided, got {name!r}")
    return Case(share, phase, batch, context)


def main_cases(kind: type = object) -> list[Case]:
    """The cases of `MAIN` in order.

    Args:
        kind: type of their shapes; default: all.
    """
    cases = [case_of(name, *load) for names, *load in MAIN for name in names.split()]
    return [case for case in cases if isinstance(case.shape, kind)]


def all_cases() -> list[Case]:
    """Every case once, the main ones first; cases whose cache is too large are left out."""
    found = main_cases()
    for shape in (*SHAPES.values(), *LATENT_SHAPES.values()):
        found += _variants(shape)
    return [case for case in dict.fromkeys(found) if case.cache_bytes <= MAX_CACHE_BYTES]


def _variants(shape: AttentionShape | LatentShape) -> Iterator[Case]:
    """Batches and contexts, then one change at a time: shards, page sizes, plain rows."""
    contexts = CONTEXTS + (LONGEST_CONTEXT,) * shape.name.startswith("v4")
    for context in (USUAL_CONTEXT,) if shape.bounded else contexts:
        for batch in BATCHES:
            yield Case(shape, "decode", batch, context)
        yield Case(shape, "prefill", 1, context)
    others = [share for n in PARALLEL if (share := shape.shard(n)) is not None]
    if isinstance(shape, AttentionShape):
        yield Case(shape, "mixed", USUAL_BATCH, USUAL_CONTEXT)
        yield Case(shape, "prefill", 4, CONTEXTS[0])
        for size in BLOCK_SIZES:
            yield Case(replace(shape, block_size=size), "decode", USUAL_BATCH, USUAL_CONTEXT)
    elif shape.fp8:
        others.append(replace(shape, fp8=False))
    for other in others:
        yield Case(other, "decode", USUAL_BATCH, USUAL_CONTEXT)
        yield Case(other, "prefill", 1, USUAL_CONTEXT)


def tiny_cases() -> list[Case]:
    """Cases of all phases that a CPU runs in seconds."""
    cases = [Case(shape, phase, 2, 40) for shape in TINY_SHAPES.values() for phase in PHASES]
    return cases + tiny_latent_cases()


def tiny_latent_cases() -> list[Case]:
    """The tiny cases of the latent operators."""
    shapes = TINY_LATENT_SHAPES.values()
    return [Case(shape, phase, 2, 40) for shape in shapes for phase in ("decode", "prefill")]
