"""The adapters for vLLM beside vLLM itself, in the Python that ``VLLM_PYTHON`` names, or this one.

The programs that run there are in `tests.support.models`: `vllm_requests` (the scheduler) and
`vllm_layers` (attention, events). ``make test-vllm`` starts them.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import models

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("program", ["vllm_requests.py", "vllm_layers.py"])
def test_beside_vllm(program, tmp_path):
    python = os.environ.get("VLLM_PYTHON") or sys.executable
    if python == sys.executable and importlib.util.find_spec("vllm") is None:
        pytest.skip(
            "needs vLLM 0.33: make test-vllm VLLM_PYTHON=... names a Python that imports it"
        )
    # What an installation would have of entry points, without one.
    info = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(info, cwd=ROOT, check=True, capture_output=True)
    command = [python, Path(models.__file__).with_name(program), ROOT]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
