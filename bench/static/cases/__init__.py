"""The calls that ``bench.static`` compiles, over tensors without storage."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from quire.kernels.common.arch import Arch

from ...cases.shapes import Case
from ..launches import Launch, record

# Compiled by default: each tile shape for the first, the samples for the others.
DEFAULT_ARCH, SAMPLE_ARCHS = "sm_90", ("sm_80", "sm_100", "gfx942", "gfx950")
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
    collapse-flash-decode collapse-pro-decode collapse-pro-prefill
    expand-flash-decode expand-pro-decode expand-pro-prefill
    route-flash-score route-flash-table route-gemma4 combine-flash-shared
    sample-probs gather-pages scatter-pages
"""


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
    name: str,
    operator: Callable[..., object],
    *arguments: Any,
    dtype: str = "bfloat16",
    key_bytes: int = 0,
    **options: Any,
) -> StaticCase:
    """The case of ``operator(*arguments, **options)``; other arguments as in `StaticCase`."""
    call = functools.partial(operator, *arguments, impl="triton", **options)
    return StaticCase(name, call, dtype, key_bytes)


def problem_case(
    name: str, case: Case, dtype: str, label: str, key_bytes: int, in_step: bool, **changes: Any
) -> StaticCase:
    """The case of the problem that ``bench.kernels`` makes of ``case``.

    Args:
        name, label, key_bytes: name, dtype and key_bytes of the `StaticCase`.
        case: shape and batch.
        dtype: dtype of queries and plain pages.
        in_step: True to hand over the step's own rows.
        changes: arguments in place of the problem's.
    """

    def call() -> object:
        import torch

        from ...cases.make import make_problem

        made = make_problem(case, torch.device("meta"), getattr(torch, dtype), copies=1)
        rows = made.in_step[0] if in_step and made.in_step is not None else {}
        arguments = made.shared | made.each[0] | made.results | rows | changes
        return made.operator(**arguments, impl="triton")

    return StaticCase(name, call, label, key_bytes)


@functools.cache
def all_cases() -> dict[str, StaticCase]:
    """All cases of the modules of this package by name."""
    modules = [
        importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    ]
    cases = [each for module in modules for each in module.cases()]
    found = {each.name: each for each in cases}
    if len(found) < len(cases):
        raise ValueError("name: expected one case of each name")
    return found


def launches_of(case: StaticCase, arch: Arch) -> list[Launch]:
    """The launches of a case on an architecture."""
    return record(case.call, arch)


def meta(*shape: int, dtype: str = "bfloat16") -> Any:
    """A contiguous tensor without storage."""
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def ints(*shape: int) -> Any:
    """An int32 tensor without storage."""
    return meta(*shape, dtype="int32")


def longs(*shape: int) -> Any:
    """An int64 tensor without storage."""
    return meta(*shape, dtype="int64")


def floats(*shape: int) -> Any:
    """An fp32 tensor without storage."""
    return meta(*shape, dtype="float32")
