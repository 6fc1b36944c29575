"""Implementations of the public operations, and the choice between them."""

from __future__ import annotations

import torch

IMPLS = ("triton", "torch")
WITH_FLASHINFER = (*IMPLS, "flashinfer")


def expect_impl(impl: str | None, device_type: str, impls: tuple[str, ...] = IMPLS) -> None:
    """Check the name of an implementation, and that it runs on a device.

    Args:
        impl: one of ``impls``; None = by device.
        device_type: device type of the tensors, "cpu" or "cuda".
        impls: implementations that the operation has.

    Raises:
        ValueError: another impl.
        NotImplementedError: Triton on a CPU, unless its interpreter is on.
    """
    if impl is not None and impl not in impls:
        names = ", ".join(map(repr, impls))
        raise ValueError(f"impl: expected {names} or None, got {impl!r}")
    if impl == "triton" and device_type == "cpu":
        import triton

        if not triton.knobs.runtime.interpret:
            raise NotImplementedError(
                "impl: 'triton' is supported on GPUs (and by Triton's interpreter, TRITON_INTERPRET=1), got a CPU"
            )


def implementation(impl: str | None, tensor: torch.Tensor, impls: tuple[str, ...] = IMPLS) -> str:
    """Choose the implementation of a call by its first tensor.

    Args:
        impl: as the public operations take it.
        tensor: first tensor of the call. Of anything else the answer is "torch", and the checks
            raise.
        impls: implementations that the operation has.
    """
    if not isinstance(tensor, torch.Tensor):
        expect_impl(impl, "", impls)
        return "torch"
    if impl is not None:
        expect_impl(impl, "cpu" if tensor.is_cpu else "cuda", impls)
        return impl
    return "triton" if tensor.is_cuda else "torch"
