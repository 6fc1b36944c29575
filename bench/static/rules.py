"""The rules that a compiled kernel has to keep, and the limits of an SM."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import sass

# Of an SM: shared memory, threads and programs it can hold (CUDA programming guide, compute
# capabilities table).
SM_SHARED = {"sm_80": 164 << 10, "sm_86": 100 << 10, "sm_89": 100 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10, "sm_120": 100 << 10}  # fmt: skip
SM_THREADS = {"sm_80": 2048, "sm_86": 1536, "sm_89": 1536, "sm_90": 2048, "sm_100": 2048, "sm_120": 1536}  # fmt: skip
SM_PROGRAMS = {"sm_80": 32, "sm_86": 16, "sm_89": 24, "sm_90": 32, "sm_100": 32, "sm_120": 24}
SM_REGISTERS = 65536
# Columns of tensor memory (sm_100), where tcgen05 keeps its accumulators.
SM_TENSOR_COLUMNS = 512
# Shared memory that the system keeps for each resident program.
RESERVED_SHARED = 1024
# Little's law for an H200: about 4.8 TB/s * 1 us over 132 SMs.
MIN_BYTES_IN_FLIGHT = 36 << 10
# Architectures with 99 KiB of shared memory for a program. Of compressed attention over fp8 pages no
# shape fits there that overlaps: the loop over the step's own rows is not pipelined with swapped
# products, and without the swap 4 warps spill and 8 copy the rotated channels 8 bytes at a time.
SMALL = ("sm_86", "sm_89", "sm_120")
PIPELINED = ("prefill_kernel", "decode_kernel", "scores_kernel")
# Pages of 48 tokens: which of them each row of a tile is in has to be divided out, and smaller
# tiles, which leave room, cost more. Decode of 64 rows of 512 channels over e4m3: no shape found
# that fits and overlaps; two tiles of 32 rows take as many instructions.
SERIAL_CASES = ("prefill-group-5-odd-pages", "decode-fp8-d512-p128-q16")
# Decode over e4m3 keeps 32 KiB there: tiles of new K/V have two bytes an element, so one stage more
# leaves no room for a second program, and smaller tiles serialise wgmma.
LESS_IN_FLIGHT = ("decode-fp8-d128-p16-q16", "decode-fp8-d128-p128-q16", "decode-fp8-d256-p128-q8", "decode-fp8-d256-p128-q16", "decode-fp8-number-d256")  # fmt: skip


class CuLimits(NamedTuple):
    """What a CU (on RDNA a WGP of two CUs) shares among wavefronts.

    Attributes:
        registers: of each lane, on one SIMD.
        granule: by which they are handed out.
        waves: that a SIMD holds.
        shared: bytes of LDS.
    """

    registers: int
    granule: int
    waves: int
    shared: int


# Source: LLVM's user guide of the AMDGPU backend, and its GCNSubtarget; wavefronts of 64 lanes on
# CDNA, of 32 on RDNA.
CU_LIMITS = {
    "gfx942": CuLimits(512, 8, 8, 64 << 10),
    "gfx950": CuLimits(512, 8, 8, 160 << 10),
    "gfx1100": CuLimits(1536, 24, 16, 128 << 10),
    "gfx1201": CuLimits(1536, 24, 16, 128 << 10),
}
SIMDS = 4  # of a CU of CDNA, and of a WGP of RDNA
# Architectures whose tile tables are not their own yet: what breaks a rule there is shown, and is no
# failure.
NOT_GATED = tuple(CU_LIMITS)


def resident_programs(
    arch: str, registers: int, shared_bytes: int, threads: int, tensor_columns: int = 0
) -> int:
    """Programs that an SM holds at once.

    Args:
        registers: of a thread; the SM hands them out by 8.
        tensor_columns: of a program.
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


def resident_workgroups(arch: str, registers: int, shared_bytes: int, num_warps: int) -> int:
    """Programs that a CU, on RDNA a WGP of two, holds at once.

    Args:
        registers: of a lane, those for accumulators included.
        num_warps: wavefronts of a program.
    """
    limits = CU_LIMITS[arch]
    rounded = -(-max(registers, 1) // limits.granule) * limits.granule
    waves = min(limits.waves, limits.registers // rounded) * SIMDS
    return min(waves // num_warps, limits.shared // max(shared_bytes, 1))


def is_gated(row: dict[str, Any]) -> bool:
    """Whether a broken rule is an error; else it is shown."""
    return row["arch"] not in NOT_GATED


def problems(row: dict[str, Any]) -> list[str]:
    """The rules that a compiled kernel breaks; of those on AMD, the ones on spills, shared memory and
    room."""
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
    if not row["kernel"].endswith(PIPELINED) or row["arch"] in CU_LIMITS:
        return found
    through_registers = row["dtype"] == "float32" and row["kv_copy_bytes"] == 0
    if row["kv_copy_bytes"] < row["min_copy_bytes"] and not through_registers:
        found.append(f"copies K/V {row['kv_copy_bytes']} bytes at a time")
    if row["dtype"] == "float32":
        return found
    fp8_rows = row["kernel"].startswith("compressed") and row["dtype"] == "uint8"
    overlaps = row["tiles_in_flight"] or row["ctas_per_sm"] >= 2
    if not overlaps and not (fp8_rows and row["arch"] in SMALL):
        found.append("copies nothing while it multiplies")
    least = MIN_BYTES_IN_FLIGHT if row["case"] not in LESS_IN_FLIGHT else 32 << 10
    paced = row["kernel"].endswith("decode_kernel") and row["arch"] == "sm_90"
    if paced and row["bytes_in_flight_per_sm"] < least:
        found.append(f"keeps {row['bytes_in_flight_per_sm']} bytes in flight per SM")
    return found
