"""``bench.static.ttgir`` on loops as Triton's pipeliner writes them, cut down to what counts."""

import pytest

from quire.bench.static import ttgir

COPY = """
        %k = ttg.async_copy_global_to_local %p, %b mask %m : tensor<64x!tt.ptr<bf16>> -> <64xbf16>
        %kt = ttg.async_commit_group tokens %k loc(#loc7)
        %v = ttg.async_copy_global_to_local %p, %b mask %m : tensor<64x!tt.ptr<bf16>> -> <64xbf16>
        %vt = ttg.async_commit_group tokens %v loc(#loc7)
"""
SUM = """
        %s = "tt.reduce"(%w) <{axis = 1 : i32}> ({
        ^bb0(%a: f32 loc(unknown), %c: f32 loc(unknown)):
          %d = arith.addf %a, %c : f32 loc(#loc9)
          tt.reduce.return %d : f32 loc(#loc9)
        }) : (tensor<64x64xf32>) -> tensor<64xf32> loc(#loc9)
"""


def wait(number):
    return f"        %t = ttg.async_wait %kt, %vt {{num = {number} : i32}} loc(#loc1)\n"


def products(opcode="ttng.warp_group_dot", last="ttng.warp_group_dot"):
    """Scores, their sum, and the product with the values; what waits for a product is none."""
    done = "        %r:2 = ttng.warp_group_dot_wait %x, %q {pendings = 0 : i32} : tensor<64xf32>\n"
    return (
        f"        %x = {opcode} %q, %k, %z : tensor<64xf32>\n{done}{SUM}"
        f"        %o = {last} %w, %v, %z : tensor<64xf32> loc(#loc2)\n"
    )


def loop(body, kind="scf.for %i = %a to %b step %c iter_args(%e = %f) -> (i32)"):
    return f"      %l = {kind}  : i32 {{\n{body}        scf.yield %f : i32 loc(#loc3)\n      }} loc(#loc3)\n"


def kernel(*parts):
    inside = "".join(parts)
    return f"module attributes {{}} {{\n  tt.func public @kernel(%arg0: i32 loc(#l)) {{\n{inside}    tt.return\n  }} loc(#l)\n}} loc(#l)\n"


@pytest.mark.parametrize("number, tiles", [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("opcode", ["ttng.warp_group_dot", "tt.dot", "ttng.tc_gen5_mma"])
def test_a_wait_leaves_whole_tiles(number, tiles, opcode):
    """Keys and values of a tile are a group each; copies at the end of an iteration come too late."""
    text = kernel(COPY, loop(wait(number) + products(opcode, opcode) + COPY), wait(0))
    assert ttgir.tiles_in_flight(text) == tiles


def test_copies_in_front_of_the_products_count():
    assert ttgir.tiles_in_flight(kernel(loop(wait(0) + COPY + products()))) == 1
    # Those after the wait of the iteration before count as well.
    assert ttgir.tiles_in_flight(kernel(loop(products() + wait(2) + COPY))) == 2


def test_the_last_product_alone_does_not_count():
    scores, values = products().split(SUM)
    early = scores + SUM + COPY + values
    assert ttgir.tiles_in_flight(kernel(loop(wait(0) + early))) == 0


def test_the_loop_with_the_fewest_counts():
    two, three = (loop(wait(n) + products() + COPY) for n in (0, 2))
    through_registers = loop(products("tt.dot", "tt.dot"))
    other = loop("        %p = tt.load %x : tensor<64xi32>\n" + COPY)
    assert ttgir.tiles_in_flight(kernel(three, other, three)) == 1
    assert ttgir.tiles_in_flight(kernel(three, two)) == 0
    assert ttgir.tiles_in_flight(kernel(three, through_registers)) == 0
    assert ttgir.tiles_in_flight(kernel(other)) is None


def test_loops_around_it_do_not_count():
    """Prologues of a loop that is within another hold products, too, on sm_100."""
    inner = loop(wait(2) + products() + COPY)
    whole = kernel(loop(COPY + wait(0) + products() + inner), loop(inner, "scf.while (%j = %k)"))
    assert ttgir.tiles_in_flight(whole) == 1
    assert len(ttgir.loops(whole)[0]) == 2


def test_what_is_within_a_condition_belongs_to_the_loop():
    """Where warps divide the scores, their product is within one."""
    scores, values = products().split(SUM)
    divided = (
        f"        %n = scf.if %h -> (i32) {{\n{scores}        }} else {{\n        }} loc(#loc4)\n"
    )
    for number, tiles in ((0, 0), (2, 1)):
        body = wait(number) + divided + SUM + values + COPY
        assert ttgir.tiles_in_flight(kernel(loop(body))) == tiles


def element(name, array):
    """An element of an array of barriers."""
    return f"        {name} = ttg.memdesc_index {array}[%i] : !ttg.memdesc<3x1xi64> -> !ttg.memdesc<1xi64>\n"


def tma(*barriers):
    text = "        ttng.async_tma_copy_global_to_local %t[%r, %c] %b, {}, %p : !tt.tensordesc<x>\n"
    return "".join(map(text.format, barriers))


def arrived(barrier):
    return f"        ttng.wait_barrier {barrier}, %ph, %p deps %q : !ttg.memdesc<1xi64>\n"


@pytest.mark.parametrize("ahead, tiles", [(1, 0), (2, 1), (3, 2)])
def test_copies_by_descriptors(ahead, tiles):
    """A barrier a tile. Names may come again for something else, as those of other barriers do."""
    prologue = "".join(element(f"%b{i}", "%full") + tma(f"%b{i}", f"%b{i}") for i in range(ahead))
    body = element("%w", "%full") + arrived("%w") + products() + element("%n", "%full")
    body += tma("%n", "%n")
    other = loop(element("%w", "%other") + element("%n", "%other") + arrived("%w"))
    assert ttgir.tiles_in_flight(kernel(prologue, loop(body), other)) == tiles


def test_copies_by_descriptors_of_sm_100():
    """A barrier each for keys and values; the first scores are formed in front of the loop.
    Products have barriers as well.
    """
    keys, values, done = element("%k", "%ks"), element("%v", "%vs"), element("%d", "%done")
    mma = "        ttng.tc_gen5_mma %q, %k, %s, %f, %p, %d[%t] {is_async} : !ttg.memdesc<64xbf16>\n"
    ahead = keys + values + done + tma("%k") + arrived("%k") + mma + tma("%v", "%k")
    body = keys + values + done + arrived("%v") + arrived("%d") + mma + arrived("%k") + mma
    body += tma("%v", "%k")
    for more, tiles in (("", 0), (tma("%v", "%k"), 1), (tma("%v", "%k", "%v", "%k"), 2)):
        assert ttgir.tiles_in_flight(kernel(ahead, more, loop(body))) == tiles


def test_descriptors_that_no_barrier_is_waited_for():
    assert ttgir.tiles_in_flight(kernel(tma("%k"), loop(products() + tma("%k")))) == 0
