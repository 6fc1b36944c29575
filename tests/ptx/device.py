"""A Triton driver whose device is the emulator: Triton's own JIT compiles, launches run here.

with emulated("sm_80"):
    kernel[grid](tensors of the CPU, ..)
"""

from __future__ import annotations

import random
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import Autotuner, _allocation, driver
from triton.runtime.interpreter import InterpretedFunction

from .bulk import encode
from .instructions import compile_ptx
from .machine import Machine, Program
from .memory import Fault, Global, extents, merged
from .parse import Unsupported

SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}  # bytes that a program may use
LOCKSTEP = 2048  # threads that run together
_address = torch.Tensor.data_ptr  # `emulated` replaces it
_PACKED = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H",
    "u32": "I", "u64": "Q", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip


class Device:
    """The emulated device.

    Attributes:
        arch: compute capability, as 80.
        orders: random orders in which a launch runs its CTAs; all must give the same bits.
        programs: PTX -> the program that runs for it.
    """

    def __init__(self, arch: int):
        self.arch = arch
        self.orders = 1
        self.random = random.Random(0)
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
        text = compiled.asm["ptx"]
        if text not in self.programs:
            self.programs[text] = compile_ptx(text)
        program = self.programs[text]
        packed = _pack(program, params)
        views = tensors + self._by_address(tensors)
        ranges = merged([r for view in views for r in extents(view)])
        ctas = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
        memory, results = None, set()
        for _ in range(self.orders):
            if memory is not None:
                memory.restore()
            self.random.shuffle(ctas)
            memory = Global(ranges, program.grains["global"], undo=self.orders > 1)
            self._run(program, packed, ctas, grid, metadata, memory)
            results.add(memory.written())
        if len(results) > 1:
            raise Fault(f"{program.kernel.name}: another order of CTAs gives other bits")

    def _run(self, program, packed, ctas, grid, metadata, memory: Global) -> None:
        threads = metadata.num_warps * 32
        step = max(1, LOCKSTEP // threads)
        for first in range(0, len(ctas), step):
            some = ctas[first : first + step]
            Machine(program, packed, some, grid, threads, metadata.shared, memory).run()

    def _by_address(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors that an int64 tensor among the arguments holds the addresses of."""
        tables = (t for t in tensors if t.dtype == torch.int64 and self.named)
        addresses = (address for table in tables for address in table.flatten().tolist())
        found = (self.named[address]() for address in addresses if address in self.named)
        return [tensor for tensor in found if tensor is not None]


def _pack(program: Program, params: list[tuple[str, Any]]) -> bytes:
    places = program.kernel.params.values()
    # After the arguments, Triton has addresses of scratch memory; those of none stay 0.
    if not 0 <= len(places) - len(params) <= 2:
        raise Unsupported(f"{len(places)} parameters, {len(params)} arguments")
    packed = bytearray(program.kernel.param_bytes)
    for offset, (code, value) in zip(places, params, strict=False):
        struct.pack_into("<" + code, packed, offset, value)
    return bytes(packed)


class Launcher:
    """The object that Triton calls to launch a kernel."""

    def __init__(self, compiled: CompiledKernel):
        self.compiled = compiled
        self.types = list(compiled.src.signature.values())

    def __call__(
        self, x, y, z, stream, function, packed, launch_metadata, enter, leave, *arguments
    ):
        metadata, device = self.compiled.metadata, driver.active.emulated
        if metadata.shared > SHARED_MEMORY[device.arch]:
            raise Fault(f"{metadata.name}: {metadata.shared} bytes of shared memory")
        params: list[tuple[str, Any]] = []
        tensors: list[torch.Tensor] = []

        def add(kind, value) -> None:
            if isinstance(kind, tuple):
                for part, item in zip(kind, value, strict=True):
                    add(part, item)
            elif kind == "constexpr":
                return
            elif kind.startswith("tensordesc"):
                tensors.append(value.base)
                params.extend(_descriptor(value, next(metas, None)))
            elif kind[0] == "*":
                params.append(("Q", 0 if value is None else _address(value)))
                if value is not None:
                    tensors.append(value)
            elif kind in _PACKED:
                params.append((_PACKED[kind], value))
            else:
                raise Unsupported(f"{metadata.name}: an argument of type {kind}")

        metas = iter(getattr(metadata, "tensordesc_meta", None) or ())
        for kind, value in zip(self.types, arguments, strict=True):
            add(kind, value)
        if size := metadata.global_scratch_size:
            allocate = _allocation._allocator.get()
            scratch = allocate(x * y * z * size, metadata.global_scratch_align, stream)
            params.append(("Q", _address(scratch)))
            tensors.append(scratch)
        device.launch(self.compiled, metadata, (x, y, z), params, tensors)


def _descriptor(value, meta: dict | None) -> list[tuple[str, Any]]:
    """Parameters of a `TensorDescriptor`; meta: None where the kernel has no tensor maps."""
    base, nan = _address(value.base), value.padding == "nan"
    shape, strides = value.shape, value.strides
    sizes = [("i", n) for n in shape] + [("q", n) for n in strides]
    if meta is not None:
        return [("128s", encode(base, meta, shape, strides, nan)), *sizes]
    wide = [("q", n) for n in (*shape, *strides)]
    flags = [nan, value.round_f32_to_tf32] if hasattr(value, "round_f32_to_tf32") else [nan]
    return [("Q", base), *wide, *(("b", flag) for flag in flags), *sizes]


def _without_assembler(backend=None, stages=None, *_):
    """Hook of Triton's compiler: no cubin is made, which nothing here reads."""
    if backend is None:
        return "ptx only", "ptx only"
    if "cubin" in stages:
        stages["cubin"] = lambda source, metadata: b""
    return None


@contextmanager
def emulated(arch: str) -> Iterator[Device]:
    """Run Triton's launches on CPU tensors here, compiled for "sm_80" or "sm_90"."""
    if arch not in ("sm_80", "sm_90"):
        raise ValueError(f"arch: expected sm_80 or sm_90, got {arch}")
    device = Device(int(arch.removeprefix("sm_")))
    active = SimpleNamespace(  # what Triton asks of a driver
        emulated=device,
        get_current_target=lambda: GPUTarget("cuda", device.arch, 32),
        get_current_device=lambda: device.arch,  # Triton keeps what it compiled by device
        set_current_device=lambda number: None,
        get_current_stream=lambda number: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
    )

    def refuse(kernel, *_, **__):
        raise RuntimeError(f"{kernel.__name__}: defined with TRITON_INTERPRET=1; expected it unset")

    def init_handles(kernel):
        if kernel.module is None:
            kernel._run = Launcher(kernel)
            kernel.module, kernel.function = "ptx", kernel
            kernel.n_regs, kernel.n_spills, kernel.n_max_threads = 0, 0, 1024

    def data_ptr(tensor):
        address = _address(tensor)
        device.named[address] = weakref.ref(tensor)
        return address

    def run_first(tuner, *arguments, **options):
        tuner.nargs = dict(zip(tuner.arg_names, arguments, strict=False))
        with patch.object(tuner, "configs", tuner.prune_configs(options)[:1]):
            return run(tuner, *arguments, **options)

    run = Autotuner.run
    with (
        patch.object(InterpretedFunction, "run", refuse),
        patch.object(Autotuner, "run", run_first),
        patch.object(CompiledKernel, "_init_handles", init_handles),
        patch.object(torch.Tensor, "data_ptr", data_ptr),
        patch.object(knobs.runtime, "add_stages_inspection_hook", _without_assembler),
        patch.object(driver, "_active", active),
    ):
        yield device
