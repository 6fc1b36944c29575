"""What can be known of the kernels without a GPU: compile every shipped configuration offline and table what came out.

    python -m bench.static [--json FILE] [--arch 80 90 100] [--jobs 2] [--only TEXT]

The arguments are those of a real launch over tensors without storage, specialised as Triton's launcher does it, so what is compiled here is
what runs there. Exit status 1 if a kernel spills, needs more shared memory than a program may use, or copies bf16 or
fp16 K/V less than 16 bytes at a time.

Columns: registers a thread; spill, bytes of the stack frame (the kernels have no other use for one); shared memory, and its limit on that
architecture; warps; stages; mma, the tensor-core instruction; copy, bytes of the widest asynchronous K/V copy (0: none, loads go through
registers); flight, KiB of K/V copies in flight per SM: tiles ahead of the one in use, times the programs that registers and shared
memory allow.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

ARCHS = (80, 90, 100)
MORE_ARCHS = (86, 89)
NUM_SMS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148}
# Shared memory of an SM, and threads it can hold (CUDA programming guide, compute capabilities table).
SM_SHARED = {80: 164 << 10, 86: 100 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10}
SM_THREADS = {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048}
SM_REGISTERS = 65536
# Shared memory that the system keeps for each resident program.
RESERVED_SHARED = 1024
MIN_COPY_BYTES = 16
PIPELINED = ("prefill_kernel", "decode_kernel")

MMA = (("UTCHMMA", "tcgen05"), ("HGMMA", "wgmma"), ("HMMA", "mma.sync"), ("FFMA", "fma"))


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


def measure(case: Case, arch: int) -> list[dict[str, Any]]:
    """Compile the kernels of a case for an architecture; one row of the table for each."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from quire.kernels.configs import SHARED_MEMORY

    rows = []
    for launch in launches(case, arch):
        signature, constants, attributes, options = specialise(launch)
        source = ASTSource(launch.kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        registers, stack = _resources(compiled.asm["cubin"])
        opcodes = _opcodes(compiled.asm["cubin"])
        shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
        copy = max((_width(op) for op in opcodes if op.startswith("LDGSTS")), default=0)
        constexprs = launch.arguments
        in_flight = 0.0
        if "BLOCK_N" in constexprs and copy:
            element = constexprs["k_pages"].element_size()
            tile = 2 * constexprs["BLOCK_N"] * case.head_dim * element
            resident = min(
                SM_REGISTERS // (_round_up(registers, 8) * warps * 32),
                SM_SHARED[arch] // (shared + RESERVED_SHARED),
                SM_THREADS[arch] // (warps * 32),
            )
            in_flight = tile * (compiled.metadata.num_stages - 1) * resident / 1024
        rows.append(
            {
                "case": case.name,
                "kernel": launch.kernel.__name__.strip("_"),
                "arch": arch,
                "tile": "x".join(
                    str(constexprs[n]) for n in ("BLOCK_M", "BLOCK_N") if n in constexprs
                ),
                "registers": registers,
                "spill": stack,
                "shared": shared,
                "limit": SHARED_MEMORY[arch],
                "warps": warps,
                "stages": compiled.metadata.num_stages,
                "mma": next(
                    (word for op, word in MMA if any(o.startswith(op) for o in opcodes)), "-"
                ),
                "copy": copy,
                "flight": round(in_flight),
            }
        )
    return rows


def problems(row: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel."""
    found = []
    if row["spill"]:
        found.append(f"spills {row['spill']} bytes")
    if row["shared"] > row["limit"]:
        found.append(f"needs {row['shared']} bytes of shared memory, limit {row['limit']}")
    if row["kernel"] in PIPELINED and row["mma"] != "fma" and row["copy"] < MIN_COPY_BYTES:
        found.append(f"copies K/V {row['copy']} bytes at a time")
    return found


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _tool(name: str, cubin: bytes, *flags: str) -> str:
    """Output of one of the CUDA tools that come with Triton."""
    import triton

    path = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [path, *flags, file.name], capture_output=True, text=True, check=True
        ).stdout


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of stack frame."""
    usage = _tool("cuobjdump", cubin, "-res-usage")
    return int(re.search(r"REG:(\d+)", usage)[1]), int(re.search(r"STACK:(\d+)", usage)[1])


def _opcodes(cubin: bytes) -> collections.Counter[str]:
    """How often each machine instruction occurs."""
    listing = _tool("nvdisasm", cubin, "-c")
    pattern = r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)"
    return collections.Counter(re.findall(pattern, listing))


def _width(opcode: str) -> int:
    """Bytes that one thread copies with an LDGSTS instruction."""
    return next((bits // 8 for bits in (128, 64) if f".{bits}" in opcode), 4)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text."""
    if not rows:
        return "no case"
    head = list(rows[0])
    cells = [head, *([str(row[name]) for name in head] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="also write the table as JSON")
    parser.add_argument(
        "--arch", type=int, nargs="+", choices=ARCHS + MORE_ARCHS, default=list(ARCHS)
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="compile only cases whose name contains this")
    options = parser.parse_args(argv)
    work = [(c, arch) for arch in options.arch for c in cases() if options.only in c.name]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        rows = [row for found in pool.map(measure, *zip(*work, strict=True)) for row in found]
    import triton

    print(f"triton {triton.__version__}; {len(rows)} kernels compiled for {options.arch}")
    print(table(rows))
    failures = [(row, text) for row in rows for text in problems(row)]
    for row, text in failures:
        print(f"FAIL {row['case']} {row['kernel']} sm_{row['arch']}: {text}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"triton": triton.__version__, "rows": rows}, file, indent=1)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
