"""Kernel launches, and the devices that they are for.

Named tuples (`strided`) are one argument of a kernel. Triton specialises each field by its value,
whatever ``do_not_specialize`` says: an integer that changes from step to step stays an argument of
its own, or each new value would compile a new kernel.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton import knobs
from triton.runtime import JITFunction

from .arch import Arch, named

# Triton 3.10 will not fuse multiplications and additions unless told to, and 3.9 warns of that.
OPTIONS = {"enable_fp_fusion": True}
# For kernels that sum products over lanes. Where two lanes each add the other's product to their
# own, fused, the sums differ in the last bit, and both lanes store theirs to the same shared
# memory.
EQUAL_SUMS = {"enable_fp_fusion": False}


def launch(kernel: JITFunction, grid: tuple[int, ...], /, **arguments: Any) -> None:
    """Launch a kernel on the current device and stream; an empty grid runs nothing."""
    if min(grid) <= 0:
        return
    if torch.version.hip is None:
        kernel[grid](**OPTIONS | arguments)
        return
    with without_buffer_operations():
        kernel[grid](**OPTIONS | arguments)


@contextmanager
def without_buffer_operations() -> Iterator[None]:
    """Compile for AMD without buffer instructions, whose offsets have 32 bits.

    With them, Triton compiles a kernel again for each set of tensors larger than 2 GiB.
    Triton 3.7.1 fails where a kernel chooses between pointers into two such tensors.
    """
    with knobs.amd.scope():
        knobs.amd.use_buffer_ops = False
        yield


# What CPU tensors (the Triton interpreter) are launched for.
INTERPRETER_ARCH = named("sm_90")
INTERPRETER_SMS = 2


def arch_and_sms(tensor: torch.Tensor) -> tuple[Arch, int]:
    """The architecture of a tensor's device, and its streaming multiprocessors (AMD: CUs)."""
    if not tensor.is_cuda:
        return INTERPRETER_ARCH, INTERPRETER_SMS
    properties = torch.cuda.get_device_properties(tensor.device)
    return arch_of(tensor.device), properties.multi_processor_count


def arch_of(device: torch.device | int | None = None) -> Arch:
    """The architecture of a GPU, NVIDIA's or (under ROCm) AMD's; None: the current device."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is None:
        return named(f"sm_{properties.major}{properties.minor}")
    return named(properties.gcnArchName)
