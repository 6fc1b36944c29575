"""Hooks of MkDocs: pages from notebooks, pictures of results, and public names.

A page gets the public names of a package where it says ``<!-- api: PACKAGE -->``.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def public_names(package: str) -> dict[str, str]:
    """Find the module that defines each name of a package's ``__all__``, from its ``__init__``.

    Args:
        package: ``"kvcore"``, ``"kvcore.device"``, ``"kvcore.tier"``, ``"kernels"`` or
            ``"models"``.

    Returns:
        The dotted path of each name, such as ``{"KVCache": "kvcore.cache.KVCache"}``.
    """
    found: dict[str, Any] = {}
    homes: dict[str, str] = {}
    for node in ast.parse(
        (ROOT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8")
    ).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            # ``[*_HOME]`` is the names of that table, which is in front of it.
            if name == "_HOME" or (name == "__all__" and ast.unparse(node.value) != "[*_HOME]"):
                found[name] = ast.literal_eval(node.value)
        elif isinstance(node, ast.ImportFrom) and node.level:
            homes |= dict.fromkeys((alias.name for alias in node.names), node.module or "")
    homes |= found.get("_HOME", {})
    return {name: f"{package}.{homes[name]}.{name}" for name in found.get("__all__", homes)}


def api(package: str) -> str:
    """Entries of mkdocstrings for all public names of a package."""
    return "\n".join(
        f"::: {path}\n    options:\n      heading: quire.{package}.{name}\n      toc_label: {name}\n"
        for name, path in sorted(public_names(package).items(), key=lambda entry: entry[0].lower())
    )


def notebook(text: str) -> str:
    """A notebook as Markdown, with the outputs that it holds."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            parts.append(f"```text\n{''.join(output['text'])}```")
    return "\n\n".join(parts) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each notebook, and the pictures of ``bench/results``."""
    from mkdocs.structure.files import File

    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            text = notebook(Path(file.abs_src_path).read_text(encoding="utf-8"))
            uri = file.src_uri.removesuffix(".ipynb") + ".md"
            files.append(File.generated(config, uri, content=text))
    for path in sorted((ROOT / "bench" / "results").glob("*.svg")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace what is meant for readers on GitHub, and put public names where a page asks."""
    markdown = markdown.replace("](../bench/results/", "](results/").replace(".ipynb)", ".md)")
    return re.sub(r"<!-- api: ([\w.]+) -->", lambda found: api(found[1]), markdown)
