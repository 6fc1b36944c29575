"""Resources of an SM (AMD: a CU), and the programs that it holds at once."""

from __future__ import annotations

from typing import NamedTuple


class SM(NamedTuple):
    """Limits of a GPU's SMs (CUDA programming guide, compute capabilities).

    Attributes:
        count: SMs of the GPU.
        shared: bytes of shared memory.
        threads, programs: most that are resident at once.
    """

    count: int
    shared: int
    threads: int
    programs: int


SMS = {
    "sm_80": SM(108, 164 << 10, 2048, 32),  # A100
    "sm_86": SM(84, 100 << 10, 1536, 16),  # RTX 3090
    "sm_89": SM(142, 100 << 10, 1536, 24),  # RTX 4090
    "sm_90": SM(132, 228 << 10, 2048, 32),  # H100
    "sm_100": SM(148, 228 << 10, 2048, 32),  # B200
    "sm_120": SM(170, 100 << 10, 1536, 24),  # RTX 5090
}
SM_REGISTERS = 65536
# Columns of tensor memory (sm_100), which holds the accumulators of tcgen05.
SM_TENSOR_COLUMNS = 512
# Shared memory that the system keeps for each resident program.
RESERVED_SHARED = 1024

# CUs of MI300X and MI355X, and LDS of a CU; registers of a lane on each of its 4 SIMDs, handed out
# by 8 to at most 8 wavefronts. Source: LLVM's user guide of the AMDGPU backend, and its
# GCNSubtarget.
CU_COUNT = {"gfx942": 304, "gfx950": 256}
CU_SHARED = {"gfx942": 64 << 10, "gfx950": 160 << 10}
CU_REGISTERS, CU_WAVES, CU_SIMDS = 512, 8, 4

NUM_SMS = {name: sm.count for name, sm in SMS.items()} | CU_COUNT
ARCHS = tuple(NUM_SMS)


def resident_programs(
    arch: str, registers: int, shared_bytes: int, threads: int, tensor_columns: int = 0
) -> int:
    """Programs of so many registers a thread that an SM holds at once."""
    sm = SMS[arch]
    bounds = [
        SM_REGISTERS // (_rounded(registers) * threads),
        sm.shared // (shared_bytes + RESERVED_SHARED),
        sm.threads // threads,
        sm.programs,
    ]
    if tensor_columns:
        bounds.append(SM_TENSOR_COLUMNS // tensor_columns)
    return min(bounds)


def resident_workgroups(arch: str, registers: int, shared_bytes: int, num_warps: int) -> int:
    """Programs that a CU holds at once; registers of a lane, with those for accumulators."""
    waves = min(CU_WAVES, CU_REGISTERS // _rounded(registers)) * CU_SIMDS
    return min(waves // num_warps, CU_SHARED[arch] // max(shared_bytes, 1))


def _rounded(registers: int) -> int:
    """Registers as they are handed out, by 8."""
    return -(-max(registers, 1) // 8) * 8
