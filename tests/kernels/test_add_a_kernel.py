"""The operator that docs/add-a-kernel.md adds, and its test there."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import quire.kernels

PAGE = Path(__file__).resolve().parents[2] / "docs" / "add-a-kernel.md"
OPERATOR, HOME, TEST = re.findall(
    r"```(?:python title|text)[^\n]*\n(.*?)```", PAGE.read_text(), re.DOTALL
)
[(NAME, MODULE)] = re.findall(r'"(\w+)": "([\w.]+)"', HOME)


def load(name, source, folder):
    """A module of that name; Triton reads its source from a file."""
    path = folder / f"{name.rpartition('.')[2]}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def test_of_the_page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(quire.kernels._HOME, NAME, MODULE)
        load(f"quire.kernels.{MODULE}", OPERATOR, folder)
        yield load("test_mean_pool", TEST, folder)
    for name in (f"quire.kernels.{MODULE}", "test_mean_pool"):
        del sys.modules[name]
    del quire.kernels.__dict__[NAME]


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_the_operator_of_the_page(test_of_the_page, impl):
    for name in test_of_the_page.CASES:
        test_of_the_page.test_pool_mean(impl, name)
