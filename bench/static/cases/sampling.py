"""``sample_tokens`` at the vocabularies of the models."""

from __future__ import annotations

import functools
from typing import Any

from quire.kernels.common.arch import Arch

from . import StaticCase, meta

NUM_ROWS = 64
VOCABULARIES = {"llama": 128256, "gemma": 262144, "v4": 129280}


def cases() -> list[StaticCase]:
    """Greedy rows, draws, and draws with their probabilities; each dtype."""
    table = (
        ("greedy", "llama", "float32"),
        ("draw", "llama", "float32"),
        ("draw", "gemma", "float32"),
        ("draw", "llama", "bfloat16"),
        ("draw", "llama", "float16"),
        ("probs", "v4", "float32"),
    )
    return [
        StaticCase(
            f"sample-{kind}-{name}-{dtype}",
            "sample",
            functools.partial(launches, kind=kind, name=name, dtype=dtype),
            dtype=dtype,
            sample=(kind, dtype) == ("probs", "float32"),
            operator="sample_tokens",
        )
        for kind, name, dtype in table
    ]


def launches(arch: Arch, kind: str, name: str, dtype: str) -> list[Any]:
    """The launch of one ``sample_tokens``."""
    from quire.kernels.sampling import triton_impl

    vocab_size = VOCABULARIES[name]
    rows: dict[str, Any] = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "u"))
    if kind != "greedy":
        dtypes = ("float32", "int32", "float32", "float32", "float64")
        rows = {n: meta(NUM_ROWS, dtype=d) for n, d in zip(rows, dtypes, strict=True)}
    probs = meta(NUM_ROWS, vocab_size, dtype="float32") if kind == "probs" else None
    _, launch = triton_impl.prepare(
        meta(NUM_ROWS, vocab_size, dtype=dtype), *rows.values(), probs=probs
    )
    return [launch]
