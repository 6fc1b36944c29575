"""Data flows one way: kvcore and kernels know nothing of each other or of what sits on top, and no modules know each other in a circle."""

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
    # Of plans it makes tensors; the allocator imports without it.
    "kvcore/device": {"numpy", "torch", "quire.kvcore"},
    "kvcore/quire": {"quire.__version__", "quire.models"},  # the command
    "kernels": {"torch", "triton", "quire.kernels"},
    "models": {
        "gguf", "huggingface_hub", "jinja2", "numpy", "safetensors", "tokenizers", "torch", "tqdm", "transformers",
        "quire.kernels", "quire.kvcore", "quire.models",
    },
    "models/integrations": {
        "msgspec", "numpy", "sglang", "torch", "transformers", "vllm", "xxhash", "zmq",
        "quire.kernels", "quire.kvcore", "quire.models",
    },
    "bench": {
        "huggingface_hub", "matplotlib", "numpy", "safetensors", "torch", "tqdm", "triton", "vllm",
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
        folder = path.parent.relative_to(ROOT).as_posix()
        if folder != package and folder in ALLOWED:
            continue  # has a line of its own
        extra = imports(path) - ALLOWED[package] - STANDARD
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


def modules(package: str) -> dict[str, Path]:
    """Files of a package by dotted name, that of the package itself first."""
    files = sorted((ROOT / package).rglob("*.py"))
    return {
        ".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f
        for f in files
    }


def known(name: str, path: Path, others: set[str]) -> set[tuple[str, str]]:
    """(module, name in it) that a module imports from its own package, within functions too, but not for type checkers alone."""
    tree = ast.parse(path.read_text(), str(path))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    home = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level or id(node) in for_types:
            continue
        base = ".".join([*home[: len(home) - node.level + 1], *filter(None, [node.module])])
        for alias in node.names:
            whole = f"{base}.{alias.name}"
            found.add((whole, "") if whole in others else (base, alias.name))
    return found


@pytest.mark.parametrize("package", ["kernels", "kvcore", "models", "bench"])
def test_no_circle_of_imports_and_no_private_name_of_another_module(package):
    files = modules(package)
    graph = {name: known(name, path, set(files)) for name, path in files.items()}
    private = {(m, *x) for m, found in graph.items() for x in found if x[1].startswith("_")}
    private |= {
        (name, node.module, alias.name)  # of another package
        for name, path in files.items()
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quire.")
        for alias in node.names
        if alias.name.startswith("_")
    }
    assert not private
    left = {m: {other for other, _ in found} - {m} for m, found in graph.items()}
    while ready := [m for m, needs in left.items() if not needs & left.keys()]:
        for m in ready:
            del left[m]
    assert not left, "these, or what they import, import each other"


@pytest.mark.parametrize("package", ["kernels", "kvcore", "models", "bench"])
def test_imports_within_a_package_are_relative(package):
    """So a package can be copied under another name, and no module is loaded under two."""
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            own = f"quire.{package}"
            if module == own or module.startswith(f"{own}."):
                raise AssertionError(f"{path.relative_to(ROOT)}:{node.lineno} imports {module}")


def test_operators_know_few_others():
    """`kernels.common` knows no operator, and an operator only those that it is made of."""
    files = modules("kernels")
    found = {
        (name.split(".")[1], other.split(".")[1])
        for name, path in files.items()
        for other, _ in known(name, path, set(files))
        if "." in name and "." in other
    }
    assert {(a, b) for a, b in found if a != b and b != "common"} == {
        ("compressor", "latent_write"),
        ("indexer", "latent_write"),
    }


def test_folders_of_bench_know_few_others():
    """`bench.common` knows no benchmark, a benchmark only what it measures with, and none the programs of the top level."""
    files = modules("bench")
    folders = {path.parent.name for path in files.values()} - {"bench"}
    found = {
        (name.split(".")[1], other.split(".")[1])
        for name, path in files.items()
        for other, _ in known(name, path, set(files))
        if name.split(".")[1:2] != other.split(".")[1:2] and path.parent.name in folders
    }
    assert {(a, b) for a, b in found if b != "common"} == {
        ("kernels", "cases"),
        ("kernels", "peers"),
        ("peers", "cases"),
        ("static", "cases"),
        ("tune", "cases"),
        ("tune", "peers"),
        ("tune", "static"),
    }
    assert not [pair for pair in found if pair[0] == "common"]


@pytest.mark.parametrize(
    ("module", "blocked"),
    [
        ("quire.kvcore", ["torch", "triton", "quire.kernels", "quire.models"]),
        ("quire.kernels", ["torch", "triton", "numpy", "quire.kvcore"]),
        ("quire.kvcore.device", ["triton", "quire.kernels", "quire.models"]),
        # Models with built-in configurations: what reads Hugging Face directories is not there.
        (
            "quire.models.llm, quire.models.deepseek_v4.hf, quire.models.families.gemma4",
            ["safetensors", "tokenizers", "tqdm", "transformers"],
        ),
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
