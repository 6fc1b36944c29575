"""A Triton driver whose device is the emulator: Triton's own JIT compiles, launches run here.

with emulated("sm_80"):
    kernel[grid](tensors of the CPU, ..)
"""

from __future__ import annotations

import random
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from .instructions import compile_ptx
from .machine import Machine, Program
from .memory import Global, extents, merged
from .parse import Unsupported

SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}  # bytes that a program may use
LOCKSTEP = 2048  # threads that run together
_PACKED = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H",
    "u32": "I", "u64": "Q", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip


@dataclass
class Launch:
    """One launch that has run."""

    kernel: str
    ctas: int
    seconds: float
    ptx: str


class Device:
    """The emulated device.

    Attributes:
        arch: compute capability, as 80.
        launches: launches that have run.
        deadline: time.perf_counter() after which launches raise `Unsupported`.
        orders: random orders in which a launch runs its CTAs; all must give the same bits.
        change: function of PTX text that gives the text to run, for mutations.
    """

    def __init__(self, arch: int):
        self.arch = arch
        self.launches: list[Launch] = []
        self.deadline = float("inf")
        self.orders = 1
        self.random = random.Random(0)
        self.change: Callable[[str], str] = lambda text: text
        self.programs: dict[str, Program] = {}
        # Tensors whose addresses were asked for: tables of addresses may name them.
        self.named: dict[int, weakref.ref] = {}

    def launch(
        self, compiled, metadata, grid, params: list[tuple[str, Any]], tensors: list[torch.Tensor]
    ) -> None:
        """Run a compiled kernel on all CTAs of a grid.

        Args:
            params: (type, value) of each parameter.
            tensors: those that the kernel may touch.
        """
        started = time.perf_counter()
        text = self.change(compiled.asm["ptx"])
        if text not in self.programs:
            self.programs[text] = compile_ptx(text)
        program = self.programs[text]
        packed = _pack(program, params)
        views = tensors + self._by_address(tensors)
        ranges = merged([r for view in views for r in extents(view)])
        ctas = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
        before = [t.untyped_storage().clone() for t in views] if self.orders > 1 else []
        results = []
        for _ in range(self.orders):
            for tensor, storage in zip(views, before, strict=False):
                tensor.untyped_storage().copy_(storage)
            self.random.shuffle(ctas)
            self._run(program, packed, ctas, grid, metadata, Global(ranges, program.global_grain))
            if self.orders > 1:
                results.append([bytes(t.untyped_storage()) for t in views])
        if any(r != results[0] for r in results):
            from .memory import Fault

            raise Fault(f"{program.kernel.name}: another order of CTAs gives other bits")
        seconds = time.perf_counter() - started
        self.launches.append(Launch(program.kernel.name, len(ctas), seconds, compiled.asm["ptx"]))

    def _run(self, program, packed, ctas, grid, metadata, memory: Global) -> None:
        threads = metadata.num_warps * 32
        step = max(1, LOCKSTEP // threads)
        for first in range(0, len(ctas), step):
            if time.perf_counter() > self.deadline:
                raise Unsupported(f"{program.kernel.name}: takes too long")
            some = ctas[first : first + step]
            Machine(program, packed, some, grid, threads, metadata.shared, memory).run()

    def _by_address(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors that an int64 tensor among the arguments holds the addresses of."""
        found = []
        for table in tensors:
            if table.dtype == torch.int64 and self.named:
                for address in table.flatten().tolist():
                    tensor = self.named.get(address, lambda: None)()
                    if tensor is not None:
                        found.append(tensor)
        return found


def _pack(program: Program, params: list[tuple[str, Any]]) -> bytes:
    places = list(program.kernel.params.values())
    # After the arguments, Triton has addresses of scratch memory that no kernel here uses.
    if not 0 <= len(places) - len(params) <= 2:
        raise Unsupported(
            f"{program.kernel.name}: {len(places)} parameters, {len(params)} arguments"
        )
    packed = bytearray(program.kernel.param_bytes)
    for (offset, _), (code, value) in zip(places, params, strict=False):
        struct.pack_into("<" + code, packed, offset, value)
    return bytes(packed)


class Launcher:
    """What Triton calls to launch a kernel."""

    def __init__(self, device: Device, compiled: CompiledKernel):
        self.device, self.compiled = device, compiled
        self.types = list(compiled.src.signature.values())

    def __call__(
        self, x, y, z, stream, function, packed, launch_metadata, enter, leave, *arguments
    ):
        metadata = self.compiled.metadata
        if metadata.global_scratch_size:
            raise Unsupported(f"{metadata.name}: scratch memory")
        params: list[tuple[str, Any]] = []
        tensors: list[torch.Tensor] = []

        def add(kind, value) -> None:
            if isinstance(kind, tuple):
                for part, item in zip(kind, value, strict=True):
                    add(part, item)
            elif kind == "constexpr":
                return
            elif kind[0] == "*":
                params.append(("Q", 0 if value is None else _address(value)))
                if value is not None:
                    tensors.append(value)
            elif kind in _PACKED:
                params.append((_PACKED[kind], value))
            else:
                raise Unsupported(f"{metadata.name}: an argument of type {kind}")

        for kind, value in zip(self.types, arguments, strict=True):
            add(kind, value)
        self.device.launch(self.compiled, metadata, (x, y, z), params, tensors)


_address = torch.Tensor.data_ptr


class _Utils:
    def __init__(self, arch: int):
        self.arch = arch

    def get_device_properties(self, device):
        return {
            "max_shared_mem": SHARED_MEMORY[self.arch], "multiprocessor_count": 2, "warpSize": 32,
            "max_num_regs": 65536, "sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1,
        }  # fmt: skip


class _Driver:
    def __init__(self, device: Device):
        self.device, self.utils = device, _Utils(device.arch)

    def get_current_target(self):
        return GPUTarget("cuda", self.device.arch, 32)

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        pass

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    @staticmethod
    def is_active():
        return True


def _without_assembler(backend=None, stages=None, *_):
    """Hook of Triton's compiler: no cubin is made, which nothing here reads."""
    if backend is None:
        return "ptx only", "ptx only"
    if "cubin" in stages:
        stages["cubin"] = lambda source, metadata: b""
    return None


@contextmanager
def emulated(arch: str) -> Iterator[Device]:
    """Run Triton's launches on CPU tensors here, compiled for an architecture ("sm_80", "sm_90")."""
    device = Device(int(arch.removeprefix("sm_")))

    def init_handles(kernel):
        if kernel.module is None:
            kernel._run = Launcher(device, kernel)
            kernel.module, kernel.function = "ptx", kernel
            kernel.n_regs, kernel.n_spills, kernel.n_max_threads = 0, 0, 1024

    def data_ptr(tensor):
        address = _address(tensor)
        device.named[address] = weakref.ref(tensor)
        return address

    active = driver._active
    saved = CompiledKernel._init_handles, knobs.runtime.add_stages_inspection_hook
    CompiledKernel._init_handles = init_handles
    torch.Tensor.data_ptr = data_ptr
    knobs.runtime.add_stages_inspection_hook = _without_assembler
    driver.set_active(_Driver(device))
    try:
        yield device
    finally:
        CompiledKernel._init_handles, knobs.runtime.add_stages_inspection_hook = saved
        torch.Tensor.data_ptr = _address
        driver._active = active
