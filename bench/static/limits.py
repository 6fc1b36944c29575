"""What an SM, or AMD's CU, shares among programs, and how many of them that leaves room for."""

from __future__ import annotations

from typing import NamedTuple

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
