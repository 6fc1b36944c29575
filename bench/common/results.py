"""Tables, files and pictures of results, and the machine that they are of."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def aligned(rows: list[tuple[str, ...]], left: int = 1) -> list[str]:
    """Lines of a table: the first ``left`` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        sized = list(zip(row, widths, strict=True))
        cells = [cell.ljust(width) for cell, width in sized[:left]]
        cells += [cell.rjust(width) for cell, width in sized[left:]]
        lines.append("  ".join(cells).rstrip())
    return lines


def table(rows: Iterable[dict[str, Any]], columns: Sequence[tuple[Any, ...]], left: int = 1) -> str:
    """Rows as aligned text.

    Args:
        columns: (title, key of a row, format, factor; default: 1); "-" for a value that is None.
        left: columns to the left, see `aligned`.
    """
    lines = [tuple(title for title, *_ in columns)]
    for row in rows:
        cells = (
            "-"
            if row.get(key) is None
            else format(factor[0] * row[key] if factor else row[key], form)
            for _, key, form, *factor in columns
        )
        lines.append(tuple(cells))
    return "\n".join(aligned(lines, left))


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]


def write_json(path: Path | None, result: Any, *, final: bool = True) -> None:
    """Write a result, or nothing without a path.

    The file is whole at any moment, with the result before or this one. A pipe or a terminal gets
    the final result only.
    """
    if path is None:
        return
    text = json.dumps(result, indent=1) + "\n"
    if path.is_file() or not path.exists():
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    elif final:
        path.write_text(text, encoding="utf-8")


def require_matplotlib(path: str | Path) -> None:
    """Raise, before the work starts, where matplotlib is missing or cannot write the format."""
    try:
        import matplotlib  # noqa: F401
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ImportError(
            "--plot needs matplotlib (pip install 'quire-attention[plot]')"
        ) from error
    formats, suffix = FigureCanvasBase.get_supported_filetypes(), Path(path).suffix
    if suffix and suffix[1:].lower() not in formats:
        raise ValueError(f"plot: expected one of {sorted(formats)}, got {suffix!r}")


def describe_machine(device: torch.device) -> dict[str, str | int | None]:
    """Keys: device, threads, driver (None on a CPU), python, torch, triton, commit."""
    import torch

    on_gpu = device.type == "cuda"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "not installed"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
        "threads": torch.get_num_threads(),
        "driver": _first_line(*query) if on_gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "commit": commit(),
    }


def machine_lines(machine: dict[str, Any], threads: str = "") -> str:
    """Device and software of `describe_machine`, one line each; threads: behind the device."""
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    software = ", ".join(
        f"{name} {machine[name]}" for name in ("python", "torch", "triton", "commit")
    )
    return f"device    {machine['device']}{threads}{driver}\nsoftware  {software}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The commit of this checkout, with -dirty if files differ; "unknown" outside a repository."""
    here = Path(__file__).resolve().parent
    command = ("git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=10")
    return _first_line(*command) or "unknown"


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None
