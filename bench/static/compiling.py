"""Compile kernels for architectures that this machine need not have."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire.kernels.common import launching
from quire.kernels.common.arch import Arch, named

from .cases import all_cases
from .launches import Launch, record
from .limits import resident_programs, resident_workgroups

PRODUCT = r"tt\.dot |warp_group_dot |tc_gen5_mma"  # of tiles, in Triton's GPU dialect


@functools.cache
def binder(kernel: Any, arch: Arch) -> tuple[Any, Callable[..., Any]]:
    """The backend of an architecture, and what Triton's launcher binds arguments with."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget(*arch.target))
    return backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def specialise(launch: Launch, arch: Arch) -> tuple[dict[str, Any], ...]:
    """Signature, constants, divisibility hints and options that Triton's launcher derives from the
    arguments; constants and hints by the index of an argument, and of a tuple's field."""
    backend, bind = binder(launch.kernel, arch)
    with launching.without_buffer_operations():
        bound, kinds, options = bind(**launch.arguments)
        _, *derived = launch.kernel._pack_args(backend, options, bound, kinds, options)
    return (*derived, options)


def distinct(
    archs: Sequence[str], only: str = "", samples: Sequence[str] = (), tiles: Sequence[str] = ()
) -> list[tuple[str, str, int]]:
    """The kernels to compile, each once: (name of the case, architecture, index of the launch).

    Args:
        archs: architectures of all cases.
        only: text in the names of the cases.
        samples: architectures of the samples alone.
        tiles: architectures of one launch for each kernel, phase, dtype, row, tile shape and set of
            arguments that are None.
    """
    work: list[tuple[str, str, int]] = []
    seen: set[tuple[Any, ...]] = set()
    # Samples come first, so that a kernel goes by one name in every run.
    cases = sorted(all_cases().items(), key=lambda item: not item[1].sample)
    for arch in (*archs, *tiles, *samples):
        for name, case in cases:
            if only not in name or (arch in samples and not case.sample):
                continue
            for index, launch in enumerate(record(case.call, named(arch))):
                keys = {(arch, launch.name, repr(specialise(launch, named(arch))))}
                if arch in tiles:
                    named_values = ("HEAD_DIM", "SCORE_DIM", "DECODE")
                    shape = [launch.values.get(name) for name in named_values]
                    absent = tuple(name for name, value in launch.values.items() if value is None)
                    keys.add((arch, launch.name, case.dtype, *shape, absent, config(launch)))
                if not keys & seen:
                    work.append((name, arch, index))
                seen |= keys
    return work


def config(launch: Launch) -> str:
    """Tile shape, warps and stages of a launch, and v2 where the values have two accumulators."""
    values = launch.values
    tile = "x".join(str(values[name]) for name in ("BLOCK_M", "BLOCK_N") if name in values)
    # Triton's own defaults, where the launch does not say.
    text = f"{tile} w{values.get('num_warps', 4)} s{values.get('num_stages', 3)}"
    parts = values.get("HEAD_DIM", 1) // values.get("VALUE_DIM", values.get("HEAD_DIM", 1))
    return f"{text} v{parts}".strip() if parts > 1 else text.strip()


def compile_launch(launch: Launch, arch: Arch) -> Any:
    """Triton's compiled kernel of a launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    *derived, options = specialise(launch, arch)
    source = ASTSource(launch.kernel, *derived)
    with launching.without_buffer_operations():
        return triton.compile(source, target=GPUTarget(*arch.target), options=options)


def usage(launch: Launch, arch: Arch) -> dict[str, Any]:
    """Compile a launch; returns what the kernel takes of an SM, by the names of `measure`."""
    compiled = compile_launch(launch, arch)
    metadata = compiled.metadata
    if arch.maker == "nvidia":
        registers, spill_bytes = _usage(compiled.asm["cubin"])
        serial = serial_loops(compiled.asm["ttgir"]) if metadata.num_stages > 1 else 0
        columns = getattr(metadata, "tmem_size", None) or 0
        threads = metadata.num_warps * 32
        resident = resident_programs(arch.name, registers, metadata.shared, threads, columns)
    else:
        registers, spill_bytes = amd_usage(compiled.asm["amdgcn"])
        serial = 0  # tiles are copied through registers
        resident = resident_workgroups(arch.name, registers, metadata.shared, metadata.num_warps)
    return {
        "config": config(launch),
        "registers": registers,
        "spill_bytes": spill_bytes,
        "shared_bytes": metadata.shared,
        "shared_limit": arch.shared_memory,
        "ctas_per_sm": resident,
        "serial_loops": serial,
        "stages_in_flight": metadata.num_stages - 1,
    }


def measure(name: str, arch: str, index: int) -> dict[str, Any]:
    """Compile one launch of the case of this name; returns its row of the report."""
    import triton

    started = processor_seconds()
    case = all_cases()[name]
    launch = record(case.call, named(arch))[index]
    used = usage(launch, named(arch))
    tile_bytes = launch.values.get("BLOCK_N", 0) * case.key_bytes  # 0: no tiles of keys
    in_flight = int(used.pop("stages_in_flight") * tile_bytes * used["ctas_per_sm"])
    return {
        "kernel": launch.name,
        "case": name,
        "config": used.pop("config"),
        "arch": arch,
        "dtype": case.dtype,
        **used,
        "bytes_in_flight_per_sm": in_flight,
        "triton": triton.__version__,
        "seconds": round(processor_seconds() - started, 2),
    }


def attempt(name: str, arch: str, index: int) -> dict[str, Any] | str:
    """`measure`, or the message of a kernel that does not compile."""
    try:
        return measure(name, arch, index)
    except OSError:  # a full disk says nothing of the kernel
        raise
    except Exception as error:
        return f"{name} {arch}: does not compile: {type(error).__name__}: {error}"


def problems(row: dict[str, Any]) -> list[str]:
    """The rules that a compiled kernel breaks."""
    found = []
    if row["spill_bytes"]:
        found.append(f"spills {row['spill_bytes']} bytes")
    if row["shared_bytes"] > row["shared_limit"]:
        found.append(
            f"needs {row['shared_bytes']} bytes of shared memory, limit {row['shared_limit']}"
        )
    elif not row["ctas_per_sm"]:
        found.append(f"cannot be launched: {row['config']}, {row['registers']} registers a thread")
    if row["serial_loops"]:
        found.append(f"copies no tile ahead in {row['serial_loops']} of its loops")
    return found


def serial_loops(ttgir: str) -> int:
    """Innermost loops that multiply tiles and start no asynchronous copy of the next ones.

    Triton pipelines a loop as a whole or not at all, and says nothing.
    """
    loops: list[tuple[int, list[str]]] = []  # that are open: indentation and lines
    count = 0
    for line in ttgir.splitlines():
        indentation = len(line) - len(line.lstrip())
        if loops and indentation == loops[-1][0] and re.match(r"\s*\}(?! do)", line):
            body = "\n".join(loops.pop()[1])
            copies = re.search(r"async_(tma_)?copy_global_to_local", body)
            count += bool(re.search(PRODUCT, body)) and not copies
        elif re.search(r"scf\.(for|while)", line):
            loops.append((indentation, []))
        elif loops:
            loops[-1][1].append(line)
    return count


def amd_usage(assembly: str) -> tuple[int, int]:
    """Vector registers of a lane with those for accumulators, and bytes that it spills."""
    spilled = _number(r"\.vgpr_spill_count:\s+(\d+)", assembly)
    scratch = _number(r"\.private_segment_fixed_size:\s+(\d+)", assembly)
    return _number(r"\.vgpr_count:\s+(\d+)", assembly), max(4 * spilled, scratch)


def processor_seconds() -> float:
    """Processor time of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack frame, where nothing but spills lies."""
    text = cuobjdump(cubin, "-res-usage")
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)


def cuobjdump(cubin: bytes, option: str) -> str:
    """The output of NVIDIA's tool of this name, which comes with Triton."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [folder / "cuobjdump", option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"expected {pattern!r} in what the compiler says, got {text[:200]!r}")
    return int(found[1])
