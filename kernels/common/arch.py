"""The architecture of a GPU as a value: tile class, limits and launch options.

Source: CUDA programming guide, table of compute capabilities; AMD ISA documents of CDNA 3 and 4.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

Tiles = Literal["hopper", "blackwell", "medium", "small", "cdna3", "cdna4"]


@dataclass(frozen=True)
class Arch:
    name: str  # as compilers call it: "sm_90", "gfx942"
    maker: Literal["nvidia", "amd"]
    tiles: Tiles  # GPUs of one class share the entries of a table of tile shapes
    shared_memory: int  # bytes of shared memory (AMD: LDS) that a program may use
    lanes: int = 32  # threads of a warp (AMD: wavefront)
    # Triton's cast of e4m3fn to fp16 is an instruction. That of CDNA 3 is for e4m3fnuz.
    widens_e4m3: bool = False
    # The ``input_precision`` by which products of fp32 lose at most 2^-22 of themselves.
    fp32_products: Literal["tf32x3", "ieee"] = "ieee"

    @property
    def target(self) -> tuple[str, int | str, int]:
        """The arguments of Triton's ``GPUTarget``."""
        if self.maker == "nvidia":
            return "cuda", int(self.name.removeprefix("sm_")), self.lanes
        return "hip", self.name, self.lanes

    def register_limit(self, registers: int) -> dict[str, Any]:
        """The launch option that limits the registers of a thread; none on AMD.

        Left alone, ptxas aims for one program more an SM and spills a few registers.
        """
        return {"maxnreg": registers} if self.maker == "nvidia" else {}


_AMPERE = Arch("sm_80", "nvidia", "medium", 163 << 10, fp32_products="tf32x3")
_SMALL = replace(_AMPERE, name="sm_86", tiles="small", shared_memory=99 << 10)
_HOPPER = replace(_AMPERE, name="sm_90", tiles="hopper", shared_memory=227 << 10, widens_e4m3=True)
_BLACKWELL = replace(_HOPPER, name="sm_100", tiles="blackwell")
_CDNA3 = Arch("gfx942", "amd", "cdna3", 64 << 10, lanes=64)
_CDNA4 = Arch("gfx950", "amd", "cdna4", 160 << 10, lanes=64, widens_e4m3=True)


@cache
def named(name: str) -> Arch:
    """The architecture of a name such as "sm_90" or "gfx942:sramecc+:xnack-"; NotImplementedError
    for an AMD GPU without the matrix instructions that the kernels need."""
    short = name.split(":")[0]
    if match := re.fullmatch(r"sm_(\d+)(\d)", short):
        return _nvidia(short, int(match[1]), int(match[2]))
    if not re.fullmatch(r"gfx\d+[0-9a-f]{2}", short):
        raise ValueError(f"arch: expected a name as sm_90 or gfx942, got {name!r}")
    for known in (_CDNA3, _CDNA4):
        if short == known.name:
            return known
    raise NotImplementedError(f"arch: of AMD, gfx942 and gfx950 are supported, got {short}")


def _nvidia(name: str, major: int, minor: int) -> Arch:
    if major == 9:
        return replace(_HOPPER, name=name)
    if major in (10, 11):
        return replace(_BLACKWELL, name=name)
    if major == 8 and minor in (0, 7):
        return replace(_AMPERE, name=name)
    ada_or_later = major > 8 or (major == 8 and minor == 9)
    return replace(_SMALL, name=name, widens_e4m3=ada_or_later)
