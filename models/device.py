"""Devices by name, and host memory for a GPU."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


def find_device(device: torch.device | str | None = None) -> torch.device:
    """The device of that name; None = the GPU if there is one, else the CPU.

    Raises ValueError for one that cannot be used here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
        if found.type == "meta":
            raise RuntimeError("its tensors have no values")
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"device: expected one of this machine's, got {str(device)!r}: {reason}"
        ) from error
    return found


def page_lock(memory: Tensor, owner: object) -> None:
    """Let the current GPU use host memory in place, until ``owner`` is collected.

    Not torch's pin_memory, which copies, and rounds sizes up to powers of two.

    Raises:
        MemoryError: the driver does not pin it.
    """
    num_bytes = memory.numel() * memory.element_size()
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    if status:
        raise MemoryError(
            f"expected {num_bytes / 2**30:.4g} GiB of host memory that the driver pins, got CUDA "
            f"error {status} of cudaHostRegister (is there a limit of locked memory?)"
        )
    weakref.finalize(owner, _unlock, memory)


def _unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
