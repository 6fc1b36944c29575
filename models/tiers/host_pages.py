"""Pages in host memory."""

from __future__ import annotations

import sys
import weakref

import torch
from torch import Tensor

from ..engine.memory import free_memory

SYSTEM_PAGE = 4096  # bytes; the driver pins whole pages


class HostPages:
    """Pages in host memory, which a GPU addresses where there is one (pinned).

    Pinned memory of torch's own allocator would be rounded up to a power of two; so this is ordinary
    memory of exactly as many bytes, which is registered with the driver.

    Args:
        num_pages: rows; what they hold is 0 at first.
        page_bytes: of a row.
        device: that copies to and from it.

    Attributes:
        rows: [num_pages, page_bytes] uint8.
        num_bytes: of all memory.

    Raises:
        MemoryError: there is not so much memory, or the driver does not pin it.
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
