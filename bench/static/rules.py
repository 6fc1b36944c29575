"""The rules that a compiled kernel has to keep."""

from __future__ import annotations

from typing import Any

from . import sass
from .cases import ALL_ARCHS, PIPELINED
from .limits import CU_LIMITS

# Little's law for an H200: about 4.8 TB/s * 1 us over 132 SMs.
MIN_BYTES_IN_FLIGHT = 36 << 10
# Architectures with 99 KiB of shared memory for a program. Of compressed attention over fp8 pages no
# shape fits there that overlaps: the loop over the step's own rows is not pipelined with swapped
# products, and without the swap 4 warps spill and 8 copy the rotated channels 8 bytes at a time.
SMALL = ("sm_86", "sm_89", "sm_120")
# Pages of 48 tokens: which of them each row of a tile is in has to be divided out, and smaller
# tiles, which leave room, cost more. Decode of 64 rows of 512 channels over e4m3: no shape found
# that fits and overlaps; two tiles of 32 rows take as many instructions.
SERIAL_CASES = ("prefill-group-5-odd-pages", "decode-fp8-d512-p128-q16")
# Decode over e4m3 keeps 32 KiB there: tiles of new K/V have two bytes an element, so one stage more
# leaves no room for a second program, and smaller tiles serialise wgmma.
LESS_IN_FLIGHT = ("decode-fp8-d128-p16-q16", "decode-fp8-d128-p128-q16", "decode-fp8-d256-p128-q8", "decode-fp8-d256-p128-q16", "decode-fp8-number-d256")  # fmt: skip


def is_gated(row: dict[str, Any]) -> bool:
    """Whether a broken rule is an error; else it is shown."""
    return row["arch"] in ALL_ARCHS


def problems(row: dict[str, Any]) -> list[str]:
    """The rules that a compiled kernel breaks; of those on AMD, the ones on spills, shared memory and
    room."""
    found = []
    if row["spill_bytes"] or row["stack_bytes"]:
        found.append(f"spills {row['spill_bytes']} bytes, stack frame {row['stack_bytes']} bytes")
    if row["shared_bytes"] > row["shared_limit"]:
        found.append(
            f"needs {row['shared_bytes']} bytes of shared memory, limit {row['shared_limit']}"
        )
    elif not row["ctas_per_sm"]:
        found.append(f"cannot be launched: {row['config']}, {row['registers']} registers a thread")
    if row["mma"] == sass.SERIAL and row["case"] not in SERIAL_CASES:
        found.append("waits for each wgmma by itself")
    if not row["kernel"].endswith(PIPELINED) or row["arch"] in CU_LIMITS:
        return found
    through_registers = row["dtype"] == "float32" and row["kv_copy_bytes"] == 0
    if row["kv_copy_bytes"] < row["min_copy_bytes"] and not through_registers:
        found.append(f"copies K/V {row['kv_copy_bytes']} bytes at a time")
    if row["dtype"] == "float32":
        return found
    fp8_rows = row["kernel"].startswith("compressed") and row["dtype"] == "uint8"
    overlaps = row["tiles_in_flight"] or row["ctas_per_sm"] >= 2
    if not overlaps and not (fp8_rows and row["arch"] in SMALL):
        found.append("copies nothing while it multiplies")
    least = MIN_BYTES_IN_FLIGHT if row["case"] not in LESS_IN_FLIGHT else 32 << 10
    paced = row["kernel"].endswith("decode_kernel") and row["arch"] == "sm_90"
    if paced and row["bytes_in_flight_per_sm"] < least:
        found.append(f"keeps {row['bytes_in_flight_per_sm']} bytes in flight per SM")
    return found
