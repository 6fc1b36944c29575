"""What the documents show runs, and the files they name exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(code: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_embedding_example_runs_and_says_what_the_text_says(tmp_path):
    assert run(EXAMPLES[0], tmp_path).splitlines() == [
        "cold: computed 320 of 320 tokens",
        "warm: computed 16 of 320 tokens",
    ]


def test_the_kvcore_example_prints_what_stands_below_it(tmp_path):
    (expected,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    assert run(EXAMPLES[1], tmp_path) == expected


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_named_files_modules_and_targets_exist(document):
    text = (ROOT / document).read_text()
    for name in re.findall(r"`((?:kernels|kvcore|models|bench|tests)/[\w/.]*)`", text):
        assert (ROOT / name).exists(), name
    for module in re.findall(r"python -m ((?:bench|models)(?:\.\w+)+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)|`make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), target
