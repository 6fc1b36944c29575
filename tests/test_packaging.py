"""The installed files lie under `quire` only; an sdist is the checkout, and wheels are built from it. CI installs and runs one."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OFFLINE = ["--no-deps", "--no-index", "--no-build-isolation"]


def run(*command: object, **options: object) -> str:
    """Stdout of a process that must succeed."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def files() -> list[str]:
    """Files of the checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    return sorted(name for name in listed if (ROOT / name).is_file())


@pytest.fixture(scope="module")
def source(files, tmp_path_factory) -> Path:
    """A copy to build from: setuptools leaves build/ and *.egg-info behind."""
    folder = tmp_path_factory.mktemp("source") / "quire"
    for name in files:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})"
    run(sys.executable, "-c", code, cwd=source)
    return next(out.glob("quire_attention-*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", *OFFLINE, "-w", out, sdist)
    return next(out.glob("quire_attention-*.whl"))


def test_the_sdist_is_the_checkout(sdist, files):
    with tarfile.open(sdist) as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    made = {name for name in names if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert sorted(names - made) == files


def test_the_wheel_holds_the_namespace_and_nothing_else(wheel, files):
    packages = ("kernels/", "kvcore/", "models/", "bench/")
    modules = [f for f in files if f.endswith((".py", ".pyi")) and f.startswith(packages)]
    expected = {f"quire/{name.removeprefix('kvcore/quire/')}" for name in modules}
    names = zipfile.ZipFile(wheel).namelist()
    assert {n for n in names if not n.split("/")[0].endswith(".dist-info")} == {
        *expected,
        "quire/py.typed",
    }


def test_the_metadata_and_the_pinned_triton(wheel):
    """The pinned Triton is allowed, and has a table of its kernels."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    code = (ROOT / "kvcore/quire/__init__.py").read_text()
    assert re.findall(r'__version__ = "(.+)"', code) == [metadata["Version"]]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_payload().startswith("# quire")
    [triton] = [r for r in metadata.get_all("Requires-Dist") if r.startswith("triton")]
    below, least = re.fullmatch(r"triton<3\.(\d+),>=3\.(\d+);.*", triton).groups()
    pins = (ROOT / "constraints.txt").read_text()
    version, minor = re.search(r"^triton==(3\.(\d+)\.\d+)$", pins, re.MULTILINE).groups()
    assert int(least) <= int(minor) < int(below)
    assert (ROOT / "bench" / "results" / "static" / f"{version}.json").is_file()
