"""What can be known of the kernels without a GPU: compile every shipped configuration offline and table what came out.

    python -m bench.static [--arch 80 90 100] [--only TEXT] [--jobs 2] [--json FILE] [--baseline FILE] [--update]

The arguments are those of a real launch over tensors without storage, specialised as Triton's launcher does it, so what is compiled here is
what runs there. What two cases share is compiled once. Exit status 1 if a kernel breaks one of these rules:

    spills         a kernel stores registers to local memory, or has a stack frame
    shared memory  a program needs more than it may use on that architecture
    narrow copies  K/V is copied less than 16 bytes at a time (fp32: where it is copied asynchronously at all)
    in flight      a 2-byte decode kernel keeps less than 36 KiB of K/V under way per SM on sm_90

The rules decide; the differences from the baseline are only shown, since registers move between versions of Triton. ``--json`` of any run
serves as ``--baseline`` of another.

Columns: registers of a thread; spill, bytes that a thread spills; stack, bytes of its frame; shared memory of a program, and its limit on
that architecture; ctas, programs that an SM holds at once; warps and stages of a program; mma, the matrix instruction; copy, bytes of the
narrowest asynchronous K/V copy (0: loads go through registers); flight, KiB of K/V copies under way per SM: tiles ahead of the one in use,
times the resident programs; sass, instructions that a warp issues for one K/V tile, of the first loop over tiles: without masks in
prefill, with masks in decode ("-": cannot be told).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.bench import sass

ARCHS = (80, 90, 100)
MORE_ARCHS = (86, 89, 120)
NUM_SMS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 170}
# Of an SM: shared memory, threads and programs it can hold (CUDA programming guide, compute capabilities table).
SM_SHARED = {80: 164 << 10, 86: 100 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}  # fmt: skip
SM_THREADS = {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}
SM_PROGRAMS = {80: 32, 86: 16, 89: 24, 90: 32, 100: 32, 120: 24}
SM_REGISTERS = 65536
# Columns of tensor memory (sm_100), where tcgen05 keeps its accumulators.
SM_TENSOR_COLUMNS = 512
# Shared memory that the system keeps for each resident program.
RESERVED_SHARED = 1024
MIN_COPY_BYTES = 16
# Little's law for an H200: about 4.8 TB/s * 1 us over 132 SMs.
MIN_BYTES_IN_FLIGHT = 36 << 10
PIPELINED = ("prefill_kernel", "decode_kernel")
BASELINE = Path(__file__).with_name("static_baseline.json")


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention call to compile, or the ``merge_partials`` / ``write_kv`` of the same shape."""

    name: str
    head_dim: int
    block_size: int
    phase: str
    dtype: str = "bfloat16"
    group: int = 4
    num_kv_heads: int = 4
    table_width: int = 256
    q_len: int = 1
    fresh: bool = True
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False


def cases() -> list[Case]:
    """Every tile shape of ``select_config`` in both ways of addressing pages, and each feature at least once."""
    table = []
    for head_dim in (16, 32, 64, 128, 256, 512):
        for block_size in (16, 128) if head_dim >= 64 else (16,):
            for q_len in (1, 8, 16) if head_dim >= 64 else (1,):
                table.append(
                    Case(f"decode-d{head_dim}-p{block_size}-q{q_len}", head_dim, block_size, "decode", q_len=q_len)
                )  # fmt: skip
            table.append(
                Case(f"prefill-d{head_dim}-p{block_size}", head_dim, block_size, "prefill")
            )
        table.append(
            Case(f"prefill-d{head_dim}-window", head_dim, 128, "prefill", sliding_window=1024)
        )
        for phase in ("decode", "prefill"):
            table.append(
                Case(f"{phase}-d{head_dim}-fp32", head_dim, 64, phase, dtype="float32", q_len=16)
            )
        table.append(Case(f"merge-d{head_dim}", head_dim, 64, "merge"))
        table.append(Case(f"write-d{head_dim}", head_dim, 64, "write"))
    for phase in ("decode", "prefill"):
        table += [
            Case(f"{phase}-pages-only", 128, 64, phase, fresh=False),
            Case(f"{phase}-pages-only-window", 128, 64, phase, fresh=False, sliding_window=512),
            Case(f"{phase}-window-ring", 256, 64, phase, sliding_window=512),
            Case(f"{phase}-softcap-sinks", 64, 64, phase, softcap=50.0, sinks=True, sliding_window=128),
            Case(f"{phase}-group-5-odd-pages", 128, 48, phase, group=5),
            Case(f"{phase}-fp16", 128, 64, phase, dtype="float16"),
            Case(f"{phase}-mqa-ones", 64, 64, phase, num_kv_heads=1, table_width=1, sliding_window=1),
        ]  # fmt: skip
    return table


def launches(case: Case, arch: int) -> list[Any]:
    """The kernels that a case launches, as ``Launch`` values over tensors without storage."""
    import torch

    from quire.kernels import _check, cache_write, merge, paged

    dtype = getattr(torch, case.dtype)
    num_kv_heads, num_seqs = case.num_kv_heads, 16
    q_len = 1024 if case.phase == "prefill" else case.q_len
    num_heads, num_tokens = num_kv_heads * case.group, num_seqs * q_len

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = (empty(num_tokens, num_kv_heads, case.head_dim) for _ in range(2))
    pool = empty(512, case.block_size, 2, num_kv_heads, case.head_dim)
    k_pages, v_pages = pool.unbind(2)
    lse = empty(num_heads, num_tokens, dtype=torch.float32)
    sinks = empty(num_heads, dtype=torch.float32) if case.sinks else None
    if case.phase == "write":
        slots = empty(num_tokens, dtype=torch.int64)
        return [cache_write.prepare(*rows, k_pages, v_pages, slots)]
    if case.phase == "merge":
        parts = empty(4, num_tokens, num_heads, case.head_dim)
        part_lse = empty(4, num_heads, num_tokens, dtype=torch.float32)
        out = empty(num_tokens, num_heads, case.head_dim)
        return [merge.prepare(parts, part_lse, sinks, out, lse)]
    k, v = rows if case.fresh else (None, None)
    call = _check.check_attention(
        empty(num_tokens, num_heads, case.head_dim),
        k_pages,
        v_pages,
        empty(num_seqs, case.table_width, dtype=torch.int32),
        empty(num_seqs, dtype=torch.int32),
        empty(num_seqs + 1, dtype=torch.int32),
        max_seqlen_q=q_len,
        k=k,
        v=v,
        max_seq_len=None,
        num_decodes=num_seqs if case.phase == "decode" else 0,
        softmax_scale=None,
        softcap=case.softcap,
        sinks=sinks,
        out=None,
        lse=lse,
        workspace=None,
        sliding_window=case.sliding_window,
    )
    return paged.prepare(call, arch, NUM_SMS[arch])


def specialise(
    launch: Any,
) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any], dict[str, int]]:
    """Signature, constants, divisibility hints and options that Triton's launcher derives from these arguments."""
    import torch

    pointer = {
        torch.bfloat16: "*bf16",
        torch.float16: "*fp16",
        torch.float32: "*fp32",
        torch.int32: "*i32",
        torch.int64: "*i64",
    }
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        name, special = parameter.name, not parameter.do_not_specialize
        value = launch.arguments[name]
        divisible = False
        if (
            parameter.is_constexpr
            or value is None
            or (type(value) is int and value == 1 and special)
        ):
            signature[name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = pointer[value.dtype]
            # The caching allocator aligns to 512 bytes; a view at an offset keeps what its offset has.
            divisible = value.storage_offset() * value.element_size() % 16 == 0
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            divisible = special and value % 16 == 0
        else:
            signature[name] = "fp32"
        if divisible:
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {k: v for k, v in launch.arguments.items() if k not in launch.kernel.arg_names}
    return signature, constants, attributes, options


def distinct(archs: Sequence[int], only: str = "") -> list[tuple[Case, int, int]]:
    """(case, arch, index of the launch) of all cases whose name contains ``only``, less what an earlier one compiles to as well."""
    work, seen = [], set()
    for arch in archs:
        for case in cases():
            if only not in case.name:
                continue
            for index, launch in enumerate(launches(case, arch)):
                key = (arch, launch.kernel.__name__, repr(specialise(launch)))
                if key not in seen:
                    seen.add(key)
                    work.append((case, arch, index))
    return work


def measure(case: Case, arch: int, index: int) -> dict[str, Any]:
    """Compile a kernel of a case for an architecture: its row of the report.

    index: of the kernel among ``launches(case, arch)``.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from quire.kernels.configs import SHARED_MEMORY

    launch = launches(case, arch)[index]
    signature, constants, attributes, options = specialise(launch)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    code, metadata = sass.read(compiled.asm["cubin"]), compiled.metadata
    threads = metadata.num_warps * 32
    resident = resident_programs(
        arch, code.registers, metadata.shared, threads, getattr(metadata, "tmem_size", None) or 0
    )
    values = launch.arguments
    copy, in_flight, instructions = 0, 0, None
    if "BLOCK_N" in values:
        element_size = values["k_pages"].element_size()
        tile_bytes = 2 * values["BLOCK_N"] * case.head_dim * element_size
        copy = code.copy_bytes(element_size)
        instructions = code.tile_instructions(tile_bytes, threads)
        if copy:
            in_flight = tile_bytes * (metadata.num_stages - 1) * resident
    tile = "x".join(str(values[name]) for name in ("BLOCK_M", "BLOCK_N") if name in values)
    return {
        "kernel": launch.kernel.__name__.strip("_"),
        "case": case.name,
        "config": " ".join(f"{tile} w{metadata.num_warps} s{metadata.num_stages}".split()),
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
        "bytes_in_flight_per_sm": in_flight,
        "sass_per_tile": instructions,
        "triton": triton.__version__,
    }


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
    if row["kernel"] not in PIPELINED:
        return found
    through_registers = row["dtype"] == "float32" and row["kv_copy_bytes"] == 0
    if row["kv_copy_bytes"] < MIN_COPY_BYTES and not through_registers:
        found.append(f"copies K/V {row['kv_copy_bytes']} bytes at a time")
    paced = row["kernel"] == "decode_kernel" and row["dtype"] != "float32" and row["arch"] == 90
    if paced and row["bytes_in_flight_per_sm"] < MIN_BYTES_IN_FLIGHT:
        found.append(f"keeps {row['bytes_in_flight_per_sm']} bytes in flight per SM")
    return found


def differences(rows: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> list[str]:
    """What changed against a baseline, one line for each kernel that is in both, and one for those that are new."""

    def name(row: dict[str, Any]) -> str:
        return f"{row['case']} {row['kernel']} sm_{row['arch']}"

    before = {name(row): row for row in baseline}
    lines, new = [], 0
    for row in rows:
        old = before.get(name(row))
        if old is None:
            new += 1
            continue
        changed = [
            f"{key} {old.get(key)} -> {value}"
            for key, value in row.items()
            if value != old.get(key) and key != "triton"
        ]
        if changed:
            lines.append(f"{name(row)}: {', '.join(changed)}")
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


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="also write the rows as a JSON list")
    parser.add_argument(
        "--arch", type=int, nargs="+", choices=ARCHS + MORE_ARCHS, default=list(ARCHS)
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="compile only cases whose name contains this")
    parser.add_argument("--baseline", default=BASELINE, help="rows to show the differences from")
    parser.add_argument("--update", action="store_true", help="write the rows to the baseline")
    options = parser.parse_args(argv)
    import triton

    work = distinct(options.arch, options.only)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        rows = list(pool.map(measure, *zip(*work, strict=True))) if work else []
    print(f"triton {triton.__version__}; {len(rows)} kernels compiled for {options.arch}")
    print(table(rows))
    if options.update:
        write(rows, options.baseline)
    elif Path(options.baseline).exists():
        baseline = json.loads(Path(options.baseline).read_text(encoding="utf-8"))
        versions = ", ".join(sorted({row["triton"] for row in baseline}))
        changes = differences(rows, baseline)
        print(f"{len(changes)} differences from {options.baseline} (triton {versions})")
        print(*changes, sep="\n", end="\n" if changes else "")
    if options.json:
        write(rows, options.json)
    failures = [(row, text) for row in rows for text in problems(row)]
    for row, text in failures:
        print(f"FAIL {row['case']} {row['kernel']} sm_{row['arch']}: {text}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
