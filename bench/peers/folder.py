"""Packages of others: installed ones, or files in a folder, for machines that cannot install.

The folder holds, packed or unpacked: ``_vllm_fa3_C.abi3.so`` and ``_flashmla_C.abi3.so``
(FlashAttention-3 and FlashMLA as vLLM builds them, their operators registered with torch;
`bench.peers.flashmla`), ``vllm/v1/attention/ops`` (vLLM's Triton kernels, which need a few modules
of vLLM in name only), and the packages ``flashinfer`` and ``tvm_ffi`` (`bench.peers.flashinfer`).
"""

from __future__ import annotations

import lzma
import shutil
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import torch


def unpack(source: Path, target: Path) -> Path:
    """Unpack ``*.so.xz``, ``*.tar.xz`` and ``*.whl`` of a folder into another one.

    Files that are there already are kept.

    Returns:
        The folder to load from: ``source`` itself when nothing in it is packed.
    """
    packed = [p for p in sorted(source.iterdir()) if p.name.endswith((".xz", ".whl"))]
    if not packed:
        return source
    target.mkdir(parents=True, exist_ok=True)
    for path in packed:
        done = target / f".{path.name}.done"
        if done.exists():
            continue
        if path.name.endswith(".tar.xz"):
            with tarfile.open(path) as archive:
                archive.extractall(target, filter="data")
        elif path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                archive.extractall(target)
        else:
            with lzma.open(path) as compressed, open(target / path.stem, "wb") as file:
                shutil.copyfileobj(compressed, file, 1 << 22)
        done.touch()
    return target


def installed(distribution: str) -> str | None:
    """Version of an installed package; a mere folder of that name on the path does not count."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def expect_nvidia(name: str) -> None:
    """Raise NotImplementedError naming a peer if torch is for AMD GPUs."""
    if torch.version.hip is not None:
        raise NotImplementedError(
            f"{name}: expected NVIDIA GPUs, got a torch for ROCm {torch.version.hip}"
        )


def file_in(folder: Path | None, name: str) -> Path:
    """A file of the folder.

    Raises:
        FileNotFoundError naming what would help.
    """
    if folder is None:
        raise FileNotFoundError("not installed, and no --peers folder")
    if not (folder / name).exists():
        raise FileNotFoundError(f"not installed, and the folder has no {name}")
    return folder / name
