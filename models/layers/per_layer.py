"""An embedding table in host memory (4.7 GB of gemma-4-e2b): a step reads a few rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..device import page_lock
from .basic import Embedding, WeightPlacement


class HostEmbedding(Embedding):
    """Scaled embedding with its table on the host; rows come out on the device of the ids.

    On a GPU the table is page-locked at its first use, and the lookup kernel reads rows over the
    bus: no host synchronization, and CUDA graphs capture it. Arguments as in `Embedding`.
    """

    def __init__(self, vocab_size: int, size: int, place: WeightPlacement, *, scale: float) -> None:
        place = replace(place, device=self.weight_device(place.device))
        super().__init__(vocab_size, size, place, scale=scale)
        self._view: Tensor | None = None

    @staticmethod
    def weight_device(device: torch.device) -> torch.device:
        """Device of the table for a model on ``device``."""
        return device if device.type == "meta" else torch.device("cpu")

    def forward(self, input_ids: Tensor, table: Tensor | None = None) -> Tensor:
        """As `Embedding.forward`."""
        if input_ids.is_cuda and self._view is None:
            # Page-locked memory belongs to the current device: of another one, torch would copy it.
            with torch.cuda.device_of(input_ids):
                page_lock(self.weight.data, self)
                self._view = _device_view(self.weight.data, input_ids.device)
        return super().forward(input_ids, self._view if input_ids.is_cuda else table)


class _CudaArray:
    """Host memory as device memory that torch did not allocate, by ``__cuda_array_interface__``."""

    def __init__(self, host: Tensor) -> None:
        self.host = host
        self.__cuda_array_interface__ = {
            "shape": (host.numel() * host.element_size(),),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 2,
        }


def _device_view(host: Tensor, device: torch.device) -> Tensor:
    """View page-locked memory as a CUDA tensor."""
    view = torch.as_tensor(_CudaArray(host), device=device)
    return view.view(host.dtype).view(host.shape)
