"""Data flows one way: kvcore and kernels know nothing of each other or of what sits on top, and no modules know each other in a circle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "kvcore": {"numpy", "quire.kvcore"},
    # Of plans it makes tensors; the allocator imports without it.
    "kvcore/device": {"numpy", "torch", "quire.kvcore"},
    "kvcore/quire": {"quire.__version__", "quire.models"},  # the command
    "kernels": {"torch", "triton", "quire.kernels"},
    "models": {
        "gguf", "huggingface_hub", "jinja2", "numpy", "safetensors", "tokenizers", "torch", "tqdm", "transformers",
        "quire.kernels", "quire.kvcore", "quire.models",
    },
    "models/integrations": {
        "msgspec", "numpy", "sglang", "torch", "transformers", "vllm", "zmq",
        "quire.kernels", "quire.kvcore", "quire.models",
    },
    "bench": {
        "huggingface_hub", "matplotlib", "numpy", "safetensors", "torch", "tqdm", "triton", "vllm",
        "quire.bench", "quire.kernels", "quire.kvcore", "quire.models",
    },
}  # fmt: skip
PACKAGES = ("kernels", "kvcore", "models", "bench")


@cache
def modules(package: str) -> dict[str, Path]:
    """Files of a package by dotted name."""
    return {
        "quire." + ".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f
        for f in sorted((ROOT / package).rglob("*.py"))
    }


@cache
def imports(path: Path) -> list[tuple[str, str, int]]:
    """(module, name in it or "", dots in front) of all imports of a file, but those for type checkers alone."""
    tree = ast.parse(path.read_text(), str(path))
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    # The packages that a file's dots stand for, the nearest first.
    home = ["quire", *path.relative_to(ROOT).parent.parts]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "", 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node not in for_types:
            base = home[: len(home) + 1 - node.level] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            found += [(module, alias.name, node.level) for alias in node.names]
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_is_below_it(package):
    allowed = ALLOWED[package] | sys.stdlib_module_names
    for path in modules(package).values():
        folder = path.parent.relative_to(ROOT).as_posix()
        if folder != package and folder in ALLOWED:
            continue  # has a line of its own
        for module, name, _ in imports(path):
            parts = f"{module}.{name}".split(".")
            top = ".".join(parts[:2]) if parts[0] == "quire" else parts[0]
            assert top in allowed, f"{path.relative_to(ROOT)} imports {top}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle_of_imports_and_no_private_name_of_another_module(package):
    """Imports within a package are relative, so that it can be copied under another name."""
    files, graph = modules(package), {}
    for module, path in files.items():
        graph[module] = set()
        for other, name, level in imports(path):
            own = f"{other}.".startswith(f"quire.{package}.")
            assert level or not own, f"{module}: expected a relative import of {other}"
            ours = other.startswith("quire.")
            assert not (ours and name.startswith("_") and not name.endswith("__")), (module, name)
            known = f"{other}.{name}" if f"{other}.{name}" in files else other
            if known in files and known != module:
                graph[module].add(known)
    while ready := [m for m, needs in graph.items() if not needs & graph.keys()]:
        for m in ready:
            del graph[m]
    assert not graph, "these, or what they import, import each other"


@pytest.mark.parametrize(
    ("module", "blocked"),
    [
        ("quire.kvcore", ["torch", "triton", "quire.kernels", "quire.models"]),
        ("quire.kernels", ["torch", "triton", "numpy", "quire.kvcore"]),
        ("quire.kvcore.device", ["triton", "quire.kernels", "quire.models"]),
        # Models with built-in configurations: what reads Hugging Face directories is not there.
        (
            "quire.models.llm, quire.models.families.gemma4",
            ["safetensors", "tokenizers", "tqdm", "transformers"],
        ),
    ],
)
def test_a_package_imports_where_the_others_are_missing(module, blocked, tmp_path):
    code = f"import sys\nfor m in {blocked}: sys.modules[m] = None\nimport {module}\n"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_only_bench_reads_the_environment():
    for path in [f for package in PACKAGES[:3] for f in modules(package).values()]:
        found = re.findall("environ|getenv|sys.path", path.read_text())
        assert not found, f"{path.relative_to(ROOT)}: {found}"
