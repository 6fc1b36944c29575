"""The kernels as a repository of the Hugging Face Hub: its layout, and its work without quire."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.models.integrations import hub_kernels

KERNELS = Path(__file__).resolve().parents[3] / "kernels"

# Attention over rows in pages, and over the same rows in the step, by the module ``loaded``.
CHECK = """
import sys
import torch

def check(loaded):
    sys.modules["quire"] = None  # cannot be imported
    pages, (k, v) = torch.randn(2, 1, 16, 2, 16), torch.randn(2, 2, 2, 16)
    loaded.write_kv(k, v, *pages, torch.tensor([4, 5]))
    tables = [torch.tensor(x, dtype=torch.int32) for x in ([[0]], [6], [0, 2])]
    attend, call = loaded.paged_attention, (torch.randn(2, 4, 16), *pages, *tables)
    in_step = attend(*call, max_seqlen_q=2, k=k, v=v, impl="triton")
    torch.testing.assert_close(in_step, attend(*call, max_seqlen_q=2, impl="torch"))
    assert all(hasattr(loaded, name) for name in loaded.__all__)
"""
ALONE = f"""{CHECK}
sys.modules["quire"] = None
sys.path.insert(0, sys.argv[1] + "/torch-ext")
import quire_kernels
check(quire_kernels)
"""
LOADED = f"""{CHECK}
from pathlib import Path
import kernels
from kernels._rust import Backend, Build, Digest, DigestAlgorithm, Metadata

check(kernels.get_local_kernel(Path(sys.argv[1]), backend="cpu"))
[loaded] = kernels.get_loaded_kernels()
assert loaded.metadata.name.python_name == "quire_kernels" and loaded.metadata.version == 0
for backend in ("cpu", "cuda"):
    folder = Path(sys.argv[1], "build", "torch-" + backend)
    metadata = Metadata.read_from_file(folder / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))
    assert metadata.backend.backend_type == Backend.from_str(backend)
assert Build.open(sys.argv[1]).general.backends == [Backend.CPU, Backend.CUDA]
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hub") / "new" / "quire-kernels"
    assert hub_kernels.main([str(directory)]) == 0
    return directory


def test_the_files_are_those_of_the_package_and_the_metadata_names_them(repository):
    files = {p.relative_to(repository): p for p in repository.rglob("*") if p.is_file()}
    assert 'name = "quire-kernels"' in files.pop(Path("build.toml")).read_text()
    files_of_package = (*KERNELS.rglob("*.py"), *KERNELS.rglob("*.pyi"))
    own = {p.relative_to(KERNELS): p.read_bytes() for p in files_of_package}
    digests = {
        path.as_posix(): base64.b64encode(hashlib.sha256(content).digest()).decode()
        for path, content in own.items()
    }
    ids = set()
    for folder in ("torch-ext/quire_kernels", "build/torch-cpu", "build/torch-cuda"):
        for path, content in own.items():
            assert files.pop(folder / path).read_bytes() == content
        if folder.startswith("build"):
            data = json.loads(files.pop(Path(folder, "metadata.json")).read_text())
            assert data["digest"] == {"algorithm": "sha256", "files": digests}
            assert {"name", "version", "license", "python-depends"} <= data.keys()
            assert data["id"].isidentifier() and folder.endswith(data["backend"]["type"])
            ids.add(data["id"])
    assert not files and len(ids) == 2
    assert data["backend"]["archs"] == ["8.0", "8.6", "9.0", "10.0", "12.0"]


@pytest.mark.parametrize("code", [ALONE, LOADED], ids=["without-quire", "by-kernels"])
def test_it_works(code, repository, tmp_path):
    if code is LOADED and not [*importlib.metadata.distributions(name="kernels")]:
        pytest.skip("the extra hub, the PyPI package kernels, is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(repository)]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment)


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    for directory in (tmp_path, tmp_path / "mine"):
        assert hub_kernels.main([str(directory)]) == 2
        message = "error: DIR: expected a new or an empty directory"
        assert capsys.readouterr().err.startswith(message)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
