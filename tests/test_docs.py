"""The code of the documents runs, and the files, commands and options that they name exist.

A block marked ``python`` runs; blocks of a page share their names. A block marked ``text`` right below is what it prints. A title
``needs a GPU``, ``needs a checkpoint`` and so on says that a block is only compiled, or what must be installed to run it.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from quire.__main__ import COMMANDS
from tests.support.forked import printed

ROOT = Path(__file__).resolve().parent.parent
TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
DOCUMENTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [*(ROOT / name for name in TOP), *sorted(ROOT.glob("docs/**/*.md"))]
}
MAKEFILE = (ROOT / "Makefile").read_text()
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = {
    f'python title="needs {what}"'
    for what in ("a GPU", "a checkout", "a checkpoint", "the extra hub")
}
# Run by the tests of the adapters, where these are (tests/models/integrations/test_transformers.py).
NOT_RUN.add('python title="needs transformers"')
INFOS = {"python", "text", "sh", *NOT_RUN}
WITH_CODE = [
    name for name, text in DOCUMENTS.items() if "```python\n" in text and name != "README.md"
]

RUN_BLOCKS = """
import contextlib, io, json, sys
names, printed = {"__name__": "__main__"}, []
for code in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "block %d" % (len(printed) + 1), "exec"), names)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def printed_by(blocks: list[str], cwd: Path) -> list[str]:
    """The output of each block, run one after another in one process outside of the checkout."""
    return json.loads(printed(RUN_BLOCKS, cwd=cwd, input=json.dumps(blocks)))


def blocks_of(text: str) -> list[tuple[str, str, bool]]:
    """Info string and text of each fenced block, and whether only blank lines part it from the one before."""
    found, end = [], -1
    for block in FENCE.finditer(text):
        found.append((block[1], block[2], end >= 0 and not text[end : block.start()].strip()))
        end = block.end()
    return found


@pytest.mark.parametrize("name", WITH_CODE)
def test_code_of_a_page_runs_and_prints_what_stands_below_it(name, tmp_path):
    blocks = blocks_of(DOCUMENTS[name])
    ran = iter(printed_by([text for info, text, _ in blocks if info == "python"], tmp_path))
    last = None
    for info, text, follows in blocks:
        if info == "text" and follows and last is not None:
            assert last == text
        last = next(ran) if info == "python" else None


@pytest.mark.parametrize("name", DOCUMENTS)
def test_blocks_say_what_they_are(name):
    for info, code, _ in blocks_of(DOCUMENTS[name]):
        assert info in INFOS, info
        if info in NOT_RUN:
            compile(code, name, "exec")


def test_the_readme_says_what_its_example_prints(tmp_path):
    readme = DOCUMENTS["README.md"]
    (code,) = [text for info, text, _ in blocks_of(readme) if info == "python"]
    (said,) = printed_by([code], tmp_path)
    assert len(said.splitlines()) == 2
    assert all(f"`{line}`" in readme for line in said.splitlines())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_prints_what_its_page_says(path, tmp_path):
    pages = [text for text in DOCUMENTS.values() if f"python examples/{path.name}\n" in text]
    (said,) = printed_by([path.read_text(encoding="utf-8")], tmp_path)
    assert pages and all(f"```text\n{said}```" in text for text in pages)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_named_files_targets_and_links_exist(name):
    text = DOCUMENTS[name]
    files = re.findall(r"`((?:kernels|kvcore|models|bench|tests|docs|examples)/[\w/.-]*)`", text)
    if name == "README.md":
        files += re.findall(r"(?<= )tests/[\w/.]+", MAKEFILE)
    assert [file for file in files if not (ROOT / file).exists()] == []
    for target in re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (ROOT / name).parent.joinpath(target).exists(), target


COMMAND = re.compile(rf"(python -m [\w.]+|quire (?:{'|'.join(COMMANDS)})\b)((?:[^\n`]|\\\n)*)")


HELP = """
import contextlib, io, json, runpy, sys
said = {}
for module in json.load(sys.stdin):
    out = io.StringIO()
    sys.argv = [module, "--help"]
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            assert not end.code, (module, end.code)
    said[module] = out.getvalue()
print(json.dumps(said))
"""


def test_commands_exist_and_take_the_options():
    """All in one process: each would load torch for itself."""
    asked = [
        (words.removeprefix("python -m "), rest)
        if words.startswith("python")
        else (COMMANDS[words.removeprefix("quire ")][0], rest)
        for text in DOCUMENTS.values()
        for words, rest in COMMAND.findall(text)
    ]
    modules = sorted({module for module, _ in asked})
    assert {"bench.static", "quire.models.generate"} <= {*modules}
    said = json.loads(printed(HELP, cwd=ROOT, input=json.dumps(modules)).splitlines()[-1])
    for module, rest in asked:
        for option in re.findall(r"(?<![\w-])(--[a-z][\w-]*)", rest.partition("#")[0]):
            assert re.search(rf"{option}(?![\w-])", said[module]), f"{module} {option}"


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("package", ["kvcore", "kvcore.device", "kvcore.tier", "kernels", "models"])
def test_the_reference_has_the_public_names(hooks, package):
    quire = importlib.import_module(f"quire.{package}")
    names = hooks.public_names(package)
    assert list(names) == quire.__all__
    for name, path in names.items():
        module, _, attribute = f"quire.{path}".rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is getattr(quire, name)
    assert f"<!-- api: {package} -->" in DOCUMENTS[f"docs/api/{package}.md"]
