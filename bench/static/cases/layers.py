"""The operators around attention: norms, RoPE, gates, experts, residual streams, sampling, pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire import kernels

from . import StaticCase, meta

NUM_ROWS = 256
STREAMS, TOP_K = 4, 6  # of DeepSeek-V4


def cases() -> list[StaticCase]:
    """Each operator at the sizes of the models, and in each dtype."""
    return [
        norm("llama", 4096, residual=True),
        norm("first", 4096),
        norm("gemma3", 5376, residual=True, post=True, offset=1.0),
        norm("gemma4", 2560, residual=True, post=True, scalar=True, sample=True),
        norm("gemma4-sum", 2560, residual=True, post=True, weight=False),
        norm("gemma4-router", 2816, out="float32"),
        norm("fp32", 2880, residual=True, dtype="float32"),
        norm("longest", 16384, residual=True, post=True, scalar=True),
        rope("llama", 32, 8, 128, sample=True),
        rope("gpt-oss", 64, 8, 64),
        rope("gemma3", 32, 16, 128, norm=True, offset=1.0),
        rope("gemma4-sliding", 8, 2, 256, norm=True, norm_v=True, sample=True),
        rope("gemma4-full", 8, 2, 512, norm=True, norm_v=True, has_v=False),
        rope("gemma4-shared", 8, 0, 512, norm=True, has_v=False),
        rope("fp32", 32, 8, 128, norm=True, norm_v=True, dtype="float32"),
        product("llama", 14336, "silu", sample=True),
        product("gemma", 10240, "gelu_tanh", sample=True),
        product("gpt-oss", 2880, "silu", limit=7.0, interleaved=True),
        product("limit", 2048, "silu", limit=10.0),
        product("fp32", 14336, "gelu_tanh", dtype="float32"),
        *expert_cases(),
        collapse("flash-decode", 4096, 32, sample=True),
        collapse("flash-prefill", 4096, 8192),
        collapse("pro-decode", 7168, 32, sample=True),
        collapse("pro-prefill", 7168, 8192, sample=True),
        collapse("pro-fp32", 7168, 8192, dtype="float32"),
        collapse("flash-head", 4096, 32, head=True),
        collapse("pro-head", 7168, 8192, head=True),
        expand("flash-decode", 4096, 32, sample=True),
        expand("pro-decode", 7168, 32, sample=True),
        expand("pro-prefill", 7168, 8192, sample=True),
        expand("pro-fp32", 7168, 8192, dtype="float32"),
        *routing_cases(),
        *sampling_cases(),
        *page_cases(),
    ]


def case(
    name: str, call: Callable[[], object], options: dict[str, Any], dtype: str = "bfloat16"
) -> StaticCase:
    """A case; options: of a call, with whether it is a sample."""
    return StaticCase(name, call, options.get("dtype", dtype), sample=options.get("sample", False))


def norm(name: str, size: int, **options: Any) -> StaticCase:
    """One ``residual_norm``; out: dtype of the result."""
    dtype = options.get("dtype", "bfloat16")
    weight = options.get("weight", True)

    def call() -> None:
        rows, scale = meta(NUM_ROWS, size, dtype=dtype), meta(size, dtype=dtype)
        kernels.residual_norm(
            rows,
            scale if weight else None,
            eps=1e-6,
            offset=options.get("offset", 0.0),
            residual=rows if "residual" in options else None,
            post_weight=scale if "post" in options else None,
            scalar=meta(1, dtype=dtype) if "scalar" in options else None,
            out=meta(NUM_ROWS, size, dtype=options.get("out", dtype)) if weight else None,
            impl="triton",
        )

    return case(f"residual-norm-{name}", call, options)


def rope(name: str, num_heads: int, num_kv_heads: int, head_dim: int, **options: Any) -> StaticCase:
    """One ``norm_rope``."""
    dtype, has_v = options.get("dtype", "bfloat16"), options.get("has_v", True)
    norm_v = options.get("norm_v", False)

    def call() -> None:
        weight = meta(head_dim, dtype=dtype) if "norm" in options else None
        heads = num_heads + num_kv_heads * (1 + has_v)
        cos, sin = meta(2, NUM_ROWS, head_dim // 2, dtype="float32").unbind(0)
        kernels.norm_rope(
            meta(NUM_ROWS, heads, head_dim, dtype=dtype),
            cos,
            sin,
            num_kv_heads=num_kv_heads,
            has_v=has_v,
            q_weight=weight,
            k_weight=weight if num_kv_heads else None,
            norm_v=norm_v,
            offset=options.get("offset", 0.0),
            impl="triton",
        )

    return case(f"norm-rope-{name}", call, options)


def product(name: str, width: int, activation: str, **options: Any) -> StaticCase:
    """One ``gated_product`` over a merged product."""

    def call() -> None:
        merged = meta(NUM_ROWS, 2 * width, dtype=options.get("dtype", "bfloat16"))
        gate, up = merged.chunk(2, 1)
        more = {}
        if "interleaved" in options:
            gate, up = merged.unflatten(1, (width, 2)).unbind(2)
            more = {"alpha": 1.702, "up_offset": 1.0}
        limit = options.get("limit")
        kernels.gated_product(gate, up, activation=activation, limit=limit, impl="triton", **more)

    return case(f"gated-product-{name}", call, options)


# hidden_size, width, experts, experts of a token; what `expert_mlp` does between the matrices.
EXPERTS: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "gemma4": ((2816, 704, 128, 8), {"activation": "gelu_tanh"}),
    "gpt-oss": (
        (2880, 2880, 32, 4),
        {"activation": "silu", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0},
    ),
    "v4-flash": ((4096, 2048, 256, 6), {"activation": "silu", "limit": 10.0}),
}


def expert_cases() -> list[StaticCase]:
    """Each tile shape, with the tokens that lead to it."""
    return [
        experts("gemma4-decode", "gemma4", 32),
        experts("gemma4-middle", "gemma4", 512),
        experts("gemma4-prefill", "gemma4", 8192),
        experts("gpt-oss-decode", "gpt-oss", 32, sample=True),
        experts("gpt-oss-middle", "gpt-oss", 256, sample=True),
        experts("gpt-oss-prefill", "gpt-oss", 8192),
        experts("gpt-oss-mxfp4-decode", "gpt-oss", 32, form="fp4"),
        experts("gpt-oss-mxfp4-prefill", "gpt-oss", 8192, form="fp4"),
        experts("v4-flash-decode", "v4-flash", 32),
        experts("v4-flash-prefill", "v4-flash", 8192, sample=True),
        experts("v4-flash-fp8-decode", "v4-flash", 32, form="fp8", sample=True),
        experts("v4-flash-fp8-middle", "v4-flash", 1024, form="fp8"),
        experts("v4-flash-fp8-prefill", "v4-flash", 8192, form="fp8"),
        experts("v4-flash-fp4-decode", "v4-flash", 32, form="fp4", sample=True),
        experts("v4-flash-fp4-middle", "v4-flash", 1024, form="fp4"),
        experts("v4-flash-fp4-prefill", "v4-flash", 8192, form="fp4", sample=True),
        experts("gemma4-fp32-decode", "gemma4", 32, dtype="float32", sample=True),
        experts("gemma4-fp32-prefill", "gemma4", 8192, dtype="float32"),
    ]


def experts(
    name: str, model: str, num_tokens: int, form: str = "plain", **options: Any
) -> StaticCase:
    """One ``expert_mlp``; form: of the weights, "plain", "fp8" or "fp4"."""
    (hidden, width, num_experts, top_k), arguments = EXPERTS[model]
    dtype = options.get("dtype", "bfloat16")

    def call() -> None:
        gate_up, gate_up_scale = matrices((num_experts, 2, width, hidden), form, dtype)
        down, down_scale = matrices((num_experts, hidden, width), form, dtype)
        biases = {}
        if model == "gpt-oss":
            if form == "plain":  # transposed, gate and up in turns
                gate_up = meta(num_experts, hidden, width, 2, dtype=dtype).permute(0, 3, 2, 1)
                down = meta(num_experts, width, hidden, dtype=dtype).transpose(1, 2)
            biases = {
                "gate_up_bias": meta(num_experts, width, 2, dtype=dtype).transpose(1, 2),
                "down_bias": meta(num_experts, hidden, dtype=dtype),
            }
        kernels.expert_mlp(
            meta(num_tokens, hidden, dtype=dtype),
            meta(num_tokens, top_k, dtype="int64"),
            gate_up,
            down,
            gate_up_scale=gate_up_scale,
            down_scale=down_scale,
            impl="triton",
            **arguments,
            **biases,
        )

    return case(f"experts-{name}", call, options)


def matrices(shape: tuple[int, ...], form: str, dtype: str) -> tuple[Any, Any]:
    """Matrices as they are stored, and their scales."""
    *lead, rows, columns = shape
    if form == "plain":
        return meta(*shape, dtype=dtype), None
    if form == "fp8":
        scales = meta(*lead, -(-rows // 128), -(-columns // 128), dtype="float32")
        return meta(*shape, dtype="float8_e4m3fn"), scales
    scales = meta(*lead, rows, columns // 32, dtype="uint8")
    return meta(*lead, rows, columns // 2, dtype="uint8"), scales


def collapse(
    name: str, hidden: int, num_tokens: int, head: bool = False, **options: Any
) -> StaticCase:
    """One ``collapse_streams``; head: that before the model's head."""

    def call() -> None:
        rows = STREAMS if head else (2 + STREAMS) * STREAMS
        kernels.collapse_streams(
            meta(num_tokens, STREAMS, hidden, dtype=options.get("dtype", "bfloat16")),
            meta(rows, STREAMS * hidden, dtype="float32"),
            meta(rows, dtype="float32"),
            meta(1 if head else 3, dtype="float32"),
            norm_weight=meta(hidden, dtype="float32"),
            impl="triton",
        )

    return case(f"collapse-{name}", call, options)


def expand(name: str, hidden: int, num_tokens: int, **options: Any) -> StaticCase:
    """One ``expand_streams`` with the rows of experts."""
    dtype = options.get("dtype", "bfloat16")

    def call() -> None:
        kernels.expand_streams(
            meta(num_tokens, STREAMS, hidden, dtype=dtype),
            meta(num_tokens, hidden, dtype=dtype),
            meta(num_tokens, STREAMS, dtype="float32"),
            meta(num_tokens, STREAMS, STREAMS, dtype="float32"),
            rows=meta(num_tokens * TOP_K, hidden, dtype=dtype),
            weights=meta(num_tokens, TOP_K, dtype="float32"),
            impl="triton",
        )

    return case(f"expand-{name}", call, options)


def routing_cases() -> list[StaticCase]:
    """``route_tokens`` of each router, and ``combine_experts``."""
    flash = {"top_k": TOP_K, "scale": 1.5}

    def by_score() -> None:
        logits, bias = meta(64, 256, dtype="float32"), meta(256, dtype="float32")
        kernels.route_tokens(logits, bias=bias, impl="triton", **flash)

    def by_table() -> None:
        table, ids = meta(129280, TOP_K, dtype="int64"), meta(64, dtype="int64")
        logits = meta(64, 256, dtype="float32")
        kernels.route_tokens(logits, table=table, token_ids=ids, impl="triton", **flash)

    def gemma4() -> None:
        logits = meta(64, 128, dtype="float32")
        more = {"logits_factor": 2816**-0.5, "expert_scale": meta(128)}
        kernels.route_tokens(logits, top_k=8, score="softmax", impl="triton", **more)

    def gpt_oss() -> None:
        logits = meta(64, 32, dtype="float32")
        bias = meta(32)
        kernels.route_tokens(logits, top_k=4, score="softmax", logits_bias=bias, impl="triton")

    def combine(addend: bool, dtype: str) -> Callable[[], None]:
        def call() -> None:
            rows, weights = meta(64 * TOP_K, 4096, dtype=dtype), meta(64, TOP_K, dtype="float32")
            shared = meta(64, 4096, dtype=dtype) if addend else None
            kernels.combine_experts(rows, weights, addend=shared, impl="triton")

        return call

    return [
        StaticCase("route-flash-score", by_score, "float32", sample=True),
        StaticCase("route-flash-table", by_table, "float32", sample=True),
        StaticCase("route-gemma4", gemma4, "float32", sample=True),
        StaticCase("route-gpt-oss", gpt_oss, "float32"),
        StaticCase("combine-flash-shared", combine(True, "bfloat16"), sample=True),
        StaticCase("combine-flash-fp32", combine(False, "float32"), "float32"),
    ]


def sampling_cases() -> list[StaticCase]:
    """``sample_tokens``: greedy, draws, and draws with their probabilities."""

    def sample(vocabulary: int, dtype: str, draw: bool, probs: bool) -> Callable[[], None]:
        def call() -> None:
            dtypes = {
                "temperature": "float32", "top_k": "int32", "top_p": "float32", "min_p": "float32",
                "u": "float64",
            }  # fmt: skip
            rows = {name: meta(64, dtype=kind) for name, kind in dtypes.items()} if draw else {}
            if probs:
                rows["probs"] = meta(64, vocabulary, dtype="float32")
            kernels.sample_tokens(meta(64, vocabulary, dtype=dtype), impl="triton", **rows)

        return call

    return [
        StaticCase("sample-greedy", sample(128256, "float32", False, False), "float32"),
        StaticCase("sample-draw", sample(262144, "float32", True, False), "float32"),
        StaticCase("sample-draw-bf16", sample(128256, "bfloat16", True, False)),
        StaticCase("sample-probs", sample(129280, "float32", True, True), "float32", sample=True),
    ]


def page_cases() -> list[StaticCase]:
    """``gather_pages`` and ``scatter_pages`` of K/V pages."""

    def copy(gather: bool) -> Callable[[], None]:
        def call() -> None:
            pool = kernels.PoolPages([meta(512, 65536, dtype="uint8") for _ in range(10)])
            buffer, ids = meta(64, pool.num_bytes, dtype="uint8"), meta(64, dtype="int64")
            operator = kernels.gather_pages if gather else kernels.scatter_pages
            operator(pool, ids, buffer, ids, impl="triton")

        return call

    return [
        StaticCase("gather-pages", copy(True), "uint8", sample=True),
        StaticCase("scatter-pages", copy(False), "uint8", sample=True),
    ]
