"""What is read from AMD assembly, on a text that has each thing once."""

import pytest

from quire.bench.static import amdgcn, limits, rules

TEXT = """
	.text
decode_kernel:
; %bb.0:
	s_load_dwordx2 s[0:1], s[4:5], 0x0
	global_load_dword v1, v0, s[0:1]
	v_fma_f32 v1, v1, v1, v1
.LBB0_1:                                ; =>This Loop Header: Depth=1
                                        ;     Child Loop BB0_2 Depth 2
	v_mov_b32_e32 v2, 0
	v_fma_f32 v1, v1, v1, v1
.LBB0_2:                                ;   Parent Loop BB0_1 Depth=1
                                        ; =>  This Inner Loop Header: Depth=2
	global_load_dwordx4 v[4:7], v[2:3], off
	buffer_load_dwordx4 v[8:11], v2, s[8:11], 0 offen
	global_load_ushort v12, v[2:3], off
	v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
	s_cbranch_vccnz .LBB0_4
; %bb.3:                                ;   in Loop: Header=BB0_2 Depth=2
	v_mfma_f32_16x16x16_bf16 v[0:3], v[8:9], v[10:11], v[0:3]
	s_cbranch_scc1 .LBB0_2
.LBB0_4:
	s_endpgm
	.section	.rodata,"a",@progbits
	s_not_an_instruction
amdhsa.kernels:
  - .agpr_count:     16
    .private_segment_fixed_size: 12
    .sgpr_spill_count: 2
    .vgpr_count:     272
    .vgpr_spill_count: 3
"""
# As RDNA names its instructions; behind the loop is a block that nothing jumps to.
RDNA_TEXT = """
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	global_load_b128 v[4:7], v[2:3], off
	global_load_u16 v8, v[2:3], off
	global_load_u16 v9, v[2:3], off
	global_load_u16 v10, v[2:3], off
	global_load_u16 v11, v[2:3], off
	v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[16:23], v[0:7]
	v_wmma_f32_16x16x16_bf16 v[0:7], v[8:15], v[16:23], v[0:7]
	v_wmma_f32_16x16x32_fp8 v[0:7], v[8:15], v[16:23], v[0:7]
	s_cbranch_scc1 .LBB0_1
; %bb.2:
	global_load_b128 v[4:7], v[2:3], off
	s_endpgm
"""


def test_a_kernel_is_read():
    code = amdgcn.read(TEXT)
    assert (code.registers, code.accumulators, code.scratch_bytes) == (272, 16, 12)
    assert (code.spilled, code.scalar_spills, code.mma) == (3, 2, "mfma 16x16x16")
    assert [len(loop) for loop in code.loops] == [2, 7] and sum(code.opcodes.values()) == 13
    assert code.tile_loops == [code.loops[1]]  # of the loops with arithmetic alone, none


def test_loads_of_page_ids_are_no_copies_of_keys():
    """Two bytes of 34 are less than a sixth."""
    code = amdgcn.read(TEXT)
    assert code.loads() == "buffer 16, global 16" and code.load_bytes() == 16
    # 64 lanes load 2 KiB in an iteration of 7 instructions.
    assert code.tile_instructions(2048, 64) == 7 and code.tile_instructions(1024, 64) == 4
    assert code.tile_instructions(1500, 64) is None and code.tile_instructions(4096, 64) is None
    narrow = amdgcn.read(TEXT.replace("_load_dwordx4", "_load_ushort"))
    assert narrow.load_bytes() == 2


def test_a_kernel_of_rdna_is_read():
    code = amdgcn.read(RDNA_TEXT)
    assert code.mma == "wmma 16x16x16"  # the one used most
    assert [len(loop) for loop in code.loops] == [9]
    # 8 bytes of 24 in fours of two.
    assert code.loads() == "global 2, global 16" and code.load_bytes() == 2
    assert code.tile_instructions(24 * 32, 32) == 9
    assert code.tile_instructions(48 * 32, 32) is None  # half a tile
    without = amdgcn.read(RDNA_TEXT.replace("global_load", "v_load"))
    assert without.mma == code.mma and without.tile_instructions(2048, 32) is None


def test_without_matrix_instructions():
    fma = "\n\tv_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[0:1]\n"
    assert amdgcn.read(fma).mma == "fma" and amdgcn.read("\n\ts_endpgm\n").mma == "-"


@pytest.mark.parametrize(
    ("arguments", "programs"),
    [
        (("gfx942", 128, 16384, 4), 4),  # 4 waves a SIMD, and 64 KiB of LDS hold 4
        (("gfx942", 129, 0, 4), 3),
        (("gfx942", 72, 0, 4), 7),  # registers come by 8
        (("gfx942", 64, 32768, 4), 2),
        (("gfx942", 512, 65536, 4), 1),
        (("gfx942", 300, 0, 8), 0),  # two waves a SIMD would need 600
        (("gfx950", 64, 65536, 4), 2),
        (("gfx1100", 192, 0, 4), 8),
        (("gfx1201", 20, 0, 4), 16),
        (("gfx1201", 20, 65536, 8), 2),
    ],
)
def test_resident_workgroups(arguments, programs):
    assert limits.resident_workgroups(*arguments) == programs


def test_rules_on_amd():
    """Spills, LDS and room; what is in flight is not known there."""
    row = {
        "kernel": "decode_kernel", "case": "c", "config": "16x64 w4 s3", "arch": "gfx942", "dtype": "bfloat16", "registers": 200,
        "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 65536, "shared_limit": 65536, "ctas_per_sm": 1, "mma": "mfma 16x16x16",
        "kv_copy_bytes": 2, "min_copy_bytes": 16, "tiles_in_flight": 0, "bytes_in_flight_per_sm": 0,
    }  # fmt: skip
    assert rules.problems(row) == []
    assert rules.problems(row | {"stack_bytes": 8}) == ["spills 0 bytes, stack frame 8 bytes"]
    assert rules.problems(row | {"shared_bytes": 65537, "ctas_per_sm": 0}) == ["needs 65537 bytes of shared memory, limit 65536"]  # fmt: skip
    assert rules.problems(row | {"ctas_per_sm": 0}) == ["cannot be launched: 16x64 w4 s3, 200 registers a thread"]  # fmt: skip
