"""What a machine is, has and can do, before anything is measured on it.

    python -m bench.environment --peers bench/out/peers --json environment.json
    python -m bench.environment --unpack .peers --target bench/out/peers --json peers.json

First a kernel is launched, since all else needs that: without a C compiler or Python's headers,
which Triton's launcher is made with, exit status 2 and what is missing.

Lists the implementations that every family of cases is compared with (`bench.kernels.families`), by
version, and why others are missing.

With --unpack: makes a folder of peers (`bench.peers.folder`) ready to load, and compiles
FlashInfer's kernels where there is an nvcc.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.environment")

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

from .common.floors import device_rates
from .common.machine import describe_machine
from .kernels.families import FAMILIES
from .peers.flashinfer import build_flashinfer
from .peers.folder import unpack


def describe(device: torch.device, folder: Path | None = None) -> dict[str, Any]:
    """Machine, device properties, measured rates and peers; folder: of peers, as in
    `bench.peers.folder`.
    """
    result: dict[str, Any] = {
        "machine": describe_machine(device),
        "first_launch_s": launch_first(device) if can_launch(device) else None,
        "cpus": os.cpu_count(),
        "nvcc": shutil.which("nvcc"),
        "rates": dataclasses.asdict(device_rates(device, torch.bfloat16)),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        result["gpu"] = {
            "arch": arch_of(device).name,
            "num_sms": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "free_bytes": free,
            "total_bytes": total,
        }
    return result | list_peers(folder)


def can_launch(device: torch.device) -> bool:
    """Whether kernels run there at all: on a GPU, or in Triton's interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def launch_first(device: torch.device) -> float:
    """Compiles and launches one kernel; returns the seconds that took.

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
        lacking = missing_tools()
        reason = f"{type(error).__name__}: {error}"
        if lacking:
            reason = f"this machine has no {' and no '.join(lacking)} ({reason})"
        raise ValueError(f"no kernel can be launched: {reason}") from error
    if not written.equal(rows):
        raise ValueError(f"the first kernel wrote {written.tolist()} in place of {rows.tolist()}")
    return perf_counter() - start


def missing_tools() -> list[str]:
    """What Triton makes its launcher with, and is not there."""
    compilers = [os.environ[name] for name in ("CC",) if name in os.environ] or ["gcc", "clang"]
    lacking = []
    if not any(shutil.which(name) for name in compilers):
        lacking.append(f"C compiler ({' or '.join(compilers)})")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        lacking.append(f"{headers / 'Python.h'}")
    return lacking


def list_peers(folder: Path | None) -> dict[str, Any]:
    """The implementations that load, this repository's too, by version, and the others with why
    they are missing.
    """
    present: dict[str, str] = {}
    missing: dict[str, str] = {}
    for family in FAMILIES.values():
        found, lacking = family.find_peers(folder)
        present |= {peer.name: peer.version for peer in found}
        missing |= lacking
    return {"present": present, "missing": missing}


def prepare_peers(source: Path, target: Path) -> dict[str, Any]:
    """Unpacks peers, compiles what has to be compiled, and sees which load.

    Raises:
        What unpacking raises.
    """
    folder = unpack(source, target)
    result: dict[str, Any] = {"folder": str(folder)}
    if not torch.cuda.is_available():
        result["flashinfer"] = "not compiled: no GPU"
    elif shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").exists():
        result["flashinfer"] = "not compiled: no nvcc"
    else:
        result["flashinfer"] = build_flashinfer(folder)
    return result | list_peers(folder)


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = _parser().parse_args(argv)
    if (args.unpack is None) != (args.target is None):
        raise ValueError("unpack: expected --target with it, and with --target this")
    if args.unpack is not None:
        result = prepare_peers(args.unpack, args.target)
    else:
        result = describe(find_device(args.device), args.peers)
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


def _parser() -> Parser:
    parser = Parser("bench.environment", __doc__)
    parser.add_argument("--device", help="torch device; default: cuda where there is one, else cpu")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder with unpacked peers")
    parser.add_argument("--unpack", type=Path, metavar="DIR", help="folder of packed peers")
    parser.add_argument("--target", type=Path, metavar="DIR", help="where to unpack them")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the result")
    return parser
