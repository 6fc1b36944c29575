"""Devices by name."""

from __future__ import annotations

import torch


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
