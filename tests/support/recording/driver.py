"""Triton's own launcher without a GPU: a stand-in for the library that it calls, libcuda or HIP's
libamdhip64, and CPU tensors that pass for those of a GPU.

What launches send is recorded, and nothing is computed. Kernels are not compiled either, which
would take seconds each: a compiled kernel is what its launcher needs to know, under a name that
tells all that it would be compiled for.
"""

import ctypes
import hashlib
import json
import re
import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

from quire.kernels.common.arch import Arch

SMS = {
    "sm_90": 132,
    "gfx942": 132,
    "gfx1100": 132,
}  # what the calls of bench.overhead have workspaces for
STREAM = 0x1230  # of the device, while no other one is the current
SIZES = {"i1": 1, "i8": 1, "u8": 1, "i16": 2, "i32": 4, "u32": 4, "fp32": 4, "i64": 8, "u64": 8}
DESCRIPTOR = re.compile(r"tensordesc<([a-z]+)(\d+)\[([\d, ]+)\]>")


def missing() -> str:
    """What this machine lacks to build a launcher; empty: nothing."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    lacks = [] if shutil.which("gcc") else ["gcc"]
    lacks += [] if header.exists() else [str(header)]
    return f"Triton's launcher needs {' and '.join(lacks)}" if lacks else ""


class Launched(NamedTuple):
    """What a driver was told: ``shape`` is grid to attributes as libcuda.c writes them."""

    kernel: str
    shape: str
    parameters: list[str]


class Driver:
    """Installs the stand-in for this process; Triton must not have looked for a driver yet.

    Args:
        folder: of what is built: the library, and Triton's modules.
        arch: of the GPU that there seems to be.
    """

    def __init__(self, folder: Path, arch: Arch):
        import triton
        from triton import knobs
        from triton.backends.amd import driver as amd_driver
        from triton.backends.nvidia import driver as nvidia_driver

        self.arch, hip = arch, arch.maker == "amd"
        include = Path((amd_driver if hip else nvidia_driver).__file__).with_name("include")
        name, source = ("libamdhip64.so", "libamdhip64.c") if hip else ("libcuda.so.1", "libcuda.c")
        library = folder / name
        macros = [f'-DARCH="{arch.name}"', f"-DUNITS={SMS[arch.name]}", f"-DLANES={arch.lanes}"]
        soname = f"-Wl,-soname,{name}"  # what Triton's modules ask for is loaded already
        subprocess.run(
            ["gcc", "-O1", "-shared", "-fPIC", soname, f"-I{include}", *macros, Path(__file__).with_name(source), "-o", library],
            check=True,
        )  # fmt: skip
        if hip:
            knobs.amd.libhip_path = str(library)
            torch.version.hip = "7.0"
        else:
            knobs.nvidia.libcuda_path = str(folder)
        knobs.cache.dir = str(folder / "cache")
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._library.recorded.restype = ctypes.c_char_p
        self._folder = folder
        self.stream, self.compiled = STREAM, 0
        triton.compiler.compile = self._compile
        self._pretend()

    def _pretend(self):
        torch.cuda.is_available = lambda: True
        torch.cuda.current_device = lambda: 0
        torch.cuda.set_device = lambda device: None
        torch.cuda.synchronize = lambda device=None: None
        # ROCm's torch has a capability, too: that of gfx942 is 9.4.
        torch.cuda.get_device_capability = lambda device=None: (major, minor)
        major, minor = (9, 0) if self.arch.maker == "nvidia" else (9, 4)
        properties = SimpleNamespace(
            major=major, minor=minor, multi_processor_count=SMS[self.arch.name], name="none"
        )
        if self.arch.maker == "amd":
            properties.gcnArchName = f"{self.arch.name}:sramecc+:xnack-"
        torch.cuda.get_device_properties = lambda device=None: properties
        torch._C._cuda_getCurrentRawStream = lambda device: self.stream

    def tensors_are_of_a_gpu(self):
        """From here on; they are made as those of a CPU, before and after."""
        torch.Tensor.is_cuda = property(lambda tensor: True)
        torch.Tensor.is_cpu = property(lambda tensor: False)
        torch.Tensor.get_device = lambda tensor: 0

    def launches(self) -> list[Launched]:
        """Those since this was last asked."""
        lines = self._library.recorded().decode().splitlines()
        self._library.forget(1)
        found = [line.split(" ") for line in lines]
        return [Launched(kernel, " ".join(more[:5]), more[5:]) for kernel, *more in found]

    def record_nothing(self):
        """Launches are dropped from here on, until ``launches`` is called."""
        self._library.forget(0)

    def _compile(self, src, target, options):
        """In place of ``triton.compile``, whose arguments these are."""
        from triton.compiler import CompiledKernel

        self.compiled += 1
        sizes, descriptors = [], []
        for argument in src.signature.values():
            _parameters(argument, sizes, descriptors)
        sizes += [8, 8]  # scratch memory, which Triton adds
        hip = self.arch.maker == "amd"
        attributes = {path: value for path, value in src.attrs.items() if value}
        name = identity(src.fn, src.signature, src.constants, attributes, options)
        metadata = {
            "name": name, "target": vars(target), "warp_size": target.warp_size, "shared": 1024, "tmem_size": 0,
            "tensordesc_meta": descriptors, "global_scratch_size": 0, "global_scratch_align": 1,
            "profile_scratch_size": 0, "profile_scratch_align": 1,
        }  # fmt: skip
        described, code = (
            self._folder / f"{name}.json",
            self._folder / f"{name}.{'hsaco' if hip else 'cubin'}",
        )
        described.write_text(json.dumps(options | metadata, default=str))
        code.write_bytes(struct.pack(f"{len(sizes) + 1}I", len(sizes), *sizes))
        return CompiledKernel(src, {path.name: path for path in (described, code)}, name)


def identity(kernel, signature, constants, attributes, options) -> str:
    """A name that two kernels share which compile to the same."""
    parts = (sorted(part.items()) for part in (constants, attributes, options))
    text = repr((kernel.module, dict(signature), *parts))
    return f"{kernel.__name__}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def offline(launch, arch: Arch) -> str:
    """``identity`` of what ``bench.static`` compiles for a launch on an architecture."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    from quire.bench.static.compiling import specialise

    signature, constants, attributes, options = specialise(launch)
    options = vars(make_backend(GPUTarget(*arch.target)).parse_options(options))
    return identity(launch.kernel, signature, constants, attributes, options)


def parameters(signature) -> list[int]:
    """Bytes of each parameter of a kernel, those of scratch memory left out."""
    sizes: list[int] = []
    for argument in signature.values():
        _parameters(argument, sizes, [])
    return sizes


def _parameters(argument, sizes, descriptors):
    """Adds an argument's parameters to ``sizes``, and what is known of a tensor descriptor."""
    if isinstance(argument, tuple):
        for field in argument:
            _parameters(field, sizes, descriptors)
    elif found := DESCRIPTOR.fullmatch(argument):
        _, bits, shape = found.groups()
        shape = [int(n) for n in shape.split(",")]
        sizes += [128, *[4] * len(shape), *[8] * len(shape)]
        size = {"elem_size": int(bits) // 8, "elem_type": 10, "block_size": shape}
        descriptors.append({**size, "swizzle": 0, "fp4_padded": False})
    elif argument != "constexpr":
        sizes.append(8 if argument.startswith("*") else SIZES[argument])
