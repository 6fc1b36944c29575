"""``collapse_streams`` and ``expand_streams`` at DeepSeek-V4 shapes."""

from __future__ import annotations

import functools
from typing import Any

from quire.kernels.common.arch import Arch

from . import NUM_SMS, StaticCase, meta

NUM_STREAMS = 4
HIDDEN = {"flash": 4096, "pro": 7168}
TOP_K = 6
SAMPLE = ("flash-decode", "pro-decode", "pro-prefill")


def cases() -> list[StaticCase]:
    """Both models, decode and prefill, other dtypes, the head, and the first layer's input."""
    table: dict[str, dict[str, Any]] = {
        "flash-decode": {"size": "flash", "num_tokens": 32},
        "flash-prefill": {"size": "flash", "num_tokens": 8192},
        "pro-decode": {"size": "pro", "num_tokens": 32},
        "pro-prefill": {"size": "pro", "num_tokens": 8192},
        "pro-first-layer": {"size": "pro", "num_tokens": 8192, "shared": True},
        "flash-fp16-no-norm": {
            "size": "flash",
            "num_tokens": 32,
            "dtype": "float16",
            "norm": False,
        },
        "pro-fp32": {"size": "pro", "num_tokens": 8192, "dtype": "float32"},
        "flash-head": {"size": "flash", "num_tokens": 32, "head": True},
        "pro-head": {"size": "pro", "num_tokens": 8192, "head": True},
    }
    return [
        StaticCase(
            f"{name}-{case}",
            name,
            functools.partial(launches, **{k: v for k, v in options.items() if k not in ignored}),
            dtype=options.get("dtype", "bfloat16"),
            sample=case in SAMPLE,
            operator=f"{name}_streams",
        )
        for name, launches, ignored in (
            ("collapse", collapse_launches, ()),
            ("expand", expand_launches, ("norm", "head")),
        )
        for case, options in table.items()
        if name == "collapse" or not options.get("head")
    ]


def streams(size: str, num_tokens: int, dtype: str, shared: bool) -> Any:
    """Residual streams; shared: one row in memory for all of a token, as before the first layer."""
    if shared:
        return meta(num_tokens, 1, HIDDEN[size], dtype=dtype).expand(-1, NUM_STREAMS, -1)
    return meta(num_tokens, NUM_STREAMS, HIDDEN[size], dtype=dtype)


def collapse_launches(
    arch: Arch, size: str, num_tokens: int, dtype: str = "bfloat16", norm: bool = True,
    head: bool = False, shared: bool = False,
) -> list[Any]:  # fmt: skip
    """The launches of one ``collapse_streams``."""
    from quire.kernels.hyper_connections import triton_impl

    rows = NUM_STREAMS if head else (2 + NUM_STREAMS) * NUM_STREAMS
    _, launches = triton_impl.prepare_collapse(
        arch,
        NUM_SMS[arch.name],
        streams(size, num_tokens, dtype, shared),
        meta(rows, NUM_STREAMS * HIDDEN[size], dtype="float32"),
        meta(rows, dtype="float32"),
        meta(1 if head else 3, dtype="float32"),
        meta(HIDDEN[size], dtype="float32") if norm else None,
        1e-6,
        1e-6,
        20,
    )
    return launches


def expand_launches(
    arch: Arch, size: str, num_tokens: int, dtype: str = "bfloat16", shared: bool = False
) -> list[Any]:
    """The launch of one ``expand_streams``, with the rows of experts; the kernel is that without."""
    from quire.kernels.hyper_connections import expansion

    n = NUM_STREAMS
    _, launch = expansion.prepare(
        streams(size, num_tokens, dtype, shared),
        meta(num_tokens, HIDDEN[size], dtype=dtype),
        meta(num_tokens, n, dtype="float32"),
        meta(num_tokens, n, n, dtype="float32"),
        meta(num_tokens * TOP_K, HIDDEN[size], dtype=dtype),
        meta(num_tokens, TOP_K, dtype="float32"),
    )
    return [launch]
