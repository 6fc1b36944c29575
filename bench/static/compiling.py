"""Kernels of the cases, compiled for architectures that this machine need not have."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from quire.kernels.common import launching
from quire.kernels.common.arch import Arch, named

from . import amdgcn, sass, ttgir
from .cases import PIPELINED, StaticCase, all_cases, launches_of
from .limits import SIMDS, resident_programs, resident_workgroups


def specialise(
    launch: Any,
) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any], dict[str, Any]]:
    """Signature, constants, divisibility hints and options that Triton's launcher derives from
    these arguments; constants and hints by the index of an argument, and of a tuple's field."""
    from quire.kernels.common.launching import OPTIONS

    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        else:
            signature[parameter.name] = _specialise(
                value, not parameter.do_not_specialize, (index,), constants, attributes
            )
    options = {k: v for k, v in launch.arguments.items() if k not in launch.kernel.arg_names}
    return signature, constants, attributes, options | OPTIONS


def _specialise(
    value: Any, special: bool, path: tuple[int, ...], constants: Any, attributes: Any
) -> Any:
    """Type of one argument, or of a named tuple's fields, which are always specialised."""
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    pointer = {
        torch.bfloat16: "*bf16",
        torch.float16: "*fp16",
        torch.float32: "*fp32",
        torch.float64: "*fp64",
        torch.int32: "*i32",
        torch.int64: "*i64",
        torch.uint8: "*u8",
        torch.uint16: "*u16",
    }
    if isinstance(value, tuple):
        return value._make(
            _specialise(field, True, (*path, i), constants, attributes)
            for i, field in enumerate(value)
        )
    if value is None or (type(value) is int and value == 1 and special):
        constants[path] = value
        return "constexpr"
    if isinstance(value, torch.Tensor):
        kind = pointer[value.dtype]
        # The caching allocator aligns to 512 bytes; a view at an offset keeps what its offset has.
        divisible = value.storage_offset() * value.element_size() % 16 == 0
    elif isinstance(value, TensorDescriptor):
        if len(path) > 1:
            raise NotImplementedError("Triton launches no tensor descriptor within a tuple")
        kind, divisible = f"tensordesc<{pointer[value.base.dtype][1:]}{value.block_shape}>", False
    elif isinstance(value, int):
        kind = "i32" if -(2**31) <= value < 2**31 else "i64"
        divisible = special and value % 16 == 0
    else:
        kind, divisible = "fp32", False
    if divisible:
        attributes[path] = [["tt.divisibility", 16]]
    return kind


def distinct(
    archs: Sequence[str], only: str = "", samples: Sequence[str] = (), tiles: Sequence[str] = ()
) -> list[tuple[str, str, int]]:
    """(case's name, arch, index of the launch): all cases for ``archs``, the samples for
    ``samples``, and for ``tiles`` one launch of each kernel, dtype and tile shape.

    What an earlier one compiles to as well is left out; samples come first, so that a kernel goes
    by one name in every run.

    Args:
        only: what the names of the cases contain.
    """
    work, seen = [], set()
    cases = sorted(all_cases().items(), key=lambda item: not item[1].sample)
    for arch in (*archs, *tiles, *samples):
        for name, case in cases:
            if only not in name or (arch in samples and not case.sample):
                continue
            for index, launch in enumerate(launches_of(case, named(arch))):
                kernel, head_dim = launch.kernel.__name__, launch.values.get("HEAD_DIM")
                keys = [(arch, kernel, repr(specialise(launch)))]
                if arch in tiles:
                    keys.append((arch, kernel, case.dtype, head_dim, config(launch)))
                for key in keys:
                    if key in seen:
                        break
                    seen.add(key)
                else:
                    work.append((name, arch, index))
    return work


def key(name: str, arch: str, index: int) -> str:
    """What decides a row, in 16 hex digits: with another Triton, another source of the kernel or of
    what it calls, other arguments or another way of reading what is compiled they differ.

    Args:
        name, arch, index: as of ``measure``.
    """
    import triton

    case = all_cases()[name]
    launch = case.launches(named(arch))[index]
    sizes = (case.dtype, case.key_bytes, case.scale_bytes, case.min_copy_bytes)
    parts = (
        triton.__version__, launch.kernel.cache_key, specialise(launch), config(launch),
        named(arch), sizes, _readers(named(arch).maker),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@cache
def _readers(maker: str) -> str:
    """A hash of the modules that make a row of what Triton gives, for the GPUs of a maker."""
    own = {"nvidia": ("sass", "ttgir"), "amd": ("amdgcn",)}[maker]
    folder = Path(__file__).parent
    files = [folder / f"{name}.py" for name in ("compiling", "limits", *own)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def config(launch: Any) -> str:
    """Tile shape, warps and stages of a launch, and v2 where two programs share a query tile."""
    values, parts = launch.values, value_parts(launch)
    tile = "x".join(str(values[name]) for name in ("BLOCK_M", "BLOCK_N") if name in values)
    # Triton's own defaults, where the launch does not say.
    text = f"{tile} w{values.get('num_warps', 4)} s{values.get('num_stages', 3)}"
    return f"{text} v{parts}".strip() if parts > 1 else text.strip()


def value_parts(launch: Any) -> int:
    """Programs that share a query tile, each with a part of the values."""
    values = launch.values
    return values["HEAD_DIM"] // values["VALUE_DIM"] if "VALUE_DIM" in values else 1


def measure(name: str, arch: str, index: int) -> dict[str, Any]:
    """Compile a kernel of a case for an architecture: its row of the report.

    Args:
        name: of the case.
        index: of the kernel among the case's launches.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    started = processor_seconds()
    case = all_cases()[name]
    launch = case.launches(named(arch))[index]
    kernel = launch.kernel.__name__.strip("_")
    signature, constants, attributes, options = specialise(launch)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    with launching.without_buffer_operations():
        compiled = triton.compile(source, target=GPUTarget(*named(arch).target), options=options)
    read = _read_nvidia if named(arch).maker == "nvidia" else _read_amd
    return {
        "kernel": kernel,
        "case": name,
        "config": config(launch),
        "arch": arch,
        "dtype": case.dtype,
        "shared_bytes": compiled.metadata.shared,
        "shared_limit": named(arch).shared_memory,
        "min_copy_bytes": case.min_copy_bytes,
        **read(case, launch, named(arch), compiled),
        "triton": triton.__version__,
        "seconds": round(processor_seconds() - started, 2),
    }


def _read_nvidia(case: StaticCase, launch: Any, arch: Arch, compiled: Any) -> dict[str, Any]:
    """The columns of a row that are read from a cubin."""
    import torch

    code, metadata = sass.read(compiled.asm["cubin"]), compiled.metadata
    threads = metadata.num_warps * 32
    resident = resident_programs(
        arch.name,
        code.registers,
        metadata.shared,
        threads,
        getattr(metadata, "tmem_size", None) or 0,
    )
    copy, tiles, in_flight, instructions = 0, 0, 0, None
    if (tile_bytes := _tile_bytes(case, launch)) is not None:
        element_size = getattr(torch, case.dtype).itemsize
        copy = code.copy_bytes(element_size, case.scale_bytes)
        instructions = code.tile_instructions(tile_bytes, threads, case.scale_bytes)
        tiles = ttgir.tiles_in_flight(compiled.asm["ttgir"]) or 0
        in_flight = tile_bytes * tiles * resident
    return {
        "registers": code.registers,
        "accumulators": None,
        "spill_bytes": code.spill_bytes,
        "stack_bytes": code.stack_bytes,
        "scalar_spills": None,
        "ctas_per_sm": resident,
        "waves_per_simd": None,
        "mma": code.mma,
        "loads": None,
        "kv_copy_bytes": copy,
        "tiles_in_flight": tiles,
        "bytes_in_flight_per_sm": in_flight,
        "sass_per_tile": instructions,
    }


def _read_amd(case: StaticCase, launch: Any, arch: Arch, compiled: Any) -> dict[str, Any]:
    """The columns of a row that are read from AMD assembly; those in flight are not known."""
    code, metadata = amdgcn.read(compiled.asm["amdgcn"]), compiled.metadata
    resident = resident_workgroups(arch.name, code.registers, metadata.shared, metadata.num_warps)
    loads, copy, instructions = "", 0, None
    if (tile_bytes := _tile_bytes(case, launch)) is not None:
        loads, copy = code.loads(), code.load_bytes()
        instructions = code.tile_instructions(tile_bytes, metadata.num_warps * arch.lanes)
    return {
        "registers": code.registers,
        "accumulators": code.accumulators,
        "spill_bytes": 4 * code.spilled,
        "stack_bytes": code.scratch_bytes,
        "scalar_spills": code.scalar_spills,
        "ctas_per_sm": resident,
        "waves_per_simd": resident * metadata.num_warps // SIMDS,
        "mma": code.mma,
        "loads": loads,
        "kv_copy_bytes": copy,
        "tiles_in_flight": 0,
        "bytes_in_flight_per_sm": 0,
        "sass_per_tile": instructions,
    }


def _tile_bytes(case: StaticCase, launch: Any) -> int | None:
    """Bytes of a K/V tile, without scales; None of a kernel without such tiles."""
    if not launch.kernel.__name__.endswith(PIPELINED):
        return None
    tile_bytes, parts = launch.values["BLOCK_N"] * case.key_bytes, value_parts(launch)
    if parts > 1:  # all of a key, and a part of its values
        tile_bytes = tile_bytes * (parts + 1) // (2 * parts)
    return int(tile_bytes)


def processor_seconds() -> float:
    """Processor time of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def attempt(name: str, arch: str, index: int) -> dict[str, Any] | str:
    """``measure``, or what to say of a kernel that does not compile."""
    try:
        return measure(name, arch, index)
    except OSError:  # a full disk says nothing of the kernel
        raise
    except Exception as error:
        return f"{name} {arch}: does not compile: {type(error).__name__}: {error}"
