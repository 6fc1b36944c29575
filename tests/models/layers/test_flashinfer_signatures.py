"""The stand-in's signatures are a part of those of the installed package: a call that the one takes is a call of the other.

Read from the package's source, so that it need not be loaded, which takes a GPU's libraries.
"""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest

from tests.support import flashinfer_stand_in

FILES = ("decode.py", "prefill.py")


def installed() -> Path:
    """The package's folder; skips where there is none."""
    found = importlib.util.find_spec("flashinfer")
    if found is None or found.origin is None:
        pytest.skip("the package flashinfer-python is not installed")
    return Path(found.origin).parent


def signature_of(definition: ast.FunctionDef) -> tuple[list[str], dict[str, str]]:
    """Names of positional parameters, and {name: default} of those that may be given by name."""
    arguments = definition.args
    positional = [a.arg for a in arguments.posonlyargs + arguments.args]
    defaults = dict(zip(positional[::-1], map(ast.unparse, arguments.defaults[::-1]), strict=False))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        defaults[each.arg] = "" if default is None else ast.unparse(default)
    return positional, defaults


def methods_of(folder: Path, name: str) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Signatures of a wrapper's methods; of overloads the last, which is what runs."""
    classes = [
        node
        for file in FILES
        for node in ast.parse((folder / file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    assert len(classes) == 1, f"{name} is in one of {FILES}"
    methods = {
        node.name: signature_of(node)
        for node in classes[0].body
        if isinstance(node, ast.FunctionDef)
    }
    if "_plan_impl" in methods:  # where options after the first arguments are handed on by name
        positional, defaults = methods["plan"]
        methods["plan"] = positional, methods["_plan_impl"][1] | defaults
    return methods


@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
@pytest.mark.parametrize(
    "wrapper", flashinfer_stand_in.WRAPPERS, ids=lambda wrapper: wrapper.__name__
)
def test_calls_of_the_stand_in_are_calls_of_the_package(wrapper, method):
    positional, defaults = methods_of(installed(), wrapper.__name__)[method]
    parameters = list(inspect.signature(getattr(wrapper, method)).parameters.values())
    ours = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert ours == positional[: len(ours)]
    for parameter in parameters:
        if parameter.default is not parameter.empty:
            assert repr(parameter.default) == defaults[parameter.name], parameter.name


def test_what_does_not_fit_is_seen(tmp_path):
    """An argument in another place, and one that is gone."""
    moved = "def plan(self, indices, indptr, *deprecated, **kwargs): pass\n"
    gone = "def _plan_impl(self, indices, indptr, *, window=-1): pass\n"
    (tmp_path / "decode.py").write_text(f"class W:\n    {moved}    {gone}")
    (tmp_path / "prefill.py").write_text("")
    positional, defaults = methods_of(tmp_path, "W")["plan"]
    assert positional == ["self", "indices", "indptr"] and defaults == {"window": "-1"}
