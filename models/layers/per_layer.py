"""An embedding table that stays in host memory.

4.7 GB of gemma-4-e2b, of which a step needs a few rows.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from ..parallel.group import Group
from ..parallel.vocabulary import Vocabulary
from .basic import empty_parameter


class HostEmbedding(nn.Module):
    """Scaled embedding whose table is on the host; its rows come out on the device of the ids.

    On a GPU the table is page-locked when it is first used, and the lookup kernel reads the rows
    over the bus: no host synchronization, and it can be captured in a CUDA graph.

    weight: [vocab_size, size], CPU; of several ranks, each has some of the rows. scale: factor of
    the rows, rounded to the dtype first.
    """

    def __init__(
        self, vocab_size: int, size: int, device: torch.device, dtype: torch.dtype, *, scale: float,
        group: Group | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        place = self.weight_device(device)
        self.vocabulary = Vocabulary(vocab_size, group)
        self.weight = empty_parameter(self.vocabulary.num_rows, size, device=place, dtype=dtype)
        self.scale = torch.tensor(scale, dtype=dtype).item()
        self._view: Tensor | None = None

    @staticmethod
    def weight_device(device: torch.device) -> torch.device:
        """Where the table of a model on ``device`` is."""
        return device if device.type == "meta" else torch.device("cpu")

    def forward(self, input_ids: Tensor) -> Tensor:
        """Rows of the table, scaled.

        Args:
            input_ids: [num_tokens] int64.

        Returns:
            [num_tokens, size] on the same device.
        """
        if not input_ids.is_cuda:
            return self.vocabulary.look_up(input_ids, self.weight) * self.scale
        if self._view is None:
            # Page-locked memory belongs to the current device: of another one, torch would copy it.
            with torch.cuda.device_of(input_ids):
                self._view = _device_view(self.weight.data, input_ids.device)
            weakref.finalize(self, _release, self.weight.data_ptr())
        return self.vocabulary.look_up(input_ids, self._view) * self.scale


class _CudaArray:
    """A host tensor as device memory that torch did not allocate, which it takes by a protocol."""

    def __init__(self, host: Tensor) -> None:
        self.host = host
        self.__cuda_array_interface__ = {
            "shape": (host.numel() * host.element_size(),),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 2,
        }


def _device_view(host: Tensor, device: torch.device) -> Tensor:
    """A CUDA tensor over the memory of ``host``, which this page-locks.

    cudaHostRegister, not torch's pin_memory: that one copies, and rounds sizes up to powers of two.
    """
    runtime = torch.cuda.cudart()
    address = host.data_ptr()
    error = runtime.cudaHostRegister(address, host.numel() * host.element_size(), 0)
    if int(error) != 0:
        raise RuntimeError(
            f"embed_tokens_per_layer: cannot page-lock the table, CUDA error {error}"
        )
    view = torch.as_tensor(_CudaArray(host), device=device)
    return view.view(host.dtype).view(host.shape)


def _release(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
