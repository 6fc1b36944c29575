"""mbarrier, tensor maps, and bulk copies of boxes of tensors (TMA).

    mbarrier.init N        a phase ends after N arrivals and the bytes that were announced
    mbarrier.arrive        orders what the thread did before it before the end of the phase
    cp.async.bulk.tensor   a load counts its bytes at an mbarrier, a store is in a thread's group
    mbarrier.*_wait        sleeps until the phase ends; then its loads are there

A load reads global memory at once, and reaches shared memory when its phase is first waited for. To
the clocks all loads are one more warp. A store reads and writes at once; what it reads must stay
until it is waited for.

Source: PTX ISA 8.8, sections 5.5 (tensor maps), 9.7.9.27 (bulk copies) and 9.7.13.15 (mbarrier).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from .machine import WARP, Machine, Mask, Step
from .memory import Fault, process_memory, swizzled
from .parse import WIDTHS, Instruction, Unsupported, vector

# A tensor map here; NVIDIA does not document its own layout.
MAP = np.dtype([
    ("global_address", "u8"), ("global_stride", "u8", 4), ("global_dim", "u4", 5),
    ("box_dim", "u4", 5), ("element_stride", "u4", 5), ("rank", "u4"), ("elemtype", "u4"),
    ("interleave_layout", "u4"), ("swizzle_mode", "u4"), ("fill_mode", "u4"), ("unused", "u8"),
])  # fmt: skip
_MARK = np.uint8(0xA5)  # bytes of an mbarrier
SIZES = (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4)  # bytes of an element, by elemtype
NANS = {6: 0x7FFF, 7: 0x7FFFFFFF, 8: 0x7FFFFFFF, 9: 0x7FFFFFFFFFFFFFFF, 10: 0x7FFF}


def encode(address: int, meta: dict, shape, strides, nan: bool) -> bytes:
    """A tensor map for the ``tensordesc_meta`` of Triton; the last dimension is contiguous."""
    made, rank = np.zeros((), MAP), len(shape)
    made["global_address"], made["rank"], made["elemtype"] = address, rank - 1, meta["elem_type"]
    made["global_stride"][: rank - 1] = np.multiply(strides[:-1], meta["elem_size"])[::-1]
    made["global_dim"][:rank], made["box_dim"][:rank] = shape[::-1], meta["block_size"][::-1]
    made["element_stride"][:rank] = 1
    made["swizzle_mode"], made["fill_mode"] = meta["swizzle"], nan
    return made.tobytes()


@dataclass
class TensorMap:
    """A tensor and the box that copies of it have; innermost dimension first.

    Attributes:
        strides: bytes, of the first dimension those of an element.
        index: [elements, rank] of the box.
        swizzle: bytes in which pieces of 16 are exchanged; 16: none.
        fill: bytes of an element that is outside of the tensor.
    """

    address: int
    strides: np.ndarray
    dims: np.ndarray
    index: np.ndarray
    swizzle: int
    fill: bytes


@lru_cache(maxsize=64)
def decode(data: bytes) -> TensorMap:
    found = np.frombuffer(data, MAP)[0]
    address, rank = int(found["global_address"]), int(found["rank"]) + 1
    kind, swizzle = int(found["elemtype"]), int(found["swizzle_mode"])
    if rank > 5 or kind >= len(SIZES) or swizzle > 3:
        raise Fault("there is no tensor map")
    if found["interleave_layout"] or (found["element_stride"][:rank] != 1).any():
        raise Unsupported("an interleaved tensor map, or one with element strides")
    size, span = SIZES[kind], 16 << swizzle
    strides = np.array([size, *found["global_stride"][: rank - 1]], "i8")
    dims, box = (found[name][:rank].astype("i8") for name in ("global_dim", "box_dim"))
    if address % 16 or (strides[1:] % 16).any():
        raise Fault("a tensor map whose address or strides are no multiples of 16 bytes")
    if box.min() < 1 or box.max() > 256 or box[0] * size % 16:
        raise Fault(f"a tensor map with a box of {box} elements of {size} bytes")
    if swizzle and box[0] * size != span:
        raise Unsupported(f"rows of {box[0] * size} bytes in a swizzle of {span}")
    index = np.indices(box[::-1]).reshape(rank, -1)[::-1].T
    fill = (NANS[kind] if found["fill_mode"] else 0).to_bytes(size, "little")
    return TensorMap(address, strides, dims, index, span, fill)


@dataclass
class Mbarrier:
    """An mbarrier.

    Attributes:
        pending: arrivals that its phase lacks; ``missing``: bytes.
        arrived: times that its arrivals had seen; ``ended``: those before the last phase's end.
        loads: under way: (phase, bytes of shared memory, what they get, time of the loads' clock).
    """

    count: int
    pending: int
    arrived: np.ndarray
    ended: np.ndarray
    missing: int = 0
    phase: int = 0
    loads: list[tuple] = field(default_factory=list)

    def progress(self, m: Machine) -> None:
        """End the phase if nothing is missing."""
        if self.pending < 0:
            raise Fault("more arrivals at an mbarrier than its phase expects")
        if self.pending == 0 and self.missing == 0:
            self.phase += 1
            self.pending, self.ended = self.count, self.arrived.copy()
            m.wake()

    def land(self, m: Machine) -> None:
        """Store the loads of phases that have ended."""
        done = [load for load in self.loads if load[0] < self.phase]
        self.loads = self.loads[len(done) :]
        for _, places, data, time in done:
            m.shared.data[places] = data
            cells = np.unique(places >> m.shared.shift)
            m.shared.in_flight[cells], m.shared.written[cells] = 0, True
            m.shared.wrote[cells] = time * 64 + m.shared.warps


def _mbarriers(m: Machine, address, lanes) -> Iterator[tuple[Mbarrier, np.ndarray, np.ndarray]]:
    """(mbarrier, its lanes, their places in ``lanes``) of each mbarrier at the lanes' addresses."""
    starts = m.shared.locate(address, 8, m.cta[lanes])
    for start in np.unique(starts):
        which = np.flatnonzero(starts == start)
        if start not in m.mbarriers or (m.shared.data[start : start + 8] != _MARK).any():
            raise Fault("there is no mbarrier, or it was overwritten")
        stamp = m.shared.wrote[m.shared.cells(starts[which], 8)]
        known = m.clocks.times[m.cta[lanes[which]], m.warp[lanes[which]]]
        m.shared.ordered(stamp, known, "uses an mbarrier that", "set up")
        yield m.mbarriers[start], lanes[which], which


def _init(c, op: Instruction) -> Step:
    address, gone = c.address(op.operands[0], "u32"), op.parts[1] == "inval"
    read = c.read("1" if gone else op.operands[1], "u32")
    c.smallest("shared", 8)

    def step(m: Machine, mask: Mask) -> None:
        lanes = m.active(mask)
        if gone:
            list(_mbarriers(m, address(m, lanes), lanes))
        for start, lane in zip(
            m.shared.locate(address(m, lanes), 8, m.cta[lanes]), lanes, strict=True
        ):
            before = m.mbarriers.pop(int(start), None)
            if before and before.loads:
                raise Fault("ends an mbarrier whose loads were not waited for")
            cells = m.shared.cells(start[None], 8)
            m.shared.check_write(cells, m.cta[[lane]], m.warp[[lane]])
            m.shared.written[cells] = False
            m.shared.data[start : start + 8] = _MARK
            if not gone:
                count, none = int(m.spread(read(m))[lane]), np.zeros(m.shared.warps + 1, "i8")
                m.mbarriers[int(start)] = Mbarrier(count, count, none, none.copy())

    return step


def _arrive(c, op: Instruction) -> Step | None:
    if op.operands[0] != "_":
        return None
    announces = "expect_tx" in op.parts
    address = c.address(op.operands[1], "u32")
    read = c.read((*op.operands, "1")[2], "u32")

    def step(m: Machine, mask: Mask) -> None:
        lanes = m.active(mask)
        values = m.spread(read(m))[lanes].astype("i8")
        for barrier, mine, which in _mbarriers(m, address(m, lanes), lanes):
            cta, warps = m.cta[mine[0]], np.unique(m.warp[mine])
            barrier.arrived = np.maximum(barrier.arrived, m.clocks.times[cta, warps].max(0))
            m.clocks.times[cta, warps, warps] += 1
            barrier.missing += int(values[which].sum()) * announces
            barrier.pending -= len(mine) if announces else int(values[which].sum())
            barrier.progress(m)

    return step


def _wait(c, op: Instruction) -> Step | None:
    if "parity" not in op.parts:
        return None
    address, read = c.address(op.operands[1], "u32"), c.read(op.operands[2], "u32")

    def value(m: Machine, mask: Mask) -> np.ndarray:
        lanes = m.active(mask)
        parity, done = m.spread(read(m)) & np.uint32(1), np.zeros(m.size, bool)
        for barrier, mine, _ in _mbarriers(m, address(m, lanes), lanes):
            done[mine] = barrier.phase & 1 != parity[mine]
            cta, warps = m.cta[mine[0]], np.unique(m.warp[mine[done[mine]]])
            if len(warps):
                barrier.land(m)
                seen = np.maximum(m.clocks.times[cta, warps], barrier.ended)
                m.clocks.times[cta, warps] = seen
        m.sleep(lanes[~done[lanes]])
        return done

    return c.assign(op.operands[0], value)


def copy_tensor(c, op: Instruction) -> Step | None:
    """cp.async.bulk.tensor: a box from global to shared memory, or back."""
    own = {"shared::cta", "shared::cluster"}  # a cluster has one CTA here
    loads = op.parts[5] in own and op.parts[6:] == ["global", "mbarrier::complete_tx::bytes"]
    if not loads and op.parts[5:] != ["global", "shared::cta", "bulk_group"]:
        return None
    tensor, shared = op.operands[1::-1] if loads else op.operands[:2]
    source, coordinates = tensor.strip("[] ").split(",", 1)
    at_map, at_shared = c.address(source, "u64"), c.address(shared, "u32")
    reads = [c.read(o, "s32") for o in vector(coordinates)]
    at_mbarrier = c.address(op.operands[2], "u32") if loads else None
    if not loads:
        c.smallest("global", 1)

    def step(m: Machine, mask: Mask) -> None:
        for lane in m.active(mask):
            one = np.array([lane])
            box = decode(_map_at(m, at_map(m, one), one))
            where = box.index + [int(m.spread(read(m))[lane]) for read in reads]
            inside = ((where >= 0) & (where < box.dims)).all(1)
            address = (box.address + where[inside] @ box.strides).astype("u8")
            size, count = len(box.fill), len(where)
            cta, lanes = m.cta[one], np.full(len(address), lane)
            start = m.shared.locate(at_shared(m, one), size * count, cta, align=128)
            cells = m.shared.cells(start, size * count)
            places = swizzled(start + np.arange(size * count), box.swizzle)
            m.global_cells(address, size, size, lanes, write=not loads)
            process, at = process_memory(address, 1, size)
            if loads:
                data = np.tile(np.frombuffer(box.fill, "u1"), (count, 1))
                data[inside] = process[at]
                m.shared.check_write(cells, cta, m.warp[one])
                m.shared.in_flight[cells], m.shared.unfenced[cells] = 1, False
                [(barrier, *_)] = _mbarriers(m, at_mbarrier(m, one), one)
                m.loads += 1
                barrier.loads.append((barrier.phase, places, data.ravel(), m.loads))
                barrier.arrived[-1] = m.loads
                barrier.missing -= size * count
                barrier.progress(m)
                continue
            if m.shared.unfenced[cells].any():
                raise Fault("stores shared memory written without a fence.proxy.async since")
            m.shared.check_read(cells, cta, m.warp[one])
            m.shared.busy[cells] += 1
            m.stores.append((int(lane), int(m.groups["bulk"][lane]), cells))
            process[at] = m.shared.data[places].reshape(count, size)[inside]

    return step


def _map_at(m: Machine, address: np.ndarray, lane: np.ndarray) -> bytes:
    """The tensor map at an address: a parameter's, or one in global memory."""
    offset = int(address[0]) - m.params.ctypes.data
    if 0 <= offset <= m.params.size - MAP.itemsize:
        return m.params[offset : offset + MAP.itemsize].tobytes()
    return m.load("global", address, 1, MAP.itemsize, lane, align=64).tobytes()


def finish_stores(m: Machine, newest: np.ndarray) -> None:
    """End the stores of each thread up to its group ``newest``."""
    left = []
    for lane, group, cells in m.stores:
        if group > newest[lane]:
            left.append((lane, group, cells))
            continue
        m.shared.busy[cells] -= 1
        m.shared.check_read(cells, m.cta[[lane]], m.warp[[lane]])
    m.stores = left


def _tensormap(c, op: Instruction) -> Step | None:
    if op.parts[1] == "cp_fenceproxy":
        to, source = c.address(op.operands[0], "u64"), c.address(op.operands[1], "u64")

        def copy(m: Machine, mask: Mask) -> None:
            m.whole_warps(mask)
            lanes = m.active(mask)[::WARP]
            data = m.load("shared", source(m, lanes), 1, MAP.itemsize, lanes)
            m.store("global", to(m, lanes), data, lanes)

        return copy
    if op.parts[1:3] != ["replace", "tile"] or op.parts[4] != "shared::cta":
        return None
    part, first = MAP.fields[op.parts[3]][:2]
    ordinal = int(op.operands[1], 0) if len(op.operands) == 3 else 0
    address, read = c.address(op.operands[0], "u64"), c.read(op.operands[-1], op.kind)
    offset = np.uint64(first + part.base.itemsize * ordinal)
    if WIDTHS[op.kind] != part.base.itemsize:
        return None
    c.smallest("shared", 4)

    def replace(m: Machine, mask: Mask) -> None:
        lanes = m.active(mask)
        values = m.spread(read(m))[lanes].reshape(-1, 1)
        m.store("shared", address(m, lanes) + offset, values, lanes)

    return replace


_MBARRIER = {
    "init": _init, "inval": _init, "arrive": _arrive, "try_wait": _wait, "test_wait": _wait,
}  # fmt: skip
HANDLERS = {"mbarrier": lambda c, op: _MBARRIER[op.parts[1]](c, op), "tensormap": _tensormap}
