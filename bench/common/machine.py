"""Machine and software that a result comes from."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def describe_machine(device: torch.device) -> dict[str, str | int | None]:
    """Keys: device, threads, driver (None on a CPU), python, torch, triton, commit ("unknown"
    outside of a repository).
    """
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
        "threads": torch.get_num_threads(),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if on_gpu
        else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "commit": commit(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The commit of this checkout, `-dirty` behind it where files differ; "unknown" elsewhere."""
    here = Path(__file__).resolve().parent
    command = ("git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=10")
    return _first_line(*command) or "unknown"


def _first_line(*command: str) -> str | None:
    """First line that a command prints; None when it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None
