"""A Python that has vLLM: the one that ``VLLM_PYTHON`` names (``make test-vllm``), or this one."""

import importlib
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
    """The JSON of a program beside this file, run once with this checkout and its entry points.

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


def expect_refused(monkeypatch: pytest.MonkeyPatch, module: str, version: str, *used: str) -> None:
    """An integration does not import with a vLLM of another version.

    Args:
        used: modules below ``vllm.v1`` that it imports.
    """
    for name in used:
        parts = ["vllm", "v1", *name.split(".")]
        for count in range(1, len(parts) + 1):
            stand_in = _AnyName(".".join(parts[:count]))
            stand_in.__version__ = version
            monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    with pytest.raises(ImportError, match=rf"vllm: expected 0\.33, got {version}"):
        importlib.import_module(f"quire.models.integrations.{module}")


def expect_named(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Without vLLM an integration says what to install."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"needs vLLM 0\.33: pip install 'quire\[vllm\]'"):
        importlib.import_module(f"quire.models.integrations.{module}")
