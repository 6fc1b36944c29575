"""Kernels that an engine compiles: all at its start, and few."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"), [("gemma4-tiny", 20), ("gpt-oss-tiny", 20), ("deepseek-v4-tiny", 39)]
)
def test_nothing_is_compiled_after_the_start(name, most):
    """Requests of all lengths, batches of all sizes, prompts beside decodes, and drafts: all of it ran once before, as padding."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.models.variants", name, "60"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not found["later"], found["later"]
    of_model = [name for name in found["start"] if name != "sample_kernel"]
    assert len(found["start"]) - len(of_model) == 2 and 4 <= len(of_model) <= most
