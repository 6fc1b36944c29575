"""The installed files lie under `quire` only and work without the source tree; an sdist is the checkout, and wheels are built from it."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SITE = [path for path in sys.path if path.endswith("site-packages")]
OFFLINE = ["--no-deps", "--no-index", "--no-build-isolation"]


def run(*command: object, **options: object) -> str:
    """Stdout of a process that must succeed."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python_with(what: list[object], folder: Path) -> Path:
    """The python of a new environment with a package, which finds numpy, torch, pip and the like in this one, but not its quire: of
    directories that a .pth file names no .pth files are read.
    """
    venv.create(folder, with_pip=False)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "zz_base.pth").write_text("\n".join(SITE))
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--ignore-installed", *OFFLINE, *what)
    return python


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


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    return python_with([wheel], tmp_path_factory.mktemp("installed") / "venv")


def test_the_sdist_is_the_checkout(sdist, files):
    with tarfile.open(sdist) as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    made = {name for name in names if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert sorted(names - made) == files


def test_the_wheel_holds_the_namespace_and_nothing_else(wheel, files):
    packages = ("kernels/", "kvcore/", "models/", "bench/")
    modules = [f for f in files if f.endswith(".py") and f.startswith(packages)]
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


WORKS = """
import quire, quire.bench, quire.kernels, quire.models, quire.kvcore, quire.kvcore.device
from importlib.metadata import version
assert quire.__version__ == version("quire-attention"), quire.__version__
from quire.kvcore import GroupSpec, KVCache
kv = KVCache([GroupSpec('g', 'dense', 16, 1)], num_pages=9, max_requests=1, max_model_len=99)
print(kv.match([1] * 40).num_tokens, quire.kvcore.__file__)
"""


@pytest.mark.nightly
def test_the_wheel_works_in_a_clean_environment(installed, tmp_path):
    hit, file = run(installed, "-c", WORKS, cwd=tmp_path).split()
    assert hit == "0" and Path(file).is_relative_to(installed.parent.parent)
    memory = run(installed, "-m", "quire.models.memory", "--model", "llama-tiny", cwd=tmp_path)
    assert "bytes a token" in memory


@pytest.mark.nightly
@pytest.mark.slow
def test_an_editable_install_is_the_source(source, tmp_path):
    python = python_with(["-e", source], tmp_path / "venv")
    hit, file = run(python, "-c", WORKS, cwd=tmp_path).split()
    assert hit == "0" and Path(file).is_relative_to(source)
    for folder, name in ((source, "bench"), (tmp_path, "quire.bench")):
        assert "--workload" in run(python, "-m", f"{name}.replay", "--help", cwd=folder)


USER = """
import quire
from quire.kvcore import GroupSpec, KVCache

kv = KVCache([GroupSpec("g", "dense", 16, 1)], num_pages=9, max_requests=1, max_model_len=99)
reveal_type(kv.match([1]).num_tokens)
kv.match([1], salt="text")
"""


@pytest.mark.nightly
def test_mypy_sees_the_types_of_an_installed_quire(installed, tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    command = ["mypy", "--strict", "--python-executable", str(installed), "user.py"]
    out = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True
    ).stdout
    assert 'Revealed type is "int"' in out and "Found 1 error" in out
    assert 'Argument "salt" to "match" of "KVCache" has incompatible type "str"' in out
