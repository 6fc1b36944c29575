"""Small host arrays to the device, and tensors back, without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; of each array in a packed copy
_TORCH = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Staging:
    """Moves small host arrays to the device, all of a call in one copy that the host does not wait
    for.

    Args:
        device: where to.
        packed: False = no copy at all, which is right for a CPU and the default there.
    """

    def __init__(self, device: torch.device | str, *, packed: bool | None = None) -> None:
        self._device = torch.device(device)
        self._packed = self._device.type != "cpu" if packed is None else packed

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Tensors of the same shapes and dtypes as the arrays.

        On a CPU they may share the arrays' memory.
        """
        arrays = [np.ascontiguousarray(array) for array in arrays]
        if not self._packed:
            return [torch.from_numpy(array) for array in arrays]
        ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
        # Pinned memory of torch's own: it is not handed out again before the copy has read it.
        host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        starts = [0, *ends[:-1]]
        for array, start in zip(arrays, starts, strict=True):
            host.numpy()[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        device = host.to(self._device, non_blocking=True)
        return [
            device[start : start + array.nbytes].view(_TORCH[array.dtype]).view(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]


class HostCopy:
    """A tensor on its way to the host, which goes on meanwhile; of a CPU it is there already."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._arrived = tensor, None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> Tensor:
        """The tensor on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
