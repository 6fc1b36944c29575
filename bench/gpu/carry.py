"""Results and compiled kernels as one file."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

CACHE = "triton"
RESULTS = (".json", ".jsonl", ".log")
# A kernel's binary, its metadata, and Triton's launchers: a tenth of what Triton stores.
KERNELS = (".cubin", ".json", ".so")


def pack(out: Path, file: Path) -> None:
    """Write a folder's results and compiled kernels into ``file``.

    Raises:
        FileNotFoundError: a process that still compiles removed a file; ``file`` is as it was.
    """
    partial = file.with_name(f".{file.name}.partial")
    with tarfile.open(partial, "w:gz", compresslevel=6) as tar:
        for folder, pattern, endings in ((out, "*", RESULTS), (out / CACHE, "*/*", KERNELS)):
            for path in sorted(folder.glob(pattern)):
                if path.is_file() and path.name.endswith(endings):
                    tar.add(path, path.relative_to(out))
    os.replace(partial, file)


def unpack(file: Path, out: Path) -> int:
    """Extract a file of `pack` over files of the same names; return the number of kernels."""
    try:
        with tarfile.open(file) as tar:
            tar.extractall(out, filter="data")
    except tarfile.TarError as error:
        raise ValueError(f"resume: expected a file of --tar, got {str(file)!r}: {error}") from error
    groups = list((out / CACHE).glob("*/__grp__*.json"))
    for group in groups:
        # Triton looks for the files of a kernel where they were when it was compiled. From 3.9 on
        # it takes no kernel that lacks one.
        paths = [group.parent / name for name in json.loads(group.read_bytes())["child_paths"]]
        moved = {path.name: str(path) for path in paths if path.exists()}
        group.write_text(json.dumps({"child_paths": moved}), encoding="utf-8")
    return len(groups)
