"""FlashInfer's functions as an implementation of a call: what they take.

They run in fp16 and bf16 on a GPU, and load rows in vectors of 16 bytes.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

DEVICES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16)
ALIGNMENT = 16


def import_flashinfer() -> Any:
    """The package.

    Raises:
        NotImplementedError: torch is for AMD GPUs, or the package is not installed.
    """
    if torch.version.hip is not None:
        refuse("NVIDIA GPUs", f"a torch for ROCm {torch.version.hip}")
    try:
        return importlib.import_module("flashinfer")
    except ModuleNotFoundError as error:
        raise NotImplementedError(
            f"impl: 'flashinfer' is supported where the package flashinfer-python is installed "
            f"(the extra quire[gpu]), got {type(error).__name__}: {error}"
        ) from error


def expect_rows(dtype: torch.dtype, **tensors: torch.Tensor | None) -> None:
    """Require tensors that its functions take, by the names of their arguments; None is none.

    Args:
        dtype: of the first argument, which all are to have.

    Raises:
        NotImplementedError: a device, a dtype, or rows that are not aligned.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device.type not in DEVICES:
            refuse(f"{name} on {list(DEVICES)}", f"a tensor on {tensor.device.type!r}")
        if tensor.dtype != dtype or dtype not in DTYPES:
            refuse(f"{name} in fp16 or bf16, one dtype for all", str(tensor.dtype))
        steps = (*tensor.stride()[:-1], tensor.shape[-1])
        if (
            any(n * tensor.element_size() % ALIGNMENT for n in steps)
            or tensor.data_ptr() % ALIGNMENT
        ):
            refuse(
                f"{name} in rows of whole {ALIGNMENT} bytes, aligned",
                f"{list(tensor.shape)} of strides {tensor.stride()} at {tensor.data_ptr():#x}",
            )


def refuse(expected: str, got: str) -> None:
    """Raises NotImplementedError."""
    raise NotImplementedError(f"impl: 'flashinfer' is supported with {expected}, got {got}")
