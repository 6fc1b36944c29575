"""The wheel installs under the `quire` namespace only, and works without the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source") / "quire"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for name in files:  # build from a copy: setuptools leaves build/ and *.egg-info behind
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
         "-w", str(out), str(source)],
        check=True,
    )  # fmt: skip
    return next(out.glob("quire-*.whl"))


def test_the_wheel_holds_the_namespace_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"quire"}
    for package in ("kernels", "kvcore", "models", "models/integrations", "bench"):
        assert f"quire/{package}/__init__.py" in names


def test_the_wheel_works_in_a_clean_environment(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)], check=True
    )
    # numpy, torch and the like come from this environment; plain directories on PYTHONPATH do not
    # process .pth files, so its own (editable) quire stays out.
    env = {**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"]}
    code = (
        "import quire.kernels, quire.kvcore, quire.models, quire.bench, sys\n"
        f"assert quire.kvcore.__file__.startswith({str(tmp_path)!r}), quire.kvcore.__file__\n"
        "from quire.kvcore import GroupSpec, KVCache\n"
        "kv = KVCache([GroupSpec('g', 'dense', 16, 1)], num_pages=9, max_requests=1, max_model_len=99)\n"
        "print(kv.match([1] * 40).num_tokens)\n"
    )
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0\n"
