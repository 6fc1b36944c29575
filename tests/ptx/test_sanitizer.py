"""Programs that are wrong in one way each, beside the right ones that they are made from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from .device import Device
from .memory import Fault
from .test_instructions import run

REGISTERS = {name: ("u32", None) for name in "toxc"} | {"q": ("u64", None), "g": ("u64", None)}
REGISTERS |= {"p": ("pred", None)}
START = """mov.u32 t, %tid.x; mov.u32 c, %ctaid.x; shl.b32 o, t, 2; ld.param.u64 q, [p0];
    mul.wide.u32 g, t, 4; add.s64 g, g, q; """
EXCHANGE = "st.shared.b32 [o], t; bar.sync 0; xor.b32 o, o, 128; ld.shared.b32 x, [o];"
COPY = """cp.async.ca.shared.global [o], [g], 4; cp.async.commit_group; cp.async.wait_group 0;
    ld.shared.b32 x, [o];"""
OWN = "mad.wide.u32 g, c, 128, g; st.global.b32 [g], t; ld.global.b32 x, [g];"
BACK = "xor.b32 o, o, 128; st.shared.b32 [o], x;"
NAMED = "setp.lt.u32 p, t, 32; @!p bra END; bar.sync 1, 32; END:"
TWICE = "st.shared.b32 [0], 7; setp.lt.u32 p, t, 32; bar.sync 0; @p st.shared.b32 [0], 7;"
BEHIND = """setp.lt.u32 p, t, 8; @p bra MORE; HERE: bar.sync 0; ret;
    MORE: mov.u32 x, 0; bra HERE;"""
RIGHT = [EXCHANGE, COPY, OWN, NAMED, TWICE, BEHIND, EXCHANGE + "bar.sync 0;" + BACK]
WRONG = [
    (EXCHANGE, "bar.sync 0;", "", "race: reads what warp"),
    (EXCHANGE + BACK, "", "", "race: writes what warp . read"),
    (EXCHANGE, "st.shared.b32 [o], t;", "", "never written"),
    (EXCHANGE, "[o], t", "[o+1020], t", "outside of 1024 bytes"),
    (EXCHANGE, "[o], t", "[o+2], t", "no multiple of 4"),
    (EXCHANGE, "[o], t;", "[0], t;", "different values to the same bytes"),
    (TWICE, "bar.sync 0;", "", "race: writes what warp 1 wrote"),
    (COPY, "wait_group 0", "wait_group 1", "a copy is on its way"),
    (COPY, "cp.async.wait_group 0;\n    ld.shared.b32 x, [o];", "", "not waited for"),
    (COPY, "cp.async.wait", "setp.lt.u32 p, t, 8; @p cp.async.wait", "a copy is on its way"),
    (COPY, "[g], 4", "[g+1024], 4", "in no tensor"),
    (OWN, "x, [g]", "x, [g+2]", "no multiple of 4"),
    (OWN, "mad.wide.u32 g, c, 128, g;", "", "two CTAs write|what CTA . wrote"),
    (OWN, "x, [g]", "x, [q]", "race in global memory: (reads|writes) what CTA"),
    (NAMED, "1, 32", "1, 64", "deadlock"),
    (BEHIND, "bra HERE", "bar.sync 0", "only some threads of a warp"),
    (BEHIND, "bra HERE", "ret", "only some threads of a warp"),
    ("shfl.sync.bfly.b32 x, t, 1, 31, -1;", "shfl", "setp.lt.u32 p, t, 3; @p shfl", "some threads of a warp"),
]  # fmt: skip


def execute(code, rows=64, ctas=1):
    tensor = torch.zeros(rows * ctas, dtype=torch.int32)
    return run(START + code, REGISTERS, tensors=[tensor], ctas=ctas, warps=rows // 32)


@pytest.mark.parametrize("code", RIGHT)
def test_right_programs_pass(code):
    execute(code, 32 if code == OWN else 64, 2)


@pytest.mark.parametrize(("code", "old", "new", "message"), WRONG)
def test_what_is_wrong_is_a_fault(code, old, new, message):
    assert old in code
    rows, ctas = (32, 2) if "global" in message or "CTA" in message else (64, 1)
    with pytest.raises(Fault, match=message):
        execute(code.replace(old, new, 1) if old else code, rows, ctas)


def test_bounds_are_those_of_views():
    """The fourth column is in the storage, but not in the view."""
    pool = torch.zeros(4, 4, dtype=torch.int32)
    code = "ld.param.u64 q, [p0]; ld.global.b32 x, [q+{}];"
    for column in (0, 2, 4, 6):  # of the row, then of the next one
        run(code.format(4 * column), REGISTERS, tensors=[pool[:, :3]])
    with pytest.raises(Fault, match="in no tensor: 0 bytes past"):
        run(code.format(12), REGISTERS, tensors=[pool[:, :3]])


def test_groups_of_copies_are_those_of_a_thread():
    """Threads below 8 commit one group more: the same wait leaves another copy under way."""
    first = "cp.async.ca.shared.global [o], [g], 4; cp.async.commit_group; setp.lt.u32 p, t, 8; "
    more = "@p cp.async.ca.shared.global [o+256], [g], 4; @p cp.async.commit_group; "
    wait = "cp.async.wait_group 1; @p ld.shared.b32 x, [o]; cp.async.wait_all; "
    execute(first + more + wait + "@p ld.shared.b32 x, [o+256];")
    with pytest.raises(Fault, match="on its way"):
        execute(first + more + "cp.async.wait_group 1; @!p ld.shared.b32 x, [o];")


def test_another_order_of_ctas_must_give_the_same_bits():
    text = """.visible .entry k(.param .u64 p0, .param .u64 p1) {
        .reg .b32 %c, %x; .reg .b64 %q, %g; ld.param.u64 %q, [p0]; ld.param.u64 %g, [p1];
        atom.global.add.u32 %x, [%q], 1; red.global.add.u32 [%q], 1; mov.u32 %c, %ctaid.x;
        mad.wide.u32 %g, %c, 4, %g; st.global.b32 [%g], VALUE; ret; }"""
    counter, out = torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    device, metadata = Device(80), SimpleNamespace(num_warps=1, shared=0)
    device.orders = 4
    params = [("Q", counter.data_ptr()), ("Q", out.data_ptr())]

    def launch(value):
        kernel = SimpleNamespace(asm={"ptx": text.replace("VALUE", value)})
        device.launch(kernel, metadata, (4, 1, 1), params, [counter, out])

    launch("%c")
    assert out.tolist() == [0, 1, 2, 3] and counter.item() == 4 * 64
    with pytest.raises(Fault, match="other bits"):
        launch("%x")
