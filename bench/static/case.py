"""One call that ``bench.static`` compiles, over tensors without storage."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from ..cases.problem import make_problem
from ..cases.shapes import Case, Shape

# Together they launch every kernel.
SAMPLES = """
    decode-d128-p128-q1 prefill-d128-p128 decode-fp8-d128-p128-q1 prefill-fp8-d128-p128
    merge-d128 write-d128 write-fp8-d128
    mla-decode-h16 mla-prefill-h128 compressed-decode-csa-h16-k512
    compressed-decode-csa-h64-k512-fp8-pages compressed-prefill-csa-h64-k512
    index-decode-k512-bf16 index-decode-k512-fp8
    latent-fp8-p64 latent-heads compress-csa-fp8-prefill overlap-compressor
    residual-norm-gemma4 norm-rope-llama norm-rope-gemma4-sliding
    gated-product-llama gated-product-gemma
    experts-gpt-oss-decode experts-gpt-oss-middle experts-v4-flash-prefill
    experts-v4-flash-fp8-decode experts-v4-flash-fp4-decode experts-v4-flash-fp4-prefill
    experts-gemma4-fp32-decode
    collapse-flash-decode collapse-pro-decode
    expand-flash-decode expand-pro-decode
    route-flash-score route-flash-table route-gemma4 combine-flash-shared
    sample-probs gather-pages scatter-pages
"""
NUM_SEQS, PREFILL, CONTEXT, LATENT_CONTEXT = 16, 1024, 4096, 1 << 17
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class StaticCase:
    """One call of a public operator at one shape.

    Attributes:
        name: unique among all cases.
        call: makes the call over tensors on the device "meta", with ``impl="triton"``.
        dtype: torch dtype by name, of the keys and values if there are any.
        key_bytes: bytes of a key and its value in the pages; 0: no kernel has tiles of keys.
    """

    name: str
    call: Callable[[], object]
    dtype: str = "bfloat16"
    key_bytes: int = 0

    @property
    def sample(self) -> bool:
        """True if it is compiled for SAMPLE_ARCHS."""
        return self.name in SAMPLES.split()


def case(
    name: str, operator: Callable[..., object], *arguments: Any, dtype: str = "bfloat16",
    **options: Any,
) -> StaticCase:  # fmt: skip
    """The case of ``operator(*arguments, **options)``."""
    return StaticCase(
        name, functools.partial(operator, *arguments, impl="triton", **options), dtype
    )


def attention_case(
    name: str, shape: Shape, q_len: int | None, *, dtype: str = "bfloat16", label: str = "",
    in_step: bool = True, **changes: Any,
) -> StaticCase:  # fmt: skip
    """The case of a problem of ``bench.kernels``.

    Args:
        q_len: new tokens of a sequence in decode; None: prefill.
        dtype: dtype of queries and plain pages.
        label: dtype in the table; default: the same.
        in_step: True to hand over the step's own rows.
        changes: arguments in place of the problem's.
    """
    phase, is_latent = "decode" if q_len else "prefill", shape.op != "attention"
    context = LATENT_CONTEXT if is_latent else CONTEXT
    batch = Case(shape, phase, NUM_SEQS, context, q_len or PREFILL)
    width = 1 if shape.fp8 else ITEM_BYTES[dtype]
    if not is_latent:
        key_bytes = 2 * shape.head_dim * width
    elif shape.fp8 and shape.op != "index":
        key_bytes = 576  # without its scales
    else:
        key_bytes = shape.head_dim * width

    def call() -> object:
        made = make_problem(batch, torch.device("meta"), getattr(torch, dtype), copies=1)
        rows = made.in_step[0] if in_step and made.in_step is not None else {}
        arguments = made.shared | made.each[0] | made.results | rows | changes
        return made.operator(**arguments, impl="triton")

    return StaticCase(name, call, label or dtype, key_bytes)


def meta(*shape: int, dtype: str = "bfloat16") -> Any:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


ints = functools.partial(meta, dtype="int32")
longs = functools.partial(meta, dtype="int64")
floats = functools.partial(meta, dtype="float32")
