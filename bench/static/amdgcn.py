"""What the assembly of a kernel compiled for AMD says: registers, spills, scratch memory, the matrix
instruction, widths of loads, instructions of the K/V loop.

Read from the text that LLVM assembles, and from the metadata that the loader is given with it.
"""

from __future__ import annotations

import collections
import re
from dataclasses import dataclass

MATRIX = re.compile(r"v_(mfma|wmma|swmmac)_\w+?_(\d+x\d+x\d+)")
ARITHMETIC = re.compile(r"v_(?:pk_|dual_)?fma")
LOAD = re.compile(r"(buffer|global|flat)_load_(\w+)")
# What a lane loads, by how instructions of both generations of names end.
WIDTHS = {
    "dwordx4": 16, "b128": 16, "dwordx3": 12, "b96": 12, "dwordx2": 8, "b64": 8, "dword": 4, "b32": 4,
    "ushort": 2, "sshort": 2, "short": 2, "u16": 2, "i16": 2, "b16": 2, "ubyte": 1, "sbyte": 1,
    "u8": 1, "i8": 1,
}  # fmt: skip
BLOCK = re.compile(r"(?:\.L|; %)(BB\d+_\d+|bb\.\d+):(.*)")
INSTRUCTION = re.compile(r"\s+([a-z]\w+)")
# Loads that carry less than this share of a loop's bytes are of page ids and of scales.
NEGLIGIBLE = 1 / 6


@dataclass(frozen=True)
class Code:
    """One kernel's assembly.

    Attributes:
        registers: vector registers of a lane, those for accumulators included.
        accumulators: of these the ones that only matrix instructions and moves reach (AGPR).
        spilled: vector registers that are spilled.
        scalar_spills: scalar registers that are, into lanes of a vector register.
        scratch_bytes: of a lane.
        loops: opcodes of each innermost loop, in the order of the text.
        opcodes: how often each instruction occurs.
    """

    registers: int
    accumulators: int
    spilled: int
    scalar_spills: int
    scratch_bytes: int
    loops: tuple[tuple[str, ...], ...]
    opcodes: collections.Counter[str]

    @property
    def mma(self) -> str:
        """Kind of the matrix instruction with its shape, of the one used most; "fma": none but
        ordinary arithmetic, "-": not even that."""
        kinds: collections.Counter[str] = collections.Counter()
        for opcode, count in self.opcodes.items():
            if match := MATRIX.match(opcode):
                kinds[f"{match[1]} {match[2]}"] += count
        if kinds:
            return kinds.most_common(1)[0][0]
        return "fma" if any(ARITHMETIC.match(opcode) for opcode in self.opcodes) else "-"

    @property
    def tile_loops(self) -> list[tuple[str, ...]]:
        """The loops that hold matrix instructions, or where none does, loops with arithmetic."""
        found = [loop for loop in self.loops if any(map(MATRIX.match, loop))]
        return found or [loop for loop in self.loops if any(map(ARITHMETIC.match, loop))]

    def loads(self) -> str:
        """Kinds and bytes of the loads of K/V in loops over tiles, as "buffer 16, global 8"."""
        found = {kind for loop in self.tile_loops for kind in _carried(loop)}
        return ", ".join(f"{kind} {width}" for kind, width in sorted(found))

    def load_bytes(self) -> int:
        """Bytes of the narrowest of them; 0 if there are none."""
        widths = [width for loop in self.tile_loops for _, width in _carried(loop)]
        return min(widths, default=0)

    def tile_instructions(self, tile_bytes: int, threads: int) -> int | None:
        """Instructions that a wavefront issues for a K/V tile: those of the first loop over tiles,
        divided by the tiles that it loads; None where these are no whole number.

        Args:
            tile_bytes: of a tile, without scales.
            threads: of a program.
        """
        for loop in self.tile_loops:
            loaded = threads * sum(_carried(loop).values())
            tiles = loaded // tile_bytes
            if tiles == 0 or 4 * loaded > 5 * tiles * tile_bytes:
                return None
            return round(len(loop) / tiles)
        return None


def read(text: str) -> Code:
    """The assembly of one kernel."""

    def field(name: str) -> int:
        match = re.search(rf"^\s+(?:- )?\.{name}:\s+(\d+)", text, re.MULTILINE)
        return int(match[1]) if match else 0

    blocks = _blocks(text)
    loops: dict[str, list[str]] = {}
    for header, body in blocks:
        if header:
            loops.setdefault(header, []).extend(body)
    return Code(
        field("vgpr_count"),
        field("agpr_count"),
        field("vgpr_spill_count"),
        field("sgpr_spill_count"),
        field("private_segment_fixed_size"),
        tuple(map(tuple, loops.values())),
        collections.Counter(opcode for _, body in blocks for opcode in body),
    )


def _blocks(text: str) -> list[tuple[str, list[str]]]:
    """Opcodes of each basic block, and the header of the innermost loop that it is in; "": none.

    LLVM says so in the comments behind the block's label.
    """
    blocks: list[tuple[str, list[str]]] = [("", [])]
    name, comments = "", ""
    for line in text.partition(".section")[0].splitlines():
        if match := BLOCK.match(line):
            name, comments = match[1], match[2]
            blocks.append((_header(name, comments), []))
        elif line.lstrip().startswith(";"):
            if name and not blocks[-1][1]:
                comments += line
                blocks[-1] = (_header(name, comments), [])
        elif match := INSTRUCTION.match(line):
            blocks[-1][1].append(match[1])
    return blocks


def _header(name: str, comments: str) -> str:
    if re.search(r"This (?:Inner )?Loop Header", comments):
        return name
    match = re.search(r"in Loop: Header=(BB\d+_\d+)", comments)
    return match[1] if match else ""


def _carried(loop: tuple[str, ...]) -> dict[tuple[str, int], int]:
    """Bytes that a lane loads of K/V, by kind and width of the loads."""
    carried: collections.Counter[tuple[str, int]] = collections.Counter()
    for opcode in loop:
        if match := LOAD.match(opcode):
            ending = next((w for name, w in WIDTHS.items() if name in match[2]), 0)
            if ending:
                carried[match[1], ending] += ending
    least = NEGLIGIBLE * carried.total()
    return {kind: size for kind, size in carried.items() if size >= least}
