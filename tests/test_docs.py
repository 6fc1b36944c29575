"""What the documents show runs, and the files they name exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_embedding_example_runs_and_says_what_the_text_says(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "cold: computed 320 of 320 tokens",
        "warm: computed 16 of 320 tokens",
    ]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_named_files_modules_and_targets_exist(document):
    text = (ROOT / document).read_text()
    for name in re.findall(r"`((?:kernels|kvcore|models|bench|tests)/[\w/.]*)`", text):
        assert (ROOT / name).exists(), name
    for module in re.findall(r"python -m (bench\.\w+)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)|`make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), target
