"""A Python that has vLLM: the one that ``VLLM_PYTHON`` names (``make test-vllm``), or this one."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.shared import once_a_run

ROOT = Path(__file__).resolve().parents[3]


def said_by(factory: pytest.TempPathFactory, program: str, *arguments: str) -> dict:
    """What a program beside this file writes as JSON, run once with this checkout and its entry points.

    Args:
        program: its name; it is given the checkout, ``arguments`` and the file.
    """
    python = os.environ.get("VLLM_PYTHON") or None
    if python is None and importlib.util.find_spec("vllm") is None:
        pytest.skip(
            "needs vLLM 0.33: make test-vllm VLLM_PYTHON=... names a Python that imports it"
        )

    def make(root: Path) -> None:
        # What an installation would have of entry points, without one.
        info = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(root)]
        subprocess.run(info, cwd=ROOT, check=True, capture_output=True)
        command = [python or sys.executable, str(Path(__file__).with_name(program)), str(ROOT)]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        command += [*arguments, str(root / "said.json")]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]

    return json.loads((once_a_run(factory, program, make) / "said.json").read_text())
