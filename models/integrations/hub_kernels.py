"""Export the kernels as a repository for the PyPI package `kernels` of Hugging Face.

    python -m quire.models.integrations.hub_kernels DIR

DIR, a new or empty directory, gets ``build.toml``, the sources in ``torch-ext/quire_kernels`` and
the same files in ``build/torch-cpu`` and ``build/torch-cuda``. They do not need quire:
``kernels.get_local_kernel(Path("DIR"))``.
Source: huggingface.co/docs/kernels, "Kernel requirements", "Writing kernels"; kernels 0.17.2.
"""

from __future__ import annotations

if __name__ == "__main__":
    from ..command import run

    run("quire.models.integrations.hub_kernels")

import base64
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from quire import kernels

from ..command import Parser, program

PACKAGE = "quire_kernels"
VERSION = 0  # alpha, by the Hub's convention
OLDEST = "0.17.2"  # of the package `kernels`
# Compute capabilities that the kernels are compiled for; each covers later minor versions.
BACKENDS = {
    "cpu": {"type": "cpu"},
    "cuda": {"type": "cuda", "archs": ["8.0", "8.6", "9.0", "10.0", "12.0"]},
}
BUILD_TOML = f"""\
[general]
name = "quire-kernels"
version = {VERSION}
edition = 5
license = "Apache-2.0"
backends = ["cpu", "cuda"]

[torch-noarch]
pyext = ["py", "pyi"]
"""


def export(directory: Path) -> None:
    """Write the repository; ValueError for a file, or a directory that holds something."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"DIR: expected a new or an empty directory, got {directory}")
    source = Path(str(kernels.__file__)).parent
    for name in ("torch-ext/" + PACKAGE, "build/torch-cpu", "build/torch-cuda"):
        without = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, directory / name, ignore=without)
    for backend in BACKENDS:
        folder = directory / "build" / f"torch-{backend}"
        text = json.dumps(metadata(folder, backend), indent=2)
        (folder / "metadata.json").write_text(text, encoding="utf-8")
    (directory / "build.toml").write_text(BUILD_TOML, encoding="utf-8")


def metadata(folder: Path, backend: str) -> dict[str, object]:
    """``metadata.json`` for the files in a folder; its id depends on their contents."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest = hashlib.sha256(path.read_bytes()).digest()
            digests[path.relative_to(folder).as_posix()] = base64.b64encode(digest).decode()
    content = hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:12]
    return {
        "name": "quire-kernels",
        "id": f"_{PACKAGE}_{backend}_{content}",
        "version": VERSION,
        "kernels-minver": OLDEST,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": BACKENDS[backend],
        "digest": {"algorithm": "sha256", "files": digests},
    }


@program
def main(argv: Sequence[str] | None = None) -> int:
    directory = _parser().parse_args(argv).directory
    export(directory)
    print(f"written to {directory}")
    return 0


def _parser() -> Parser:
    parser = Parser("quire.models.integrations.hub_kernels", __doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to; new or empty")
    return parser
