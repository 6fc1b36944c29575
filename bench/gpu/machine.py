"""The first part of `bench.gpu`: launch a kernel, describe the machine.

    python -m bench.gpu.machine --json machine.json

Exit status 2 if no kernel can be launched, with what the machine lacks: Triton builds its launcher
with a C compiler and Python's headers.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.gpu.machine")

import dataclasses
import json
import os
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from quire.kernels import write_kv
from quire.kernels.common.launching import arch_of
from quire.models.command import Parser, output_file, program
from quire.models.device import find_device

from ..common.floors import device_rates
from ..common.results import describe_machine, write_json


def describe(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    can_launch = on_gpu or os.environ.get("TRITON_INTERPRET") == "1"
    result: dict[str, Any] = {
        "machine": describe_machine(device),
        "first_launch_s": launch_first(device) if can_launch else None,
        "cpus": os.cpu_count(),
        "rates": dataclasses.asdict(device_rates(device, torch.bfloat16)),
    }
    if on_gpu:
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        result["gpu"] = {
            "arch": arch_of(device).name,
            "num_sms": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "free_bytes": free,
            "total_bytes": total,
        }
    return result


def launch_first(device: torch.device) -> float:
    """Compile and launch one kernel; returns the seconds.

    Raises:
        ValueError naming what this machine lacks.
    """
    start = perf_counter()
    rows = torch.arange(32, device=device, dtype=torch.float32).view(2, 1, 16)
    k_pages, v_pages = torch.zeros(2, 1, 16, 1, 16, device=device).unbind(0)
    slots = torch.tensor([3, 9], device=device)
    try:
        write_kv(rows, -rows, k_pages, v_pages, slots, impl="triton")
        written = k_pages[0, slots]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if lacking := missing_tools():
            reason = f"this machine has no {' and no '.join(lacking)} ({reason})"
        raise ValueError(f"no kernel can be launched: {reason}") from error
    if not written.equal(rows):
        raise ValueError(f"the first kernel wrote {written.tolist()} in place of {rows.tolist()}")
    return perf_counter() - start


def missing_tools() -> list[str]:
    """Tools that Triton builds its launcher with and this machine lacks."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    lacking = []
    if not any(map(shutil.which, compilers)):
        lacking.append(f"C compiler ({' or '.join(compilers)})")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        lacking.append(str(header))
    return lacking


@program
def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    result = describe(find_device(None))
    print(json.dumps(result, indent=1))
    write_json(args.json, result)
    return 0


def _parser() -> Parser:
    parser = Parser("bench.gpu.machine", __doc__)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the result")
    return parser
