"""``expert_mlp`` at the sizes of the models that have experts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from quire.kernels.common.arch import Arch

from . import StaticCase, meta

OPTIONS: dict[str, tuple[str, float | None, float, float]] = {
    "gemma4": ("gelu_tanh", None, 1.0, 0.0),
    "gpt-oss": ("silu", 7.0, 1.702, 1.0),
    "v4-flash": ("silu", 10.0, 1.0, 0.0),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call; form: of the weights, "plain", "fp8" or "fp4"."""

    model: str
    num_tokens: int
    form: str = "plain"
    dtype: str = "bfloat16"


# hidden_size, width, experts, experts of a token
SIZES = {
    "gemma4": (2816, 704, 128, 8),
    "gpt-oss": (2880, 2880, 32, 4),
    "v4-flash": (4096, 2048, 256, 6),
}
# Tokens that make each tile shape: up to 16 rows of an expert, and more, few of them and many.
TOKENS = {
    "gemma4": {"decode": 32, "middle": 512, "prefill": 8192},
    "gpt-oss": {"decode": 32, "middle": 256, "prefill": 8192},
    "v4-flash": {"decode": 32, "middle": 1024, "prefill": 8192},
}
SAMPLE = (
    "gpt-oss-decode", "gpt-oss-middle", "v4-flash-prefill", "v4-flash-fp8-decode",
    "v4-flash-fp4-decode", "v4-flash-fp4-prefill", "gemma4-fp32-decode",
)  # fmt: skip


def cases() -> list[StaticCase]:
    """Every tile shape: plain weights of each model, quantized ones, and fp32."""
    table = {
        f"{model}-{phase}": Shape(model, num_tokens)
        for model, by_phase in TOKENS.items()
        for phase, num_tokens in by_phase.items()
    }
    for phase, num_tokens in TOKENS["v4-flash"].items():
        for form in ("fp8", "fp4"):
            table[f"v4-flash-{form}-{phase}"] = Shape("v4-flash", num_tokens, form)
    table["gpt-oss-mxfp4-decode"] = Shape("gpt-oss", 32, "fp4")
    table["gpt-oss-mxfp4-prefill"] = Shape("gpt-oss", 8192, "fp4")
    table["gemma4-fp16-decode"] = Shape("gemma4", 32, dtype="float16")
    table["gemma4-fp32-decode"] = Shape("gemma4", 32, dtype="float32")
    table["gemma4-fp32-prefill"] = Shape("gemma4", 8192, dtype="float32")
    table["v4-flash-fp8-fp32-decode"] = Shape("v4-flash", 32, "fp8", "float32")
    table["v4-flash-fp4-fp32-prefill"] = Shape("v4-flash", 8192, "fp4", "float32")
    return [
        StaticCase(
            f"experts-{name}",
            "experts",
            functools.partial(launches, shape=shape),
            dtype=shape.dtype,
            sample=name in SAMPLE,
            operator="expert_mlp",
        )
        for name, shape in table.items()
    ]


def launches(arch: Arch, shape: Shape) -> list[Any]:
    """The launches of one ``expert_mlp``."""
    from quire.kernels.experts import triton_impl

    hidden, width, num_experts, top_k = SIZES[shape.model]
    gate_up, gate_up_scale = stack(shape, (num_experts, 2), width, hidden)
    down, down_scale = stack(shape, (num_experts,), hidden, width)
    biases: tuple[Any, Any] = (None, None)
    if shape.model == "gpt-oss":
        if shape.form == "plain":  # transposed, gate and up in turns
            gate_up = meta(num_experts, hidden, width, 2, dtype=shape.dtype).permute(0, 3, 2, 1)
            down = meta(num_experts, width, hidden, dtype=shape.dtype).transpose(1, 2)
        biases = (
            meta(num_experts, width, 2, dtype=shape.dtype).transpose(1, 2),
            meta(num_experts, hidden, dtype=shape.dtype),
        )
    _, made = triton_impl.prepare(
        arch,
        meta(shape.num_tokens, hidden, dtype=shape.dtype),
        meta(shape.num_tokens, top_k, dtype="int64"),
        (gate_up, down),
        (gate_up_scale, down_scale),
        biases,
        *OPTIONS[shape.model],
    )
    return made


def stack(shape: Shape, lead: tuple[int, ...], rows: int, columns: int) -> tuple[Any, Any]:
    """Matrices [*lead, rows, columns] as they are stored, and their scales."""
    if shape.form == "plain":
        return meta(*lead, rows, columns, dtype=shape.dtype), None
    if shape.form == "fp8":
        blocks = (-(-rows // 128), -(-columns // 128))
        return (
            meta(*lead, rows, columns, dtype="float8_e4m3fn"),
            meta(*lead, *blocks, dtype="float32"),
        )
    return (
        meta(*lead, rows, columns // 2, dtype="uint8"),
        meta(*lead, rows, columns // 32, dtype="uint8"),
    )
