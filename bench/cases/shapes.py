"""Attention shapes of named models, and the batches that kernels are measured on. A new shape is a
line of a table, not code.

A case is one launch: a shape (or its share under tensor parallelism), a phase, and how many
sequences of which context:

    decode   every sequence adds one token to its context
    prefill  every sequence adds a chunk: the whole prompt, or its last ``CHUNK`` tokens where it is longer
    mixed    decodes, and behind them one sequence with a chunk of ``MIXED_CHUNK`` tokens
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from quire.models.config.named import CONFIGS

CHUNK = 8192
MIXED_CHUNK = 2048
PHASES = ("decode", "prefill", "mixed")
BATCHES = (1, 16, 128)
CONTEXTS = (4096, 32768, 131072)
BLOCK_SIZES = (16, 32, 64, 128, 256)
PARALLEL = (2, 4, 8)
# The case that every other one differs from in one respect.
USUAL_BATCH, USUAL_CONTEXT = 16, 32768
# Keys and values of a case; larger cases are left out.
MAX_CACHE_BYTES = 40 * 2**30


@dataclass(frozen=True)
class Shape:
    """Attention of one kind of layer; fields as in ``quire.kernels.paged_attention``.

    Attributes:
        name: model/kind, with /fp8 behind it for e4m3 pages, and /tpN for the share of one of N
            devices.
        block_size: tokens of a page in this model's layout.
        fp8: whether pages are e4m3, with a scale for each row.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    softmax_scale: float | None = None
    sinks: bool = False
    block_size: int = 16
    fp8: bool = False

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's K and V: in 16 bits, or in 8 with an fp32 scale for each row."""
        row_bytes = self.head_dim + 4 if self.fp8 else 2 * self.head_dim
        return 2 * self.num_kv_heads * row_bytes

    def shard(self, devices: int) -> Shape | None:
        """The share of one of ``devices`` under tensor parallelism; None where KV heads do not
        divide.
        """
        if self.num_kv_heads % devices:
            return None
        return replace(
            self,
            name=f"{self.name}/tp{devices}",
            num_heads=self.num_heads // devices,
            num_kv_heads=self.num_kv_heads // devices,
        )


class Batch:
    """What the cases of all families share: ``batch`` sequences of ``context`` keys each, including
    the new ones.
    """

    phase: str
    batch: int
    context: int

    @property
    def chunk(self) -> int:
        """New tokens of a sequence in prefill, at most."""
        return CHUNK

    @property
    def q_lens(self) -> list[int]:
        """New tokens of each sequence; decodes come first."""
        if self.phase == "decode":
            return [1] * self.batch
        if self.phase == "prefill":
            return [min(self.context, self.chunk)] * self.batch
        return [1] * (self.batch - 1) + [min(self.context, MIXED_CHUNK)]

    @property
    def seq_lens(self) -> list[int]:
        """Keys of each sequence, including the new ones."""
        return [self.context] * self.batch

    @property
    def num_decodes(self) -> int:
        """Sequences that add one token."""
        return {"decode": self.batch, "prefill": 0, "mixed": self.batch - 1}[self.phase]


@dataclass(frozen=True)
class Case(Batch):
    """One launch of attention over keys and values in pages; see the file's docstring."""

    shape: Shape
    phase: str
    batch: int
    context: int
    block_size: int

    @property
    def name(self) -> str:
        """Unique, and readable in a table."""
        return f"{self.shape.name} {self.phase} b{self.batch} c{short(self.context)} p{self.block_size}"

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values that some query sees, scales included."""
        reach = self.shape.sliding_window
        seen = (n if reach is None else min(n, reach - 1 + q) for n, q in zip(self.seq_lens, self.q_lens, strict=True))  # fmt: skip
        return sum(seen) * self.shape.kv_token_bytes


def _gemma(name: str) -> list[Shape]:
    """The two kinds of layers of a configuration; the page of the lighter one holds more tokens, so
    that all pages have equal bytes.
    """
    config = CONFIGS[name]
    kinds = {"local": config.sliding, "global": config.full}
    heaviest = max(a.num_kv_heads * a.head_dim for a in kinds.values())
    return [
        Shape(
            f"{name}/{kind}",
            a.num_heads,
            a.num_kv_heads,
            a.head_dim,
            a.sliding_window,
            config.softmax_scale,
            block_size=16 * heaviest // (a.num_kv_heads * a.head_dim),
        )
        for kind, a in kinds.items()
    ]


# Shapes without a configuration here: config.json of the checkpoints named. Scale 1: Gemma-4's q
# and k norms carry it.
_OTHERS = (
    Shape("gemma-4-26b/local", 16, 8, 256, 1024, 1.0, block_size=16),
    Shape("gemma-4-26b/global", 16, 2, 512, None, 1.0, block_size=32),
    Shape("gemma-4-e4b/local", 8, 2, 256, 512, 1.0, block_size=32),
    Shape("gemma-4-e4b/global", 8, 2, 512, None, 1.0, block_size=16),
    Shape("llama-3-70b", 64, 8, 128),
    Shape("gpt-oss-120b/local", 64, 8, 64, 128, sinks=True),
    Shape("gpt-oss-120b/full", 64, 8, 64, sinks=True),
)
SHAPES = {shape.name: shape for shape in (*_gemma("gemma-4-31b"), *_OTHERS, *_gemma("gemma-3-27b"))}

# Of these, also with e4m3 pages: decode and prefill at the usual batch and context, decode of one
# sequence and of many.
FP8_SHAPES = {
    f"{name}/fp8": replace(SHAPES[name], name=f"{name}/fp8", fp8=True)
    for name in ("gemma-4-31b/global", "gemma-4-31b/local", "llama-3-70b")
}

# Shapes small enough for a CPU, one with everything that a shape can have.
TINY_SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny/local", 4, 2, 16, 24, sinks=True),
        Shape("tiny/global", 4, 2, 32, None, 1.0),
        Shape("tiny/local/fp8", 4, 2, 16, 24, sinks=True, fp8=True),
    )
}


def headline() -> list[Case]:
    """The cases that matter most, best first: decode and prefill of the main shapes at the usual
    batch and context.
    """
    names = ("gemma-4-31b/global", "gemma-4-31b/local", "llama-3-70b", "gpt-oss-120b/full")
    found = []
    for phase, batch in (("decode", USUAL_BATCH), ("prefill", 1), ("decode", 1)):
        found += [_case(SHAPES[name], phase, batch, USUAL_CONTEXT) for name in names]
    return found


def fp8_cases() -> list[Case]:
    """The cases with e4m3 pages."""
    found: dict[Case, None] = {}
    for shape in FP8_SHAPES.values():
        found.update(dict.fromkeys(_phases(shape)))
        found.update(dict.fromkeys(_batches(shape)))
    return list(found)


def all_cases() -> list[Case]:
    """Every case once, headline first, then one respect changed at a time: e4m3 pages, batch,
    context, tensor parallelism, page size.
    """
    found = dict.fromkeys([*headline(), *fp8_cases()])
    for vary in (_phases, _batches, _contexts, _parallel, _pages):
        for shape in SHAPES.values():
            found.update(dict.fromkeys(vary(shape)))
    return [case for case in found if case.cache_bytes <= MAX_CACHE_BYTES]


def tiny_cases() -> list[Case]:
    """One case of every phase for each tiny shape."""
    return [Case(shape, phase, 2, 40, 16) for shape in TINY_SHAPES.values() for phase in PHASES]


def _case(
    shape: Shape, phase: str, batch: int, context: int, block_size: int | None = None
) -> Case:
    return Case(shape, phase, batch, context, block_size or shape.block_size)


def _phases(shape: Shape) -> Iterator[Case]:
    yield _case(shape, "decode", USUAL_BATCH, USUAL_CONTEXT)
    yield _case(shape, "prefill", 1, USUAL_CONTEXT)
    yield _case(shape, "mixed", USUAL_BATCH, USUAL_CONTEXT)


def _batches(shape: Shape) -> Iterator[Case]:
    for batch in BATCHES:
        yield _case(shape, "decode", batch, USUAL_CONTEXT)


def _contexts(shape: Shape) -> Iterator[Case]:
    for context in CONTEXTS:
        # A window sees the same keys at any context: its decodes are measured at one only.
        if shape.sliding_window is None:
            for batch in BATCHES:
                yield _case(shape, "decode", batch, context)
        yield _case(shape, "prefill", 1, context)
    yield _case(shape, "prefill", 4, CONTEXTS[0])


def _parallel(shape: Shape) -> Iterator[Case]:
    for devices in PARALLEL:
        if (share := shape.shard(devices)) is not None:
            yield _case(share, "decode", USUAL_BATCH, USUAL_CONTEXT)
            yield _case(share, "prefill", 1, USUAL_CONTEXT)


def _pages(shape: Shape) -> Iterator[Case]:
    for block_size in BLOCK_SIZES:
        yield _case(shape, "decode", USUAL_BATCH, USUAL_CONTEXT, block_size)


def short(count: int) -> str:
    """A number of tokens, in k or M where it is whole."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{letter}"
    return str(count)
