"""Products of matrices: ldmatrix, stmatrix, mma and wgmma.

A product is c + a_0 b_0 + a_1 b_1 + ..., summed in float64 in the order of k and rounded to fp32
once. tf32 operands lose their low 13 bits.

Source: PTX ISA 8.8, sections 9.7.14.5 (fragments of mma).
"""

from __future__ import annotations

import numpy as np

from .arithmetic import from_bf16, from_f16
from .machine import WARP, Machine, Mask, Step
from .parse import Instruction, vector


def _ldmatrix(c, op: Instruction) -> Step:
    targets, trans = vector(op.operands[0]), "trans" in op.parts
    address, count = c.address(op.operands[1], "u32"), len(targets)

    def values(m: Machine, mask: Mask) -> list:
        m.whole_warps(mask)
        lanes = m.active(mask)
        lanes = lanes[m.lane[lanes] < 8 * count]  # each gives the address of a row
        rows = np.zeros((m.size, 8), "u2")
        rows[lanes] = m.load("shared", address(m, lanes), 2, 8, lanes)
        rows = rows.reshape(-1, 4, 8, 8)  # warp, matrix, row, column
        if trans:
            rows = rows.swapaxes(2, 3)
        words = np.ascontiguousarray(rows).view("u4")  # a thread holds two columns of a row
        return [np.ascontiguousarray(words[:, i]).reshape(m.size) for i in range(count)]

    return c.assign_all(targets, values)


def _stmatrix(c, op: Instruction) -> Step:
    sources, trans = vector(op.operands[1]), "trans" in op.parts
    address = c.address(op.operands[0], "u32")
    reads = [c.read(s, "b32") for s in sources]

    def step(m: Machine, mask: Mask) -> None:
        m.whole_warps(mask)
        lanes = m.active(mask)
        lanes = lanes[m.lane[lanes] < 8 * len(sources)]
        rows = np.zeros((m.size // WARP, 4, 8, 8), "u2")
        for i, read in enumerate(reads):
            words = np.ascontiguousarray(m.spread(read(m))).reshape(-1, 8, 4)
            rows[:, i] = words.view("u2")
        if trans:
            rows = rows.swapaxes(2, 3)
        m.store("shared", address(m, lanes), rows.reshape(m.size, 8)[lanes], lanes)

    return step


def as_floats(words: np.ndarray, kind: str) -> np.ndarray:
    """Words of 32 bits as float64: two halves each, or one tf32."""
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view("f4").astype("f8")
    halves = np.ascontiguousarray(words).view("u2")
    return (from_bf16(halves) if kind == "bf16" else from_f16(halves)).astype("f8")


def a_of_registers(words: np.ndarray, kind: str) -> np.ndarray:
    """float64 [warps, 16, k] of the registers [4, threads] of a matrix a."""
    # Registers: (k half, m half); threads: (warp, row, group of columns).
    values = as_floats(words, kind).reshape(2, 2, -1, 8, 4, 1 if kind == "tf32" else 2)
    return values.transpose(2, 1, 3, 0, 4, 5).reshape(values.shape[2], 16, -1)


def product(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fp32 registers [n / 2, threads] of a b + c.

    Args:
        a: float64 [warps, 16, k].
        b: float64 [warps or 1, k, n].
        c: fp32 registers, as those of the result.
    """
    blocks = len(c) // 4
    # Registers: (block of 8 columns, m half, column of 2); threads: (warp, row, group of columns).
    total = c.reshape(blocks, 2, 2, -1, 8, 4).transpose(3, 1, 4, 0, 5, 2).astype("f8")
    total = total.reshape(-1, 16, 8 * blocks)
    for k in range(a.shape[-1]):
        total += a[..., k, None] * b[..., k, None, :]
    d = total.astype("f4").reshape(-1, 2, 8, blocks, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    return np.ascontiguousarray(d).reshape(c.shape)


def _mma(c, op: Instruction) -> Step | None:
    shape, kinds = op.parts[3], op.parts[6:]
    if op.parts[1:3] != ["sync", "aligned"] or op.parts[4:6] != ["row", "col"] or len(kinds) != 4:
        return None
    kind = kinds[1]
    if kinds != ["f32", kind, kind, "f32"] or (shape, kind) not in (
        ("m16n8k16", "bf16"), ("m16n8k16", "f16"), ("m16n8k8", "tf32"),
    ):  # fmt: skip
        return None
    targets, *sources = (vector(o) for o in op.operands)
    reads = [[c.read(o, t) for o in s] for s, t in zip(sources, ("b32", "b32", "f32"), strict=True)]
    pair = 1 if kind == "tf32" else 2

    def values(m: Machine, mask: Mask) -> list:
        m.whole_warps(mask)
        a, b, acc = (np.stack([m.spread(r(m)) for r in group]) for group in reads)
        b = as_floats(b, kind).reshape(2, -1, 8, 4, pair)  # k half, warp, column, group of k
        b = b.transpose(1, 0, 3, 4, 2).reshape(-1, 8 * pair, 8)
        return list(product(a_of_registers(a, kind), b, acc))

    return c.assign_all(targets, values)


HANDLERS = {"ldmatrix": _ldmatrix, "stmatrix": _stmatrix, "mma": _mma}
