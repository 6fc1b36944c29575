"""The kernels as a kernel repository of the Hugging Face Hub: its layout, and that it works without quire."""

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

ROOT = Path(__file__).resolve().parents[3]

# Attention over pages and in-step rows by the module ``loaded``, against plain torch. On a CPU Triton is its interpreter.
CHECK = """
import torch

def check(loaded):
    q, k, v = (torch.randn(5, heads, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    pages, v_pages = torch.zeros(2, 4, 16, 2, 16)
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    loaded.write_kv(k[:3], v[:3], pages, v_pages, torch.tensor([48, 49, 50]))
    lengths, cu = torch.tensor([5], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[3:].transpose(0, 1), *(x.repeat_interleave(2, 1).transpose(0, 1) for x in (k, v)),
        attn_mask=torch.ones(2, 5, dtype=torch.bool).tril(3),
    ).transpose(0, 1)
    for impl in ("torch", "triton"):
        out = loaded.paged_attention(
            q[3:], pages, v_pages, table, lengths, cu, max_seqlen_q=2, k=k[3:], v=v[3:], impl=impl
        )
        torch.testing.assert_close(out, expected)  # that it is these functions: their errors have tests of their own
    assert {name for name in loaded.__all__ if getattr(loaded, name)} == set(loaded.__all__)
    assert not any(m == "quire" or m.startswith("quire.") for m in sys.modules)
"""
ALONE = f"""
import sys

class NoQuire:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "quire":
            raise ImportError("quire is not installed")

sys.meta_path.insert(0, NoQuire())
sys.path.insert(0, sys.argv[1] + "/torch-ext")
{CHECK}
import quire_kernels
check(quire_kernels)
"""
LOADED = f"""
import sys
from pathlib import Path
import kernels
{CHECK}
check(kernels.get_local_kernel(Path(sys.argv[1]), backend="cpu"))
[loaded] = kernels.get_loaded_kernels()
assert loaded.metadata.name.python_name == "quire_kernels" and loaded.metadata.version == 0

from kernels._rust import Backend, Build, Digest, DigestAlgorithm, Metadata
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
    own = {p.relative_to(ROOT / "kernels"): p.read_bytes() for p in (ROOT / "kernels").rglob("*.py")}  # fmt: skip
    ids = set()
    for folder in ("torch-ext/quire_kernels", "build/torch-cpu", "build/torch-cuda"):
        for path, content in own.items():
            assert files.pop(folder / path).read_bytes() == content
        if folder.startswith("build"):
            data = json.loads(files.pop(Path(folder, "metadata.json")).read_text())
            hashed = {p: base64.b64encode(hashlib.sha256(c).digest()).decode() for p, c in own.items()}  # fmt: skip
            files_of = {p.as_posix(): digest for p, digest in hashed.items()}
            assert data["digest"] == {"algorithm": "sha256", "files": files_of}
            assert {"name", "version", "license", "python-depends"} <= data.keys()
            assert data["id"].isidentifier() and folder.endswith(data["backend"]["type"])
            ids.add(data["id"])
    assert not files and len(ids) == 2
    assert data["backend"]["archs"] == ["8.0", "8.6", "9.0", "10.0", "12.0"]


@pytest.mark.parametrize("code", [ALONE, LOADED], ids=["without-quire", "by-kernels"])
def test_it_works(code, repository, tmp_path):
    if code is LOADED:
        try:
            version = importlib.metadata.version("kernels")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("the extra hub, the PyPI package kernels, is not installed")
        if tuple(map(int, version.split(".")[:3])) < (0, 17, 2):
            pytest.skip(f"the PyPI package kernels is {version}, older than {hub_kernels.OLDEST}")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(repository)]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment)


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    for directory in (tmp_path, tmp_path / "mine"):
        assert hub_kernels.main([str(directory)]) == 2
        assert capsys.readouterr().err.startswith("error: DIR: expected a new or an empty directory")  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
