"""Write the kernels as a kernel repository for the Hugging Face Hub, which the PyPI package `kernels`
loads.

    python -m bench.export_hub DIR

DIR gets what the tools of the Hub know: ``build.toml`` with the sources in ``torch-ext/quire_kernels``, and
what they build of them, ``build/torch-cpu`` and ``build/torch-cuda``. There is nothing to compile, so
the two hold the same files: the modules of `quire.kernels`, its tables of tile shapes, and
``metadata.json`` with the digest of all. Nothing of them needs quire to be installed. DIR is written
as a whole or not at all, and must not hold anything.

    from kernels import get_local_kernel
    quire_kernels = get_local_kernel(Path("DIR"))

Source: huggingface.co/docs/kernels, "Kernel requirements" (layout, ``metadata.json``, digests) and
    "Writing kernels" (``build.toml`` of edition 5); checked with kernels 0.17.2.
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.export_hub")

import base64
import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from quire import kernels
from quire.models.command import Parser, program

# Of the repository and, as the Hub's tools have it, of the package.
NAME, PACKAGE = "quire-kernels", "quire_kernels"
# Alpha: the Hub's convention for a kernel whose functions may still change.
VERSION = 0
# The oldest package that was tried.
NEEDS = "0.17.2"
# What the kernels are compiled for without a GPU (docs/support-matrix.md). Each covers later minor
# versions of its generation.
ARCHS = {"cpu": None, "cuda": ["8.0", "8.6", "9.0", "10.0", "12.0"]}
BUILD_TOML = """\
[general]
name = "{name}"
version = {version}
edition = 5
license = "Apache-2.0"
backends = ["cpu", "cuda"]

[torch-noarch]
pyext = ["py", "json"]
"""


def export(directory: Path) -> list[Path]:
    """Write a kernel repository.

    Args:
        directory: where to; made, and its parents.

    Returns:
        The files, relative to ``directory``.

    Raises:
        ValueError: ``directory`` holds something, or is a file.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"DIR: expected a new or an empty directory, got {directory}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    files = _package_files()
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        repository = Path(folder) / "repository"
        _write(files, repository / "torch-ext" / PACKAGE)
        toml = BUILD_TOML.format(name=NAME, version=VERSION)
        (repository / "build.toml").write_text(toml, encoding="utf-8")
        for backend in ARCHS:
            variant = repository / "build" / f"torch-{backend}"
            _write(files, variant)
            text = json.dumps(metadata(files, backend), indent=2)
            (variant / "metadata.json").write_text(text + "\n", encoding="utf-8")
        repository.replace(directory)
    return sorted(p.relative_to(directory) for p in directory.rglob("*") if p.is_file())


def metadata(files: dict[str, Path], backend: str) -> dict[str, object]:
    """``metadata.json`` of the files of a backend.

    Its id is the name that the package is loaded under, so it is another one for other contents.
    """
    digests = {path: hashlib.sha256(file.read_bytes()).digest() for path, file in files.items()}
    encoded = {path: base64.b64encode(digest).decode() for path, digest in sorted(digests.items())}
    content = hashlib.sha256(json.dumps(encoded).encode()).hexdigest()[:12]
    archs = ARCHS[backend]
    return {
        "name": NAME,
        "id": f"_{PACKAGE}_{backend}_{content}",
        "version": VERSION,
        "kernels-minver": NEEDS,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend} | ({"archs": archs} if archs else {}),
        "digest": {"algorithm": "sha256", "files": encoded},
    }


def _package_files() -> dict[str, Path]:
    """Modules and tables of `quire.kernels`, by their paths in the package."""
    package = Path(str(kernels.__file__)).parent
    files = [path for suffix in ("py", "json") for path in package.rglob(f"*.{suffix}")]
    return {path.relative_to(package).as_posix(): path for path in files}


def _write(files: dict[str, Path], folder: Path) -> None:
    for path, file in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = _parser().parse_args(argv)
    files = export(args.directory)
    size = sum((args.directory / file).stat().st_size for file in files)
    print(f"{args.directory}: {len(files)} files, {size / 2**20:.1f} MiB")
    return 0


def _parser() -> Parser:
    parser = Parser("bench.export_hub", __doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to; new or empty")
    return parser
