"""Shapes of the latent kernels of DeepSeek-V4 and V3, and the batches that they are measured on. A
new shape is a line of a table.

A latent row is key and value at once, and one serves all query heads, so under tensor parallelism
heads are divided and rows are not. What one call does is its op:

    mla       attention to all rows of the context (V2 and V3)
    window    attention to the last raw rows (V4 layers that only slide)
    csa       the same, and to the top-k entries, each of which stands for 4 tokens
    hca       the same, and to all entries, each of which stands for 128 tokens
    index     the top-k of csa: scores of all its entries, and the best of them
    compress  the entries that the step closes; in decode every sequence closes one, which one step in ``ratio`` does
    write     norm, RoPE and writing of the step's raw rows

Phases as in `bench.cases.shapes`, without "mixed".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from quire.models.deepseek_v4.config import CONFIGS, DeepseekV4Config

from .shapes import (
    BATCHES,
    CHUNK,
    MAX_CACHE_BYTES,
    PARALLEL,
    USUAL_BATCH,
    USUAL_CONTEXT,
    Batch,
    short,
)

ATTENTION = ("mla", "window", "csa", "hca")
PHASES = ("decode", "prefill")
CONTEXTS = {"v3": (4096, 32768, 131072), "v4": (4096, 32768, 131072, 1048576)}
# Chunk of the only op whose prefill takes most of a second at a long context, and the context from
# which it is cut.
LONG_CHUNK, LONG_CONTEXT = 2048, 131072
# Bytes of a quantised row with its scales: latents, and index keys beyond their channels.
FP8_ROW_BYTES, FP8_KEY_SCALE = 584, 4


@dataclass(frozen=True)
class LatentShape:
    """One kind of call; which fields matter depends on ``op``, see the file's docstring.

    Attributes:
        name: model/kind, with /tpN behind it for the share of one of N devices.
        num_heads: query heads, or those of the indexer.
        head_dim: channels of a row or of an index key.
        head_dim_v: of its value, for "mla".
        rope_dim: trailing roped channels.
        ratio: raw tokens of an entry.
        overlap: whether an entry pools two windows.
        rows: of a page of entries (of raw rows: ``window_rows``).
        index: whether entries are keys of the indexer.
    """

    name: str
    op: str
    num_heads: int = 0
    head_dim: int = 512
    rope_dim: int = 64
    head_dim_v: int = 512
    sliding_window: int = 128
    ratio: int = 1
    overlap: bool = False
    topk: int = 0
    rows: int = 64
    window_rows: int = 64
    index: bool = False
    scale: float | None = None

    @property
    def softmax_scale(self) -> float:
        """The given factor, or head_dim ** -0.5."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def shard(self, devices: int) -> LatentShape | None:
        """The share of one of ``devices``; None for what every device does in whole."""
        if self.op not in ATTENTION:
            return None
        return replace(self, name=f"{self.name}/tp{devices}", num_heads=self.num_heads // devices)


@dataclass(frozen=True)
class LatentCase(Batch):
    """One call.

    Attributes:
        fp8: whether rows are quantised, 584 bytes each; else they are bf16.
    """

    shape: LatentShape
    phase: str
    batch: int
    context: int
    fp8: bool

    @property
    def name(self) -> str:
        """Unique, and readable in a table."""
        kind = "fp8" if self.fp8 else "bf16"
        return f"{self.shape.name} {self.phase} b{self.batch} c{short(self.context)} {kind}"

    @property
    def chunk(self) -> int:
        """New tokens of a sequence in prefill, at most."""
        return LONG_CHUNK if self.shape.op == "mla" and self.context >= LONG_CONTEXT else CHUNK

    @property
    def num_tokens(self) -> int:
        """New tokens."""
        return sum(self.q_lens)

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row, or of an index key."""
        if not self.fp8:
            return 2 * self.shape.head_dim
        return self.shape.head_dim + FP8_KEY_SCALE if self.shape.index else FP8_ROW_BYTES

    @property
    def num_entries(self) -> int:
        """Entries of one sequence; all of its rows for "mla"."""
        return 0 if self.shape.op in ("window", "write") else self.context // self.shape.ratio

    @property
    def pool_bytes(self) -> int:
        """Bytes of all entries of all sequences."""
        return self.batch * self.num_entries * self.row_bytes


def _v4(name: str, config: DeepseekV4Config) -> list[LatentShape]:
    """Attention of the three kinds of layers, and the indexer."""
    heads, width = config.num_heads, {"sliding_window": config.sliding_window}
    wide = {"num_heads": heads, "head_dim": config.head_dim, "rope_dim": config.rope_dim, **width}
    csa = {"ratio": config.csa_ratio, "topk": config.index_topk}
    block = 256
    return [
        LatentShape(f"{name}/csa", "csa", **wide, **csa, rows=block // config.csa_ratio),
        LatentShape(f"{name}/hca", "hca", **wide, ratio=config.hca_ratio, rows=block // config.hca_ratio),
        LatentShape(f"{name}/sliding", "window", **wide),
        LatentShape(
            f"{name}/index", "index", config.index_num_heads, config.index_head_dim, **csa, index=True
        ),
    ]  # fmt: skip


# Flash and Pro pool and write alike. V2 and V3 scale by their uncompressed heads of 128 + 64
# channels.
_SHAPES = (
    *_v4("v4-flash", CONFIGS["deepseek-v4-flash"]),
    *_v4("v4-pro", CONFIGS["deepseek-v4-pro"]),
    LatentShape("v4/compress-csa", "compress", ratio=4, overlap=True),
    LatentShape("v4/compress-hca", "compress", ratio=128, rows=2),
    LatentShape("v4/compress-index", "compress", head_dim=128, ratio=4, overlap=True, index=True),
    LatentShape("v4/write", "write"),
    LatentShape("v3/mla", "mla", 128, head_dim=576, scale=192**-0.5),
)
SHAPES = {shape.name: shape for shape in _SHAPES}

# Small enough for a CPU. Quantised latents have 512 channels, whatever the model.
_TINY = {"head_dim": 32, "rope_dim": 8, "sliding_window": 8, "window_rows": 4}
_TINY_FP8 = {"sliding_window": 8, "window_rows": 4}
_CSA, _HCA = {"ratio": 4, "topk": 4, "rows": 4}, {"ratio": 8, "rows": 2}
TINY_SHAPES = {
    shape.name: shape
    for shape in (
        LatentShape("tiny/mla", "mla", 4, head_dim=48, rope_dim=16, head_dim_v=32, rows=4),
        LatentShape("tiny/sliding", "window", 4, **_TINY),
        LatentShape("tiny/csa", "csa", 4, **_TINY, **_CSA),
        LatentShape("tiny/hca", "hca", 4, **_TINY, **_HCA),
        LatentShape("tiny/index", "index", 8, head_dim=16, rope_dim=8, **_CSA, index=True),
        LatentShape("tiny/compress", "compress", head_dim=32, rope_dim=8, ratio=4, overlap=True, rows=4),
        LatentShape("tiny/write", "write", **_TINY),
        LatentShape("tiny-wide/csa", "csa", 2, **_TINY_FP8, **_CSA),
        LatentShape("tiny-wide/hca", "hca", 2, **_TINY_FP8, **_HCA),
        LatentShape("tiny-wide/compress", "compress", ratio=8, rows=2),
        LatentShape("tiny-wide/write", "write", **_TINY_FP8),
    )
}  # fmt: skip


def headline() -> list[LatentCase]:
    """The cases that matter most, best first: quantised pages, as models are served; V3 in bf16,
    the format that its kernels take.
    """

    def case(name: str, phase: str, batch: int, context: int = USUAL_CONTEXT) -> LatentCase:
        return case_of(name, phase, batch, context)

    names = ("v4-flash/csa", "v4-pro/csa", "v4-flash/csa/tp8", "v4-flash/hca", "v3/mla")
    found = [case(name, "decode", 128) for name in names[:-1]]
    found += [
        case(name, "decode", USUAL_BATCH) for name in (*names, "v3/mla/tp8", "v4-flash/index")
    ]
    found += [
        case(name, "prefill", 1)
        for name in ("v4-flash/csa", "v4-flash/hca", "v4-flash/index", "v3/mla")
    ]
    found += [
        case(name, "decode", USUAL_BATCH, 1 << 20) for name in ("v4-flash/hca", "v4-flash/index")
    ]
    found += [case("v4/compress-csa", "prefill", 1), case("v4/write", "prefill", 1)]
    return [*found, case("v4-flash/csa", "decode", 1), case("v4-flash/sliding", "decode", 128)]  # fmt: skip


def all_cases() -> list[LatentCase]:
    """Every case once, headline first; then batches and contexts, shards, and plain rows where
    quantised ones are usual.
    """
    found = dict.fromkeys(headline())
    for vary in (_sizes, _parallel, _plain):
        for shape in SHAPES.values():
            found.update(dict.fromkeys(vary(shape)))
    return [case for case in found if case.pool_bytes <= MAX_CACHE_BYTES]


def tiny_cases() -> list[LatentCase]:
    """Every tiny shape in both phases, and in every format that its rows can have."""
    found = []
    for shape in TINY_SHAPES.values():
        formats = (
            [True]
            if shape.name.startswith("tiny-wide")
            else [False, True]
            if shape.index
            else [False]
        )
        found += [LatentCase(shape, phase, 2, 40, fp8) for phase in PHASES for fp8 in formats]
    return found  # fmt: skip


def case_of(name: str, phase: str, batch: int, context: int) -> LatentCase:
    """The case of a shape, or of a share of one, by its name, in its usual format: quantised, but
    bf16 for "mla".
    """
    whole, _, devices = name.partition("/tp")
    shape = SHAPES[whole].shard(int(devices)) if devices else SHAPES[whole]
    if shape is None:
        raise ValueError(f"name: expected a shape that is divided, got {name!r}")
    return _case(shape, phase, batch, context)


def _case(
    shape: LatentShape, phase: str, batch: int, context: int, fp8: bool | None = None
) -> LatentCase:
    return LatentCase(shape, phase, batch, context, shape.op != "mla" if fp8 is None else fp8)


def _sizes(shape: LatentShape) -> Iterator[LatentCase]:
    # What is raw or closes one window is the same at any context.
    bounded = shape.op in ("window", "write", "compress")
    contexts = (USUAL_CONTEXT,) if bounded else CONTEXTS[shape.name[:2]]
    for context in contexts:
        for batch in BATCHES:
            yield _case(shape, "decode", batch, context)
        yield _case(shape, "prefill", 1, context)


def _parallel(shape: LatentShape) -> Iterator[LatentCase]:
    for devices in PARALLEL:
        if (share := shape.shard(devices)) is not None:
            for batch in BATCHES:
                yield _case(share, "decode", batch, USUAL_CONTEXT)
            yield _case(share, "prefill", 1, USUAL_CONTEXT)


def _plain(shape: LatentShape) -> Iterator[LatentCase]:
    for batch in BATCHES:
        yield _case(shape, "decode", batch, USUAL_CONTEXT, False)
    yield _case(shape, "prefill", 1, USUAL_CONTEXT, False)
