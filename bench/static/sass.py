"""What the machine code of a compiled kernel says: registers, stack, spills, widths of copies,
instructions of the K/V loop.

Read from the cubin with the tools that come with Triton, so that it is what the GPU would run, not
what a pass had planned.
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass

# Most specific first: a tcgen05 kernel also has plain arithmetic.
MMA = (("UTCHMMA", "tcgen05"), ("HGMMA", "wgmma"), ("HMMA", "mma.sync"), ("FFMA", "fma"))

# wgmma without the overlap that it is there for.
SERIAL = "wgmma, serial"

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
LABEL = re.compile(r"^(\.L_x_\d+):")


@dataclass(frozen=True)
class Code:
    """One kernel's machine code.

    Attributes:
        registers: of a thread.
        stack_bytes: its stack frame.
        lines: (label or "", opcode or "", operands), in the order of addresses.
    """

    registers: int
    stack_bytes: int
    lines: tuple[tuple[str, str, str], ...]

    @property
    def opcodes(self) -> collections.Counter[str]:
        """How often each instruction occurs."""
        return collections.Counter(opcode for _, opcode, _ in self.lines if opcode)

    @property
    def spill_bytes(self) -> int:
        """Bytes that a thread stores to local memory, each store counted once; the kernels use it
        for nothing but spills.
        """
        return sum(_width(op) * n for op, n in self.opcodes.items() if op.startswith("STL"))

    @property
    def mma(self) -> str:
        """Kind of the matrix instruction; "fma": none but ordinary arithmetic, "-": not even that.

        "wgmma, serial": each one is opened and waited for by itself, not with the others of its
        product. ptxas does so throughout a kernel where other instructions touch an accumulator
        that is under way, for want of registers most of the time.
        """
        counts = self.opcodes
        kind = next((k for prefix, k in MMA if any(op.startswith(prefix) for op in counts)), "-")
        products = sum(n for op, n in counts.items() if op.startswith("HGMMA"))
        serial = kind == "wgmma" and counts["WARPGROUP.ARRIVE"] >= products
        return SERIAL if serial else kind

    def copy_bytes(self, element_size: int, scale_bytes: int = 0) -> int:
        """Bytes of the narrowest K/V copy; 0 if none is asynchronous and loads of whole vectors go
        through registers.

        All asynchronous copies of the attention kernels are of K and V: page ids come by ordinary
        loads. A row whose alignment is unknown to the compiler is loaded element by element, and no
        2-byte element can be copied asynchronously.

        Args:
            scale_bytes: what the scales of a quantised row take, whose copies do not count.
        """
        widths = list(_carried(self.opcodes, scale_bytes))
        if element_size == 2 and any(op.startswith("LDG.") and "U16" in op for op in self.opcodes):
            widths.append(2)
        return min(widths, default=0)

    def tile_instructions(self, tile_bytes: int, threads: int, scale_bytes: int = 0) -> int | None:
        """Instructions that a warp issues for a K/V tile: the body of the first loop over tiles,
        divided by the tiles it copies.

        None where that cannot be told: no loop holds a matrix instruction, or its copies make no
        whole number of tiles. Up to a quarter more may be lanes that copy nothing: a row of 576
        bytes takes those of 640.

        Args:
            tile_bytes: of a tile, without scales.
            threads: of a program.
            scale_bytes: as in ``copy_bytes``.
        """
        prefix = next((p for p, kind in MMA if self.mma.startswith(kind)), None)
        if prefix is None:
            return None
        for first, last in self._loops():
            body = [opcode for _, opcode, _ in self.lines[first:last] if opcode]
            if not any(opcode.startswith(prefix) for opcode in body):
                continue
            copied = threads * _carried(collections.Counter(body), scale_bytes).total()
            tiles = copied // tile_bytes
            if tiles == 0 or 4 * copied > 5 * tiles * tile_bytes:
                return None
            return round(len(body) / tiles)
        return None

    def _loops(self) -> list[tuple[int, int]]:
        """Ranges of lines from the target of a backward branch through the branch, innermost ones
        only, in order.
        """
        labels = {label: i for i, (label, _, _) in enumerate(self.lines) if label}
        found = []
        for i, (_, opcode, operands) in enumerate(self.lines):
            target = re.search(r"\.L_x_\d+", operands) if opcode.startswith("BRA") else None
            # A branch to itself ends every kernel.
            if target and labels.get(target[0], i) < i - 1:
                found.append((labels[target[0]], i + 1))
        inner = [
            loop for loop in found if not any(o != loop and loop[0] <= o[0] and o[1] <= loop[1] for o in found)
        ]  # fmt: skip
        return sorted(inner)


def read(cubin: bytes) -> Code:
    """The machine code of a cubin that holds one kernel."""
    usage = _tool("cuobjdump", cubin, "-res-usage")
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    return Code(registers, stack, parse(_tool("nvdisasm", cubin, "-c", "-ndf")))


def parse(listing: str) -> tuple[tuple[str, str, str], ...]:
    """Labels and instructions of nvdisasm's listing, as in ``Code.lines``."""
    lines = []
    for text in listing.splitlines():
        if label := LABEL.match(text):
            lines.append((label[1], "", ""))
        elif instruction := INSTRUCTION.search(text):
            lines.append(("", instruction[1], instruction[2]))
    return tuple(lines)


def _carried(opcodes: collections.Counter[str], scale_bytes: int) -> collections.Counter[int]:
    """Bytes that a thread copies asynchronously of K/V tiles, by width.

    Copies as wide as ``scale_bytes`` are of scales while they carry less than a third of all bytes:
    of 584 bytes they are 8, but an instruction counts whole, however few of its threads copy.
    """
    carried: collections.Counter[int] = collections.Counter()
    for opcode, count in opcodes.items():
        if opcode.startswith("LDGSTS"):
            carried[_width(opcode)] += count * _width(opcode)
    if 3 * carried[scale_bytes] < carried.total():
        del carried[scale_bytes]
    return carried


def _width(opcode: str) -> int:
    """Bytes that one thread moves with a load, store or copy of more than a halfword."""
    return next((bits // 8 for bits in (128, 64) if f".{bits}" in opcode), 4)


def _tool(name: str, cubin: bytes, *flags: str) -> str:
    """Output of one of the CUDA tools that come with Triton."""
    import triton

    path = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [path, *flags, file.name], capture_output=True, text=True, check=True
        ).stdout
