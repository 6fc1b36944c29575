"""``bench.static.sass`` on a listing written by hand: two nested loops, of which the inner one runs over tiles."""

import dataclasses

import pytest

from quire.bench.static import sass

LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_3) ;
.L_x_0:
        /*0020*/                   LDG.E R2, desc[UR4][R2.64] ;
.L_x_1:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR4][R2.64] ;
        /*0040*/              @P1 LDGSTS.E.BYPASS.128 [R3+0x800], desc[UR4][R2.64] ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0060*/              @!UP0 STL.64 [R1+0x8], R4 ;
        /*0070*/              @P0 BRA `(.L_x_1) ;
        /*0080*/              @P2 BRA `(.L_x_0) ;
.L_x_3:
        /*0090*/                   STL [R1], R4 ;
        /*00a0*/                   EXIT ;
.L_x_4:
        /*00b0*/                   BRA `(.L_x_4);
"""
CODE = sass.Code(40, 16, sass.parse(LISTING))


def changed(old, new):
    assert old in LISTING
    return dataclasses.replace(CODE, lines=sass.parse(LISTING.replace(old, new)))


def test_opcodes_and_spills():
    assert CODE.opcodes["LDGSTS.E.BYPASS.128"] == 2
    assert CODE.opcodes["BRA"] == 4
    assert CODE.spill_bytes == 8 + 4


@pytest.mark.parametrize(
    "opcode, kind",
    [("HGMMA.64x64x16.F32", "wgmma"), ("UTCHMMA", "tcgen05"), ("FFMA", "fma"), ("IADD3", "-")],
)
def test_mma(opcode, kind):
    assert CODE.mma == "mma.sync"
    assert changed("HMMA.16816.F32.BF16", opcode).mma == kind


def test_wgmma_that_is_waited_for_one_by_one():
    """Two products of one loop, opened once or twice."""
    line = "        /*0050*/ {} ;\n".format
    product, opened = line("HGMMA.64x64x16.F32 R4, gdesc[UR8]"), line("WARPGROUP.ARRIVE")
    for listing, kind in ((opened + 2 * product, "wgmma"), (2 * (opened + product), sass.SERIAL)):
        code = changed("        /*0050*/", f"{listing}        /*0050*/")
        assert code.mma == kind
        assert code.tile_instructions(4096, 128) == 5 + len(listing.splitlines())


def test_the_narrowest_copy_counts():
    assert CODE.copy_bytes(2) == 16
    assert changed("@P1 LDGSTS.E.BYPASS.128", "@P1 LDGSTS.E").copy_bytes(2) == 4
    assert changed("@P1 LDGSTS.E.BYPASS.128", "@P1 LDGSTS.E.64").copy_bytes(2) == 8
    narrow = changed("LDG.E R2", "LDG.E.U16 R2")
    assert narrow.copy_bytes(2) == 2
    assert narrow.copy_bytes(4) == 16
    assert changed("LDGSTS", "LDG").copy_bytes(2) == 0


@pytest.mark.parametrize(
    "rows, scale_bytes, expected", [(1, 8, 8), (2, 8, 16), (2, 0, 8), (2, 4, 8)]
)
def test_copies_of_scales_do_not_count(rows, scale_bytes, expected):
    """8 bytes of scales beside 2 * 16 bytes are less than a third of both, beside 16 they are a third."""
    line = "/*0000*/ LDGSTS.E.BYPASS.128 [R3], desc[UR4][R2.64] ;"
    scales = "/*0000*/ LDGSTS.E.64 [R3], desc[UR4][R2.64] ;"
    code = dataclasses.replace(CODE, lines=sass.parse("\n".join([line] * rows + [scales])))
    assert code.copy_bytes(1, scale_bytes) == expected


def test_instructions_of_a_tile():
    """5 instructions copy 2 * 16 bytes a thread: a tile of 128 threads is 4096 bytes, or two of 2048."""
    assert CODE.tile_instructions(4096, 128) == 5
    assert CODE.tile_instructions(2048, 128) == 2
    assert CODE.tile_instructions(3000, 128) is None
    assert changed("HMMA.16816.F32.BF16", "IADD3").tile_instructions(4096, 128) is None
    assert changed("LDGSTS", "LDG").tile_instructions(4096, 128) is None


def test_scales_and_idle_lanes_are_not_part_of_a_tile():
    """Lanes that copy nothing are at most a quarter of those that do; 4 bytes of scales come beside 2 * 16 of values."""
    assert CODE.tile_instructions(3300, 128) == 5
    assert CODE.tile_instructions(3200, 128) is None
    scales = "        /*0048*/ LDGSTS.E [R9], desc[UR4][R2.64] ;\n"
    code = changed("        /*0050*/", f"{scales}        /*0050*/")
    assert code.tile_instructions(3300, 128) is None
    assert code.tile_instructions(3300, 128, 4) == 6
    assert code.tile_instructions(3300, 128, 8) is None
