"""Shared and global memory, in which every access is checked.

Two accesses race if one of them writes, both touch a byte, and no barrier orders them. The order is
kept as vector clocks: ``clocks[cta, a, b]`` is the time of warp b that warp a has seen, and a
barrier gives its warps the largest times of each other. A warp's own accesses are in order.

    warp 0   store at time 3 ---- bar.sync ---------------- time 4
    warp 1   ....................bar.sync: sees (3, 1) .... loads: 3 <= 3, no race

Source: FastTrack (Flanagan and Freund, PLDI 2009) for clocks; PTX ISA 8.8, chapter 8 and 9.7.9.25
    for what cp.async orders.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# NaN in fp32, bf16, fp16 and e4m3; as an address or an index, outside of everything.
POISON = {0: True, 1: 0x7F, 2: 0x7FFF, 4: 0x7FFF7FFF, 8: 0x7FFF7FFF7FFF7FFF}
UINT = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}
_BASE, _SPAN = 4096, 1 << 47  # addresses of a process
# All memory of this process; only addresses that were checked are indexed.
_PROCESS = np.ctypeslib.as_array((ctypes.c_uint8 * _SPAN).from_address(_BASE))


class Fault(Exception):
    """The kernel did something that it must not do."""


def extents(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Sorted, disjoint byte ranges [start, end) of a view's elements, without the gaps of rows."""
    if not tensor.numel():
        return []
    length = tensor.element_size()
    outer = []
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda x: x[1]):
        stride *= tensor.element_size()
        if not outer and stride <= length:
            length = max(length, stride * (size - 1) + length)
        elif size > 1:
            outer.append(range(0, size * stride, stride))
    starts = np.zeros(1, "i8")
    for offsets in outer:
        starts = (starts[:, None] + np.asarray(offsets)).ravel()
    base = tensor.data_ptr()
    return merged([(base + int(s), base + int(s) + length) for s in starts])


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges sorted, with those that touch made one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


class Clocks:
    """Vector clocks of warps: int64 [ctas, warps, warps + 1]; the last is that of bulk loads."""

    def __init__(self, ctas: int, warps: int):
        self.times = np.tile(np.eye(warps, warps + 1, dtype="i8"), (ctas, 1, 1))
        self.diagonal = np.arange(warps)

    def join(self, which: np.ndarray) -> None:
        """Order the warps that are set in ``which`` [ctas, warps] at a barrier."""
        latest = np.where(which[:, :, None], self.times, 0).max(1)
        self.times = np.where(which[:, :, None], latest[:, None], self.times)
        self.times[:, self.diagonal, self.diagonal] += which


class Global:
    """Memory of this process that one launch may touch, and who has touched it.

    Args:
        ranges: byte ranges of the views that the kernel was given.
        grain: bytes of the smallest store of the kernel, the unit in which races are found.
        undo: remember what is overwritten.
    """

    def __init__(self, ranges: list[tuple[int, int]], grain: int, undo: bool = False):
        self.starts = np.array([start for start, _ in ranges], "u8")
        self.ends = np.array([end for _, end in ranges], "u8")
        self.shift = grain.bit_length() - 1
        # Each range has its own cells, from ``cells``: cell = (address >> shift) - first + cells.
        self.first = self.starts >> np.uint64(self.shift)
        sizes = ((self.ends - np.uint64(1)) >> np.uint64(self.shift)) - self.first + np.uint64(1)
        self.cells = np.concatenate([[0], np.cumsum(sizes)]).astype("i8")
        count = int(self.cells[-1])
        # 0: none. Else 1 + CTA; of readers, -1: several CTAs. The times: 64 * time + warp.
        self.writer, self.reader = np.zeros(count, "i4"), np.zeros(count, "i4")
        self.wrote, self.read = np.zeros(count, "i8"), np.zeros(count, "i8")
        self.undo = undo
        self.kept: list[tuple[np.ndarray, np.ndarray]] = []  # indices in the process, old bytes

    def keep(self, address: np.ndarray, size: int) -> None:
        """Note that ``size`` bytes at each address are about to be overwritten."""
        if self.undo:
            _, at = process_memory(address, 1, size)
            self.kept.append((at, _PROCESS[at]))

    def written(self) -> bytes:
        """Places that the launch has written, and their bytes now."""
        at = np.unique(np.concatenate([np.empty(0, "i8"), *(at.ravel() for at, _ in self.kept)]))
        return at.tobytes() + _PROCESS[at].tobytes()

    def restore(self) -> None:
        for at, old in reversed(self.kept):
            _PROCESS[at] = old

    def locate(self, address: np.ndarray, size: int, align: int) -> np.ndarray:
        """Cells [lanes, n] of accesses of ``size`` bytes; `Fault` if one is not allowed."""
        if (address & np.uint64(align - 1)).any():
            wrong = int(address[(address & np.uint64(align - 1)) != 0][0])
            raise Fault(f"global address {wrong:#x} is no multiple of {align}")
        if not len(self.starts):
            raise Fault("global access of a kernel without tensors")
        index = np.searchsorted(self.starts, address, "right") - 1
        bad = (index < 0) | (address + np.uint64(size) > self.ends[np.maximum(index, 0)])
        if bad.any():
            raise Fault(self._outside(int(address[bad][0]), size, int(bad.sum())))
        first = (address >> np.uint64(self.shift)) - self.first[index]
        cells = first.astype("i8") + self.cells[index]
        return cells[:, None] + np.arange(max(1, size >> self.shift))

    def _outside(self, address: int, size: int, lanes: int) -> str:
        past = min((address - int(e) for e in self.ends if address + size > e), default="?")
        return (
            f"global address {address:#x}, {size} bytes, is in no tensor: {past} bytes past the "
            f"end of the nearest before it ({lanes} lanes)"
        )

    def check(self, cells, cta, tag, known, *, write: bool, atomic: bool = False) -> None:
        """Note an access to cells [lanes, n]; `Fault` for a race.

        Args:
            cta: [lanes] 1 + CTA.
            tag: [lanes] 64 * time + warp.
            known: [lanes, warps + 1] times that the warp of the lane has seen.
        """
        me, tag = cta[:, None], tag[:, None]
        lanes = np.arange(len(cta))[:, None]

        def clash(owner, stamp):
            other = (owner != 0) & (owner != me)
            late = (owner == me) & (stamp >> 6 > known[lanes, stamp & 63])
            return other | late

        writer = self.writer[cells]
        if clash(writer, self.wrote[cells]).any() and not atomic:
            what = "writes" if write else "reads"
            raise Fault(f"race in global memory: {what} what {self._name(writer, me)} wrote")
        if not write:
            reader = self.reader[cells]
            self.reader[cells] = np.where((reader == 0) | (reader == me), me, -1)
            seen = self.reader[cells]
            self.reader[cells[(seen != me) & (seen != -1)]] = -1
            self.read[cells] = tag
            return
        reader = self.reader[cells]
        if clash(reader, self.read[cells]).any() and not atomic:
            raise Fault(f"race in global memory: writes what {self._name(reader, me)} read")
        if atomic:
            return
        self.writer[cells], self.wrote[cells] = me, tag
        if (self.writer[cells] != me).any():
            raise Fault("race in global memory: two CTAs write the same bytes")

    @staticmethod
    def _name(owner, me) -> str:
        other = owner[(owner != 0) & (owner != me)]
        return f"CTA {max(other[0] - 1, -1)} (-1: several)" if other.size else "another warp"


def process_memory(address: np.ndarray, width: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(words of all memory of this process, indices [lanes, count] of those at the addresses)."""
    index = ((address - np.uint64(_BASE)) // np.uint64(width)).astype("i8")
    return _PROCESS.view(UINT[width]), index[:, None] + np.arange(count)


@dataclass
class Copy:
    """cp.async of some lanes: bytes [lanes, size] that are stored when they are waited for."""

    lanes: np.ndarray
    group: np.ndarray
    start: np.ndarray
    data: np.ndarray

    def select(self, which: np.ndarray) -> Copy:
        return Copy(self.lanes[which], self.group[which], self.start[which], self.data[which])


def swizzled(address: np.ndarray, row: int) -> np.ndarray:
    """Addresses in rows of 128, 64, 32 or 16 bytes: bits 4.. are exchanged by xor with bits 7..."""
    return address ^ (address >> 7 & row // 16 - 1) << 4


class Shared:
    """Shared memory of some CTAs, one after the other.

    Args:
        machine: the `Machine` that runs them.
        size: bytes of a CTA.
        grain: bytes of the smallest access of the kernel, the unit of all checks.
    """

    # Whether wgmma may read what cp.async wrote only after a fence.proxy.async.
    copies_need_fence = True

    def __init__(self, machine, size: int, grain: int):
        self.size, self.stride = size, -(-size // 1024) * 1024
        self.machine, self.clocks = machine, machine.clocks
        ctas, self.warps, _ = self.clocks.times.shape
        self.data = np.full(ctas * self.stride // 2 + 8, POISON[2], "u2").view("u1")
        self.shift = grain.bit_length() - 1
        cells = ctas * self.stride >> self.shift
        self.written = np.zeros(cells, bool)
        self.in_flight = np.zeros(cells, "u1")
        self.wrote = np.zeros(cells, "i8")  # 64 * time + warp
        self.writer = np.zeros(cells, "i4")  # the instruction
        self.read = np.zeros((cells, self.warps + 1), "i8")
        self.added = np.zeros(cells, bool)  # the last write was an atomic one
        self.copies: list[Copy] = []
        self.unfenced = np.zeros(cells, bool)  # written, and no fence.proxy.async since
        self.busy = np.zeros(cells, "i2")  # wgmma and bulk copies under way that read it

    def locate(self, address: np.ndarray, size: int, cta: np.ndarray, align: int = 0) -> np.ndarray:
        """First bytes of accesses; `Fault` if one is not aligned, or outside of the CTA's."""
        address = address.astype("i8")
        if (address & ((align or size) - 1)).any():
            raise Fault(f"shared address is no multiple of {align or size}")
        if len(address) and (address.min() < 0 or address.max() + size > self.size):
            wrong = address[(address < 0) | (address + size > self.size)][0]
            raise Fault(f"shared address {wrong}, {size} bytes, is outside of {self.size} bytes")
        return address + cta * self.stride

    def cells(self, start: np.ndarray, size: int) -> np.ndarray:
        return (start >> self.shift)[:, None] + np.arange(max(1, size >> self.shift))

    def check_read(self, cells: np.ndarray, cta: np.ndarray, warp: np.ndarray) -> None:
        """Note a read of cells [lanes, n] by a warp [lanes] of a CTA [lanes]."""
        if self.in_flight[cells].any():
            raise Fault("reads shared memory that a copy is on its way to")
        if not self.written[cells].all():
            raise Fault("reads shared memory that was never written")
        known = self.clocks.times[cta, warp]
        self.ordered(self.wrote[cells], known, "reads what", "wrote")
        self.read[cells, warp[:, None]] = known[np.arange(len(warp)), warp][:, None]

    def check_write(self, cells, cta, warp, *, same=False, atomic=False) -> None:
        """Note a write. same: [lanes, n] or False, cells that hold the new value already.

        Layouts that hold a value several times store it several times: such stores of one instruction
        are no race, and two atomic operations are none.
        """
        if self.in_flight[cells].any():
            raise Fault("writes shared memory that a copy is on its way to")
        if self.busy[cells].any():
            raise Fault("writes shared memory that a wgmma or a bulk copy under way reads")
        self.unfenced[cells] = True
        known = self.clocks.times[cta, warp]
        mine = (known[np.arange(len(warp)), warp] * 64 + warp)[:, None]
        same = same & (self.writer[cells] == self.machine.at)
        apart = np.where(same | (self.added[cells] & atomic), 0, self.wrote[cells])
        self.ordered(apart, known, "writes what", "wrote")
        late = self.read[cells] > known[:, None, :]
        if late.any():
            reader = np.nonzero(late)[2][0]
            raise Fault(f"race: writes what warp {reader} read since the last barrier")
        self.wrote[cells], self.added[cells] = mine, atomic
        self.writer[cells] = self.machine.at

    def check_atomic(self, cells, cta, warp) -> None:
        if not self.written[cells].all():
            raise Fault("atomic operation on shared memory that was never written")
        self.check_write(cells, cta, warp, atomic=True)

    def ordered(self, stamp, known, what, did) -> None:
        late = stamp >> 6 > known[np.arange(len(known))[:, None], stamp & 63]
        if late.any():
            raise Fault(f"race: {what} warp {stamp[late][0] & 63} {did} since the last barrier")

    def put(self, start: np.ndarray, data: np.ndarray, cta: np.ndarray, warp: np.ndarray) -> None:
        """Store bytes [lanes, size], with all checks."""
        cells = self.cells(start, data.shape[1])
        at = start[:, None] + np.arange(data.shape[1])
        bytes_same = self.data[at] == data
        same = bytes_same.reshape(*cells.shape, -1).all(-1) & self.written[cells]
        self.check_write(cells, cta, warp, same=same)
        self.data[at] = data
        self.written[cells] = True
        if (self.data[at] != data).any():
            raise Fault("race: lanes store different values to the same bytes at once")

    def fence(self, cta: int, warp: int) -> None:
        """fence.proxy.async: wgmma and bulk copies may read what the warp wrote or saw written."""
        own = slice(cta * self.stride >> self.shift, (cta + 1) * self.stride >> self.shift)
        known = self.clocks.times[cta, warp]
        self.unfenced[own] &= self.wrote[own] >> 6 > known[self.wrote[own] & 63]

    def begin(self, copy: Copy, cta: np.ndarray, warp: np.ndarray) -> None:
        """Start copies; what they write may not be touched until they are waited for."""
        cells = self.cells(copy.start, copy.data.shape[1])
        self.check_write(cells, cta, warp)
        self.in_flight[cells] = 1
        self.copies.append(copy)

    def finish(self, newest: np.ndarray, cta: np.ndarray, warp: np.ndarray) -> None:
        """End the copies of each lane up to its group ``newest`` [all lanes], -1: none."""
        left = []
        for copy in self.copies:
            done = copy.group <= newest[copy.lanes]
            if not done.all():
                left.append(copy.select(~done))
            if done.any():
                copy = copy.select(done)
                cells = self.cells(copy.start, copy.data.shape[1])
                self.in_flight[cells] = 0
                self.put(copy.start, copy.data, cta[copy.lanes], warp[copy.lanes])
                self.unfenced[cells] = self.copies_need_fence
        self.copies = left
