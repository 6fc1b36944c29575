"""Pages in host memory."""

from __future__ import annotations

import sys
import weakref

import torch
from torch import Tensor

from ..engine.memory import free_memory

SYSTEM_PAGE = 4096  # bytes; the driver pins whole pages


class HostPages:
    """Pages in host memory, pinned for a GPU.

    Torch rounds pinned memory up to a power of two. So this is ordinary memory of the exact size,
    registered with the driver.

    Args:
        num_pages: number of rows, all zeros at first.
        page_bytes: bytes of a row.
        device: device that copies to and from the rows.

    Attributes:
        rows: [num_pages, page_bytes] uint8.
        num_bytes: bytes of all rows.

    Raises:
        MemoryError: not enough free memory, or the driver does not pin it.
    """

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_pages * page_bytes
        if sys.platform == "linux" and self.num_bytes > (free := free_memory(torch.device("cpu"))):
            raise MemoryError(
                f"expected host memory for {num_pages} pages of {page_bytes} bytes, "
                f"{self.num_bytes / 2**30:.4g} GiB, and {free / 2**30:.4g} GiB are free"
            )
        memory = torch.zeros(self.num_bytes + SYSTEM_PAGE, dtype=torch.uint8)
        whole = memory[-memory.data_ptr() % SYSTEM_PAGE :][: self.num_bytes]
        self.rows = whole.view(num_pages, page_bytes)
        if device.type == "cuda":
            _pin(whole, device)
            weakref.finalize(self, _unpin, whole)


def _pin(memory: Tensor, device: torch.device) -> None:
    """Has the driver pin memory, so that it moves without a copy in between.

    Raises:
        MemoryError: it does not.
    """
    with torch.cuda.device(device):
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if status:
        raise MemoryError(
            f"expected {memory.numel() / 2**30:.4g} GiB of host memory that the driver pins, got "
            f"CUDA error {status} of cudaHostRegister (is there a limit of locked memory?)"
        )


def _unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
