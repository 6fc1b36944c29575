"""Hooks of MkDocs: pages of the reference, a module each, and pictures of results.

A page gets links to all public names of a package from ``<!-- api: PACKAGE -->`` to its end.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

PACKAGES = ("kvcore", "kvcore.device", "kvcore.tier", "kernels", "models")
ROOT = Path(__file__).resolve().parent.parent


def public_names(package: str) -> dict[str, str]:
    """Find the module that defines each name of a package's ``__all__``, from its ``__init__``.

    Args:
        package: ``"kvcore"``, ``"kvcore.device"``, ``"kvcore.tier"``, ``"kernels"`` or
            ``"models"``.

    Returns:
        The dotted path of each name, such as ``{"KVCache": "kvcore.cache.KVCache"}``.
    """
    homes: dict[str, str] = {}
    names: list[str] | None = None
    folder = ROOT / package.replace(".", "/")
    stub = folder / "__init__.pyi"  # of packages whose names load on first use
    file = stub if stub.exists() else folder / "__init__.py"
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
        elif isinstance(node, ast.ImportFrom) and node.level:
            homes |= dict.fromkeys((alias.name for alias in node.names), node.module or "")
    return {name: f"{package}.{homes[name]}.{name}" for name in names or homes}


def pages(package: str) -> dict[str, dict[str, str]]:
    """Public names and their paths, by the page of the module that defines them."""
    found: dict[str, dict[str, str]] = {}
    for name, path in sorted(public_names(package).items(), key=lambda entry: entry[0].lower()):
        module = path.removeprefix(f"{package}.").split(".")[:-1]
        page = "-".join(part for part in module if part != "api")
        found.setdefault(page, {})[name] = path
    return dict(sorted(found.items()))


def index(package: str) -> str:
    """Links to the pages of a package, with the first line of each docstring."""
    lines = []
    for page, names in pages(package).items():
        lines.append(f"\n## [{page}]({package}/{page}.md)\n")
        lines += [f"- [`{name}`][{path}]: {summary(path)}" for name, path in names.items()]
    return "\n".join(lines)


def summary(path: str) -> str:
    """The first sentence or line of a public name's docstring."""
    module, _, name = path.rpartition(".")
    file = ROOT / module.replace(".", "/")
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if getattr(node, "name", None) == name and (text := ast.get_docstring(node)):
            return " ".join(text.partition("\n\n")[0].split()).replace("``", "`").rstrip(":")
    return "see its page"


def reference(package: str, page: str, names: dict[str, str]) -> str:
    """A page: entries of mkdocstrings for the public names of a module."""
    entries = [
        f"::: {path}\n    options:\n"
        f"      heading: quire.{package}.{name}\n      toc_label: {name}\n"
        for name, path in names.items()
    ]
    return f"# {page}\n\n[quire.{package}](../{package}.md)\n\n" + "\n".join(entries)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the reference, and the pictures of ``bench/results``."""
    from mkdocs.structure.files import File

    for package in PACKAGES:
        for page, names in pages(package).items():
            uri, text = f"api/{package}/{page}.md", reference(package, page, names)
            files.append(File.generated(config, uri, content=text))
    for path in sorted((ROOT / "bench" / "results").glob("*.svg")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace what is meant for readers on GitHub, and put public names where a page asks."""
    markdown = markdown.replace("](../bench/results/", "](results/")
    return re.sub(r"(?s)<!-- api: ([\w.]+) -->.*", lambda found: index(found[1]), markdown)
