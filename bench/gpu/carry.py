"""A folder of results as one file: borrowed machines give back few files, and forget the rest.

With the results travel the kernels that Triton compiled. The same Triton and Python find them again
by their sources; only binaries are kept, which are a tenth of what Triton stores.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

CACHE = "triton"
MAX_BYTES = 15 << 20
MAX_LOG_BYTES = 1 << 20
RESULTS = (".json", ".jsonl", ".log")
# Of a kernel: its binary, what the launcher has to know of it, and Triton's own launchers.
KEPT = (".cubin", ".json", ".so")


def pack(out: Path, file: Path, *, max_bytes: int = MAX_BYTES) -> int:
    """Writes a folder's results, and of its compiled kernels as many as fit, newest last.

    Args:
        max_bytes: of the file, about; results are written whatever they take.

    Returns:
        Kernels that were left out.
    """
    partial = file.with_name(f".{file.name}.partial")
    left_out = 0
    with open(partial, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz", compresslevel=6) as tar:
        for path in sorted(out.iterdir()):
            if path.is_file() and path.suffix in RESULTS:
                _add(tar, path.name, path.read_bytes()[-MAX_LOG_BYTES:])
        cache = out / CACHE
        kernels = sorted(cache.iterdir(), key=_time) if cache.is_dir() else []
        for kernel in kernels:
            if raw.tell() > max_bytes:
                left_out += 1
                continue
            for path in sorted(kernel.iterdir()) if kernel.is_dir() else []:
                if path.is_file() and path.name.endswith(KEPT):
                    _add(tar, f"{CACHE}/{kernel.name}/{path.name}", path.read_bytes())
    os.replace(partial, file)
    return left_out


def unpack(file: Path, out: Path) -> int:
    """Reads what `pack` wrote into a folder, over what is there of the same names.

    Returns:
        Compiled kernels that came along.

    Raises:
        ValueError for a file that is no such archive.
    """
    try:
        with tarfile.open(file) as tar:
            tar.extractall(out, filter="data")
    except tarfile.TarError as error:
        raise ValueError(f"resume: expected what --tar wrote, got {str(file)!r}: {error}") from error  # fmt: skip
    groups = list((out / CACHE).glob("*/__grp__*.json"))
    for group in groups:
        # Triton looks for the files of a kernel where they were when it was compiled.
        names = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
        moved = {name: str(group.parent / name) for name in names}
        group.write_text(json.dumps({"child_paths": moved}), encoding="utf-8")
    return len(groups)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # a process is still compiling
        return 0.0
