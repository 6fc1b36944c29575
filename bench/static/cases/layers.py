"""Operators around attention: norms, RoPE, gates, experts, residual streams, sampling, pages."""

from __future__ import annotations

from typing import Any

from quire import kernels

from ..case import StaticCase, case, floats, longs, meta

NUM_ROWS, NUM_TOKENS = 256, 64
STREAMS, TOP_K = 4, 6  # of DeepSeek-V4
CLAMPED = {"activation": "silu", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}  # gpt-oss
# hidden_size, width, experts, experts of a token; options of ``expert_mlp``.
EXPERTS: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "gemma4": ((2816, 704, 128, 8), {"activation": "gelu_tanh"}),
    "gpt-oss": ((2880, 2880, 32, 4), CLAMPED),
    "v4-flash": ((4096, 2048, 256, 6), {"activation": "silu", "limit": 10.0}),
}


def cases() -> list[StaticCase]:
    """Each operator at the sizes of the models, and in each dtype."""
    return [
        norm("llama", 4096, residual=True),
        norm("first", 4096),
        norm("gemma3", 5376, residual=True, post=True, offset=1.0),
        norm("gemma4", 2560, residual=True, post=True, scalar=True),
        norm("gemma4-sum", 2560, residual=True, post=True, weight=False),
        norm("gemma4-router", 2816, out="float32"),
        norm("fp32", 2880, residual=True, dtype="float32"),
        norm("longest", 16384, residual=True, post=True, scalar=True),
        rope("llama", 32, 8, 128),
        rope("gpt-oss", 64, 8, 64),
        rope("gemma3", 32, 16, 128, norm=True, offset=1.0),
        rope("gemma4-sliding", 8, 2, 256, norm=True, norm_v=True),
        rope("gemma4-full", 8, 2, 512, norm=True, norm_v=True, has_v=False),
        rope("gemma4-shared", 8, 0, 512, norm=True, has_v=False),
        rope("fp32", 32, 8, 128, norm=True, norm_v=True, dtype="float32"),
        product("llama", 14336, activation="silu"),
        product("gemma", 10240, activation="gelu_tanh"),
        product("gpt-oss", 2880, **CLAMPED),
        product("limit", 2048, activation="silu", limit=10.0),
        product("fp32", 14336, dtype="float32", activation="gelu_tanh"),
        # Each tile shape of experts, with the tokens that lead to it.
        experts("gemma4-decode", 32),
        experts("gemma4-middle", 512),
        experts("gpt-oss-decode", 32),
        experts("gpt-oss-middle", 256),
        experts("gpt-oss-mxfp4-decode", 32, "fp4"),
        experts("gpt-oss-mxfp4-prefill", 8192, "fp4"),
        experts("v4-flash-decode", 32),
        experts("v4-flash-prefill", 8192),
        experts("v4-flash-fp8-decode", 32, "fp8"),
        experts("v4-flash-fp8-middle", 1024, "fp8"),
        experts("v4-flash-fp4-decode", 32, "fp4"),
        experts("v4-flash-fp4-prefill", 8192, "fp4"),
        experts("gemma4-fp32-decode", 32, dtype="float32"),
        experts("gemma4-fp32-prefill", 8192, dtype="float32"),
        collapse("flash-decode", 4096, 32),
        collapse("pro-decode", 7168, 32),
        collapse("pro-fp32", 7168, 8192, dtype="float32"),
        collapse("flash-head", 4096, 32, head=True),
        collapse("pro-head", 7168, 8192, head=True),
        expand("flash-decode", 4096, 32),
        expand("pro-decode", 7168, 32),
        expand("pro-fp32", 7168, 8192, dtype="float32"),
        *routing_cases(),
        *sampling_cases(),
        *page_cases(),
    ]


def norm(
    name: str, size: int, *, dtype: str = "bfloat16", out: str = "", weight: bool = True,
    residual: bool = False, post: bool = False, scalar: bool = False, offset: float = 0.0,
) -> StaticCase:  # fmt: skip
    """One ``residual_norm``; out: dtype of the result, default ``dtype``."""
    rows, scale = meta(NUM_ROWS, size, dtype=dtype), meta(size, dtype=dtype)
    return case(
        f"residual-norm-{name}", kernels.residual_norm, rows, scale if weight else None, eps=1e-6,
        offset=offset, residual=rows if residual else None, post_weight=scale if post else None,
        scalar=meta(1, dtype=dtype) if scalar else None,
        out=meta(NUM_ROWS, size, dtype=out or dtype) if weight else None, dtype=dtype,
    )  # fmt: skip


def rope(
    name: str, num_heads: int, num_kv_heads: int, head_dim: int, *, dtype: str = "bfloat16",
    norm: bool = False, has_v: bool = True, **options: Any,
) -> StaticCase:  # fmt: skip
    """One ``norm_rope``."""
    weight = meta(head_dim, dtype=dtype) if norm else None
    x = meta(NUM_ROWS, num_heads + num_kv_heads * (1 + has_v), head_dim, dtype=dtype)
    cos, sin = floats(2, NUM_ROWS, head_dim // 2).unbind(0)
    return case(
        f"norm-rope-{name}", kernels.norm_rope, x, cos, sin, num_kv_heads=num_kv_heads,
        has_v=has_v, q_weight=weight, k_weight=weight if num_kv_heads else None, **options,
        dtype=dtype,
    )  # fmt: skip


def product(name: str, width: int, dtype: str = "bfloat16", **options: Any) -> StaticCase:
    """One ``gated_product`` over a merged product; gpt-oss has gate and up in turns."""
    merged = meta(NUM_ROWS, 2 * width, dtype=dtype)
    parts = merged.unflatten(1, (width, 2)).unbind(2) if "alpha" in options else merged.chunk(2, 1)
    return case(f"gated-product-{name}", kernels.gated_product, *parts, **options, dtype=dtype)


def experts(name: str, num_tokens: int, form: str = "plain", dtype: str = "bfloat16") -> StaticCase:
    """One ``expert_mlp`` of a model; form: of the weights, "plain", "fp8" or "fp4"."""
    [model] = [model for model in EXPERTS if name.startswith(model)]
    (hidden, width, num_experts, top_k), options = EXPERTS[model]
    gate_up, gate_up_scale = matrices((num_experts, 2, width, hidden), form, dtype)
    down, down_scale = matrices((num_experts, hidden, width), form, dtype)
    if model == "gpt-oss":
        if form == "plain":  # transposed, gate and up in turns
            gate_up = meta(num_experts, hidden, width, 2, dtype=dtype).permute(0, 3, 2, 1)
            down = meta(num_experts, width, hidden, dtype=dtype).transpose(1, 2)
        gate_up_bias = meta(num_experts, width, 2, dtype=dtype).transpose(1, 2)
        down_bias = meta(num_experts, hidden, dtype=dtype)
        options = options | {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    x, chosen = meta(num_tokens, hidden, dtype=dtype), longs(num_tokens, top_k)
    return case(
        f"experts-{name}", kernels.expert_mlp, x, chosen, gate_up, down,
        gate_up_scale=gate_up_scale, down_scale=down_scale, **options, dtype=dtype,
    )  # fmt: skip


def matrices(shape: tuple[int, ...], form: str, dtype: str) -> tuple[Any, Any]:
    """Matrices as they are stored, and their scales."""
    *lead, rows, columns = shape
    if form == "plain":
        return meta(*shape, dtype=dtype), None
    if form == "fp8":
        scales = floats(*lead, -(-rows // 128), -(-columns // 128))
        return meta(*shape, dtype="float8_e4m3fn"), scales
    scales = meta(*lead, rows, columns // 32, dtype="uint8")
    return meta(*lead, rows, columns // 2, dtype="uint8"), scales


def collapse(
    name: str, hidden: int, num_tokens: int, head: bool = False, dtype: str = "bfloat16"
) -> StaticCase:
    """One ``collapse_streams``; head: the one before the model's head."""
    rows = STREAMS if head else (2 + STREAMS) * STREAMS
    streams = meta(num_tokens, STREAMS, hidden, dtype=dtype)
    weights = floats(rows, STREAMS * hidden), floats(rows), floats(1 if head else 3)
    norm = floats(hidden)
    operator = kernels.collapse_streams
    return case(f"collapse-{name}", operator, streams, *weights, norm_weight=norm, dtype=dtype)


def expand(name: str, hidden: int, num_tokens: int, dtype: str = "bfloat16") -> StaticCase:
    """One ``expand_streams`` with the rows of experts."""
    return case(
        f"expand-{name}", kernels.expand_streams, meta(num_tokens, STREAMS, hidden, dtype=dtype),
        meta(num_tokens, hidden, dtype=dtype), floats(num_tokens, STREAMS),
        floats(num_tokens, STREAMS, STREAMS), rows=meta(num_tokens * TOP_K, hidden, dtype=dtype),
        weights=floats(num_tokens, TOP_K), dtype=dtype,
    )  # fmt: skip


def routing_cases() -> list[StaticCase]:
    """``route_tokens`` of each router, and ``combine_experts``."""

    def route(name: str, num_experts: int, **options: Any) -> StaticCase:
        logits = floats(NUM_TOKENS, num_experts)
        return case(f"route-{name}", kernels.route_tokens, logits, **options, dtype="float32")

    def combine(name: str, dtype: str, addend: Any = None) -> StaticCase:
        rows, weights = meta(NUM_TOKENS * TOP_K, 4096, dtype=dtype), floats(NUM_TOKENS, TOP_K)
        operator = kernels.combine_experts
        return case(f"combine-flash-{name}", operator, rows, weights, addend=addend, dtype=dtype)

    flash = {"top_k": TOP_K, "scale": 1.5}
    table = {"table": longs(129280, TOP_K), "token_ids": longs(NUM_TOKENS)}
    gemma4 = {"logits_factor": 2816**-0.5, "expert_scale": meta(128)}
    return [
        route("flash-score", 256, bias=floats(256), **flash),
        route("flash-table", 256, **table, **flash),
        route("gemma4", 128, top_k=8, score="softmax", **gemma4),
        route("gpt-oss", 32, top_k=4, score="softmax", logits_bias=meta(32)),
        combine("shared", "bfloat16", meta(NUM_TOKENS, 4096)),
        combine("fp32", "float32"),
    ]


def sampling_cases() -> list[StaticCase]:
    """``sample_tokens``: greedy, draws, and draws with their probabilities."""

    def sample(name: str, vocabulary: int, dtype: str = "float32", **rows: Any) -> StaticCase:
        logits = meta(NUM_TOKENS, vocabulary, dtype=dtype)
        return case(f"sample-{name}", kernels.sample_tokens, logits, **rows, dtype=dtype)

    draw = {name: floats(NUM_TOKENS) for name in ("temperature", "top_p", "min_p")}
    draw |= {"top_k": meta(NUM_TOKENS, dtype="int32"), "u": meta(NUM_TOKENS, dtype="float64")}
    return [
        sample("greedy", 128256),
        sample("draw", 262144, **draw),
        sample("draw-bf16", 128256, "bfloat16", **draw),
        sample("probs", 129280, **draw, probs=floats(NUM_TOKENS, 129280)),
    ]


def page_cases() -> list[StaticCase]:
    """``gather_pages`` and ``scatter_pages`` of K/V pages."""
    pool = kernels.PoolPages([meta(512, 65536, dtype="uint8") for _ in range(10)])
    buffer, ids = meta(NUM_TOKENS, pool.num_bytes, dtype="uint8"), longs(NUM_TOKENS)
    arguments = (pool, ids, buffer, ids)
    return [
        case("gather-pages", kernels.gather_pages, *arguments, dtype="uint8"),
        case("scatter-pages", kernels.scatter_pages, *arguments, dtype="uint8"),
    ]
