"""Shapes of named models, and the batches that kernels are measured on.

A case is one call: a shape, a phase, and ``batch`` sequences of ``context`` keys with the new ones:

    decode   every sequence adds one token, or ``q_len``
    prefill  every sequence adds its last ``CHUNK`` or ``q_len`` tokens, or all if there are fewer
    mixed    decodes, then one sequence with a chunk of ``MIXED_CHUNK`` tokens (attention only)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
class Shape:
    """One operator of a model, or the share of one of several devices.

    Attributes:
        name: model/kind, then /fp8 for e4m3 pages of attention, then /tpN for a share of N devices.
        op: attention  to keys and values in pages (``quire.kernels.paged_attention``)
            mla        to all latent rows, each key and value of all query heads (DeepSeek-V3)
            window     to the last raw latent rows (V4)
            csa        the same, and to the top-k entries of 4 tokens each
            hca        the same, and to all entries of 128 tokens each
            index      scores of all entries of csa, and their top-k
        num_heads: query heads, or those of the indexer.
        head_dim, head_dim_v: channels of a key, latent row or index key, and of a value.
        rope_dim: trailing roped channels.
        sliding_window: None: attention to all keys. mla and index have none.
        ratio: raw tokens of an entry.
        rows, window_rows: rows of a page of keys or entries, and of raw rows.
        scale: factor of the logits; None: head_dim ** -0.5.
        fp8: e4m3 pages with a scale for each row, or quantized latent rows.
    """

    name: str
    op: str
    num_heads: int
    head_dim: int = 512
    rope_dim: int = 64
    head_dim_v: int = 512
    sliding_window: int | None = 128
    ratio: int = 1
    topk: int = 0
    rows: int = 64
    window_rows: int = 64
    scale: float | None = None
    fp8: bool = True
    num_kv_heads: int = 1
    sinks: bool = True

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def layout(self) -> str:
        """The last word of a case's name."""
        if self.op == "attention":
            return f"p{self.rows}"
        return "fp8" if self.fp8 else "bf16"

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row with its scales; of attention a key and its value."""
        if self.op == "attention":
            return 2 * self.num_kv_heads * (self.head_dim + 4 if self.fp8 else 2 * self.head_dim)
        if not self.fp8:
            return 2 * self.head_dim
        return self.head_dim + 4 if self.op == "index" else 584

    @property
    def token_bytes(self) -> int:
        """Bytes of a new token's queries and indices, and of results in bf16 or fp32 weights."""
        per_head = 2 * self.head_dim + (4 if self.op == "index" else 2 * self.head_dim_v)
        return self.num_heads * per_head + 4 * self.topk

    @property
    def bounded(self) -> bool:
        """True if a long context costs no more than a short one."""
        return self.op in ("attention", "window") and self.sliding_window is not None

    @property
    def seen(self) -> list[Rows]:
        """Keys or raw rows of a window, and entries."""
        channels = self.num_heads * (self.head_dim + (self.op != "index") * self.head_dim_v)
        window = Rows(self.sliding_window, 1, self.row_bytes, channels)
        limit = self.topk if self.op == "csa" else None
        entries = Rows(limit, self.ratio, self.row_bytes, channels)
        if self.op in ("attention", "window"):
            return [window]
        return [entries] if self.op in ("mla", "index") else [window, entries]

    def entries(self, context: int) -> int:
        """Entries of one sequence; for "mla" all of its rows."""
        return 0 if self.op == "window" else context // self.ratio

    def lowest(self, position: int) -> int:
        """The first position whose key or raw row the query of a position sees."""
        if self.op in ("mla", "index") or self.sliding_window is None:
            return 0
        return max(0, position - self.sliding_window + 1)

    def shard(self, devices: int) -> Shape | None:
        """The share of one of ``devices``.

        None if KV heads of attention do not divide, or for the indexer, which each runs in whole.
        """
        kv_heads = self.num_kv_heads // devices if self.op == "attention" else 1
        if self.op == "index" or kv_heads * devices < self.num_kv_heads:
            return None
        name, heads = f"{self.name}/tp{devices}", self.num_heads // devices
        return replace(self, name=name, num_heads=heads, num_kv_heads=kv_heads)


def attention(
    name: str, num_heads: int, num_kv_heads: int, head_dim: int, sliding_window: int | None = None,
    scale: float | None = None, sinks: bool = False, block_size: int = 16, fp8: bool = False,
) -> Shape:  # fmt: skip
    """Attention over pages of K and V; arguments as in ``quire.kernels.paged_attention``."""
    return Shape(
        name, "attention", num_heads, head_dim, head_dim_v=head_dim, sliding_window=sliding_window,
        rows=block_size, scale=scale, fp8=fp8, num_kv_heads=num_kv_heads, sinks=sinks,
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call; see the file's docstring."""

    shape: Shape
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
        if self.phase == "decode":
            return [self.q_len or 1] * self.batch
        if self.phase == "prefill":
            return [min(self.context, self.q_len or CHUNK)] * self.batch
        return [1] * (self.batch - 1) + [min(self.context, MIXED_CHUNK)]

    @property
    def new(self) -> list[range]:
        """Positions of the new tokens of each sequence."""
        return [range(self.context - q_len, self.context) for q_len in self.q_lens]

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens)

    @property
    def num_decodes(self) -> int:
        return {"decode": self.batch, "prefill": 0, "mixed": self.batch - 1}[self.phase]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the visible keys and values of the batch, or of all its entries."""
        if self.shape.op == "attention":
            return sum(self.shape.seen[0].read(q_len, self.context) for q_len in self.q_lens)
        return self.batch * self.shape.entries(self.context) * self.shape.row_bytes

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


def _by_name(*shapes: Shape) -> dict[str, Shape]:
    return {shape.name: shape for shape in shapes}


# From config.json of the checkpoints. Gemma-4's q and k norms carry the scale. Pages of one model
# have equal bytes; those of V4 cover 256 raw tokens. V3 scales by uncompressed heads of 128 + 64
# channels.
SHAPES = _by_name(
    attention("gemma-4-31b/local", 32, 16, 256, 1024, 1.0),
    attention("gemma-4-31b/global", 32, 4, 512, None, 1.0, block_size=32),
    attention("gemma-4-26b/local", 16, 8, 256, 1024, 1.0),
    attention("gemma-4-26b/global", 16, 2, 512, None, 1.0, block_size=32),
    attention("gemma-4-e4b/local", 8, 2, 256, 512, 1.0, block_size=32),
    attention("gemma-4-e4b/global", 8, 2, 512, None, 1.0),
    attention("llama-3-70b", 64, 8, 128),
    attention("gpt-oss-120b/local", 64, 8, 64, 128, sinks=True),
    attention("gpt-oss-120b/full", 64, 8, 64, sinks=True),
    attention("gemma-3-27b/local", 32, 16, 128, 1024, 168**-0.5),
    attention("gemma-3-27b/global", 32, 16, 128, None, 168**-0.5),
    attention("gemma-4-31b/local/fp8", 32, 16, 256, 1024, 1.0, fp8=True),
    attention("gemma-4-31b/global/fp8", 32, 4, 512, None, 1.0, block_size=32, fp8=True),
    attention("llama-3-70b/fp8", 64, 8, 128, fp8=True),
    Shape("v4-flash/csa", "csa", 64, ratio=4, topk=512),
    Shape("v4-flash/hca", "hca", 64, ratio=128, rows=2),
    Shape("v4-flash/sliding", "window", 64),
    Shape("v4-flash/index", "index", 64, 128, ratio=4, topk=512),
    Shape("v4-pro/csa", "csa", 128, ratio=4, topk=1024),
    Shape("v4-pro/hca", "hca", 128, ratio=128, rows=2),
    Shape("v4-pro/sliding", "window", 128),
    Shape("v4-pro/index", "index", 64, 128, ratio=4, topk=1024),
    Shape("v3/mla", "mla", 128, head_dim=576, scale=192**-0.5, fp8=False),
)
# Small enough for a CPU. Quantized latents have 512 channels in every model ("wide").
_WIDE = {"sliding_window": 8, "window_rows": 4}
_SMALL = {"head_dim": 32, "rope_dim": 8, "head_dim_v": 32, "fp8": False, **_WIDE}
_INDEX = {"head_dim": 16, "rope_dim": 8, "ratio": 4, "topk": 4, "rows": 4}
_CSA, _HCA = {"ratio": 4, "topk": 4, "rows": 4}, {"ratio": 8, "rows": 2}
TINY_SHAPES = _by_name(
    attention("tiny/local", 4, 2, 16, 24, sinks=True),
    attention("tiny/global", 4, 2, 32, None, 1.0),
    attention("tiny/local/fp8", 4, 2, 16, 24, sinks=True, fp8=True),
    Shape("tiny/mla", "mla", 4, 48, 16, 32, rows=4, fp8=False),
    Shape("tiny/sliding", "window", 4, **_SMALL),
    Shape("tiny/csa", "csa", 4, **_SMALL, **_CSA),
    Shape("tiny/hca", "hca", 4, **_SMALL, **_HCA),
    Shape("tiny/index", "index", 8, **_INDEX),
    Shape("tiny/index-bf16", "index", 8, **_INDEX, fp8=False),
    Shape("tiny-wide/csa", "csa", 2, **_WIDE, **_CSA),
    Shape("tiny-wide/hca", "hca", 2, **_WIDE, **_HCA),
)

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
    shape = SHAPES[whole]
    return Case(shape.shard(int(devices)) if devices else shape, phase, batch, context)


def main_cases() -> list[Case]:
    return [case_of(name, *load) for names, *load in MAIN for name in names.split()]


def all_cases() -> list[Case]:
    """Every case once, the main ones first; cases whose cache is too large are left out."""
    found = main_cases()
    for shape in SHAPES.values():
        found += _variants(shape)
    return [case for case in dict.fromkeys(found) if case.cache_bytes <= MAX_CACHE_BYTES]


def _variants(shape: Shape) -> Iterator[Case]:
    """Batches and contexts, then one change at a time: shards, page sizes, plain rows."""
    contexts = CONTEXTS + (LONGEST_CONTEXT,) * shape.name.startswith("v4")
    for context in (USUAL_CONTEXT,) if shape.bounded else contexts:
        for batch in BATCHES:
            yield Case(shape, "decode", batch, context)
        yield Case(shape, "prefill", 1, context)
    others = [share for n in PARALLEL if (share := shape.shard(n)) is not None]
    if shape.op == "attention":
        yield Case(shape, "mixed", USUAL_BATCH, USUAL_CONTEXT)
        yield Case(shape, "prefill", 4, CONTEXTS[0])
        for size in BLOCK_SIZES:
            yield Case(replace(shape, rows=size), "decode", USUAL_BATCH, USUAL_CONTEXT)
    elif shape.fp8:
        others.append(replace(shape, fp8=False))
    for other in others:
        yield Case(other, "decode", USUAL_BATCH, USUAL_CONTEXT)
        yield Case(other, "prefill", 1, USUAL_CONTEXT)


def tiny_cases() -> list[Case]:
    return [
        Case(shape, phase, 2, 40)
        for shape in TINY_SHAPES.values()
        for phase in (PHASES if shape.op == "attention" else PHASES[:2])
    ]
