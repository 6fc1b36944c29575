"""Results and compiled kernels as one file, to carry from a machine that is lent and then reset."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

CACHE = "triton"
RESULTS = (".json", ".jsonl", ".log")
# Of a kernel: its binary, what the launcher has to know of it, and Triton's own launchers: a tenth
# of what Triton stores.
KERNELS = (".cubin", ".json", ".so")


def pack(out: Path, file: Path) -> None:
    """Writes a folder's results and compiled kernels into ``file``.

    Raises:
        FileNotFoundError where a process that still compiles removes a file meanwhile; ``file`` is
        then as it was.
    """
    partial = file.with_name(f".{file.name}.partial")
    with tarfile.open(partial, "w:gz", compresslevel=6) as tar:
        for folder, pattern, endings in ((out, "*", RESULTS), (out / CACHE, "*/*", KERNELS)):
            for path in sorted(folder.glob(pattern)):
                if path.is_file() and path.name.endswith(endings):
                    tar.add(path, path.relative_to(out))
    os.replace(partial, file)


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
        raise ValueError(f"resume: expected a file of --tar, got {str(file)!r}: {error}") from error
    groups = list((out / CACHE).glob("*/__grp__*.json"))
    for group in groups:
        # Triton looks for the files of a kernel where they were when it was compiled.
        names = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
        moved = {name: str(group.parent / name) for name in names}
        group.write_text(json.dumps({"child_paths": moved}), encoding="utf-8")
    return len(groups)
