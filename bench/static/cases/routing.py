"""``route_tokens`` and ``combine_experts`` at DeepSeek-V4 shapes, and the routers of Gemma-4 and
gpt-oss."""

from __future__ import annotations

import functools
from typing import Any

from quire.kernels.common.arch import Arch

from . import StaticCase, meta

NUM_TOKENS, TOP_K = 64, 6
HIDDEN = {"flash": 4096, "pro": 7168}
NUM_EXPERTS = {"flash": 256, "pro": 384}
# Experts, experts of a token
SOFTMAX = {"gemma4": (128, 8), "gpt-oss": (32, 4)}


def cases() -> list[StaticCase]:
    """Routing by score and by a table, in both models; sums with and without a shared expert."""
    routes = [
        StaticCase(
            f"route-{size}-{by}",
            "route",
            functools.partial(route_launches, size=size, by=by),
            dtype="float32",
            sample=size == "flash",
            operator="route_tokens",
        )
        for size in HIDDEN
        for by in ("score", "table")
    ]
    routes += [
        StaticCase(
            f"route-{model}",
            "route",
            functools.partial(softmax_launches, model=model),
            dtype="float32",
            sample=model == "gemma4",
            operator="route_tokens",
        )
        for model in SOFTMAX
    ]
    sums = [
        StaticCase(
            f"combine-{size}-{dtype}{'-shared' if shared else ''}",
            "combine",
            functools.partial(combine_launches, size=size, dtype=dtype, shared=shared),
            dtype=dtype,
            sample=shared and size == "flash",
            operator="combine_experts",
        )
        for size, dtype, shared in (
            ("flash", "bfloat16", True),
            ("flash", "float32", False),
            ("pro", "bfloat16", True),
        )
    ]
    return routes + sums


def route_launches(arch: Arch, size: str, by: str) -> list[Any]:
    """The launch of one ``route_tokens``."""
    from quire.kernels.routing import triton_impl

    num_experts = NUM_EXPERTS[size]
    _, launch = triton_impl.prepare_route(
        meta(NUM_TOKENS, num_experts, dtype="float32"),
        TOP_K,
        "sqrt_softplus",
        1.5,
        1.0,
        None,
        None,
        meta(num_experts, dtype="float32") if by == "score" else None,
        meta(129280, TOP_K, dtype="int64") if by == "table" else None,
        meta(NUM_TOKENS, dtype="int64") if by == "table" else None,
    )
    return [launch]


def softmax_launches(arch: Arch, model: str) -> list[Any]:
    """The launch of one ``route_tokens`` with a softmax."""
    from quire.kernels.routing import triton_impl

    num_experts, top_k = SOFTMAX[model]
    gemma = model == "gemma4"
    _, launch = triton_impl.prepare_route(
        meta(NUM_TOKENS, num_experts, dtype="float32"),
        top_k,
        "softmax",
        1.0,
        2816**-0.5 if gemma else 1.0,
        None if gemma else meta(num_experts),
        meta(num_experts) if gemma else None,
        None,
        None,
        None,
    )
    return [launch]


def combine_launches(arch: Arch, size: str, dtype: str, shared: bool) -> list[Any]:
    """The launch of one ``combine_experts``."""
    from quire.kernels.routing import triton_impl

    _, launch = triton_impl.prepare_combine(
        meta(NUM_TOKENS * TOP_K, HIDDEN[size], dtype=dtype),
        meta(NUM_TOKENS, TOP_K, dtype="float32"),
        meta(NUM_TOKENS, HIDDEN[size], dtype=dtype) if shared else None,
    )
    return [launch]
