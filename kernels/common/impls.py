"""Implementations of the public operations, and the choice between them."""

from __future__ import annotations

import torch

IMPLS = ("triton", "torch")


def expect_impl(impl: str | None, device_type: str) -> None:
    """Check the name of an implementation, and that it runs on a device.

    Args:
        impl: one of ``IMPLS``; None = by device.
        device_type: device type of the tensors, "cpu" or "cuda".

    Raises:
        ValueError: another impl.
        NotImplementedError: Triton on a CPU, unless its interpreter is on.
    """
    if impl is not None and impl not in IMPLS:
        names = ", ".join(map(repr, IMPLS))
        raise ValueError(f"impl: expected {names} or None, got {impl!r}")
    if impl == "triton" and device_type == "cpu":
        import triton

        if not triton.knobs.runtime.interpret:
            raise NotImplementedError(
                "impl: 'triton' is supported on GPUs (and by Triton's interpreter, TRITON_INTERPRET=1), got a CPU"
            )


def implementation(impl: str | None, tensor: torch.Tensor) -> str:
    """Choose the implementation of a call by its first tensor.

    Of anything but a tensor the answer is "torch", and the checks raise.
    """
    if not isinstance(tensor, torch.Tensor):
        expect_impl(impl, "")
        return "torch"
    if impl is not None:
        expect_impl(impl, "cpu" if tensor.is_cpu else "cuda")
        return impl
    return "triton" if tensor.is_cuda else "torch"
