"""A Python that has vLLM: the one that ``VLLM_PYTHON`` names (``make test-vllm``), or this one."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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


class _AnyName(ModuleType):
    """A package in which every public name is a class."""

    __path__: list[str] = []  # noqa: RUF012  as packages have it

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


def other_version(monkeypatch: pytest.MonkeyPatch, version: str, *modules: str) -> None:
    """Puts a vLLM of another version in place of any, as far as an import goes.

    Args:
        modules: below ``vllm.v1``, which are imported from it.
    """
    for module in modules:
        parts = ["vllm", "v1", *module.split(".")]
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            stand_in = _AnyName(name)
            stand_in.__version__ = version
            monkeypatch.setitem(sys.modules, name, stand_in)
