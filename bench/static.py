"""What can be known of the kernels without a GPU: compile every shipped configuration offline and table what came out.

    python -m bench.static [--all | --arch 80 90 100] [--only TEXT] [--jobs 2] [--json FILE] [--baseline FILE] [--update]

By default every kernel is compiled for sm_90 once with each of its tile shapes, and for sm_80 and sm_100 a sample that holds every kernel
once or twice. ``--arch`` compiles every case for the architectures named, ``--all`` for sm_80, 86, 90, 100 and 120. The rules below apply to
whatever is compiled.

The arguments are those of a real launch over tensors without storage, specialised as Triton's launcher does it, so what is compiled here is
what runs there. What two cases share is compiled once. Exit status 1 if a kernel breaks one of these rules:

    spills         a kernel stores registers to local memory, or has a stack frame
    shared memory  a program needs more than it may use on that architecture
    room           an SM cannot hold even one program: its threads need more registers than there are
    narrow copies  K/V is copied less than 16 bytes at a time (fp32: where it is copied asynchronously at all; quantised index keys: 8)
    serial wgmma   each wgmma of a product is waited for before the next: ptxas gave up their overlap
    in flight      a 2-byte decode kernel keeps less than 36 KiB of K/V under way per SM on sm_90

A kernel that does not compile fails as well. The baseline, ``bench/results/static/VERSION.json`` of the Triton installed, has all cases on
all architectures; ``--all --update`` makes it anew, ``--arch 80 --update`` its rows of sm_80. The rules decide; the differences from the
baseline are only shown. ``--json`` of any run serves as ``--baseline`` of another; its ``seconds`` are processor time, the compiler's
included, and next to nothing where Triton's cache has the kernel.

Columns: registers of a thread; spill, bytes that a thread spills; stack, bytes of its frame; shared memory of a program, and its limit on
that architecture; ctas, programs that an SM holds at once; warps and stages of a program, and v2 where two share a query tile, each with
half of the values; mma, the matrix instruction ("wgmma, serial": without overlap); copy, bytes of the narrowest asynchronous K/V copy (0: loads go through registers); flight,
KiB of K/V copies under way per SM: tiles ahead of the one in use, times the resident programs; sass, instructions that a warp issues for
one K/V tile, of the first loop over tiles: without masks in prefill, with masks in decode ("-": cannot be told).
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.static")

import argparse
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.models.command import Parser, integer, output_file, program

from . import sass
from .static_cases import ALL_ARCHS, ARCHS, DEFAULT_ARCH, MORE_ARCHS, SAMPLE_ARCHS, all_cases
from .workers import Workers

# Of an SM: shared memory, threads and programs it can hold (CUDA programming guide, compute capabilities table).
SM_SHARED = {80: 164 << 10, 86: 100 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}  # fmt: skip
SM_THREADS = {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}
SM_PROGRAMS = {80: 32, 86: 16, 89: 24, 90: 32, 100: 32, 120: 24}
SM_REGISTERS = 65536
# Columns of tensor memory (sm_100), where tcgen05 keeps its accumulators.
SM_TENSOR_COLUMNS = 512
# Shared memory that the system keeps for each resident program.
RESERVED_SHARED = 1024
# Little's law for an H200: about 4.8 TB/s * 1 us over 132 SMs.
MIN_BYTES_IN_FLIGHT = 36 << 10
PIPELINED = ("prefill_kernel", "decode_kernel", "scores_kernel")
# Pages of 48 tokens: which of them each row of a tile is in has to be divided out, and smaller tiles, which leave room, cost more. Decode of
# 64 rows of 512 channels over e4m3: no shape found that fits and overlaps; two tiles of 32 rows take as many instructions.
SERIAL_CASES = ("prefill-group-5-odd-pages", "decode-fp8-d512-p128-q16")
# Of a row: what says nothing of the kernel.
NOT_COMPARED = ("triton", "seconds")
RESULTS = Path(__file__).parent / "results" / "static"


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
    archs: Sequence[int], only: str = "", samples: Sequence[int] = (), tiles: Sequence[int] = ()
) -> list[tuple[str, int, int]]:
    """(case's name, arch, index of the launch): all cases for ``archs``, the samples for ``samples``, and for ``tiles`` one launch of
    each kernel, dtype and tile shape.

    What an earlier one compiles to as well is left out; samples come first, so that a kernel goes by one name in every run. only: what the
    names of the cases contain.
    """
    work, seen = [], set()
    cases = sorted(all_cases().items(), key=lambda item: not item[1].sample)
    for arch in (*archs, *tiles, *samples):
        for name, case in cases:
            if only not in name or (arch in samples and not case.sample):
                continue
            for index, launch in enumerate(case.launches(arch)):
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


def measure(name: str, arch: int, index: int) -> dict[str, Any]:
    """Compile a kernel of a case for an architecture: its row of the report.

    name: of the case. index: of the kernel among the case's launches.
    """
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from quire.kernels.common.tile_shapes import SHARED_MEMORY

    started = processor_seconds()
    case = all_cases()[name]
    launch = case.launches(arch)[index]
    kernel = launch.kernel.__name__.strip("_")
    signature, constants, attributes, options = specialise(launch)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    code, metadata = sass.read(compiled.asm["cubin"]), compiled.metadata
    threads = metadata.num_warps * 32
    resident = resident_programs(
        arch, code.registers, metadata.shared, threads, getattr(metadata, "tmem_size", None) or 0
    )
    values = launch.values
    copy, in_flight, instructions = 0, 0, None
    parts = value_parts(launch)
    if kernel.endswith(PIPELINED):
        element_size = getattr(torch, case.dtype).itemsize
        tile_bytes = values["BLOCK_N"] * case.key_bytes
        if parts > 1:  # all of a key, and a part of its values
            tile_bytes = tile_bytes * (parts + 1) // (2 * parts)
        copy = code.copy_bytes(element_size, case.scale_bytes)
        instructions = code.tile_instructions(tile_bytes, threads, case.scale_bytes)
        if copy:
            in_flight = tile_bytes * (metadata.num_stages - 1) * resident
    return {
        "kernel": kernel,
        "case": name,
        "config": config(launch),
        "arch": arch,
        "dtype": case.dtype,
        "registers": code.registers,
        "spill_bytes": code.spill_bytes,
        "stack_bytes": code.stack_bytes,
        "shared_bytes": metadata.shared,
        "shared_limit": SHARED_MEMORY[arch],
        "ctas_per_sm": resident,
        "mma": code.mma,
        "kv_copy_bytes": copy,
        "min_copy_bytes": case.min_copy_bytes,
        "bytes_in_flight_per_sm": in_flight,
        "sass_per_tile": instructions,
        "triton": triton.__version__,
        "seconds": round(processor_seconds() - started, 2),
    }


def processor_seconds() -> float:
    """Processor time of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def attempt(name: str, arch: int, index: int) -> dict[str, Any] | str:
    """``measure``, or what to say of a kernel that does not compile."""
    try:
        return measure(name, arch, index)
    except OSError:  # a full disk says nothing of the kernel
        raise
    except Exception as error:
        return f"{name} sm_{arch}: does not compile: {type(error).__name__}: {error}"


def resident_programs(
    arch: int, registers: int, shared_bytes: int, threads: int, tensor_columns: int = 0
) -> int:
    """Programs that an SM holds at once.

    registers: of a thread; the SM hands them out by 8. tensor_columns: of a program.
    """
    bounds = [
        SM_REGISTERS // (-(-registers // 8) * 8 * threads),
        SM_SHARED[arch] // (shared_bytes + RESERVED_SHARED),
        SM_THREADS[arch] // threads,
        SM_PROGRAMS[arch],
    ]
    if tensor_columns:
        bounds.append(SM_TENSOR_COLUMNS // tensor_columns)
    return min(bounds)


def problems(row: dict[str, Any]) -> list[str]:
    """The rules that a compiled kernel breaks."""
    found = []
    if row["spill_bytes"] or row["stack_bytes"]:
        found.append(f"spills {row['spill_bytes']} bytes, stack frame {row['stack_bytes']} bytes")
    if row["shared_bytes"] > row["shared_limit"]:
        found.append(
            f"needs {row['shared_bytes']} bytes of shared memory, limit {row['shared_limit']}"
        )
    elif not row["ctas_per_sm"]:
        found.append(f"cannot be launched: {row['config']}, {row['registers']} registers a thread")
    if row["mma"] == sass.SERIAL and row["case"] not in SERIAL_CASES:
        found.append("waits for each wgmma by itself")
    if not row["kernel"].endswith(PIPELINED):
        return found
    through_registers = row["dtype"] == "float32" and row["kv_copy_bytes"] == 0
    if row["kv_copy_bytes"] < row["min_copy_bytes"] and not through_registers:
        found.append(f"copies K/V {row['kv_copy_bytes']} bytes at a time")
    paced = (
        row["kernel"].endswith("decode_kernel") and row["dtype"] != "float32" and row["arch"] == 90
    )
    if paced and row["bytes_in_flight_per_sm"] < MIN_BYTES_IN_FLIGHT:
        found.append(f"keeps {row['bytes_in_flight_per_sm']} bytes in flight per SM")
    return found


def differences(rows: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> list[str]:
    """What changed against a baseline, one line for each kernel that is in both, and one for those that are new."""

    def named(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Rows by case, kernel and arch; a case may launch a kernel in several ways, which are counted."""
        found: dict[str, dict[str, Any]] = {}
        for row in rows:
            name = first = f"{row['case']} {row['kernel']} sm_{row['arch']}"
            for i in itertools.count(2):
                if name not in found:
                    break
                name = f"{first} ({i})"
            found[name] = row
        return found

    before = named(baseline)
    lines, new = [], 0
    for name, row in named(rows).items():
        old = before.get(name)
        if old is None:
            new += 1
            continue
        changed = [
            f"{key} {old.get(key)} -> {value}"
            for key, value in row.items()
            if value != old.get(key) and key not in NOT_COMPARED
        ]
        if changed:
            lines.append(f"{name}: {', '.join(changed)}")
    if new:
        lines.append(f"{new} kernels are not in the baseline")
    return lines


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text."""
    if not rows:
        return "no case"
    columns = {
        "case": "case", "kernel": "kernel", "arch": "arch", "config": "config", "registers": "registers", "spill": "spill_bytes",
        "stack": "stack_bytes", "shared": "shared_bytes", "limit": "shared_limit", "ctas": "ctas_per_sm", "mma": "mma",
        "copy": "kv_copy_bytes",
    }  # fmt: skip
    cells = [[*columns, "flight", "sass"]]
    for row in rows:
        flight, instructions = row["bytes_in_flight_per_sm"] / 1024, row["sass_per_tile"]
        cells.append(
            [
                *(str(row[key]) for key in columns.values()),
                f"{flight:g}",
                "-" if instructions is None else str(instructions),
            ]
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def write(rows: list[dict[str, Any]], path: str | Path) -> None:
    """Write rows as a JSON list, a row to a line."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    Path(path).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def write_baseline(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows without what is not compared: the names of the columns once, and the values of a row to a line.

    Of what ``path`` has already the rows of other architectures stay.
    """
    archs = {row["arch"] for row in rows}
    kept = [row for row in read(path) if row["arch"] not in archs] if path.exists() else []
    rows = sorted(kept + rows, key=lambda row: row["arch"])
    columns = [name for name in rows[0] if name not in NOT_COMPARED]
    lines = ",\n".join(json.dumps([row[name] for name in columns]) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'{{"columns": {json.dumps(columns)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8"
    )


def read(path: str | Path) -> list[dict[str, Any]]:
    """The rows that ``write`` or ``write_baseline`` has written."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            found = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
        _ = {(row["case"], row["kernel"], row["arch"]) for row in found}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"baseline: expected rows of this program in {str(path)!r}, got {error!r}"
        ) from error
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    options = _parser().parse_args(argv)
    if options.update and (options.only or not (options.arch or options.all)):
        raise ValueError("update: expected --all or --arch without --only")
    if options.update and options.baseline:
        output_file(str(options.baseline))
    return options


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    options = parse(argv)
    import triton

    baseline = options.baseline or RESULTS / f"{triton.__version__}.json"
    before = read(baseline) if baseline.exists() else None
    if options.all or options.arch:
        work = distinct(options.arch or ALL_ARCHS, options.only)
    else:
        work = distinct((), options.only, samples=SAMPLE_ARCHS, tiles=(DEFAULT_ARCH,))
    with Workers(options.jobs) as pool:
        results = list(pool.map(attempt, *zip(*work, strict=True))) if work else []
    rows = [row for row in results if isinstance(row, dict)]
    seconds = sum(row["seconds"] for row in rows)
    print(f"triton {triton.__version__}; {len(rows)} kernels, {seconds:.0f} s of processor time")
    print(table(rows))
    if before is not None:
        changes = differences(rows, before)
        print(f"{len(changes)} differences from {baseline}")
        print(*changes, sep="\n", end="\n" if changes else "")
    if options.json:
        write(rows, options.json)
    if options.update:
        write_baseline(rows, baseline)
    failures = [text for text in results if isinstance(text, str)]
    failures += [
        f"{row['case']} {row['kernel']} sm_{row['arch']}: {text}"
        for row in rows
        for text in problems(row)
    ]
    for text in failures:
        print(f"FAIL {text}")
    return 1 if failures else 0


def _parser() -> Parser:
    parser = Parser(
        "bench.static",
        __doc__.split("\n")[0],
        epilog="By default: every tile shape for sm_90, and a sample with each kernel for sm_80 and sm_100.",
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the rows as a JSON list"
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--all", action="store_true", help=f"every case for sm_{', '.join(map(str, ALL_ARCHS))}"
    )
    chosen.add_argument(
        "--arch", type=integer(), nargs="+", choices=ARCHS + MORE_ARCHS, help="every case for these"
    )
    parser.add_argument("--jobs", type=integer(most=1024), default=os.cpu_count())
    parser.add_argument("--only", default="", help="compile only cases whose name contains this")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="rows to show the differences from; default: those of this Triton")  # fmt: skip
    parser.add_argument("--update", action="store_true", help="make this run the baseline's rows of its architectures")  # fmt: skip
    return parser
