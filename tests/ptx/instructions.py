"""Steps of all PTX instructions but arithmetic, products and bulk copies.

A step is a function of a `Machine` and of the mask of the threads that run it.

Source: PTX ISA 8.8, chapter 9.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import numpy as np

from . import bulk, matrix, wgmma
from .arithmetic import DTYPES, arithmetic
from .machine import WARP, Block, Machine, Mask, Program, Step
from .memory import UINT, Copy, Fault, process_memory
from .parse import WIDTHS, Instruction, Kernel, Unsupported, parse, vector

Read = Callable[[Machine], np.ndarray]
_SPECIAL = re.compile(r"%(n?tid|n?ctaid)\.[xyz]|%laneid")
JUMPS = {"bra": "bra", "ret": "ret", "exit": "ret", "bar": "bar", "barrier": "bar"}


def compile_ptx(text: str) -> Program:
    """A program from PTX text."""
    return Compiler(parse(text)).program


class Compiler:
    """Turns the instructions of a kernel into steps."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.program = Program(kernel, {}, {})
        code = kernel.instructions
        starts = {0, *kernel.labels.values()}
        for i, op in enumerate(code):
            if op.name in JUMPS and op.parts[1:2] != ["warp"]:
                starts.add(i + 1)
        starts = sorted(s for s in starts if s < len(code))
        for start, end in zip(starts, [*starts[1:], len(code)], strict=True):
            block = self.program.blocks[start] = self._block(start, end)
            block.guarded = tuple(i for i, _ in block.steps if code[i].guard)
        self.program.blocks[len(code)] = Block([], len(code), "ret")

    def _block(self, start: int, end: int) -> Block:
        op = self.kernel.instructions[end - 1]
        jump = JUMPS.get(op.name)
        if jump is None or op.parts[1:2] == ["warp"]:
            return Block([(i, self.step(i)) for i in range(start, end)], end)
        steps = [(i, self.step(i)) for i in range(start, end - 1)]
        block = Block(steps, end, jump, op.guard)
        if jump == "bra":
            block.target = self.kernel.labels[op.operands[0]]
        elif jump == "bar":
            if "sync" not in op.parts or op.guard:
                raise Unsupported(op.text)
            block.barrier = tuple(int(o, 0) for o in (*op.operands, "0")[:2])
        return block

    def step(self, index: int) -> Step:
        """The step of an instruction; one that is unknown raises when it runs."""
        op = self.kernel.instructions[index]
        try:
            step = self._step(op)
        except (KeyError, ValueError, IndexError, TypeError, Unsupported):
            step = None
        if step is None:

            def step(m: Machine, mask: Mask) -> None:
                raise Unsupported("no such instruction here")

        if op.guard is None:
            return step
        register, negated = op.guard

        def guarded(m: Machine, mask: Mask) -> None:
            on = m.registers[register] ^ np.bool_(negated)
            if mask is not None or not on.all():
                on = mask = m.spread(on) if mask is None else on & mask
            if on.any():
                m.program.active.add(index)
                step(m, mask)

        return guarded

    def _step(self, op: Instruction) -> Step | None:
        if op.name in _HANDLERS:
            return _HANDLERS[op.name](self, op)
        found = arithmetic(op)
        if found is None:
            return None
        types, function = found
        reads = [self.read(o, t) for o, t in zip(op.operands[1:], types, strict=True)]
        return self.assign(op.operands[0], lambda m, mask: function(*[r(m) for r in reads]))

    def assign(self, target: str, value: Callable[[Machine, Mask], np.ndarray]) -> Step:
        """A step that writes a value to a register ("_": nowhere)."""
        return self.assign_all([target], lambda m, mask: [value(m, mask)])

    def assign_all(self, targets: list[str], values: Callable[[Machine, Mask], list]) -> Step:
        indices = [None if t == "_" else self.kernel.registers[t] for t in targets]

        def step(m: Machine, mask: Mask) -> None:
            for index, value in zip(indices, values(m, mask), strict=True):
                if index is not None:
                    m.write(index, value, mask)

        return step

    def smallest(self, space: str, width: int) -> None:
        """Note the bytes of an access to shared memory, or of a store to global memory."""
        grains = self.program.grains
        grains[space] = min(grains[space], width)

    def read(self, operand: str, kind: str) -> Read:
        """Reads a register (its low bits), a special register or a constant as a type."""
        dtype, registers = DTYPES[kind], self.kernel.registers
        if _SPECIAL.fullmatch(operand) and operand not in registers:
            self.kernel.add_register(operand, 4)
            self.program.special[operand] = registers[operand]
        if operand in self.kernel.params:
            operand = str(self.kernel.params[operand])
        if operand not in registers:
            value = self._constant(operand, dtype)
            return lambda m: value
        index = registers[operand]
        if self.kernel.widths[index] > dtype.itemsize and dtype.kind != "b":
            narrow = UINT[dtype.itemsize]
            wide = UINT[self.kernel.widths[index]]
            return lambda m: m.registers[index].view(wide).astype(narrow).view(dtype)

        def read(m: Machine) -> np.ndarray:
            value = m.registers[index]
            return value if value.dtype == dtype else value.view(dtype)

        return read

    def _constant(self, text: str, dtype):
        if text in self.kernel.shared_names:
            return dtype.type(0)
        if dtype.kind == "b":
            return np.bool_(int(text) != 0)
        if text[:2] in ("0f", "0F"):
            return np.uint32(int(text[2:], 16)).view(dtype)
        if text[:2] in ("0d", "0D"):
            return np.float64(struct.unpack(">d", bytes.fromhex(text[2:]))[0]).view(dtype)
        if "." in text:
            return dtype.type(float(text))
        bits = int(text.rstrip("U"), 0) & ((1 << 8 * dtype.itemsize) - 1)
        return UINT[dtype.itemsize].type(bits).view(dtype)

    def address(self, operand: str, kind: str) -> Callable[[Machine, np.ndarray], np.ndarray]:
        """Addresses [lanes] of "[register + offset]": int64 for shared memory, else uint64."""
        base, _, offset = operand.strip("[] ").partition("+")
        read, offset = self.read(base.strip(), kind), int(offset or "0", 0)
        dtype = np.dtype("i8" if kind == "u32" else "u8")
        delta = np.int64(offset).view(dtype)
        return lambda m, lanes: m.spread(read(m))[lanes].astype(dtype) + delta


def full(m: Machine, values, lanes: np.ndarray, mask: Mask):
    """Values of some lanes as an array of all threads."""
    if mask is None:
        return values
    result = np.zeros(m.size, values.dtype)
    result[lanes] = values
    return result


def _mov(c: Compiler, op: Instruction) -> Step:
    target, source = op.operands
    if target[0] == "{":
        parts = vector(target)
        size = WIDTHS[op.kind] // len(parts)
        read = c.read(source, op.kind)

        def split(m: Machine, mask: Mask) -> list:
            value = read(m)
            shifts = [value.dtype.type(8 * size * i) for i in range(len(parts))]
            return [(value >> shift).astype(UINT[size]) for shift in shifts]

        return c.assign_all(parts, split)
    if source[0] == "{":
        parts = vector(source)
        size, whole = WIDTHS[op.kind] // len(parts), UINT[WIDTHS[op.kind]]
        reads = [c.read(p, f"b{8 * size}") for p in parts]

        def join(m: Machine, mask: Mask) -> np.ndarray:
            result = whole.type(0)
            for i, read in enumerate(reads):
                result = result | read(m).astype(whole) << whole.type(8 * size * i)
            return result

        return c.assign(target, join)
    read = c.read(source, op.kind)
    return c.assign(target, lambda m, mask: read(m))


def _access(op: Instruction) -> tuple[str, int]:
    """(space, bytes of one word) of a load or a store."""
    known = {"v2", "v4", "volatile", "relaxed", "weak", "gpu", "cta", "nc", "L1::evict_last",
             "L1::evict_first", "L1::no_allocate", "L2::128B", "L2::cache_hint", "global",
             "shared", "shared::cta", "param"}  # fmt: skip
    if not set(op.parts[1:-1]) <= known:
        raise Unsupported(op.text)
    spaces = [p.removesuffix("::cta") for p in op.parts[1:-1]]
    return next(p for p in spaces if p in ("param", "shared", "global")), WIDTHS[op.kind]


def _ld(c: Compiler, op: Instruction) -> Step:
    space, width = _access(op)
    targets = vector(op.operands[0])
    if space == "param":
        offset, dtype = c.kernel.params[op.operands[1].strip("[] ")], DTYPES[op.kind]
        return c.assign(targets[0], lambda m, mask: np.frombuffer(m.params, dtype, 1, offset)[0])
    address = c.address(op.operands[1], "u32" if space == "shared" else "u64")
    count, dtype = len(targets), DTYPES[op.kind]
    if space == "shared":
        c.smallest("shared", width)

    def values(m: Machine, mask: Mask) -> list:
        lanes = m.active(mask)
        words = m.load(space, address(m, lanes), width, count, lanes)
        return [full(m, w, lanes, mask) for w in np.ascontiguousarray(words.T).view(dtype)]

    return c.assign_all(targets, values)


def _st(c: Compiler, op: Instruction) -> Step:
    space, width = _access(op)
    address = c.address(op.operands[0], "u32" if space == "shared" else "u64")
    reads = [c.read(v, f"b{8 * width}") for v in vector(op.operands[1])]
    c.smallest(space, width)

    def step(m: Machine, mask: Mask) -> None:
        lanes = m.active(mask)
        words = np.stack([m.spread(r(m))[lanes] for r in reads], 1)
        m.store(space, address(m, lanes), words, lanes)

    return step


_ATOMIC = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "exch": lambda old, new: new,
}  # fmt: skip


def _atom(c: Compiler, op: Instruction) -> Step:
    """atom and red: the threads one after the other, in the order of their numbers."""
    operands = op.operands if op.name == "atom" else ["_", *op.operands]
    function = next(_ATOMIC[p] for p in op.parts if p in _ATOMIC)
    space = "shared" if any(p.startswith("shared") for p in op.parts) else "global"
    address = c.address(operands[1], "u32" if space == "shared" else "u64")
    read, dtype, width = c.read(operands[2], op.kind), DTYPES[op.kind], WIDTHS[op.kind]
    c.smallest(space, width)

    def value(m: Machine, mask: Mask) -> np.ndarray:
        lanes = m.active(mask)
        place, operand = address(m, lanes), m.spread(read(m))[lanes]
        if space == "shared":
            place = m.shared.locate(place, width, m.cta[lanes]) // width
            m.shared.check_atomic(m.shared.cells(place * width, width), m.cta[lanes], m.warp[lanes])
            memory = m.shared.data.view(dtype)
        else:
            m.global_cells(place, width, width, lanes, write=True, atomic=True)
            process, at = process_memory(place, width, 1)
            memory, place = process.view(dtype), at[:, 0]
        old = np.zeros(len(lanes), dtype)
        for i, at in enumerate(place):
            old[i] = memory[at]
            memory[at] = function(old[i], operand[i])
        return full(m, old, lanes, mask)

    return c.assign(operands[0], value)


def _cp(c: Compiler, op: Instruction) -> Step | None:
    if op.parts[1:2] != ["async"]:
        return None
    if op.parts[2:4] == ["bulk", "tensor"]:
        return bulk.copy_tensor(c, op)
    kind = "bulk" if op.parts[2] == "bulk" else "async"
    if "commit_group" in op.parts:

        def commit(m: Machine, mask: Mask) -> None:
            m.groups[kind][m.active(mask)] += 1

        return commit
    if "wait_group" in op.parts or "wait_all" in op.parts:
        pending = int(op.operands[0], 0) if op.operands else -1

        def wait(m: Machine, mask: Mask) -> None:
            newest = m.newest(kind, pending, mask)
            if kind == "bulk":
                bulk.finish_stores(m, newest)
            else:
                m.shared.finish(newest, m.cta, m.warp)

        return wait
    if op.parts[2] not in ("ca", "cg"):
        return None
    to, source = c.address(op.operands[0], "u32"), c.address(op.operands[1], "u64")
    size = int(op.operands[2], 0)
    read = c.read(op.operands[3] if len(op.operands) > 3 else str(size), "u32")
    c.smallest("shared", size)

    def copy(m: Machine, mask: Mask) -> None:
        lanes = m.active(mask)
        real = m.spread(read(m))[lanes]
        place = source(m, lanes)
        if (real > size).any():
            raise Fault("cp.async of more bytes than its size")
        data = np.zeros((len(lanes), size), "u1")
        for amount in np.unique(real[real > 0]):
            which = real == amount
            some = m.load("global", place[which], 1, int(amount), lanes[which], align=size)
            data[which, : int(amount)] = some
        start = m.shared.locate(to(m, lanes), size, m.cta[lanes])
        begun = Copy(lanes, m.groups["async"][lanes], start, data)
        m.shared.begin(begun, m.cta[lanes], m.warp[lanes])

    return copy


def _all_lanes(c: Compiler, operand: str) -> Callable[[Machine, Mask], None]:
    """Requires whole warps, and a member mask of all."""
    read = c.read(operand, "u32")

    def check(m: Machine, mask: Mask) -> None:
        m.whole_warps(mask)
        if (m.spread(read(m))[m.active(mask)] != 0xFFFFFFFF).any():
            raise Unsupported("a member mask of some lanes")

    return check


def _shfl(c: Compiler, op: Instruction) -> Step:
    how = op.parts[2]
    check = _all_lanes(c, op.operands[4])
    reads = [c.read(o, "u32") for o in op.operands[1:4]]

    def value(m: Machine, mask: Mask) -> np.ndarray:
        check(m, mask)
        a, b, clamp = (m.spread(r(m)) for r in reads)
        lane, segment = m.lane, (clamp >> np.uint32(8) & np.uint32(31)).astype("i8")
        low = lane & segment
        last = low | ((clamp & np.uint32(31)).astype("i8") & ~segment)
        by = (b & np.uint32(31)).astype("i8")
        source = {
            "up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": low | (by & ~segment),
        }[how]  # fmt: skip
        inside = source >= last if how == "up" else source <= last
        return a[m.lanes - lane + np.where(inside, source, lane)]

    return c.assign(op.operands[0], value)


def _redux(c: Compiler, op: Instruction) -> Step:
    check, read = _all_lanes(c, op.operands[2]), c.read(op.operands[1], op.kind)
    function = _ATOMIC[op.parts[2]]

    def value(m: Machine, mask: Mask) -> np.ndarray:
        check(m, mask)
        values = m.spread(read(m)).reshape(-1, WARP)
        return np.repeat(function.reduce(values, axis=1, dtype=values.dtype), WARP)

    return c.assign(op.operands[0], value)


def _vote(c: Compiler, op: Instruction) -> Step | None:
    check, read = _all_lanes(c, op.operands[2]), c.read(op.operands[1], "pred")
    bits = np.uint32(1) << np.arange(WARP, dtype="u4")
    if op.parts[2] != "ballot":
        return None

    def value(m: Machine, mask: Mask) -> np.ndarray:
        check(m, mask)
        ballots = (m.spread(read(m)).reshape(-1, WARP) * bits).sum(1, dtype="u4")
        return np.repeat(ballots, WARP)

    return c.assign(op.operands[0], value)


def _elect(c: Compiler, op: Instruction) -> Step:
    """The first lane of each warp is chosen."""
    check = _all_lanes(c, op.operands[1])

    def values(m: Machine, mask: Mask) -> list:
        check(m, mask)
        return [np.uint32(0), m.lane == 0]

    return c.assign_all(op.operands[0].split("|"), values)


def _cvta(c: Compiler, op: Instruction) -> Step | None:
    """Addresses in global memory are generic ones here; those of parameters are offsets."""
    read = c.read(op.operands[1], op.kind)
    if op.parts[1] == "param":
        return c.assign(op.operands[0], lambda m, mask: read(m) + np.uint64(m.params.ctypes.data))
    return c.assign(op.operands[0], lambda m, mask: read(m)) if "global" in op.parts else None


def _bar_warp(c: Compiler, op: Instruction) -> Step | None:
    return _all_lanes(c, op.operands[0]) if op.parts[1:] == ["warp", "sync"] else None


def _nothing(c: Compiler, op: Instruction) -> Step:
    """Orders what is in order here anyway, or advises."""
    return lambda m, mask: None


_HANDLERS: dict[str, Callable[[Compiler, Instruction], Step | None]] = {
    "mov": _mov, "ld": _ld, "st": _st, "atom": _atom, "red": _atom, "cp": _cp,
    "shfl": _shfl, "elect": _elect, "cvta": _cvta, "redux": _redux, "vote": _vote, "bar": _bar_warp,
    "membar": _nothing, "nanosleep": _nothing, "prefetch": _nothing, "griddepcontrol": _nothing,
    **matrix.HANDLERS,
    **wgmma.HANDLERS,
    **bulk.HANDLERS,
}  # fmt: skip
