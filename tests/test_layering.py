"""Data flows one way: kvcore and kernels know nothing of each other or of what sits on top."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STANDARD = sys.stdlib_module_names
ALLOWED = {
    "kvcore": {"numpy", "quire.kvcore"},
    "kernels": {"torch", "triton", "quire.kernels"},
    "models": {
        "jinja2", "numpy", "safetensors", "tokenizers", "torch", "tqdm",
        "quire.kernels", "quire.kvcore", "quire.models",
    },
    "models/integrations": {"msgspec", "prometheus_client", "zmq", "quire.kvcore"},
    "bench": {
        "matplotlib", "numpy", "torch", "tqdm", "triton",
        "quire.bench", "quire.kernels", "quire.kvcore", "quire.models",
    },
}  # fmt: skip


def imports(path: Path) -> set[str]:
    """Packages that a file imports, `quire` ones with their second part."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                names = [f"quire.{path.relative_to(ROOT).parts[0]}"]
            elif node.module == "quire":
                names = [f"quire.{alias.name}" for alias in node.names]
            else:
                names = [node.module or ""]
        for name in names:
            parts = name.split(".")
            found.add(".".join(parts[:2]) if parts[0] == "quire" else parts[0])
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_is_below_it(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        if package == "models" and path.parent.name == "integrations":
            continue  # has a line of its own
        extra = imports(path) - ALLOWED[package] - STANDARD
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


@pytest.mark.parametrize(
    ("module", "blocked"),
    [
        ("quire.kvcore", ["torch", "triton", "quire.kernels", "quire.models"]),
        ("quire.kernels", ["torch", "triton", "numpy", "quire.kvcore"]),
    ],
)
def test_a_package_imports_where_the_others_are_missing(module, blocked, tmp_path):
    code = f"import sys\nfor m in {blocked}: sys.modules[m] = None\nimport {module}\n"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.mark.parametrize("package", ALLOWED)
def test_only_bench_reads_the_environment(package):
    if package == "bench":
        return
    for path in sorted((ROOT / package).rglob("*.py")):
        text = path.read_text()
        assert "environ" not in text and "getenv" not in text, path.relative_to(ROOT)
        assert "sys.path" not in text, path.relative_to(ROOT)
