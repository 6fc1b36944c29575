"""Single instructions against the results that the PTX ISA documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .arithmetic import DTYPES
from .instructions import compile_ptx
from .machine import Machine
from .memory import Global, extents, merged

NAN, INF = float("nan"), float("inf")


def run(code: str, registers: dict[str, tuple[str, object]], *, tensors=(), ctas=1, warps=1):
    """Run instructions; returns a reader of registers.

    Args:
        registers: name -> (type, None or its value: one for all threads, or one for each).
        tensors: those that may be touched; parameter i is the address of the i-th.
    """
    declared = "".join(
        f".reg .{'pred' if t == 'pred' else f'b{8 * DTYPES[t].itemsize}'} {n}; "
        for n, (t, _) in registers.items()
    )
    params = ", ".join(f".param .u64 p{i}" for i in range(len(tensors)))
    text = f".extern .shared .align 16 .b8 smem[];\n.visible .entry test({params})\n{{ {declared} {code} ret; }}"
    program = compile_ptx(text)
    ranges = merged([r for t in tensors for r in extents(t)])
    addresses = np.array([t.data_ptr() for t in tensors], "u8").tobytes()
    memory = Global(ranges, program.grains["global"])
    every = [(i, 0, 0) for i in range(ctas)]
    m = Machine(program, addresses, every, (ctas, 1, 1), 32 * warps, 1024, memory)
    for name, (kind, value) in registers.items():
        if value is not None:
            array = np.broadcast_to(np.asarray(value, DTYPES[kind]), m.size).copy()
            m.registers[program.kernel.registers[name]] = array
    m.run()

    def result(name: str) -> np.ndarray:
        value = m.spread(m.registers[program.kernel.registers[name]])
        return value.view(DTYPES[registers[name][0]])

    return result


T12 = 1 + 2.0**-12
CASES = [  # instruction, types of d, a, b, c; values of a, b, c; the result
    ("mul.hi.s32", "s32 s32 s32", (-(2**31), 3), -2),
    ("mul.hi.u16", "u16 u16 u16", (65535, 65535), 65534),
    ("mul.hi.u64", "u64 u64 u64", (2**63, 6), 3),
    ("mul.wide.s32", "s64 s32 s32", (-(2**31), 2), -(2**32)),
    ("mul.lo.s32", "s32 s32 s32", (2**30, 4), 0),
    ("mad.wide.u32", "u64 u32 u32 u64", (2**32 - 1, 2, 5), 2**33 + 3),
    ("div.s32", "s32 s32 s32", (-7, 2), -3),
    ("rem.s32", "s32 s32 s32", (-7, 2), -1),
    ("div.u32", "u32 u32 u32", (7, 0), 2**32 - 1),
    ("shl.b32", "u32 u32 u32", (1, 32), 0),
    ("shr.u32", "u32 u32 u32", (2**31, 40), 0),
    ("shr.s32", "s32 s32 u32", (-8, 40), -1),
    ("bfe.u32", "u32 u32 u32 u32", (0xABCD1234, 4, 8), 0x23),
    ("bfe.s32", "s32 s32 u32 u32", (0x00000800, 8, 4), -8),
    ("bfe.s32", "s32 s32 u32 u32", (-(2**31), 28, 16), -8),
    ("prmt.b32", "u32 u32 u32 u32", (0x8877FF01, 0, 0xB2A0), 0xFF770001),
    ("popc.b32", "u32 u32", (0xF0F1,), 9),
    ("min.relu.s32", "s32 s32 s32", (-3, 5), 0),
    ("neg.s32", "s32 s32", (-(2**31),), -(2**31)),
    ("cvt.s16.s8", "s16 u16", (0x1280,), -128),
    ("cvt.u64.u32", "u64 u32", (2**32 - 1,), 2**32 - 1),
    ("cvt.s64.s32", "s64 s32", (-1,), -1),
    ("cvt.rzi.s32.f32", "s32 f32", (3e9,), 2**31 - 1),
    ("cvt.rzi.s32.f32", "s32 f32", (NAN,), 0),
    ("cvt.rni.s32.f32", "s32 f32", (2.5,), 2),
    ("cvt.rn.f32.s32", "f32 s32", (2**24 + 1,), 2.0**24),
    ("cvt.rna.tf32.f32", "f32 f32", (1 + 2.0**-11,), 1 + 2.0**-10),
    ("cvt.rn.bf16x2.f32", "u32 f32 f32", (1 + 2.0**-8, NAN), 0x3F807FFF),
    ("cvt.rn.f16x2.f32", "u32 f32 f32", (65520.0, 2.0**-24), 0x7C000001),
    ("cvt.rn.satfinite.e4m3x2.f32", "u16 f32 f32", (-1e9, NAN), 0xFE7F),
    ("cvt.rn.satfinite.e4m3x2.f32", "u16 f32 f32", (17.0, 2.0**-10), 0x5800),
    ("cvt.rn.f16x2.e4m3x2", "u32 u16", (0xFF01,), 0x7FFF1800),
    # fp32 fma rounds once: the small term decides a tie that float64 loses.
    ("fma.rn.f32", "f32 f32 f32 f32", (T12, T12, 2.0**-80), 1 + 2.0**-11 + 2.0**-23),
    ("fma.rn.f32", "f32 f32 f32 f32", (T12, T12, -(2.0**-80)), 1 + 2.0**-11),
    ("fma.rn.f32", "f32 f32 f32 f32", (2.0**-75, 2.0**-75, 2.0**-149), 2.0**-148),
    ("fma.rn.f32", "f32 f32 f32 f32", (3 * 2.0**-76, 2.0**-74, 2.0**-149), 2.0**-148),
    ("fma.rn.ftz.f32", "f32 f32 f32 f32", (2.0**-70, 2.0**-70, 0.0), 0.0),
    ("mul.ftz.f32", "f32 f32 f32", (2.0**-130, 2.0**100), 0.0),
    ("mul.f32", "f32 f32 f32", (2.0**-130, 2.0**100), 2.0**-30),
    ("add.f32", "f32 f32 f32", (2.0**24, 1.0), 2.0**24),
    ("fma.rn.bf16x2", "u32 u32 u32 u32", (0x3F803F80, 0x3F803F80, 0x3B803B81), 0x3F803F81),
    ("mul.f16", "f16 f16 f16", (300.0, 300.0), INF),
    ("max.f32", "f32 f32 f32", (NAN, 1.0), 1.0),
    ("max.NaN.f32", "f32 f32 f32", (NAN, 1.0), NAN),
    ("setp.ne.f32", "pred f32 f32", (NAN, 1.0), False),
    ("setp.neu.f32", "pred f32 f32", (NAN, 1.0), True),
    ("setp.lt.u32", "pred u32 u32", (2**31, 1), False),
    ("ex2.approx.ftz.f32", "f32 f32", (-INF,), 0.0),
    ("ex2.approx.f32", "f32 f32", (0.0,), 1.0),
    ("rsqrt.approx.ftz.f32", "f32 f32", (2.0**-130,), INF),
    ("div.full.f32", "f32 f32 f32", (3.0, 1.0), 3.0),
    ("sqrt.approx.ftz.f32", "f32 f32", (-1.0,), NAN),
]  # fmt: skip


@pytest.mark.parametrize(("code", "types", "values", "expected"), CASES)
def test_instruction(code, types, values, expected):
    kind, *sources = types.split()
    registers = {n: (t, v) for n, t, v in zip("abc", sources, values, strict=False)}
    registers["d"] = (kind, None)
    result = run(f"{code} d, {', '.join('abc'[: len(values)])};", registers)("d")
    assert np.array_equal(result[:1], np.array([expected], DTYPES[kind]), equal_nan=kind[0] == "f")


@pytest.mark.parametrize(
    ("code", "function", "ulps"),
    [
        ("ex2.approx.f32", np.exp2, 2), ("rcp.approx.f32", np.reciprocal, 1),
        ("sqrt.approx.f32", np.sqrt, 1), ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x), 1),
    ],
)  # fmt: skip
def test_approximate_functions_err_as_far_as_they_may(code, function, ulps):
    """No farther, and not by less than half of it for all operands."""
    x = np.random.default_rng(0).uniform(0.5, 8, 32).astype("f4")
    d = run(f"{code} d, a;", {"a": ("f32", x), "d": ("f32", None)})("d")
    exact = function(x.astype("f8"))
    error = np.abs(d - exact) / np.spacing(exact.astype("f4"))
    assert ulps / 2 < error.max() <= ulps


def test_registers_that_were_not_written_are_nan():
    assert np.isnan(run("mov.b32 d, a;", {"a": ("f32", None), "d": ("f32", None)})("d")).all()


def test_lanes_that_are_off_keep_their_registers():
    off = np.arange(32) % 2 == 0
    d = run("@!p mov.b32 d, 7;", {"p": ("pred", off), "d": ("u32", np.arange(32))})("d")
    assert np.array_equal(d, np.where(off, np.arange(32), 7))


def test_the_address_of_a_parameter_may_pass_through_32_bits():
    registers = {"a": ("u32", None), "b": ("u64", None), "c": ("u64", None)}
    code = (
        "mov.b32 a, p1; cvt.u64.u32 b, a; cvta.param.u64 b, b; mov.b64 c, p1; cvta.param.u64 c, c;"
    )
    result = run(code, registers, tensors=torch.empty(2, 1))
    assert np.array_equal(result("b"), result("c"))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("shfl.sync.bfly.b32 d, a, 1, 31, -1;", np.arange(32) ^ 1),
        ("shfl.sync.up.b32 d, a, 1, 0, -1;", np.maximum(np.arange(32) - 1, 0)),
        ("shfl.sync.down.b32 d, a, 2, 31, -1;", np.where(np.arange(32) < 30, np.arange(32) + 2, np.arange(32))),
        ("shfl.sync.idx.b32 d, a, 3, 0x1C1F, -1;", np.arange(32) // 4 * 4 + 3),
        ("redux.sync.max.s32 d, a, -1;", np.full(32, 31)),
        ("setp.lt.s32 p, a, 3; vote.sync.ballot.b32 d, p, -1;", np.full(32, 7)),
    ],
)  # fmt: skip
def test_instructions_of_a_warp(code, expected):
    registers = {"a": ("s32", np.arange(32)), "d": ("s32", None), "p": ("pred", None)}
    assert np.array_equal(run(code, registers)("d"), expected)
