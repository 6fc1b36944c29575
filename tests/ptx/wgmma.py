"""wgmma: products of a warpgroup (four warps), under way until they are waited for.

    wgmma.fence      registers written before may be read by what follows
    fence.proxy      shared memory written before may be read by what follows
    wgmma.mma_async  starts a product; until it ends its result is infinite, its operands must stay
    wgmma.commit     closes a group;   wgmma.wait_group N: at most N groups stay under way

A matrix in shared memory consists of rows of S bytes (the swizzle: 128, 64, 32, or 16 for none),
eight of which are an atom:

    along k     row r of 8 at r S,  atoms of rows at SBO          elements of k follow each other
    along m, n  k of 8 at k S,      atoms of k at SBO, of m or n at LBO

Source: PTX ISA 8.8, sections 9.7.15.5 (layouts, descriptors) and 9.7.15.7; CUTLASS
    ``cute/arch/mma_sm90_desc.hpp``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .machine import WARP, Machine, Mask, Step
from .matrix import a_of_registers, as_floats, product
from .memory import Fault, swizzled
from .parse import Instruction, Unsupported, vector

GROUP = 4 * WARP
INFINITY = 0x7F800000  # kernels that split fp32 into two tf32 replace NaN
SWIZZLES = {0: 16, 1: 128, 2: 64, 3: 32}  # bits 62 and 63 of a descriptor -> bytes of a row


@lru_cache(maxsize=512)
def offsets(descriptor: int, rows: int, depth: int, size: int, along_k: bool) -> np.ndarray:
    """Bytes [rows, depth] at which the elements of a matrix begin.

    Args:
        rows: of A (m), or columns of B (n).
        depth: k.
        size: bytes of an element.
        along_k: elements of one row are neighbours; otherwise those of one k.
    """
    start, lbo, sbo = ((descriptor >> s & 0x3FFF) << 4 for s in (0, 16, 32))
    swizzle = SWIZZLES[descriptor >> 62 & 3]
    if descriptor >> 49 & 7:
        raise Unsupported("a base offset of a matrix descriptor")
    r, k = np.arange(rows)[:, None], np.arange(depth)
    if not along_k:  # the roles change; the atoms of a row are LBO apart
        r, k = k, r
    width = swizzle // size  # elements of a row of an atom
    if swizzle == 16 and not along_k:
        lbo, sbo = sbo, lbo
    address = start + r % 8 * swizzle + r // 8 * sbo + k % width * size + k // width * lbo
    return swizzled(address, swizzle)


@dataclass
class Matrix:
    """An operand in shared memory of one CTA."""

    index: np.ndarray  # [rows, depth] numbers of the elements
    cells: np.ndarray  # [n]
    kind: str

    def values(self, m: Machine) -> np.ndarray:
        words = m.shared.data.view("u4" if self.kind == "tf32" else "u2")[self.index]
        return as_floats(words, self.kind)


@dataclass
class Product:
    """One wgmma of one warpgroup.

    Attributes:
        group: number of the group that it is committed with.
        a: shared memory, or [4, 128] registers as they were at the start.
        c: [n, 128] fp32 of the result's registers before; None: those of the product before it.
    """

    warpgroup: int
    group: int
    targets: tuple[int, ...]
    a: Matrix | np.ndarray
    a_registers: tuple[int, ...]
    b: Matrix
    c: np.ndarray | None
    kind: str

    @property
    def lanes(self) -> slice:
        return slice(self.warpgroup * GROUP, (self.warpgroup + 1) * GROUP)


def _touch(m: Machine, item: Product, change: int) -> None:
    """Note the reads of a product's matrices, by all four warps."""
    cta = int(m.cta[item.lanes.start])
    warps = np.unique(m.warp[item.lanes])
    for matrix in (operand for operand in (item.a, item.b) if isinstance(operand, Matrix)):
        cells = matrix.cells
        if change > 0 and m.shared.unfenced[cells].any():
            raise Fault("wgmma reads shared memory written without a fence.proxy.async since")
        m.shared.check_read(np.tile(cells, (len(warps), 1)), np.full(len(warps), cta), warps)
        m.shared.busy[cells] += change


def _mma_async(c, op: Instruction) -> Step | None:
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", op.parts[4])
    kind = op.parts[-1]
    if op.parts[5:] != ["f32", kind, kind] or kind not in ("bf16", "f16", "tf32"):
        return None
    columns, depth = int(shape[1]), int(shape[2])
    size = 4 if kind == "tf32" else 2
    targets = tuple(c.kernel.registers[t] for t in vector(op.operands[0]))
    a_names = vector(op.operands[1]) if op.operands[1][0] == "{" else []
    a_registers = tuple(c.kernel.registers[name] for name in a_names)
    a_descriptor = None if a_names else c.read(op.operands[1], "b64")
    b_descriptor = c.read(op.operands[2], "b64")
    scale_d = c.read(op.operands[3], "pred")
    sign_a, sign_b, *transposed = op.operands[4:]
    if (sign_a, sign_b) != ("1", "1"):
        raise Unsupported("negated operands of wgmma")
    trans_b = transposed[-1:] == ["1"]
    trans_a = len(transposed) == 2 and transposed[0] == "1"

    def matrix(m: Machine, descriptor, lane: int, rows: int, trans: bool) -> Matrix:
        at = offsets(int(m.spread(descriptor)[lane]), rows, depth, size, not trans)
        at = m.shared.locate(at, size, m.cta[lane])
        return Matrix(at // size, np.unique(at >> m.shared.shift), kind)

    def step(m: Machine, mask: Mask) -> None:
        groups = _warpgroups(m, mask)
        started = {(p.warpgroup, p.targets) for p in m.products}
        in_flight = {(p.warpgroup, t): p.targets for p in m.products for t in p.targets}
        if max((m.changed[r] for r in a_registers), default=-1) >= m.fences:
            raise Fault("wgmma reads registers written without a wgmma.fence since")
        for g in groups:
            lane, lanes = g * GROUP, slice(g * GROUP, (g + 1) * GROUP)
            keep = m.spread(scale_d(m))[lanes]
            if keep.any() != keep.all():
                raise Fault("threads of a warpgroup scale the accumulator in different ways")
            start, first = None, (g, targets) not in started
            if first and max(m.changed[t] for t in targets) >= m.fences:
                raise Fault("wgmma accumulates in registers written without a wgmma.fence since")
            if not keep.all():
                start = np.zeros((len(targets), GROUP), "f4")
            elif first:
                start = np.stack([m.spread(m.registers[t])[lanes].view("f4") for t in targets])
            if any(in_flight.get((g, t), targets) != targets for t in targets):
                raise Fault("wgmma writes registers of another one under way")
            if a_descriptor is None:
                a = np.stack([m.spread(m.registers[r])[lanes].view("u4") for r in a_registers])
            else:
                a = matrix(m, a_descriptor(m), lane, 64, trans_a)
            b = matrix(m, b_descriptor(m), lane, columns, trans_b)
            number = int(m.groups["wgmma"][lane])
            item = Product(g, number, targets, a, a_registers, b, start, kind)
            _touch(m, item, 1)
            m.products.append(item)
        for target in targets:
            m.write(target, np.full(m.size, INFINITY, "u4"), mask)

    return step


def _warpgroups(m: Machine, mask: Mask) -> list[int]:
    m.whole_warps(mask)
    if m.threads % GROUP:
        raise Unsupported("wgmma in a CTA of fewer than four warps")
    if mask is None:
        return list(range(m.size // GROUP))
    groups = mask.reshape(-1, GROUP)
    if (groups.any(1) != groups.all(1)).any():
        raise Fault("only some warps of a warpgroup run a wgmma instruction")
    return list(np.flatnonzero(groups.any(1)))


def _result(m: Machine, item: Product, c: np.ndarray) -> np.ndarray:
    """The registers [n, 128] of a product's result; c: those that it adds to."""
    b = item.b.values(m).T[None]
    if isinstance(item.a, Matrix):
        return product(item.a.values(m).reshape(4, 16, -1), b, c)
    now = np.stack([m.spread(m.registers[r])[item.lanes].view("u4") for r in item.a_registers])
    if (now != item.a).any():
        raise Fault("registers that a wgmma under way reads were changed")
    return product(a_of_registers(item.a, item.kind), b, c)


def _wait(pending: int) -> Step:
    def step(m: Machine, mask: Mask) -> None:
        _warpgroups(m, mask)
        newest, left = m.newest("wgmma", pending, mask), []
        ended: dict[tuple[int, ...], tuple] = {}  # targets -> their values, threads that have them
        for item in m.products:
            if item.targets not in ended:
                values = np.zeros((len(item.targets), m.size), "f4")
                ended[item.targets] = values, np.zeros(m.size, bool)
            values, have = ended[item.targets]
            before = values[:, item.lanes] if item.c is None else item.c
            if item.group > newest[item.lanes.start]:
                if item.c is None and have[item.lanes].all():
                    item.c, have[item.lanes] = before.copy(), False
                left.append(item)
                continue
            _touch(m, item, -1)
            values[:, item.lanes], have[item.lanes] = _result(m, item, before), True
        m.products = left
        for targets, (values, have) in ended.items():
            for target, row in zip(targets, values, strict=True):
                if have.any():
                    m.write(target, row, None if have.all() else have)

    return step


def _wgmma(c, op: Instruction) -> Step | None:
    what = op.parts[1]
    if what == "mma_async":
        return _mma_async(c, op)
    if what == "wait_group":
        return _wait(int(op.operands[0]))
    return {"commit_group": _commit, "fence": _fence_registers}.get(what)


def _commit(m: Machine, mask: Mask) -> None:
    _warpgroups(m, mask)
    m.groups["wgmma"][m.active(mask)] += 1


def _fence_registers(m: Machine, mask: Mask) -> None:
    _warpgroups(m, mask)
    m.fences += 1


def _fence(c, op: Instruction) -> Step:
    """fence.proxy.async; other fences order what is in order here anyway."""
    if op.parts[1] != "proxy" or not op.parts[2].startswith("async"):
        return lambda m, mask: None

    def step(m: Machine, mask: Mask) -> None:
        lanes = m.active(mask)
        for cta, warp in {(int(m.cta[i]), int(m.warp[i])) for i in lanes[::WARP]}:
            m.shared.fence(cta, warp)

    return step


HANDLERS = {"wgmma": _wgmma, "fence": _fence, "setmaxnreg": lambda c, op: _warpgroups}
