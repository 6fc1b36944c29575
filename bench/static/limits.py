"""Resources of an SM (AMD: a CU), and the programs that it holds at once."""

from __future__ import annotations

# Streaming multiprocessors of A100, RTX 3090, RTX 4090, H100, B200 and RTX 5090; CUs of MI300X and
# MI355X.
NUM_SMS = {
    "sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 170,
    "gfx942": 304, "gfx950": 256,
}  # fmt: skip
ARCHS = tuple(NUM_SMS)
# Shared memory, threads and programs of an SM (CUDA programming guide, compute capabilities).
SM_SHARED = {"sm_80": 164 << 10, "sm_86": 100 << 10, "sm_89": 100 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10, "sm_120": 100 << 10}  # fmt: skip
SM_THREADS = {"sm_80": 2048, "sm_86": 1536, "sm_89": 1536, "sm_90": 2048, "sm_100": 2048, "sm_120": 1536}  # fmt: skip
SM_PROGRAMS = {"sm_80": 32, "sm_86": 16, "sm_89": 24, "sm_90": 32, "sm_100": 32, "sm_120": 24}
SM_REGISTERS = 65536
# Columns of tensor memory (sm_100), which holds the accumulators of tcgen05.
SM_TENSOR_COLUMNS = 512
# Shared memory that the system keeps for each resident program.
RESERVED_SHARED = 1024

# LDS of a CU; registers of a lane on each of its 4 SIMDs, handed out by 8 to at most 8 wavefronts.
# Source: LLVM's user guide of the AMDGPU backend, and its GCNSubtarget.
CU_SHARED = {"gfx942": 64 << 10, "gfx950": 160 << 10}
CU_REGISTERS, CU_WAVES, CU_SIMDS = 512, 8, 4


def resident_programs(
    arch: str, registers: int, shared_bytes: int, threads: int, tensor_columns: int = 0
) -> int:
    """Programs that an SM holds at once.

    Args:
        registers: of a thread.
        tensor_columns: of a program.
    """
    bounds = [
        SM_REGISTERS // (_rounded(registers) * threads),
        SM_SHARED[arch] // (shared_bytes + RESERVED_SHARED),
        SM_THREADS[arch] // threads,
        SM_PROGRAMS[arch],
    ]
    if tensor_columns:
        bounds.append(SM_TENSOR_COLUMNS // tensor_columns)
    return min(bounds)


def resident_workgroups(arch: str, registers: int, shared_bytes: int, num_warps: int) -> int:
    """Programs that a CU holds at once.

    Args:
        registers: of a lane, with those for accumulators.
        num_warps: wavefronts of a program.
    """
    waves = min(CU_WAVES, CU_REGISTERS // _rounded(registers)) * CU_SIMDS
    return min(waves // num_warps, CU_SHARED[arch] // max(shared_bytes, 1))


def _rounded(registers: int) -> int:
    """Registers as they are handed out, by 8."""
    return -(-max(registers, 1) // 8) * 8
