"""Make a checkout that is not installed importable as ``quire``. Workers run this file."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if "quire" not in sys.modules and importlib.util.find_spec("quire") is None:
    spec = importlib.util.spec_from_file_location(
        "quire", ROOT / "kvcore/quire/__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    package = sys.modules["quire"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
